import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool.config import Origin, compose, finish_provenance, write_provenance
from mlotool.config.schema import DebugConfig, LoggerConfig, RunnerConfig
from mlotool.folders.run_folder import RunFolder


def _git(*arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)


def _record(folder: Path) -> dict[str, object]:
    record: dict[str, object] = json.loads((folder / "provenance.json").read_text())
    return record


def test_everything_that_a_rerun_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    origin = Origin("mlotool run +recipe=mwn seed=3", ("seed=3",), Path("recipes/mwn.yaml"))
    write_provenance(RunFolder(folder), compose("mwn", ["seed=3"]), origin)
    record = _record(folder)
    assert record["command"] == origin.command
    assert (record["seed"], record["recipe_path"], record["finished"]) == (3, "recipes/mwn.yaml", None)
    assert set(record["versions"]) >= {"mlotool", "torch", "hydra-core", "pytorch-lightning"}  # type: ignore[call-overload]
    assert record["git"]["commit"] is None  # type: ignore[index]
    assert "hunter2" not in (folder / "provenance.json").read_text()
    finish_provenance(RunFolder(folder))
    record = _record(folder)
    assert isinstance(record["duration_s"], float)
    assert isinstance(record["finished"], str)


ORIGIN = Origin("x", (), None)


@pytest.fixture
def repository(folder: Path) -> Path:
    """The working directory, with a commit."""
    _git("init", "-q")
    (folder / "file").write_text("1")
    _git("add", "file")
    _git("commit", "-qm", "first")
    return folder


def test_a_changed_working_directory_is_dirty(repository: Path) -> None:
    for text, is_dirty in (("1", False), ("2", True)):
        (repository / "file").write_text(text)
        write_provenance(RunFolder(repository), compose(None), ORIGIN)
        git: Any = _record(repository)["git"]
        assert len(git["commit"]) == 40 and git["dirty"] is is_dirty


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.x.clean"])
def test_git_runs_nothing_of_the_folder(repository: Path, setting: str) -> None:
    (repository / "file").write_text("2")
    (repository / ".git" / "info" / "attributes").write_text("* filter=x\n")
    _git("config", setting, "touch owned; cat")
    write_provenance(RunFolder(repository), compose(None), ORIGIN)
    git: Any = _record(repository)["git"]
    assert git["commit"] is not None and git["dirty"] is None and not (repository / "owned").exists()
    # Make sure of the canary: git itself does run it.
    subprocess.run(["git", "status", "--porcelain"], check=False, capture_output=True)
    assert (repository / "owned").exists()


@pytest.mark.parametrize(
    ("key", "schema"), [("runner", RunnerConfig), ("logger", LoggerConfig), ("debug", DebugConfig)]
)
def test_the_default_options_are_the_schema_s_defaults(key: str, schema: type) -> None:
    assert OmegaConf.to_container(compose(None)[key]) == OmegaConf.to_container(OmegaConf.structured(schema))
