"""`baseline=fixed`: what is learned above is held at its neutral value, so that a gain is measured and not invented."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mlotool
from mlotool.config import build
from mlotool.core.errors import ConfigError
from mlotool.folders.run_folder import RunFolder
from mlotool.models import LabelCorrector, MixtureWeights, PositiveVector, WeightNet
from mlotool.problem.neutral import hold
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.report import write_report
from mlotool.runner.evaluation import rehearse_losses


class Table:
    """Rows of a CSV file: twelve features and a target, all rows as good as any other."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        slope = torch.linspace(-1, 1, 12)
        self.x = torch.randn(size, 12, generator=generator)
        self.y = torch.sin(self.x @ slope) + 0.3 * torch.randn(size, generator=generator)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


TRAIN, HELD_OUT = Table(400, 0), Table(200, 1)


def error(batch: Any, *, model: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x).squeeze(1), y)


def weighted(batch: Any, *, model: Any, weigher: Any) -> Tensor:
    x, y = batch
    losses = F.mse_loss(model(x).squeeze(1), y, reduction="none")
    return (weigher(mlotool.stop_gradient(losses)[:, None]).squeeze(1) * losses).mean()


def regressor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))


def stream() -> Stream:
    return Stream(TRAIN, 50, seed=1)


def trained(num_ticks: int, lr: float, *, is_held: bool) -> nn.Module:
    model = regressor()
    net = WeightNet(20)
    lower = Problem(
        "regressor",
        model,
        weighted,
        roles={"model": "regressor", "weigher": "weights"},
        stream=stream(),
        optimizer=partial(torch.optim.SGD, lr=0.01),
        hypergradient=mlotool.Implicit(mlotool.Identity(), product="reverse"),
    )
    upper = Problem(
        "weights",
        net,
        error,
        roles={"model": "regressor"},
        stream=Stream(HELD_OUT, 50, seed=2),
        optimizer=partial(torch.optim.Adam, lr=lr),
    )
    held = ["weights"] if is_held else []
    program = Program([lower, upper], Graph({"weights": ["regressor"]}, {"regressor": ["weights"]}), held=held)
    schedule = Schedule(program)
    for _ in range(num_ticks):
        results = schedule.tick()
    assert results["weights"].loss > 0 and upper.num_steps == (0 if is_held else num_ticks)
    return model


def by_hand(num_ticks: int) -> nn.Module:
    model, batches = regressor(), stream()
    # The kernel of torch that mlotool takes where the choice is free.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for _ in range(num_ticks):
        x, y = batches.next()
        optimizer.zero_grad()
        F.mse_loss(model(x).squeeze(1), y, reduction="none").mean().backward()
        optimizer.step()
    return model


def test_the_control_is_plain_training_and_one_without_steps_above_is_not() -> None:
    def held_out(model: nn.Module) -> float:
        return F.mse_loss(model(HELD_OUT.x).squeeze(1), HELD_OUT.y).item()

    control, plain = trained(150, 0.1, is_held=True), by_hand(150)
    assert all(map(torch.equal, control.parameters(), plain.parameters()))
    # An untrained net gives weights around 1/2: without steps above the regressor trains at a part of its rate.
    idle, learned = (held_out(trained(150, lr, is_held=False)) for lr in (0.0, 0.1))
    assert learned < 0.98 * idle
    # What looks like a gain beside that is none beside the control.
    assert learned > 0.999 * held_out(control)


def test_a_module_that_is_held_is_that_of_a_control_alone() -> None:
    """In another program its outputs would be constants, and the hypergradient 0."""
    net, roles = WeightNet(20), {"model": "regressor", "weigher": "weights"}
    lower = Problem("regressor", regressor(), weighted, roles=roles, stream=stream(), hypergradient="cg")
    upper = Problem("weights", net, error, roles={"model": "regressor"}, stream=Stream(HELD_OUT, 50, seed=2))
    Program([upper, lower], held=["weights"])
    with pytest.raises(ConfigError, match=r"problems\.weights\.module: found 'one of a control'; .* Make a new module"):
        Program([upper, lower])


def test_neutral_values() -> None:
    features, given = torch.randn(3, 4), torch.tensor([2, 0, 1])
    corrector, mixture, rate = LabelCorrector(4, 3), MixtureWeights(4), PositiveVector(2, initial=0.3)
    with torch.no_grad():
        mixture.logits.copy_(torch.arange(4.0))
    for module in (corrector, mixture, rate):
        hold(module)
    assert torch.equal(corrector(features, given), F.one_hot(given, 3).float())
    assert torch.equal(mixture(), torch.full((4,), 0.25))
    # A hyperparameter stays where it begins, unless the recipe says otherwise.
    torch.testing.assert_close(rate(), torch.full((2,), 0.3))
    hold(rate, 2.0)
    assert torch.equal(rate(), torch.full((2,), 2.0))


def test_a_recipe_s_control_is_a_run_that_says_so(tmp_path: Path) -> None:
    words = ["baseline=fixed", "debug=fast", "logger=csv", "runner.progress_bar=false"]
    result = mlotool.run(mlotool.compose("mwn", words), output_dir=tmp_path / "run")
    assert result.metrics["reweight/step"] == 0 and result.metrics["reweight/loss"] > 0
    assert result.metrics["classifier/mean_weight"] == result.metrics["weights/mean_weight"] == 1.0
    folder = RunFolder(tmp_path / "run")
    assert folder.summary()["baseline"] == "fixed"
    page = write_report(folder.path).read_text()
    assert "<h1>mwn, control</h1>" in page and "A control run (baseline=fixed): reweight" in page
    net = mlotool.load(folder.path, "reweight")
    assert torch.equal(net(torch.rand(2, 1)), torch.ones(2, 1))


def test_what_has_no_control_is_told() -> None:
    with pytest.raises(ConfigError, match="baseline: found fixed, but no problem shapes another"):
        build(mlotool.compose("plain", ["baseline=fixed"]))
    words = ["baseline=fixed", "debug=fast", "problems.reweight.neutral=null"]
    program = build(mlotool.compose("domain_adaptation", words)).program
    with pytest.raises(ConfigError, match=r"problems\.reweight\.neutral: .*MLP declares no `neutral`"):
        rehearse_losses(program)
