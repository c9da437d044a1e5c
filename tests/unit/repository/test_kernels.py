"""``make kernels`` brings files from git repositories and folders, and checks their hashes."""

from __future__ import annotations

import hashlib
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from benchmarks.findings.results import OTHERS
from tests.kernels.__main__ import MANIFEST, main

CODE = b"def attention(): ...\n"
ADAPTERS = [path for path in MANIFEST.parent.glob("*.py") if path.stem not in (
    "__init__", "__main__", "brought", "slots")]  # fmt: skip


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *author, *words], cwd=folder, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path) -> Path:
    """A git repository with one file, and a later commit without it."""
    folder = tmp_path / "from" / "owner" / "name"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "kernel.py").write_bytes(CODE)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "one")
    return folder


def manifest(tmp_path: Path, repository: Path, content: bytes = CODE, url: str = "") -> list[str]:
    """Write a manifest; return the arguments that name it and the folder to bring files to."""
    path = tmp_path / "kernels.toml"
    path.write_text(
        f'[[repository]]\nname = "owner/name"\nurl = "{url or repository.as_uri()}"\n'
        f'commit = "{git(repository, "rev-parse", "HEAD")}"\nlicence = "MIT"\n'
        f'[repository.files]\n"src/kernel.py" = "{hashlib.sha256(content).hexdigest()}"\n'
    )
    return [f"--manifest={path}", f"--to={tmp_path / 'to'}"]


def brought(tmp_path: Path) -> bytes:
    return (tmp_path / "to" / "owner" / "name" / "src" / "kernel.py").read_bytes()


def test_one_commit_is_fetched_from_its_url(tmp_path, repository, capsys):
    arguments = manifest(tmp_path, repository)
    git(repository, "rm", "--quiet", "src/kernel.py")
    git(repository, "commit", "--quiet", "-m", "two")
    assert main(arguments) == 0
    assert brought(tmp_path) == CODE
    # A second run needs no repository.
    repository.rename(tmp_path / "away")
    assert main(arguments) == 0
    assert "owner/name: 1 files are there" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["work tree", "bare", "plain files"])
def test_files_come_from_a_folder_without_a_network(tmp_path, repository, kind):
    arguments = [*manifest(tmp_path, repository, url="https://0.0.0.0/x"), "--from"]
    source = tmp_path / "from"
    if kind == "bare":
        source = tmp_path / "bare"
        git(tmp_path, "clone", "--quiet", "--bare", str(repository), f"{source}/owner/name")
    elif kind == "plain files":
        (repository / ".git").rename(tmp_path / "away")
    assert main([*arguments, str(source)]) == 0
    assert brought(tmp_path) == CODE


def test_a_file_with_another_hash_is_refused(tmp_path, repository, capsys):
    assert main([*manifest(tmp_path, repository, b"other"), f"--from={tmp_path}/from"]) == 1
    assert re.search(r"src/kernel\.py has sha256 \w{64}; needs \w{64}", capsys.readouterr().err)
    assert not (tmp_path / "to").exists()


def test_a_repository_out_of_reach_is_told_of_folders(tmp_path, repository, capsys):
    arguments = manifest(tmp_path, repository, url=(tmp_path / "nowhere").as_uri())
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("owner/name: git fails: ")
    assert "without a network, make kernels KERNELS_FROM=FOLDER" in said


def test_a_folder_without_the_repository_is_named(tmp_path, repository, capsys):
    assert main([*manifest(tmp_path, repository), f"--from={tmp_path}/to"]) == 1
    assert f"there is no folder {tmp_path}/to/owner/name" in capsys.readouterr().err


def test_every_repository_has_a_commit_a_licence_and_an_adapter():
    code = "".join(path.read_text(encoding="utf-8") for path in ADAPTERS)
    for one in tomllib.loads(MANIFEST.read_text(encoding="utf-8"))["repository"]:
        assert re.fullmatch("[0-9a-f]{40}", one["commit"])
        assert one["licence"]
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in one["files"].values())
        assert f'"{one["name"]}"' in code


def test_every_adapter_and_commit_has_a_row_of_findings():
    said = (MANIFEST.parents[2] / "results" / OTHERS).read_text(encoding="utf-8")
    assert {path.name for path in ADAPTERS} == {*re.findall(r"`(\w+\.py):\w+`", said)}
    for one in tomllib.loads(MANIFEST.read_text(encoding="utf-8"))["repository"]:
        assert f"https://github.com/{one['name']}/blob/{one['commit']}/" in said


def test_no_adapter_needs_files_that_are_not_listed():
    listed = MANIFEST.read_text(encoding="utf-8")
    for path in ADAPTERS:
        paths = re.findall(r'"([\w/.-]+\.(?:py|jsonl))"', path.read_text(encoding="utf-8"))
        assert paths, path
        assert all(f'"{x}"' in listed for x in paths), path
