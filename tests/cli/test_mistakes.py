"""Further mistakes of users: each ends in one message with what was found and what to do, and leaves nothing."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlotool.config import trusted
from mlotool.core import user_code
from tests.cli.conftest import Result
from tests.cli.mistakes import in_code, in_commands, in_numbers, in_recipes
from tests.cli.mistakes.mistake import Mistake
from tests.cli.user_package import write_package

Call = Callable[..., Result]
MISTAKES = {
    f"{place}: {name}": mistake
    for place, table in {
        "recipe": in_recipes.MISTAKES,
        "code": in_code.MISTAKES,
        "numbers": in_numbers.MISTAKES,
        "command": in_commands.MISTAKES,
    }.items()
    for name, mistake in table.items()
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with mypackage/ and mine.yaml; what is imported from it is forgotten."""
    write_package(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trusted, "_packages", {})
    monkeypatch.setattr(user_code, "_packages", set())
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mypackage", "slip")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(call: Call, folder: Path, name: str) -> None:
    mistake: Mistake = MISTAKES[name]
    for file, content in mistake.files.items():
        path = folder / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if mistake.prepare is not None:
        mistake.prepare(folder)
    before = _files(folder)
    with warnings.catch_warnings():
        # As for a user, to whom a warning is shown.
        warnings.simplefilter("default")
        code, out, err = call(*mistake.words)
    text = out + err
    assert [part for part in mistake.says if part not in text] == [], text
    assert code == mistake.code, text
    assert "not foreseen" not in text
    assert "mlotool: " in err
    left = {path for path in _files(folder) - before if "__pycache__" not in path}
    assert bool(left) == bool(mistake.leaves), left
    assert all(path.startswith("outputs/") for path in left)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _process(folder: Path, *words: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Call `python -m mlotool` as a shell does; an environment variable of None is not there."""
    variables = {**os.environ, **environment}
    given = {key: value for key, value in variables.items() if value is not None}
    command = [sys.executable, "-m", "mlotool", *words]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=60, check=False)


ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "no home": {"HOME": None},
    "no folder for temporary files": {"TMPDIR": "/no/such/folder"},
    "a terminal of 20 columns": {"COLUMNS": "20"},
    "columns that are no number": {"COLUMNS": "wide"},
    "ASCII alone": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "warnings as errors": {"PYTHONWARNINGS": "error"},
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_odd_environment_changes_nothing(tmp_path: Path, name: str) -> None:
    done = _process(tmp_path, "show", "plain", **ENVIRONMENTS[name])
    assert done.returncode == 0, done.stderr
    assert "problems:" in done.stdout
    assert "Traceback" not in done.stderr
    assert "not foreseen" not in done.stderr


@pytest.mark.parametrize(("closing", "code"), [(">&-", 0), ("2>&- >/dev/null", 0), ("> /dev/full", 1), ("| true", 0)])
def test_output_that_goes_nowhere(tmp_path: Path, closing: str, code: int) -> None:
    command = f"{sys.executable} -m mlotool list {closing}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "not foreseen" not in done.stderr


def test_overrides_with_which_a_checkpoint_does_not_fit_are_told(call: Call, tmp_path: Path) -> None:
    code, _, err = call(
        "run", "plain", "runner.max_ticks=1", "logger=csv", "runner.report=false", "evaluate.splits.val=1"
    )
    assert code == 0, err
    [run] = (tmp_path / "outputs" / "plain").iterdir()
    hidden = "problems.classifier.module.hidden"
    for value, expected in {
        "8": f"'{hidden}=8'; expected a list of plain values",
        "[8]": f"found the override {hidden}=[8], with which the problems do not fit",
        "[90000,90000]": "leave out overrides of the module",
    }.items():
        code, _, err = call("evaluate", str(run), "--split", "val", f"{hidden}={value}")
        assert code == 2
        assert expected in err
    code, out, err = call("evaluate", str(run), "--split", "val", "evaluate.metrics=[f1]")
    assert code == 0, err
    assert out.startswith("val/f1 ")


def test_a_working_folder_that_is_gone(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = call("validate", "plain")
    monkeypatch.chdir(tmp_path)
    assert code == 1
    assert "the working folder has been removed" in err
