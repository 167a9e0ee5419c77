"""A file or folder named `${oc.env:SECRET}`: Hydra would resolve the name, and print the variable."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

Call = Callable[..., Result]
SECRET = "a-secret-of-the-environment"
TRAP = "${oc.env:SECRET}"
TEXT = "# @package _global_\n# A trap.\ndefaults: [plain, _self_]\n"


@pytest.fixture(autouse=True)
def _traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    for folder in (tmp_path / "recipes", tmp_path / "recipes" / TRAP, tmp_path / TRAP):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "fine.yaml").write_text(TEXT)
        (folder / f"{TRAP}.yaml").write_text(TEXT)


WORDS = [
    ["list"],
    ["validate", f"recipes/{TRAP}.yaml"],
    ["run", f"{TRAP}/fine.yaml"],
    ["copy", f"recipes/{TRAP}.yaml", "copied.yaml"],
    ["run", f"+recipe={TRAP}/fine"],
    ["run", "-m", "+recipe=glob(*oc*)"],
    ["run", "-m", "fine", f"resume=outputs/{TRAP}"],
    ["report", TRAP],
]


def test_nothing_is_resolved(call: Call) -> None:
    for words in WORDS:
        code, out, err = call(*words)
        assert SECRET not in out + err
        assert code in (0, 1, 2)
        assert "not foreseen" not in err


def test_a_path_is_refused_by_name(call: Call) -> None:
    code, _, err = call("show", f"recipes/{TRAP}.yaml")
    assert code == 2
    assert "expected a path without '$'" in err
    assert TRAP not in call("list")[1]


def test_completion(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMP_LINE", "mlotool run +recipe=")
    _, out, _ = call("-sc", "query=bash")
    assert "+recipe=fine" in out
    assert SECRET not in out
    assert TRAP not in out


def test_the_working_folder(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / TRAP)
    code, out, err = call("run", "plain", "--cfg", "all")
    assert code == 2
    assert SECRET not in out + err
    assert "Rename it" in err
