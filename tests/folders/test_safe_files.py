"""Files of a folder that may be a stranger's: read and written inside it alone."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlotool.core.errors import RunFileError, WriteError
from mlotool.folders import safe_files
from mlotool.folders.files import at_home


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder, and beside it outside/secret.txt, which nothing may read or write."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_text("secret")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_links_that_lead_out_are_refused(run: Path) -> None:
    (run / "file.txt").symlink_to("../outside/secret.txt")
    (run / "folder").symlink_to("../outside")
    (run / "dangling").symlink_to("../outside/new")
    (run / "circle").symlink_to("circle")
    for name in ("file.txt", "folder/secret.txt", "folder/new.txt", "dangling", "../outside/secret.txt"):
        with pytest.raises(RunFileError, match=r"leads out of its folder.*expected.*Replace the link"):
            safe_files.read_text(run, name)
    assert not safe_files.read_text(run, "absent")
    for name in ("folder/secret.txt", "folder/new.txt"):
        with pytest.raises(RunFileError):
            safe_files.write_text(run, name, "mine")
    with pytest.raises(RunFileError):
        safe_files.make_folder(run, "folder/new")
    with pytest.raises(RunFileError):
        safe_files.list_files(run, "folder", ".txt", 10)
    assert [path.name for path in (run.parent / "outside").iterdir()] == ["secret.txt"]


def test_a_link_in_the_place_of_a_file_is_replaced(run: Path) -> None:
    secret = run.parent / "outside" / "secret.txt"
    (run / "linked").symlink_to(secret)
    os.link(secret, run / "hard")
    for name in ("linked", "hard"):
        assert safe_files.write_text(run, name, "mine").read_text() == "mine"
        assert not (run / name).is_symlink()
    assert secret.read_text() == "secret"
    assert {path.name for path in run.iterdir()} == {"linked", "hard"}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [_pipe, Path.mkdir])
def test_only_files_are_opened(run: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    make(Path("strange"))
    with pytest.raises(RunFileError, match="found a special file"):
        safe_files.read_text(run, "strange")
    if make is _pipe:
        with pytest.raises(RunFileError, match="found a special file"):
            safe_files.check_tree(run)


def test_sizes_are_limited(run: Path) -> None:
    (run / "text").write_text("x" * 11)
    with pytest.raises(RunFileError, match="found 11 bytes; expected at most 10"):
        safe_files.read_text(run, "text", 10)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"a": 1}x'])
def test_what_is_no_json_mapping_is_refused(run: Path, text: str) -> None:
    (run / "summary.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(RunFileError, match=r"summary\.json: found"):
        safe_files.read_json(run, "summary.json")


def test_numbers_of_json_are_finite(run: Path) -> None:
    assert safe_files.read_json(run, "summary.json") is None
    digits = "9" * 10_000
    (run / "summary.json").write_text(f'{{"a": NaN, "b": [Infinity, 1e999], "c": {digits}, "d": {"9" * 30}, "e": 3}}')
    found = safe_files.read_json(run, "summary.json")
    assert found == {"a": None, "b": [None, None], "c": None, "d": 1e30, "e": 3}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("where", ["a", "a/b/c"])
def test_a_tree_with_a_link_out_of_it_is_refused(run: Path, where: str) -> None:
    (run / where).mkdir(parents=True)
    safe_files.check_tree(run)
    (run / where / "link").symlink_to(run.parent / "not_there")
    with pytest.raises(RunFileError, match=r"link: found a link that leads out"):
        safe_files.check_tree(run)


@pytest.mark.parametrize(
    ("make", "name", "match"),
    [
        (lambda run: (run / "report").touch(), "report/x.png", r"report.*File exists.*Rename or remove what is there"),
        (lambda run: (run / "x").mkdir(), "x", r"x: cannot be written \(Is a directory\); expected .* Rename"),
        (lambda run: run.rmdir() or run.touch(), "x", r"cannot be written \(.*\); expected .* Rename"),
    ],
)
def test_what_stands_in_the_way_is_named(run: Path, make: Callable[[Path], None], name: str, match: str) -> None:
    make(run)
    with pytest.raises(WriteError, match=match):
        safe_files.write_text(run, name, "text")
    assert not list(run.parent.rglob("*.tmp"))


@pytest.mark.parametrize("path", ["~nobody_of_that_name/x.yaml", "a/~", "~/"])
def test_a_home_that_is_not_there_is_a_place_without_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert str(at_home(path)) == {"~/": "/home/me"}.get(path, path)
