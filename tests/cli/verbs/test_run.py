"""`mlotool run` with a runner that trains nothing: what it is given, and what becomes of its errors."""

import csv
import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import mlotool
import mlotool.report
from mlotool.config import VERSION_KEYWORDS
from mlotool.core.errors import ConfigError, RunError
from tests.cli.conftest import Call, Recipe


class FakeRunner:
    """Stands in for mlotool.runner, and for what writes a page; `raises` may hold an error by seed."""

    def __init__(self) -> None:
        self.reports: list[Path] = []
        self.calls: list[SimpleNamespace] = []
        self.raises: dict[int, BaseException] = {}

    def run(self, config: Any, *, output_dir: Path, origin: Any, watch: Any = None) -> SimpleNamespace:
        self.calls.append(SimpleNamespace(config=config, output_dir=output_dir, origin=origin))
        error = self.raises.get(config.seed)
        if isinstance(error, ConfigError):
            raise error
        status = "finished" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        objective = {"key": config.objective, "value": None if error else 0.5 + config.seed / 100, "mode": "max"}
        summary = {"status": status, "objective": objective, "metrics": {}, "error": str(error)}
        (output_dir / "summary.json").write_text(json.dumps(summary))
        (output_dir / "overrides.txt").write_text("\n".join(origin.overrides))
        if error is not None:
            raise error
        metrics = {"val/accuracy": 0.25, "test/accuracy": 0.75, "classifier/loss": 0.1}
        more = {"output_dir": output_dir, "checkpoint": None, "objective": objective["value"], "had_finished": False}
        more |= {"ticks": {"val/accuracy": 30, "test/accuracy": 20}, "best_tick": 20}
        return SimpleNamespace(metrics=metrics, **more)

    def write_report(self, run_dir: Path) -> Path:
        self.reports.append(run_dir)
        (run_dir / "report.html").write_text("<html>")
        return run_dir / "report.html"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    fake = FakeRunner()
    import_module("mlotool.cli.verbs.report")  # which would keep the fake one, were it imported here for the first time
    monkeypatch.setattr(mlotool.report, "write_report", fake.write_report)
    monkeypatch.setitem(sys.modules, "mlotool.runner", fake)
    monkeypatch.setattr(mlotool, "runner", fake, raising=False)
    return fake


@pytest.mark.parametrize("words", [["+recipe=plain"], ["plain"]])
@pytest.mark.usefixtures("pages")
def test_runs_in_the_folder_of_hydra(call: Call, runner: FakeRunner, tmp_path: Path, words: list[str]) -> None:
    code, out, err = call("run", *words, "seed=4", "runner.max_ticks=3")
    [made] = runner.calls
    assert code == 0 and (made.config.seed, made.config.runner.max_ticks) == (4, 3)
    assert "hydra" not in made.config and made.output_dir.parent == tmp_path / "outputs" / "plain"
    assert made.origin.command == " ".join(["mlotool", "run", *words, "seed=4", "runner.max_ticks=3"])
    assert made.origin.overrides == ("+recipe=plain", "seed=4", "runner.max_ticks=3")
    assert made.origin.recipe_path.name == "plain.yaml" and runner.reports == [made.output_dir]
    folder = made.output_dir.relative_to(tmp_path)
    assert f"{folder}/report.html" in out and "classifier/loss" not in out
    assert [" ".join(line.split()) for line in out.splitlines() if "tick" in line] == [
        "objective val/accuracy 0.54 at tick 20 (best checkpoint)",
        "test/accuracy 0.75 at tick 20 (best checkpoint)",
        "val/accuracy 0.25 at tick 30 (last)",
    ]
    assert "plain.yaml" in err


def test_runs_a_file_and_own_recipes_hide_built_in_ones(
    call: Call, runner: FakeRunner, recipe: Recipe, tmp_path: Path
) -> None:
    file = recipe("seed: 3", name="with space")
    assert call("run", str(file))[0] == 0
    assert (runner.calls[0].config.seed, runner.calls[0].origin.recipe_path) == (3, file)
    (tmp_path / "recipes").mkdir()
    file.rename(tmp_path / "recipes" / "mwn.yaml")
    code, _, err = call("run", "+recipe=mwn")
    assert code == 0 and runner.calls[1].config.seed == 3 and "recipes/mwn.yaml" in err


