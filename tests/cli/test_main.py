import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from mlotool import __version__
from mlotool.cli.main import VERBS, main
from mlotool.cli.verbs import list as list_verb
from mlotool.core.errors import RunError
from tests.cli.conftest import Call


def test_help_and_version(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0 and all(verb in out for verb in VERBS)
    for verb in VERBS:
        code, out, _ = call(verb, "--help")
        assert code == 0 and f"usage: mlotool {verb}" in out
    assert call("--version") == (0, f"mlotool {__version__}\n", "")
    code, out, _ = call()
    assert code == 2 and "usage: mlotool" in out


def test_wrong_words_are_told_the_right_ones(call: Call) -> None:
    for words, text in (
        ("vaildate mwn", "Did you mean 'validate'?"), ("validate mwn --target", "Did you mean '--targets'?"),
        ("+recipe=mwn", "mlotool run +recipe=mwn"), ("mine.yaml", "mlotool run mine.yaml"), ("-m", "mlotool run -m"),
    ):  # fmt: skip
        code, _, err = call(*words.split())
        assert code == 2 and text in err


@pytest.mark.parametrize(
    ("raised", "code"),
    [(RunError("it broke"), 1), (ZeroDivisionError("unforeseen"), 1), (KeyboardInterrupt(), 130), (SystemExit(3), 1)],
)
def test_exit_codes(call: Call, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int) -> None:
    def fail(words: object) -> int:
        raise raised

    monkeypatch.setattr(list_verb, "main", fail)
    found, _, err = call("list")
    assert found == code
    assert str(raised) in err or isinstance(raised, KeyboardInterrupt | SystemExit)
    assert main(["list", "--debug"]) == code


@pytest.mark.filterwarnings("always")
def test_a_warning_has_no_path(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def show(message: Warning | str, *rest: object) -> None:
        sys.stderr.write(f"Python's way: {message}")

    monkeypatch.setattr(list_verb, "main", lambda words: warnings.warn("raise the damping", stacklevel=1) or 0)
    monkeypatch.setattr(warnings, "showwarning", show)
    assert main(["list"]) == 0
    assert capsys.readouterr().err == "mlotool: warning: raise the damping\n"
    assert main(["list", "--debug"]) == 0
    assert capsys.readouterr().err == "Python's way: raise the damping"
    assert warnings.showwarning is show


@pytest.mark.parametrize("words", [["run", "--help"], ["list"], ["run", "plain", "--cfg", "job"]])
def test_imports_no_torch(words: list[str], tmp_path: object) -> None:
    probe = (
        "import sys; from mlotool.cli.main import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'pytorch_lightning', 'wandb', 'matplotlib', 'sklearn'} & set(sys.modules); "
        "heavy |= {'hydra'} & set(sys.modules) if '--help' in sys.argv else set(); "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    path = [entry for entry in sys.path if entry]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {probe}", *words],
        cwd=str(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


GONE = "(sleep 0.05; {command} 2>&1) | true; exit ${{PIPESTATUS[0]}}"
"""Its reader has gone before it says a word."""


def _called(tmp_path: Path, line: str, words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = line.format(command=f"{sys.executable} -m mlotool {words}")
    root = str(Path(__file__).parents[2])
    known = {**os.environ, "PYTHONPATH": root, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1", **environment}
    how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": 100, "check": False}
    return subprocess.run(["bash", "-c", command], cwd=tmp_path, env=known, **how)


def test_a_reader_that_has_gone_ends_no_command_and_a_full_disk_is_told_once_the_work_is_done(tmp_path: Path) -> None:
    done = _called(tmp_path, GONE, "copy plain")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "recipes/plain.yaml").is_file()
    done = _called(tmp_path, "{command} >&- 2>/dev/full <&-", "copy maml")
    assert done.returncode == 0 and (tmp_path / "recipes/maml.yaml").is_file()
    done = _called(tmp_path, "{command} > /dev/full", "copy mwn")
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("mlotool: error: stdout: cannot be written (No space left on device)")
    assert (tmp_path / "recipes/mwn.yaml").is_file()


def test_a_word_that_is_no_text_is_refused(tmp_path: Path) -> None:
    done = _called(tmp_path, "{command}", "validate $'\\xff.yaml'", PYTHONUTF8="1")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert r"\udcff" in line
