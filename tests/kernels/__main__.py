"""Bring the files of kernels.toml: ``python -m tests.kernels [--from FOLDER]``."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kernels.brought import FOLDER

MANIFEST = Path(__file__).with_name("kernels.toml")
_SECONDS = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Bring every repository; return 0 if all files are there with the hashes of the manifest."""
    parser = argparse.ArgumentParser(prog="python -m tests.kernels", description=__doc__)
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FOLDER",
        help="take FOLDER/OWNER/NAME, a git repository or a folder of its files, and no network",
    )  # fmt: skip
    parser.add_argument("--to", type=Path, default=FOLDER, help="(default: %(default)s)")
    parser.add_argument("--manifest", type=Path, default=MANIFEST, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    manifest = tomllib.loads(options.manifest.read_text(encoding="utf-8"))
    failed = [
        why for one in manifest["repository"] for why in bring(one, options.to, options.source)
    ]
    for why in failed:
        print(why, file=sys.stderr)
    return int(bool(failed))


def bring(repository: Mapping[str, Any], to: Path, source: Path | None) -> Iterator[str]:
    """Bring the files of one repository that are not there already; yield why some are missing.

    Args:
        repository: A table ``repository`` of the manifest.
        to: Folder of all repositories.
        source: Folder with OWNER/NAME; None fetches the commit from the repository's URL.
    """
    name, commit = repository["name"], repository["commit"]
    folder = to / name
    wanted = {
        path: digest
        for path, digest in repository["files"].items()
        if not (folder / path).is_file() or _digest((folder / path).read_bytes()) != digest
    }
    if not wanted:
        print(f"{name}: {len(repository['files'])} files are there")
        return
    with tempfile.TemporaryDirectory(prefix="kernels-") as scratch:
        try:
            if source is None:
                git = _fetched(repository["url"], commit, Path(scratch))
            else:
                git = _local(source / name)
            for path, digest in wanted.items():
                content = _content(git, commit, path)
                if _digest(content) != digest:
                    yield (
                        f"{name}: {path} has sha256 {_digest(content)}; needs {digest}, that of "
                        f"commit {commit}"
                    )
                    continue
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(content)
                print(f"{name}: {path}")
        except OSError as error:
            hint = "" if source else "; without a network, make kernels KERNELS_FROM=FOLDER"
            yield f"{name}: {error}{hint}"


def _fetched(url: str, commit: str, scratch: Path) -> Path:
    """Fetch one commit into a new repository."""
    _git("init", "--quiet", "--bare", str(scratch))
    _git("--git-dir", str(scratch), "fetch", "--quiet", "--depth=1", url, commit)
    return scratch


def _local(folder: Path) -> Path:
    """Return the git directory of a folder, or the folder itself."""
    if not folder.is_dir():
        raise OSError(f"there is no folder {folder}")
    return folder / ".git" if (folder / ".git").is_dir() else folder


def _content(source: Path, commit: str, path: str) -> bytes:
    """Return a file of a git directory at a commit, or of a plain folder."""
    if (source / "HEAD").is_file():
        return _git("--git-dir", str(source), "show", f"{commit}:{path}")
    return (source / path).read_bytes()


def _git(*words: str) -> bytes:
    """Run git.

    Raises:
        OSError: It fails, takes too long or is not installed.
    """
    try:
        done = subprocess.run(["git", *words], capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"git {words[-1]} took more than {_SECONDS} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OSError(f"git fails: {said[-1]}")
    return done.stdout


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
