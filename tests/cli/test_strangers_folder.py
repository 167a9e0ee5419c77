"""A folder from a stranger as the working directory: its recipes, links and pipes."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Call

HEADER = "# @package _global_\n# A test's recipe.\ndefaults: [plain, _self_]\n"


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    return folder


def _is_plain(text: str) -> bool:
    return all(each.isprintable() or each in "\n\t" for each in text)


def test_names_and_summaries_are_no_commands_to_the_terminal(call: Call, recipes: Path) -> None:
    (recipes / "a\x1b]0;owned\x07\nb.yaml").write_text(HEADER)
    (recipes / "mine.yaml").write_text("# @package _global_\n# Nice\x1b[2J \u202eone.\n", encoding="utf-8")
    code, out, err = call("list")
    assert code == 0 and _is_plain(out + err) and r"Nice\x1b[2J \u202eone." in out
    assert len(out.splitlines()) == len(call("list")[1].splitlines())
    assert [line for line in out.splitlines() if line.startswith("b.yaml")] == []


def test_pipes_and_links_are_no_recipes(call: Call, recipes: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.yaml"
    secret.write_text("a-secret-line\n")
    os.mkfifo(recipes / "pipe.yaml")
    (recipes / "link.yaml").symlink_to(secret)
    (recipes / "far").symlink_to("/")
    (recipes / "mine.yaml").write_text(HEADER.replace("plain", "link"))
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "named.yaml"
    link.symlink_to(secret)
    out = call("list")[1]
    assert "pipe" not in out and "link" not in out
    for word in ("link", "pipe", "mine", str(link), "far/etc/x"):
        code, out, err = call("validate", word)
        assert code == 2 and "a-secret-line" not in out + err


def test_names_that_hydra_would_resolve(call: Call, recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or folder named `${oc.env:SECRET}`: Hydra would resolve the name, and print the variable."""
    monkeypatch.setenv("SECRET", "a-secret-of-the-environment")
    trap = "${oc.env:SECRET}"
    for folder in (recipes, recipes / trap, recipes.parent / trap):
        folder.mkdir(exist_ok=True)
        (folder / "fine.yaml").write_text(HEADER)
        (folder / f"{trap}.yaml").write_text(HEADER)
    for words in (["list"], ["validate", f"recipes/{trap}.yaml"], ["run", f"{trap}/fine.yaml"], ["report", trap],
                  ["run", "-m", "+recipe=glob(*oc*)"], ["run", "-m", "fine", f"resume=outputs/{trap}"]):  # fmt: skip
        code, out, err = call(*words)
        assert "a-secret" not in out + err and "not foreseen" not in err
        assert code in (0, 1, 2)
    assert "expected a path without '$'" in call("show", f"recipes/{trap}.yaml")[2]
    monkeypatch.chdir(recipes.parent / trap)
    code, out, err = call("run", "plain", "--cfg", "all")
    assert code == 2 and "a-secret" not in out + err and "Rename it" in err


def test_completion_offers_nothing_that_a_shell_runs(
    call: Call, recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a$(touch owned)", "a`touch owned`", "a\x1b[2J"):
        (recipes / f"{name}.yaml").write_text(HEADER)
    (recipes / "atag.yaml").write_text(HEADER + "seed: !!python/object/apply:os.mkdir [owned]\n")
    for line in ("mlotool run a", "mlotool run +recipe=a", "mlotool run atag se"):
        monkeypatch.setenv("COMP_LINE", line)
        code, out, _ = call("-sc", "query=bash")
        assert code == 0 and not set("$`;|&<>\\\x1b") & set(out)


def test_a_strangers_options_are_held_to_the_rules_unless_the_command_line_trusts_the_folder(
    call: Call, tmp_path: Path
) -> None:
    (tmp_path / "conf" / "logger").mkdir(parents=True)
    (tmp_path / "conf" / "logger" / "up.yaml").write_text("mode: online\n")
    for words in (("validate", "plain"), ("run", "-m", "plain", "seed=0,1", "sweep.workers=2")):
        assert call(*words, "logger=up")[0] == 2
    assert call("run", "plain", "--cfg", "job", "-cd", "conf", "logger=up")[0] == 0


def test_doctor_shows_where_options_are_looked_for(call: Call, tmp_path: Path) -> None:
    for name in ("data/mine", "data/digits", "dta/other"):
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("_target_: mlotool.data.Digits\n")
    out = call("doctor")[1]
    assert "yours in ./conf/<group>/<name>.yaml: data (2)" in out and "conf/dta belongs to no group" in out
    assert "conf/data/digits.yaml has the name of a built-in option" in out
