"""A folder from a stranger as the working directory: its recipes, links, pipes and git configuration."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from mlotool.config import Origin, compose, write_provenance
from tests.cli.conftest import Call

HEADER = "# @package _global_\n# A test's recipe.\ndefaults: [plain, _self_]\n"
SECONDS = 60
"""More than enough for what must not hang; without the limits none of these would end."""


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
    started = time.monotonic()
    out = call("list")[1]
    assert "pipe" not in out and "link" not in out
    for word in ("link", "pipe", "mine", str(link), "far/etc/x"):
        code, out, err = call("validate", word)
        assert code == 2 and "a-secret-line" not in out + err
    assert time.monotonic() - started < SECONDS


def test_names_that_lead_elsewhere(call: Call, tmp_path: Path) -> None:
    (tmp_path.parent / "x.yaml").write_text(HEADER)
    for name in ("../../x", "..", "/etc/hostname", "a/../../x", "plain\0", "", "~", "${oc.env:HOME}"):
        for verb in ("run", "copy"):
            code, out, err = call(verb, f"+recipe={name}")
            assert code == 2 and ("expected" in err or "found" in err)
            assert os.environ["HOME"] not in out + err or os.environ["HOME"] in str(tmp_path)
    assert not (tmp_path / "outputs").exists()


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
    call: Call, recipes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (recipes / "a$(touch owned).yaml").write_text(HEADER)
    (recipes / "a`touch owned`.yaml").write_text(HEADER)
    (recipes / "a\x1b[2J.yaml").write_text(HEADER)
    laughs = "".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9)}]\n" for i in range(1, 12))
    (recipes / "abomb.yaml").write_text(HEADER + "k0: &k0 [x]\n" + laughs)
    (recipes / "atag.yaml").write_text(HEADER + "seed: !!python/object/apply:os.mkdir [owned]\n")
    started = time.monotonic()
    for line in ("mlotool run a", "mlotool run +recipe=a", "mlotool run abomb k", "mlotool run atag se"):
        monkeypatch.setenv("COMP_LINE", line)
        code, out, _ = call("-sc", "query=bash")
        assert code == 0 and not set("$`;|&<>\\\x1b") & set(out)
    assert time.monotonic() - started < SECONDS
    assert not (tmp_path / "owned").exists()


GIT_SETTINGS = {"core.fsmonitor": "touch owned; false", "filter.x.clean": "touch owned; cat"}


@pytest.mark.parametrize("setting", GIT_SETTINGS)
def test_git_runs_nothing_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.chdir(tmp_path)

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-qm", "x")
    (tmp_path / "file").write_text("2")
    (tmp_path / ".git" / "info" / "attributes").write_text("* filter=x\n")
    git("config", setting, GIT_SETTINGS[setting])
    write_provenance(tmp_path, compose("plain"), Origin("mlotool run plain", (), None))
    record = json.loads((tmp_path / "provenance.json").read_text())
    assert record["git"]["commit"] is not None and record["git"]["dirty"] is None
    assert not (tmp_path / "owned").exists()
    # Make sure of the canary: git itself does run it.
    subprocess.run(["git", "status", "--porcelain"], check=False, capture_output=True)
    assert (tmp_path / "owned").exists()


def test_a_strangers_options_are_held_to_the_rules(call: Call, tmp_path: Path) -> None:
    model = "_target_: mlotool.models.MLP\nimage_shape: [1, 8, 8]\nnum_classes: 10\n"
    options = {
        "data/far": "_target_: mlotool.data.Digits\nroot: /etc\n",
        "logger/up": "mode: online\n",
        "sweep/far": "launcher: slurm\n",
        "model/up": f"{model}mode: online\n",
        "data/code": "_target_: os.system\ncommand: touch canary\n",
    }
    for name, text in options.items():
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "conf" / "pipes").mkdir()
    os.mkfifo(tmp_path / "conf" / "pipes" / "mine.yaml")
    (tmp_path / "conf" / "x\x1b[2J").mkdir()
    for word in ("data=far", "logger=up", "sweep=far", "+model@logger=up", "data=code", "data=mine"):
        in_jobs = ("run", "-m", "plain", "seed=0,1", "sweep.workers=2")
        for words in (("validate", "plain"), *((in_jobs,) if word == "data=far" else ())):
            code, out, err = call(*words, word)
            assert code == 2, (words, word)
            assert _is_plain(out + err)
    assert not (tmp_path / "canary").exists()
    assert _is_plain(call("doctor")[1])
    # The command line may trust the folder.
    assert call("run", "plain", "--cfg", "job", "-cd", "conf", "logger=up")[0] == 0


def test_doctor_shows_where_options_are_looked_for(call: Call, tmp_path: Path) -> None:
    for name in ("data/mine", "data/digits", "dta/other"):
        file = tmp_path / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("_target_: mlotool.data.Digits\n")
    out = call("doctor")[1]
    assert "yours in ./conf/<group>/<name>.yaml: data (2)" in out and "conf/dta is no group's" in out
    assert "conf/data/digits.yaml has the name of a built-in option" in out
