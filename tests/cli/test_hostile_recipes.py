"""Recipes of a stranger: whichever verb reads one, nothing that it names runs, is written or is read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests import forked
from tests.cli.conftest import Result
from tests.cli.hostile import HEADER, RECIPES

Call = Callable[..., Result]
SECRET = "a-secret-of-the-environment"
# A subset for processes of their own: one of each kind.
IN_A_PROCESS = ["hydra:callback", "defaults:recipe-as-logger", "yaml:python-apply", "references:environment",
                "places:upload", "targets:os.mkdir-as-loss"]  # fmt: skip


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path outside the working folder, which a payload that runs would make; and a secret."""
    monkeypatch.setenv("SECRET", SECRET)
    outside = tmp_path / "outside"
    outside.mkdir()
    return outside / "canary"


@pytest.fixture
def write(tmp_path: Path, canary: Path) -> Callable[[str], Path]:
    """Write a hostile recipe by name into a working folder of its own."""

    def write_one(name: str) -> Path:
        folder = tmp_path / "work"
        (folder / "parts").mkdir(parents=True)
        (folder / "parts" / "upload.yaml").write_text(f"{HEADER}mode: online\n")
        file = folder / "hostile.yaml"
        lines, _ = RECIPES[name]
        file.write_text(HEADER + lines.replace("CANARY", str(canary)) + "\n", encoding="utf-8")
        return file

    return write_one


def _files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_there_are_many() -> None:
    assert len(RECIPES) >= 100


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_of_it_runs(
    name: str, call: Call, write: Callable[[str], Path], canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(name)
    monkeypatch.chdir(file.parent)
    before = _files(tmp_path)
    _, words = RECIPES[name]
    for verb in (["run"], ["validate", "--targets"]):
        code, out, err = call(*verb, str(file))
        assert code == 2, (verb, out, err)
        for word in words:
            assert word in err, (verb, err)
    shown = call("show", str(file))
    copied = call("copy", str(file), "copied.yaml")
    assert {shown[0], copied[0]} <= {0, 2}
    for text in (out, err, *shown[1:], *copied[1:]):
        assert SECRET not in text
        assert all(each.isprintable() or each in "\n\t" for each in text)
    assert not canary.exists()
    # Hydra makes the folder of a run before its config is checked; the run's own is taken away again.
    outputs = file.with_name("outputs")
    assert _files(tmp_path) - before <= {file.with_name("copied.yaml"), outputs, outputs / "plain"}


@pytest.mark.parametrize("name", IN_A_PROCESS)
def test_in_a_process_of_its_own(name: str, write: Callable[[str], Path], canary: Path) -> None:
    file = write(name)
    environment = {**os.environ, "WANDB_MODE": "offline"}
    done = forked.run(forked.call_mlotool, ("run", str(file)), folder=file.parent, environment=environment)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in RECIPES[name][1]:
        assert word in done.stderr
    assert not canary.exists()
    assert SECRET not in done.stdout + done.stderr


def test_the_payloads_would_run(
    write: Callable[[str], Path], canary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make sure of the canary: where YAML's tags are obeyed, or Hydra builds what it is told, it is there."""
    from hydra.utils import instantiate

    yaml.unsafe_load(write("yaml:python-apply").read_text())
    assert canary.is_dir()
    monkeypatch.chdir(tmp_path)
    node = yaml.safe_load(RECIPES["targets:os.mkdir-as-loss"][0])
    instantiate(node["problems"]["classifier"]["loss"])
    assert (tmp_path / "here").is_dir()


@pytest.mark.parametrize("words", [["check"], ["run", "-m", "seed=0,1"], ["run", "--cfg", "job", "--resolve"]])
@pytest.mark.parametrize("name", [*IN_A_PROCESS, "hydra:sweep-of-upload", "references:node-laughs"])
def test_other_ways_in(
    words: list[str],
    name: str,
    call: Call,
    write: Callable[[str], Path],
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = write(name)
    monkeypatch.chdir(file.parent)
    code, out, err = call(*words, str(file))
    # The jobs of a sweep fail one by one, and `--cfg` shows a target without a word on it, as `show` does.
    allowed = {2, 1} if "-m" in words else {2, 0} if name.startswith("targets") and "--cfg" in words else {2}
    assert code in allowed
    assert SECRET not in out + err
    assert not canary.exists()
    assert not list(file.parent.rglob("here"))
