"""What a run evaluates: metrics against their definitions, recalibrated statistics, analyses, the rehearsal."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mlotool
from mlotool.cli.main import main
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.user_code import WrongResultError
from mlotool.data import Digits, InMemoryTensors
from mlotool.folders.run_folder import RunFolder
from mlotool.program import Graph, Problem, Program, Stream
from mlotool.runner import evaluation
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.evaluation import (
    NUM_REHEARSED,
    Batches,
    Evaluator,
    FunctionMetric,
    Objective,
    Recalibration,
    build_metric,
    rehearse,
    run_analyses,
)
from mlotool.runner.session import Session
from tests.runner.test_resume import assert_equal
from tests.runner.tiny import NUM_CLASSES, NUM_FEATURES, Analysis, Blobs, Data, make_built

QUIET = ["debug=fast", "logger.wandb=false", "runner.progress_bar=false", "runner.report=false"]


def test_a_rehearsal_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
        result = mlotool.run(mlotool.compose("mwn", ["hypergradient=unrolled", *QUIET]), output_dir=folder)
        state = read_checkpoint(folder / "checkpoints" / "last.ckpt")
        del state["training_s"]
        return result.metrics, state

    metrics, state = run(tmp_path / "rehearsed")
    monkeypatch.setattr(Session, "rehearse", lambda self: None)
    other_metrics, other_state = run(tmp_path / "plain")
    assert metrics == other_metrics
    assert_equal(state, other_state, "state")


class Noisy:
    """A data set without `__getitems__`, which adds noise to each sample."""

    def __init__(self, inner: Blobs, draw: Callable[[], Any]) -> None:
        self._inner, self._draw = inner, draw

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._inner[index], "input": self._inner[index]["input"] + self._draw()}


def _rehearse(draw: Callable[[], float]) -> None:
    program = make_built().program
    program.problems["weights"].stream = Stream(Noisy(Blobs(40, 0), draw), batch_size=8)
    rehearse(program, None, (), Objective(None, None, is_tracked=False), lambda: None)


def test_samples_that_no_seed_makes_the_same_are_told() -> None:
    for draw in (numpy.random.rand, random.random, lambda: torch.rand(()).item(), lambda: 1.0):
        _rehearse(draw)
    for draw in (lambda: numpy.random.default_rng().random(), numpy.random.default_rng(0).random):
        with pytest.warns(UserWarning, match=r"problems\.weights\.stream: a sample was different when it was read"):
            _rehearse(draw)


def look(function: Any, problem: str = "classifier") -> Analysis:
    return Analysis(function, {"model": problem}, "val", 3)


def _found(batches: Any, *, model: Any) -> dict[str, torch.Tensor | str]:
    target = torch.cat([batch["target"] for batch in batches])
    assert not torch.is_grad_enabled()
    return {"target": target, "count": torch.tensor(len(target)), "name": "kept as it is"}


def test_arrays_texts_and_numbers_go_their_ways(tmp_path: Path) -> None:
    problem = Problem("line", torch.nn.Linear(1, 1), lambda batch, *, model: model(batch), roles={"model": "line"})
    data = Digits({"val": 5})
    numbers: dict[str, float] = {}
    built = SimpleNamespace(analyses={"look": look(_found, "line")}, program=Program([problem], Graph()), data=data)
    folder = RunFolder(tmp_path)
    folder.make_folders()
    run_analyses(built, folder, "cpu", numbers.update)
    assert numbers == {"look/count": 5.0}
    assert (folder.artifacts / "look_name.txt").read_text() == "kept as it is\n"
    with numpy.load(folder.artifacts / "look.npz") as arrays:
        assert arrays["target"].tolist() == data.split("val").target.tolist()
    assert sorted(path.name for path in folder.artifacts.iterdir()) == ["look.npz", "look_name.txt"]


def _fails_from(call: int, size: int = 10**9) -> Callable[..., dict[str, float]]:
    """Return an analysis that fails from its n-th call on, or where it gets fewer samples than `size`."""
    calls = []

    def analysis(batches: Any, *, model: Any) -> dict[str, float]:
        calls.append(sum(len(batch["target"]) for batch in batches))
        if len(calls) >= call or calls[-1] < size < 10**9:
            raise ValueError("no use")
        return {"calls": float(len(calls))}

    return analysis


UNUSABLE: dict[str, Any] = {
    "ZeroDivisionError": lambda batches, *, model: 1 / 0,
    "threshold": lambda batches, *, model, threshold: {},
    "KeyError": lambda batches, *, model: {"x": [batch["label"] for batch in batches]},
    "returned a float": lambda batches, *, model: 3.0,
    "the name 'a/b'": lambda batches, *, model: {"a/b": 1.0},
    "returned a tensor of shape () as 'x'": lambda batches, *, model: {"x": torch.tensor(1j)},
}


@pytest.mark.parametrize("message", UNUSABLE)
def test_what_cannot_work_is_told_before_the_first_tick(
    tiny_run: Callable[..., Any], tmp_path: Path, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        tiny_run(analyses={"look": look(UNUSABLE[message])})
    assert str(caught.value).startswith("analyses.look: ")
    assert not (tmp_path / "run").exists()


def test_one_that_needs_more_samples_gets_all(tiny_run: Callable[..., Any]) -> None:
    result = tiny_run({"runner.max_ticks": 2}, analyses={"look": look(_fails_from(9, size=NUM_REHEARSED + 1))})
    assert result.metrics["look/calls"] == 3.0


def test_a_failure_at_the_end_loses_nothing_else(tiny_run: Callable[..., Any], tmp_path: Path) -> None:
    made = {"bad": _fails_from(2), "good": _fails_from(9), "worse": _fails_from(2)}
    analyses = {name: look(function) for name, function in made.items()}
    with pytest.raises(
        RunError, match=r"After tick 4: analyses\.bad: .*: ValueError: no use.*resume=auto: the training is kept"
    ):
        tiny_run({"runner.max_ticks": 4}, analyses=analyses)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["num_ticks"]) == ("failed", 4)
    assert summary["metrics"]["good/calls"] == 2.0
    assert (tmp_path / "run/checkpoints/last.ckpt").is_file()
    whole = {name: look(_fails_from(9)) for name in made}
    result = tiny_run({"runner.max_ticks": 4}, analyses=whole, resume=tmp_path / "run")
    assert result.metrics["bad/calls"] == 1.0


def linear() -> nn.Linear:
    return nn.Linear(NUM_FEATURES, NUM_CLASSES)


def test_metrics_are_those_of_the_whole_split() -> None:
    data, module = Data(), linear()
    split = data.split("test")
    values = Evaluator(module, data, ["accuracy", "cross_entropy", "recall"], batch_size=7).evaluate("test")
    with torch.no_grad():
        logits = module(split.input)
    correct = logits.argmax(1) == split.target
    assert values["test/accuracy"] == pytest.approx(correct.float().mean().item())
    assert values["test/cross_entropy"] == pytest.approx(functional.cross_entropy(logits, split.target).item())
    recalls = [correct[split.target == label].float().mean().item() for label in range(NUM_CLASSES)]
    assert values["test/recall"] == pytest.approx(sum(recalls) / NUM_CLASSES)


def test_evaluation_is_in_eval_mode_and_leaves_the_mode_and_random_numbers_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(NUM_FEATURES), nn.Dropout(0.5), linear())
    module[0].eval()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    evaluator, state = Evaluator(module, Data(), ["cross_entropy"], batch_size=8), torch.get_rng_state()
    assert evaluator.evaluate("val") == evaluator.evaluate("val")
    assert torch.equal(torch.get_rng_state(), state)
    assert [child.training for child in module] == [False, True, True]
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in module.named_buffers())


def test_samples_of_an_evaluation_draw_the_same_in_batches_of_each_size() -> None:
    def inputs(dataset: Any, size: int) -> Tensor:
        return torch.cat([batch["input"] for batch in Batches(dataset, size)])

    split = Data().split("val")
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    noisy = Noisy(split, lambda: torch.randn(()) + numpy.random.randn() + random.gauss(0, 1))
    found = [inputs(noisy, size) for size in (6, 4, 7)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert torch.equal(inputs(Noisy(split, lambda: 0.0), 6), inputs(split, 6))
    assert not torch.equal(found[0], inputs(split, 6))
    assert (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_every_metric_can_be_built() -> None:
    assert all(build_metric(name, 3) is not None for name in evaluation.METRIC_NAMES)
    with pytest.raises(ConfigError, match="needs classes"):
        build_metric("accuracy", None)
    with pytest.raises(ConfigError, match=r"data\.num_classes: found .*; expected a whole number of at least 2"):
        build_metric("f1", 1)


def test_metrics_of_a_language_model_are_means_over_its_tokens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    tokens = torch.randint(5, (10, 4))
    data = Data()
    data.split = lambda name: InMemoryTensors({"input": tokens[:, :-1], "target": tokens[:, 1:]})  # type: ignore[method-assign]
    values = Evaluator(model, data, ["nats_per_token", "bits_per_token"], batch_size=4).evaluate("val")
    with torch.no_grad():
        probabilities = model(tokens[:, :-1]).softmax(2)
    found = [probabilities[i, j, tokens[i, j + 1]].log().item() for i in range(10) for j in range(3)]
    assert values["val/nats_per_token"] == pytest.approx(-sum(found) / 30)
    assert values["val/bits_per_token"] == pytest.approx(-sum(found) / 30 / math.log(2))


def test_logits_that_are_nan_count_as_no_class() -> None:
    module = linear()
    evaluator = Evaluator(module, Data(), ["accuracy", "f1"], batch_size=7)
    for value, is_nan in ((math.nan, True), (0.0, False)):
        with torch.no_grad():
            module.bias[0] = value
        assert [math.isnan(found) for found in evaluator.evaluate("test").values()] == [is_nan, is_nan]


def test_targets_have_to_fit_the_number_of_classes() -> None:
    data = Data()
    data.num_classes = 2  # type: ignore[misc]
    evaluator = Evaluator(linear(), data, ["accuracy"], batch_size=16)
    with pytest.raises(ConfigError, match=r"found 2, while the split 'val' has targets from 0 to 2"):
        evaluator.rehearse("val")


class Numbers:
    """Five samples, of which a batch of two leaves one over."""

    splits = ("val",)
    num_classes = 2

    def split(self, name: str) -> list[dict[str, Any]]:
        return [{"input": torch.tensor([float(number)]), "target": number % 2} for number in range(5)]


def _mean(module: BoundModule, batch: Any) -> dict[str, Any]:
    assert not torch.is_grad_enabled()
    return {"mean": module(batch["input"]).mean(), "each": module(batch["input"])[:, 0], "always": 3}


def test_means_of_a_function_count_samples_not_batches() -> None:
    model = nn.Linear(1, 1)
    evaluator = Evaluator(model, Numbers(), [], 2, functions={"evaluate.metrics[0]": _mean})
    expected = model(torch.arange(5.0)[:, None]).mean().item()
    values = evaluator.evaluate("val")
    assert values == {"val/mean": pytest.approx(expected), "val/each": pytest.approx(expected), "val/always": 3.0}
    assert evaluator.rehearse("val") == ["val/mean", "val/each", "val/always"]
    assert evaluator.evaluate("val") == values


def test_a_value_that_is_not_finite_is_not_left_out() -> None:
    metric = FunctionMetric("key", lambda module, batch: {"x": torch.tensor([1.0, float("nan")])})
    metric.update(BoundModule(nn.Identity()), None, 2)
    assert math.isnan(metric.compute(taken=())["x"])

    class Spoiled(nn.Module):
        """NaN for the first samples alone."""

        def forward(self, values: Tensor) -> Tensor:
            return torch.where(values < 2, float("nan"), values).repeat(1, 2)

    assert math.isnan(Evaluator(Spoiled(), Numbers(), ["cross_entropy"], 2).evaluate("val")["val/cross_entropy"])


@pytest.mark.parametrize("result", [None, {}, {"x": torch.zeros(3)}, {"x": "y"}, {"a/b": torch.zeros(())}])
def test_what_is_no_metric(result: Any) -> None:
    metric = FunctionMetric("key", lambda module, batch: result)
    with pytest.raises(WrongResultError, match="expected"):
        metric.update(BoundModule(nn.Identity()), None, 2)


BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    for _ in range(2):
        module(torch.randn(8, 4) + 3)
    return module


def _given() -> Iterator[dict[str, Tensor]]:
    return ({"input": batch} for batch in BATCHES)


def assert_unchanged(module: nn.Sequential, before: Any) -> None:
    assert (module.training, module[2].momentum) == (True, 0.1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_statistics_are_means_over_the_batches_and_put_back() -> None:
    module = _network()
    before = deepcopy(module.state_dict())
    hidden = [module[0](batch) for batch in BATCHES]
    with Recalibration(_given, 0).applied(module, lambda batch: module(batch["input"])):
        torch.testing.assert_close(module[2].running_mean, torch.stack([part.mean(0) for part in hidden]).mean(0))
        torch.testing.assert_close(module[2].running_var, torch.stack([part.var(0) for part in hidden]).mean(0))
    assert_unchanged(module, before)

    def fail(batch: Any) -> None:
        module(batch["input"])
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), Recalibration(_given, 0).applied(module, fail):
        pass
    assert_unchanged(module, before)


def test_a_backward_pass_of_an_earlier_call_is_not_disturbed() -> None:
    """BatchNorm's keeps the layer's running statistics; a step that is recorded may be differentiated later."""
    module, expected = _network(), _network()
    loss, same = (net(BATCHES[0]).square().sum() for net in (module.eval(), expected.eval()))
    with Recalibration(_given, 0).applied(module, lambda batch: module(batch["input"])):
        pass
    loss.backward()
    same.backward()
    assert torch.equal(module[0].weight.grad, expected[0].weight.grad)


def test_an_evaluation_takes_statistics_and_draws_no_random_numbers_of_its_surroundings() -> None:
    module, data = _network(), Data()
    noisy = Recalibration(lambda: iter([{"input": torch.randn(8, 4)} for _ in range(3)]), 7)
    state = torch.get_rng_state()
    first, other, again = (
        Evaluator(module, data, ["cross_entropy"], 8, recalibration=how).evaluate("val") for how in (noisy, None, noisy)
    )
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_a_run_trains_the_same_with_statistics_that_are_taken_anew(tiny_run: Callable[..., Any]) -> None:
    def ends(folder: str, **changes: Any) -> tuple[Any, float]:
        stream = {"split": "train", "batch_size": 8, "shuffle": True, "drop_last": True}
        changes = {"problems.classifier": {"stream": stream, "same_batch_as": None}, "runner.max_ticks": 10, **changes}
        result = tiny_run(changes, folder=folder, between=[nn.BatchNorm1d(16)])
        state = read_checkpoint(result.output_dir / "checkpoints" / "last.ckpt")
        return state["program"], result.metrics["val/cross_entropy"]

    (own, value), (other, plain) = ends("with", **{"evaluate.recalibrate": 2}), ends("without")
    assert_equal(own, other, "program")
    assert value != plain


def test_what_cannot_be_taken_anew_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "+recipe=plain", "evaluate.recalibrate=2", "logger=csv", "hydra.run.dir=refused"]) == 2
    assert "the problem 'classifier' has no layer with running statistics" in capfd.readouterr().err
    assert not (tmp_path / "refused" / "config.yaml").exists()
