"""Files that hold the tensors of a failed ``assert_attention_close``, for ``fa-verify explain``.

A file is an .npz archive of arrays and one JSON text. Nothing in it is unpickled, evaluated or
imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fa_verify.oracles.masks.codec import mask_from_record, mask_to_record
from fa_verify.oracles.masks.mask import Mask
from fa_verify.oracles.outputs import Numerics

__all__ = ["FOLDER", "MOST_BYTES", "read", "write"]

VERSION = 1
# The default folder, relative to the current directory.
FOLDER = "fa-verify-replays"
# The largest sum of the bytes of all tensors.
MOST_BYTES = 2**20
_TEXT = "arguments"
_ADDED_BYTES = 2**16
# numpy has no bfloat16, so its bits are stored.
_BITS = {torch.bfloat16: ("bf16", torch.int16)}


# Errors of files that are cut, changed or made by other programs.
_DAMAGE = (
    OSError, TypeError, ValueError, AttributeError, EOFError, MemoryError, OverflowError,
    RuntimeError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def write(
    folder: str | os.PathLike[str], arguments: Mapping[str, torch.Tensor | Any], mask: Mask
) -> Path | None:
    """Write the arguments of a call; return the path, or None if the tensors are not small.

    The name of the file is a digest of its content, so that a test which fails again writes no
    second file. The folder is made, with a ``.gitignore`` for its content.

    Args:
        folder: The folder.
        arguments: The arguments by name: tensors, numbers, ``numerics`` and those that are None.
        mask: The mask.

    Raises:
        OSError: The file cannot be written.
        TypeError: The mask has a field that JSON cannot hold.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    if sum(x.numel() * x.element_size() for x in tensors.values()) > MOST_BYTES:
        return None
    record: dict[str, Any] = {"version": VERSION, "mask": mask_to_record(mask), "bits": {}}
    arrays = {}
    for name, x in tensors.items():
        x = x.detach().cpu().contiguous()
        if x.dtype in _BITS:
            record["bits"][name], dtype = _BITS[x.dtype]
            x = x.view(dtype)
        arrays[name] = x.numpy()
    for name, value in arguments.items():
        if isinstance(value, Numerics):
            record[name] = dataclasses.asdict(value)
        elif isinstance(value, float | int):
            record[name] = value
    text = json.dumps(record)
    digest = hashlib.blake2b(text.encode(), digest_size=6)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape}".encode() + arrays[name].tobytes())
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    path = folder / f"attention-{digest.hexdigest()}.npz"
    with path.open("wb") as file:
        content: dict[str, Any] = {_TEXT: np.array(text), **arrays}
        np.savez_compressed(file, **content)
    return path


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the arguments of a call, as ``assert_attention_close`` takes them; tensors on the CPU.

    Raises:
        ValueError: The file is missing, no such archive, too large, of another version, or names a
            mask that is not registered.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(item.file_size for item in archive.infolist())
        if size > MOST_BYTES + _ADDED_BYTES:
            raise ValueError(f"it holds {size:,} bytes, more than {MOST_BYTES + _ADDED_BYTES:,}")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        record = json.loads(str(arrays.pop(_TEXT)))
        if record.pop("version") != VERSION:
            raise ValueError(f"it needs version {VERSION}")
        kinds = {name: dtype for dtype, (name, _) in _BITS.items()}
        bits = {name: kinds[kind] for name, kind in record.pop("bits").items()}
        tensors = {name: torch.from_numpy(x) for name, x in arrays.items()}
        tensors |= {name: tensors[name].view(dtype) for name, dtype in bits.items()}
        mask = mask_from_record(record.pop("mask"))
        numerics: dict[str, Any] = {
            word: tuple(value) if isinstance(value, list) else value
            for word, value in record.pop("numerics").items()
        }
        return {**record, **tensors, "mask": mask, "numerics": Numerics(**numerics)}
    except KeyError as error:
        raise ValueError(f"{path} is no replay file: it has no {error}") from None
    except _DAMAGE as error:
        raise ValueError(f"{path} is no replay file: {error or type(error).__name__}") from None
