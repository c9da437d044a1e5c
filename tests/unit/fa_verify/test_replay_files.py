"""A failed assert_attention_close writes a file, which fa-verify explain judges again."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fa_verify import Mask, Numerics, assert_attention_close, replay_files
from fa_verify.__main__ import main
from fa_verify.oracles.masks.block_sparse import BlockSparse
from fa_verify.replay_files import read, write

FOLDER = Path("fa-verify-replays")
MASKS = (Mask(), Mask(causal=True, seqlens_k=(3, 5)), BlockSparse(side=2, percent=50, seed=1))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def arguments(dtype: torch.dtype = torch.float16, mask: Mask = MASKS[1]) -> dict:
    """A call with wrong results."""
    q = torch.arange(2 * 4 * 5 * 8, dtype=torch.float32).view(2, 4, 5, 8).sin().to(dtype)
    k, v = q[:, :2].cos(), q[:, 2:].neg()
    return {
        "out": q, "q": q, "k": k, "v": v, "mask": mask, "sm_scale": 0.75, "softcap": 2.0,
        "alibi_slopes": torch.ones(4), "numerics": Numerics(backward_reads=("out", "lse")),
        "dout": q, "dq": q.transpose(1, 2).contiguous().transpose(1, 2),
    }  # fmt: skip


def failed(given: dict) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_attention_close(**given)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_file_holds_the_arguments_of_the_call(dtype, mask):
    given = arguments(dtype, mask)
    path = write("there/below", {**given, "lse": None}, mask)
    found = read(path)
    assert found.keys() == given.keys()
    for name, value in given.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].equal(value)
        else:
            assert found[name] == value
    assert type(found["mask"]) is type(mask)


def test_a_failure_is_explained_as_it_was_told(capsys):
    told, _, line = failed(arguments()).rpartition("\n")
    path = line.removeprefix("replay: fa-verify explain ")
    assert [str(x) for x in FOLDER.glob("*.npz")] == [path]
    assert (FOLDER / ".gitignore").read_text() == "*\n"
    assert main(["explain", path]) == 1
    assert capsys.readouterr().out == told + "\n"
    assert failed(arguments()).endswith(path)
    assert len([*FOLDER.glob("*.npz")]) == 1
    other = arguments()
    other["q"] = other["q"] * 2
    assert not failed(other).endswith(path)


def test_results_that_hold_are_said_to_hold(capsys):
    path = write(FOLDER, {"out": torch.ones(1, 1, 1, 1), "q": torch.ones(1, 1, 1, 1),
                          "k": torch.ones(1, 1, 1, 1), "v": torch.ones(1, 1, 1, 1),
                          "numerics": Numerics()}, Mask())  # fmt: skip
    assert main(["explain", str(path)]) == 0
    assert capsys.readouterr().out == "every result lies within its bound\n"


def test_no_file_is_written_on_success_for_large_tensors_or_without_a_folder(monkeypatch):
    given = arguments()
    assert "replay" not in failed({**given, "replay_folder": None})
    q = torch.ones(1, 1, 1, 1)
    assert_attention_close(q, q, q, q)
    size = sum(x.numel() * x.element_size() for x in given.values() if isinstance(x, torch.Tensor))
    monkeypatch.setattr(replay_files, "MOST_BYTES", size - 1)
    assert "replay" not in failed(given)
    assert not FOLDER.exists()
    monkeypatch.setattr(replay_files, "MOST_BYTES", size)
    assert "replay" in failed(given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfAnObject(Mask):
    """A mask with a field that JSON does not hold."""

    thing: object = None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"replay_folder": "a_file"}, "no replay file: .*a_file"),
        ({"mask": OfAnObject(thing=object())}, "no replay file: Object of type object is not JSON"),
    ],
)
def test_what_cannot_be_written_hides_no_failure(changed, said):
    Path("a_file").write_text("")
    *told, last = failed({**arguments(), **changed}).splitlines()
    assert told[0].startswith("G1 accuracy: out of attention")
    assert re.match(said, last), last


def archive(**changed) -> Path:
    """A valid file with some arrays replaced, and those that are None removed."""
    path = write(FOLDER, arguments(), MASKS[1])
    with np.load(path, allow_pickle=False) as file:
        arrays = {**{name: file[name] for name in file.files}, **changed}
    np.savez("changed.npz", **{name: x for name, x in arrays.items() if x is not None})
    return Path("changed.npz")


class Planted:
    """An object that leaves a file where it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def test_nothing_is_unpickled():
    path = archive(q=np.array([Planted()], dtype=object))
    with pytest.raises(ValueError, match="is no replay file: Object arrays cannot be loaded"):
        read(path)
    assert not Path("unpickled").exists()


