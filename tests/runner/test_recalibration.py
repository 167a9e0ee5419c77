"""Running statistics that are taken anew for an evaluation."""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.cli.main import main
from mlotool.core.run_files import read_json
from mlotool.runner.evaluation import Evaluator, Recalibration, layers_with_statistics
from tests.runner.tiny import Data

SHARED = [
    *(f"~problems.classifier.module.{key}" for key in ("image_shape", "hidden", "num_classes")),
    "problems.classifier.module={_target_: mlotool.spaces.Space, shared: true, inputs: '${data.image_shape}', base: "
    "{_target_: mlotool.models.ResNet, depth: 8, width: 2, image_shape: '${data.image_shape}', num_classes: 10}, "
    "mutators: [{_target_: mlotool.spaces.Operator, name: activation, at: 'stages.0.0:relu', candidates: "
    "{relu: null, tanh: {_target_: torch.nn.Tanh}}}], paths: {_target_: mlotool.spaces.UniformPaths}}",
]
BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    for _ in range(2):
        module(torch.randn(8, 4) + 3)
    return module


def _given() -> Iterator[dict[str, Tensor]]:
    return ({"input": each} for each in BATCHES)


def test_statistics_are_means_over_the_batches_and_put_back() -> None:
    module = _network()
    before = deepcopy(module.state_dict())
    hidden = [module[0](each) for each in BATCHES]
    with Recalibration(_given, 0).applied(module, lambda batch: module(batch["input"])):
        torch.testing.assert_close(module[2].running_mean, torch.stack([each.mean(0) for each in hidden]).mean(0))
        torch.testing.assert_close(module[2].running_var, torch.stack([each.var(0) for each in hidden]).mean(0))
        assert module[2].momentum == 0.1
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_backward_pass_of_an_earlier_call_is_not_disturbed() -> None:
    """BatchNorm's keeps the layer's running statistics; a step that is recorded may be differentiated later."""
    module, expected = _network(), _network()
    loss, same = (each(BATCHES[0]).square().sum() for each in (module.eval(), expected.eval()))
    with Recalibration(_given, 0).applied(module, lambda batch: module(batch["input"])):
        pass
    loss.backward()
    same.backward()
    assert torch.equal(module[0].weight.grad, expected[0].weight.grad)


def test_what_a_batch_raises_leaves_the_module_as_it_was() -> None:
    module = _network()
    before = deepcopy(module.state_dict())

    def fail(batch: Any) -> None:
        module(batch["input"])
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), Recalibration(_given, 0).applied(module, fail):
        pass
    assert (module.training, module[2].momentum) == (True, 0.1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_an_evaluation_takes_them_and_draws_no_random_numbers_of_its_surroundings() -> None:
    module, data = _network(), Data()
    noisy = Recalibration(lambda: iter([{"input": torch.randn(8, 4)} for _ in range(3)]), 7)
    state = torch.get_rng_state()
    own, other = (
        Evaluator(module, data, ["cross_entropy"], 8, recalibration=each).evaluate("val") for each in (noisy, None)
    )
    assert own != other
    assert own == Evaluator(module, data, ["cross_entropy"], 8, recalibration=noisy).evaluate("val")
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_without_running_statistics_are_none() -> None:
    layers = nn.ModuleList([nn.BatchNorm1d(3, track_running_stats=False), nn.InstanceNorm2d(3), nn.LayerNorm(3)])
    assert layers_with_statistics(layers) == []
    assert len(layers_with_statistics(nn.ModuleList([nn.InstanceNorm2d(3, track_running_stats=True)]))) == 1


def test_a_run_trains_the_same_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["+recipe=explore_mnasnet", "runner.max_ticks=4", "evaluate.splits={val: 2}", "debug.limit_samples=60"]
    quiet = ["runner.report=false", "runner.progress_bar=false", "logger.mode=disabled"]
    for name, more in {"with": ["evaluate.recalibrate=2"], "without": []}.items():
        assert main(["run", *words, *quiet, *more, f"hydra.run.dir={name}"]) == 0
    found = [torch.load(Path(each) / "checkpoints" / "last.ckpt")["mlotool"]["program"] for each in ("with", "without")]
    own, other = (each["classifier"]["module"] for each in found)
    assert all(torch.equal(value, other[name]) for name, value in own.items())
    metrics = [(read_json(Path(each), "summary.json") or {})["metrics"]["val/accuracy"] for each in ("with", "without")]
    assert metrics[0] != metrics[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate.recalibrate=2"], "the problem 'classifier' has no layer with running statistics"),
        (
            [*SHARED, "evaluate.recalibrate=2", "++problems.classifier.module.statistics=path"],
            "found 2, while the problem 'classifier' has running statistics for each path",
        ),
    ],
)
def test_what_cannot_be_taken_anew_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "+recipe=plain", *words, "hydra.run.dir=refused"]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "refused" / "config.yaml").exists()


@pytest.mark.filterwarnings("default:evaluate. found no path")
def test_metrics_of_drawn_paths_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "+recipe=plain", *SHARED, "debug=fast"]) == 0
    assert capfd.readouterr().err.count("evaluate: found no path for the shared space of 'classifier'") == 1
