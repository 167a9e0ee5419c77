"""A script's program gets what a recipe's run has; its numbers are those of a plain loop over ticks."""

import csv
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.utils.data import TensorDataset

import mlotool
from mlotool.core.errors import ConfigError
from mlotool.program import Program, Schedule
from mlotool.runner import evaluate
from tests.program.small import assert_identical, pair, parameters
from tests.runner.tiny import Blobs, make_built

SILENT: dict[str, Any] = {"logger": {"wandb": False}, "progress_bar": False, "report": False, "num_threads": None}


def program() -> Program:
    return make_built().program


class Ticks(Callback):
    """Notes the ticks at which it is called."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen.append(module.schedule.num_ticks)


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_has_what_a_run_has() -> None:
    made, callback, calls = program(), Ticks(), list[int]()

    def margin(module: Any, batch: Any) -> dict[str, Any]:
        calls.append(len(batch["target"]))
        return {"margin": module(batch["input"]).amax(1)}

    val = Blobs(20, 2)
    data = {"val": TensorDataset(val.input, val.target), "test": Blobs(24, 3)}
    splits = {"val": 10, "test": "end"}
    chosen = {"problem": "classifier", "metrics": ["accuracy", margin], "splits": splits, "batch_size": 7}
    logger = CSVLogger("logs", version="one")
    result = mlotool.fit(
        made, 20, data=data, evaluate=chosen, objective="val/accuracy", callbacks=callback, logger=logger, log_every=5,
        ticks_per_chunk=10, name="small", progress_bar=False,
    )  # fmt: skip
    with (result.output_dir / "metrics.csv").open() as file:
        rows = [(int(row["tick"]), row["key"]) for row in csv.DictReader(file)]
    assert [tick for tick, key in rows if key == "classifier/loss"] == [5, 10, 15, 20]
    assert [tick for tick, key in rows if key == "val/accuracy"] == [10, 20]
    assert callback.seen == [10, 20]
    assert Path("logs/lightning_logs/one/metrics.csv").is_file()
    assert {file.name for file in result.output_dir.iterdir()} >= {"summary.json", "config.yaml", "report.html"}
    assert result.output_dir.parent == Path("outputs/small")
    # The program holds what was best, and so does a module of the user's; the accuracy is counted by hand.
    fresh = deepcopy(make_built().program.problems["classifier"].module)
    loaded = mlotool.load(result.output_dir, "classifier", into=fresh)
    assert_identical(loaded.state_dict(), made.problems["classifier"].module.state_dict())
    with torch.no_grad():
        right = (loaded(val.input).argmax(1) == val.target).float().mean()
        assert result.objective == pytest.approx(float(right))
        assert result.metrics["test/margin"] == pytest.approx(float(loaded(Blobs(24, 3).input).amax(1).mean()))
    assert set(calls) <= {7, 6, 3, 16, 4, 8}
    with pytest.raises(ConfigError, match=r"a run of a script .* into=module"):
        evaluate(result.output_dir, "val")
    with pytest.raises(ConfigError, match=r"load.into: found Linear, which does not fit 'classifier'"):
        mlotool.load(result.output_dir, "classifier", into=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"Unknown problem 'clasifier' .* Did you mean 'classifier'"):
        mlotool.load(result.output_dir, "clasifier", into=fresh)


def test_it_takes_the_steps_of_a_plain_loop_and_goes_on_bit_by_bit() -> None:
    by_hand, whole, cut = program(), program(), program()
    schedule = Schedule(by_hand)
    for _ in range(12):
        schedule.tick()
    mlotool.fit(whole, 12, folder="whole", **SILENT)
    assert_identical(parameters(whole), parameters(by_hand))
    mlotool.fit(cut, 5, folder="cut", **SILENT)
    assert cut.problems["classifier"].num_steps == 5
    again = program()
    result = mlotool.fit(again, 12, folder="cut", resume="auto", **SILENT)
    assert_identical(parameters(again), parameters(by_hand))
    # A run that has finished gives its parameters back.
    with torch.no_grad():
        again.problems["classifier"].module[0].weight.zero_()
    assert mlotool.fit(again, 12, resume=result.output_dir, **SILENT).had_finished
    assert_identical(parameters(again), parameters(by_hand))
    with pytest.raises(ConfigError, match=r"problems.classifier.optimizer.lr: 0.1 there, 0.2 here"):
        other = program()
        other.problems["classifier"].optimizer.param_groups[0]["lr"] = 0.2  # type: ignore[union-attr]
        mlotool.fit(other, 12, resume=result.output_dir, **SILENT)


def test_a_control_takes_no_steps_above_and_no_other_program_resumes_it() -> None:
    def made(*held: str) -> Program:
        plain = program()
        (upper,) = plain.graph.upper_to_lower
        plain.problems[upper].module.neutral = 1.0  # type: ignore[assignment]
        return Program(plain.problems.values(), plain.graph, held=held)

    (upper,) = program().graph.upper_to_lower
    control = made(upper)
    result = mlotool.fit(control, 5, folder="control", **SILENT)
    assert {name: problem.num_steps for name, problem in control.problems.items() if name == upper} == {upper: 0}
    assert json.loads((result.output_dir / "summary.json").read_text())["baseline"] == "fixed"
    with pytest.raises(ConfigError, match=rf"data.held: \['{upper}'\] there, 'nothing' here"):
        mlotool.fit(made(), 9, resume=result.output_dir, **SILENT)


VAL = {"problem": "w", "metrics": ["mean_squared_error"], "splits": {"val": 5}}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"ticks": 1.5}, "runner.max_ticks: found 1.5; expected a whole number of at least 0"),
    ({"log_evry": 5}, "fit: found the argument 'log_evry'; expected one of ticks, data"),
    ({"log_every": 0}, "runner.log_every: found 0; expected a whole number of at least 1"),
    (
        {"max_ticks": 3},
        "fit.max_ticks: mlotool.fit does not take this argument. Write mlotool.fit(program, ticks",
    ),
    ({"devices": 2}, "python -m torch.distributed.run --nproc-per-node 2 SCRIPT"),
    ({"evaluate": ["val"]}, "fit.evaluate: found ['val']; expected a mapping with the keys of a recipe's evaluate"),
    ({"evaluate": {**VAL, "problem": "v"}}, "evaluate.problem: found 'v'; expected one of w, u."),
    ({"evaluate": {**VAL, "metrics": ["acuracy"]}}, "Did you mean 'accuracy'?"),
    ({"evaluate": {**VAL, "split": {}}}, "evaluate.split: unknown key 'split'; expected one of problem, arguments"),
    ({"evaluate": VAL, "data": {"test": [1]}}, "evaluate.splits: found 'val'; expected a split of the data: test."),
    ({"evaluate": {**VAL, "recalibrate": 3}}, "evaluate.recalibrate: found 3; expected none"),
    ({"objective": "val/accuracy"}, "objective: found 'val/accuracy'; expected one of w/loss, u/loss."),
    ({"callbacks": [3]}, "fit.callbacks: found 3; expected Lightning callbacks"),
    ({"logger": "wandb"}, "fit.logger: found 'wandb'; expected Lightning loggers, or a mapping with the keys"),
    ({"logger": {"wandbb": True}}, "logger.wandbb: unknown key 'wandbb'"),
    ({"folder": 3}, "fit.folder: found 3; expected a path or null"),
    ({"program": nn.Linear(1, 1)}, "fit.program: found a Linear; expected a Program"),
]


@pytest.mark.parametrize(("given", "said"), MISTAKES, ids=[said[:25] for _, said in MISTAKES])
def test_a_mistake_is_said_in_the_words_of_a_recipe(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        mlotool.fit(**{"program": pair(), "ticks": 2, **SILENT, **given})
    assert said in str(refused.value)
    assert not Path("outputs").exists()


def test_data_that_nothing_reads_warn() -> None:
    with pytest.warns(UserWarning, match=r"fit.data: found data without evaluate"):
        mlotool.fit(pair(), 1, data={"val": [1]}, checkpoint=False, **SILENT)