def of_text(**changed) -> np.ndarray:
    """The JSON text of a file with some fields replaced."""
    path = write(FOLDER, arguments(), MASKS[1])
    with np.load(path, allow_pickle=False) as file:
        return np.array(json.dumps({**json.loads(str(file["arguments"])), **changed}))


def claiming(elements: int) -> str:
    """An archive with a small array whose header has another number of elements."""
    header = str({"descr": "<f8", "fortran_order": False, "shape": (elements,)}).encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    with zipfile.ZipFile("large.npz", "w") as file:
        start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
        file.writestr("q.npy", start + header + b"few")
    return "large.npz"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: "missing.npz", r"missing.npz is no replay file: .*No such file"),
        (lambda: archive(arguments=np.array("[" * 100_000)), "file: maximum recursion depth"),
        (lambda: claiming(2**40), "is no replay file: "),
        (lambda: archive(arguments=None), "is no replay file: it has no 'arguments'"),
        (lambda: archive(arguments=np.array("{")), "is no replay file: Expecting"),
        (lambda: archive(arguments=np.array("[]")), "is no replay file: "),
        (lambda: archive(arguments=of_text(version=2)), "is no replay file: it needs version 1"),
        (lambda: archive(arguments=of_text(mask={"type": "Mine"})), "'Mine' is not replayable"),
        (lambda: archive(arguments=of_text(numerics={"dots": "fp8"})), "dots is 'fp8'"),
        (lambda: archive(arguments=of_text(numerics={"dot": "tf32"})), "unexpected keyword"),
        (lambda: archive(arguments=of_text(bits={"q": "fp8"})), "it has no 'fp8'"),
        (lambda: archive(more=np.zeros(2**21, np.uint8)), "is no replay file: it holds 2,"),
    ],
)  # fmt: skip
def test_another_file_is_refused(made, said, capsys):
    path = made()
    with pytest.raises(ValueError, match=said):
        read(path)
    assert main(["explain", str(path)]) == 2
    assert capsys.readouterr().err.startswith("fa-verify explain: ")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"q": None}, "missing 1 required positional argument: 'q'"),
        ({"more": np.zeros(1)}, "unexpected keyword argument 'more'"),
        ({"k": np.zeros(3, np.float16)}, "k has shape (3,); needs four axes"),
    ],
)
def test_other_arguments_are_refused(changed, said, capsys):
    assert main(["explain", str(archive(**changed))]) == 2
    assert said in capsys.readouterr().err


def test_a_text_that_is_no_archive_is_refused():
    Path("text.npz").write_text("text")
    with pytest.raises(ValueError, match="is no replay file: File is not a zip file"):
        read("text.npz")
    with zipfile.ZipFile("empty.npz", "w"):
        pass
    with pytest.raises(ValueError, match="is no replay file: it has no 'arguments'"):
        read("empty.npz")


@pytest.mark.parametrize("option", ["--kernel=my.py:attention", "--forward-only", "--json=out"])
def test_options_of_a_run_are_refused_beside_a_file(option, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["explain", "some.npz", option])
    assert ended.value.code == 2
    assert f"a file of results takes no {option.partition('=')[0]}" in capsys.readouterr().err