@pytest.mark.usefixtures("pages")
def test_a_report_that_breaks_is_a_warning(call: Call, runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlotool.report, "write_report", Mock(side_effect=OSError("disk full")))
    code, _, err = call("run", "plain")
    assert code == 0 and "disk full" in err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (RunError("The loss became nan."), 1, "The loss became nan."),
        (ZeroDivisionError("unforeseen"), 1, "ZeroDivisionError: unforeseen"),
        (ConfigError("This cannot run."), 2, "This cannot run."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
@pytest.mark.usefixtures("pages")
def test_what_a_run_raises_is_an_exit_code(
    call: Call, runner: FakeRunner, error: BaseException, code: int, said: str
) -> None:
    runner.raises[0] = error
    found, _, err = call("run", "plain")
    assert (found, said in err, "Error executing job" in err) == (code, True, False)
    folder = runner.calls[0].output_dir
    assert runner.reports == ([folder] if code == 1 and isinstance(error, RunError) else [])
    assert folder.exists() == (code != 2)


def test_sweep(call: Call, runner: FakeRunner, tmp_path: Path) -> None:
    code, out, err = call("run", "-m", "+recipe=plain", "seed=0,1", "hydra.run.dir=x")
    assert code == 0 and "warning: hydra.run.dir: has no effect with -m." in err
    assert [made.output_dir.name for made in runner.calls] == ["0", "1"]
    [sweep] = (tmp_path / "outputs" / "plain" / "multirun").iterdir()
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [(row["status"], row["value"]) for row in rows] == [("finished", "0.5"), ("finished", "0.51")]
    assert "(mean ± standard error of 2 seeds; larger is better)" in out
    assert json.loads((sweep / "plan.json").read_text())["num_jobs"] == 2
    assert f"{sweep.relative_to(tmp_path)}/sweep.csv" in out


def test_failing_jobs_hide_no_other(call: Call, runner: FakeRunner, tmp_path: Path) -> None:
    runner.raises = {0: RunError("job broke"), 1: ConfigError("job refused")}
    code, out, err = call("run", "-m", "plain", "seed=0,1,2")
    assert code == 1 and [made.config.seed for made in runner.calls] == [0, 1, 2]
    [sweep] = (tmp_path / "outputs" / "plain" / "multirun").iterdir()
    rows = list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))
    assert [row["status"] for row in rows] == ["failed", "failed", "finished"] and rows[1]["seed"] == "1"
    assert "job broke" in err and "job refused" in err and "failed" in out


def test_ctrl_c_in_a_sweep_shows_what_there_is(call: Call, runner: FakeRunner) -> None:
    runner.raises[1] = KeyboardInterrupt()
    code, out, _ = call("run", "-m", "plain", "seed=0,1,2")
    assert code == 130 and len(runner.calls) == 2 and "finished" in out and "interrupted" in out


def test_what_does_nothing_is_a_warning(call: Call, runner: FakeRunner) -> None:
    code, _, err = call("run", "plain", "seed=1", "seed=2", "hydra.sweep.dir=x", "sweep.workers=2")
    assert code == 0 and "warning: found seed=1, and later seed=2; the later one counts." in err
    assert "warning: hydra.sweep.dir: has no effect without -m." in err
    assert "warning: found sweep settings" in err
    assert "warning" not in call("run", "plain", "hydra.run.dir=x", "seed=3")[2]


def test_sweep_over_recipes_has_one_folder(call: Call, runner: FakeRunner, tmp_path: Path) -> None:
    code, _, _ = call("run", "-m", "+recipe=plain,mwn")
    assert code == 0
    assert [made.config.name for made in runner.calls] == ["plain", "mwn"]
    assert len({made.output_dir.parent for made in runner.calls}) == 1
    assert [made.origin.recipe_path.stem for made in runner.calls] == ["plain", "mwn"]


def test_cfg_and_info_run_nothing(call: Call, runner: FakeRunner, tmp_path: Path) -> None:
    code, out, _ = call("run", "plain", "seed=9", "--cfg", "job")
    assert code == 0 and "seed: 9" in out
    assert call("run", "plain", "-c", "job", "-p", "runner", "--resolve")[1].startswith("# @package runner")
    assert "recipes://" in call("run", "--info", "searchpath")[1]
    for words in (["-m", "--cfg", "job"], ["--resolve"], ["-cn", "other"]):
        assert call("run", "plain", *words)[0] == 2
    assert runner.calls == []
    assert not (tmp_path / "outputs").exists()


# Hydra 1.4 composes nothing to learn the mode, so it asks no group for it.
by_a_group = pytest.mark.skipif(not VERSION_KEYWORDS, reason="Hydra 1.4 finds no mode in a group")
MODES = [["hydra.mode=MULTIRUN"], pytest.param(["+hydra/modes=many", "-cd", "mine"], marks=by_a_group)]


@pytest.mark.parametrize("words", MODES)
@pytest.mark.usefixtures("hydra_mode")
def test_other_ways_to_say_that_it_is_a_sweep(call: Call, runner: FakeRunner, tmp_path: Path, words: list[str]) -> None:
    option = tmp_path / "mine" / "hydra" / "modes" / "many.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("# @package hydra\nmode: MULTIRUN\n")
    code, _, err = call("run", "plain", "seed=1,2", *words)
    assert code == 0, err
    assert [each.config.seed for each in runner.calls] == [1, 2]
    assert all("multirun" in each.output_dir.parts for each in runner.calls)
