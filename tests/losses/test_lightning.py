"""Weights of samples above an unchanged training_step, against the cross-entropy whose samples are weighted."""

from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from mlotool import BoundModule, ConfigError, Problem, Stream
from mlotool.losses import (
    reweighted_cross_entropy,
    sample_weighted_cross_entropy,
    validation_step,
    weighted_training_step,
)
from mlotool.models import SampleWeights, WeightNet


class LitNet(LightningModule):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("acc", (logits.argmax(1) == y).double().mean())
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> float:
        x, y = batch
        return F.cross_entropy(self(x), y).item()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def parts(*layers: nn.Module) -> tuple[Any, dict[str, Tensor], Any, Any]:
    torch.manual_seed(0)
    net, batch = LitNet(*layers), {"input": torch.randn(6, 3).double(), "target": torch.tensor([0, 1, 1, 0, 1, 0])}
    problem = Problem("net", net, stream=Stream(torch.zeros(6), 2))
    return problem, {**batch, "index": torch.arange(6)}, problem.pure([*net.parameters()], None), net


@pytest.mark.parametrize(("given", "vectorize"), [("loss", True), ("index", True), ("loss", False)])
def test_weights_of_an_unchanged_step_are_those_of_the_cross_entropy(given: Any, vectorize: bool) -> None:
    problem, batch, model, net = parts()
    weigher = (WeightNet(4) if given == "loss" else SampleWeights(6)).double()
    with torch.no_grad():
        for parameter in weigher.parameters():
            parameter.copy_(torch.randn_like(parameter))
    roles = {"model": model, "weigher": BoundModule(weigher)}
    problem.loss = lambda batch, **roles: weighted_training_step(batch, given=given, vectorize=vectorize, **roles)
    found = problem.evaluated(batch, roles)
    if given == "loss":
        expected = reweighted_cross_entropy(batch, **roles)
    else:
        expected = sample_weighted_cross_entropy(batch, model=model, weights=BoundModule(weigher))
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    sources = [*net.parameters(), *weigher.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(x.loss, sources) for x in (found, expected)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-14)
    accuracy, mean = (expected.metrics[name].item() for name in ("accuracy", "mean_weight"))
    assert {name: x.item() for name, x in found.metrics.items()} == pytest.approx(
        {"acc": accuracy, "mean_weight": mean}
    )


def test_a_layer_that_looks_at_the_batch_is_refused_in_train_mode_alone() -> None:
    problem, batch, model, net = parts(nn.BatchNorm1d(4))
    weigher = BoundModule(SampleWeights(6).double())
    with pytest.raises(ConfigError, match=r"found 'net.1' in train mode.*role \{problem: .., mode: eval\}"):
        weighted_training_step(batch, model=model, weigher=weigher, given="index")
    model = problem.pure([*net.parameters()], False)
    assert weighted_training_step(batch, model=model, weigher=weigher, given="index").loss.isfinite()


def test_a_step_that_asks_for_a_number_is_told_what_to_do() -> None:
    _, batch, model, net = parts()
    net.training_step = lambda batch: F.cross_entropy(net(batch[0]), batch[1]) / (1 + batch[0].sum().item() ** 2)
    weigher = BoundModule(SampleWeights(6).double())
    with pytest.raises(ConfigError, match=r"torch.vmap cannot evaluate \(.*item.*Set vectorize: false"):
        weighted_training_step(batch, model=model, weigher=weigher, given="index")
    assert weighted_training_step(batch, model=model, weigher=weigher, given="index", vectorize=False).loss.isfinite()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, r"float from validation_step.*log=val_loss"),
        ({"log": "val"}, "nothing by self.log in validation_step.*'val'"),
    ],
)
def test_a_validation_step_without_a_loss_is_told(settings: dict[str, str], said: str) -> None:
    problem, batch, model, _ = parts()
    problem.loss = lambda batch, *, model: validation_step(batch, model=model, **settings)
    with pytest.raises(Exception, match=said):
        problem.evaluated(batch, {"model": model})
