"""Folders that a command made, and copies of them that a builder of hostile ones spoils."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import pytest

from mlotool.cli.main import main
from tests.cli.hostile_folders import SECRET, Builder

Spoil = Callable[[str], Path]


def made_by(words: Sequence[str], factory: pytest.TempPathFactory) -> Path:
    """Return a working folder in which `mlotool WORDS` has run."""
    work = factory.mktemp("whole") / "work"
    work.mkdir()
    here = Path.cwd()
    os.chdir(work)
    try:
        assert main([*words]) == 0
    finally:
        os.chdir(here)
    return work


@contextmanager
def spoiling(
    builders: Mapping[str, Builder], whole: Path, parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Spoil]:
    """Spoil a copy of `whole` by a builder's name; in the end nothing outside has changed.

    Args:
        builders: by name.
        whole: a working folder.
        parent: in it, the folder whose only folder a builder gets.
        tmp_path: where the copy and what is outside go; the copy becomes the working folder.
        monkeypatch: of the test.
    """
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    states: list[dict[Path, bytes]] = []

    def spoil(name: str) -> Path:
        copytree(whole, tmp_path / "work", symlinks=True, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path / "work")
        [found] = (tmp_path / "work" / parent).iterdir()
        builders[name](found, outside)
        states.append(contents(outside))
        return found

    yield spoil
    assert contents(outside) == states[0]


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the files below a folder, with what is in them."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}
