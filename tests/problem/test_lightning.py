"""A LightningModule as it is, as a problem: its training_step and configure_optimizers, against Lightning's loop."""

import warnings
from typing import Any

import pytest
import torch
import torchmetrics
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from mlotool import Graph, Problem, Program, Schedule, Stream, Unrolled
from mlotool.losses import validation_step
from mlotool.models import PositiveVector

NUM_BATCHES, BATCH = 3, 4


class LitNet(LightningModule):
    """In the form of Lightning's tutorials."""

    def __init__(self, num_inputs: int = 2, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(num_inputs, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        # The weight changes with each epoch, as in an annealed loss.
        loss = F.cross_entropy(logits, y) * (1 + self.current_epoch)
        self.accuracy(logits, y)
        self.log("train/acc", self.accuracy, prog_bar=True, on_step=True, on_epoch=False)
        self.log_dict({"loss": loss, "size": len(x)}, batch_size=len(x))
        self.seen.append((batch_idx, self.current_epoch, self.global_step))
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch", "frequency": 2}]


def data(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_BATCHES * BATCH, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


def made(module: nn.Module, **settings: Any) -> Problem:
    return Problem("net", module, stream=Stream(data(), BATCH, shuffle=False), **settings)


def fresh(kind: type[LitNet] = LitNet, **settings: Any) -> LitNet:
    torch.manual_seed(0)
    return kind(**settings)


@pytest.mark.filterwarnings("ignore")
def test_it_trains_as_lightnings_trainer_trains_it() -> None:
    reference, net = fresh(), fresh()
    trainer = Trainer(
        accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(reference, DataLoader(data(), BATCH))
    schedule = Schedule(Program([problem := made(net)], Graph()))
    results = [schedule.tick()["net"] for _ in range(5 * NUM_BATCHES)]
    assert net.seen == reference.seen
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=0)
    assert problem.optimizer is not None
    assert problem.optimizer.param_groups[0]["lr"] == trainer.optimizers[0].param_groups[0]["lr"] == 0.1 / 4
    last = {name: value.item() for name, value in results[-1].metrics.items()}
    assert last == pytest.approx({"train.acc": float(trainer.callback_metrics["train/acc"]),
                                  "logged_loss": float(trainer.callback_metrics["loss"]), "size": 4.0})  # fmt: skip
    # Outside of its losses it is as it was: to save, or to go on with in Lightning.
    assert not {"log", "log_dict"} & vars(net).keys() and net._trainer is None


def test_a_resumed_schedule_counts_on() -> None:
    first, net = fresh(), fresh()
    schedule = Schedule(program := Program([made(first)], Graph()))
    for _ in range(4):
        schedule.tick()
    states = program.state_dict(), schedule.state_dict()
    resumed = Schedule(other := Program([made(net)], Graph()))
    other.load_state_dict(states[0])
    resumed.load_state_dict(states[1])
    for _ in range(4):
        schedule.tick(), resumed.tick()
    assert net.seen == first.seen[4:]
    assert all(map(torch.equal, net.parameters(), first.parameters()))


def test_a_problem_above_learns_its_rate_by_its_validation_step() -> None:
    """One step of SGD: the derivative of the validation loss with respect to the rate, by torch alone."""
    net, rate = fresh(), PositiveVector(size=1, initial=0.3).double()
    upper = Problem(
        "rate", rate, lambda batch, *, model: validation_step(batch, model=model, log="val_loss"),
        roles={"model": "net"}, stream=Stream(data(1), 12, shuffle=False), optimizer=lambda x: torch.optim.SGD(x, 1.0),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"problems.net.scheduler: found StepLR from .*It is left out"):
        lower = made(net, optimizer_roles={"lr": "rate"}, hypergradient=Unrolled())
    program = Program([upper, lower], Graph({"rate": ["net"]}, {"net": ["rate"]}))
    start = {name: tensor.detach().clone().requires_grad_() for name, tensor in net.named_parameters()}
    x, y = data()[:BATCH]
    slopes = torch.autograd.grad(F.cross_entropy(torch.func.functional_call(net, start, x), y), [*start.values()])
    [parameter] = rate.parameters()
    lr = rate().squeeze()
    moved = {name: tensor - lr * slope for (name, tensor), slope in zip(start.items(), slopes, strict=True)}
    x, y = data(1)[:12]
    [expected] = torch.autograd.grad(F.cross_entropy(torch.func.functional_call(net, moved, x), y), [parameter])
    before = parameter.detach().clone()
    result = Schedule(program).tick()["rate"]
    assert set(result.metrics) == {"val_loss"} and result.metrics["val_loss"] == result.loss
    assert lower.num_steps == 1
    assert (before - parameter).item() == pytest.approx(expected.item(), rel=1e-10)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1.0)


FORMS = {
    "an optimizer": (lambda o: o, 1.0),
    "a list": (lambda o: [o], 1.0),
    "a dict": (lambda o: {"optimizer": o}, 1.0),
    "a list of a dict": (lambda o: [{"optimizer": o, "lr_scheduler": ExponentialLR(o, 0.5)}], 0.25),
    "two lists": (lambda o: ([o], [ExponentialLR(o, 0.5)]), 0.25),
    "an empty list": (lambda o: ([o], []), 1.0),
    "steps": (
        lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": ExponentialLR(o, 0.5), "interval": "step"}}, 0.5**6,
    ),
    "every other step": (
        lambda o: ([o], [{"scheduler": ExponentialLR(o, 0.5), "interval": "step", "frequency": 2}]), 0.5**3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_configure_optimizers_after_two_epochs(form: str) -> None:
    returned, expected = FORMS[form]
    net = fresh()
    net.configure_optimizers = lambda: returned(sgd(net))  # type: ignore[method-assign]
    schedule = Schedule(Program([problem := made(net)], Graph()))
    for _ in range(2 * NUM_BATCHES):
        schedule.tick()
    assert problem.optimizer is not None and problem.optimizer.param_groups[0]["lr"] == expected


def returning(value: Any) -> LitNet:
    net = fresh()
    net.configure_optimizers = lambda: value(net)  # type: ignore[method-assign]
    return net


class Manual(LitNet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Stepping(LitNet):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class Asking(LitNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_epochs)


class Summing(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("sum", 1.0, reduce_fx="sum")


class Silent(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


def plateau(net: LitNet) -> Any:
    optimizer = sgd(net)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}}


@pytest.mark.parametrize(
    ("module", "settings", "said"),
    [
        (lambda: nn.Linear(2, 2), {}, "problems.net.loss: found None; expected a function .* LightningModule"),
        (Manual, {}, "problems.net.module: found Manual with automatic_optimization=False; expected a training_step"),
        (Stepping, {}, "problems.net.module: found Stepping.optimizer_step, which mlotool's steps do not call"),
        (Asking, {}, "problems.net.module: Asking asks for trainer.max_epochs; expected current_epoch, global_step"),
        (lambda: returning(lambda net: [sgd(net), sgd(net)]), {}, "found 2 optimizers from .*; expected one"),
        (lambda: returning(lambda net: None), {}, "problems.net.optimizer: found None from"),
        (lambda: returning(plateau), {}, "found a ReduceLROnPlateau; expected scheduler_interval=evaluation"),
        (LitNet, {"compile": True}, "problems.net.compile: found compile with training_step; expected false"),
        (LitNet, {"roles": {"model": "net"}}, "problems.net.roles: found .*; expected none"),
        (Summing, {}, r"self.log\('sum'\): found reduce_fx=sum; expected 'mean'"),
        (Silent, {}, "None from training_step; expected its loss"),
    ],
)  # fmt: skip
def test_what_a_hypergradient_cannot_pass_through_is_one_error(module: Any, settings: Any, said: str) -> None:
    with pytest.raises(Exception, match=said) as error:
        Schedule(Program([made(module(), **settings)], Graph())).tick()
    assert type(error.value).__module__.startswith("mlotool.")


class Hooked(LitNet):
    def on_train_epoch_end(self) -> None: ...


def test_hooks_that_nothing_calls_are_told() -> None:
    with pytest.warns(UserWarning, match="problems.net.module: Hooked has on_train_epoch_end; expected none"):
        made(Hooked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(Hooked(), loss=lambda batch, *, model: model.training_step(batch, 0)["loss"], roles={"model": "net"})


def test_a_loss_calls_its_methods_by_their_names_and_what_they_log_are_its_metrics() -> None:
    net = fresh()

    def loss(batch: Any, *, model: Any) -> Tensor:
        with pytest.raises(AttributeError, match="found the attribute 'net' of a role; expected a call of the role"):
            _ = model.net
        loss: Tensor = model.training_step({"input": batch[0], "target": batch[1]}, 7)["loss"]
        return 2 * loss

    result = Schedule(Program([made(net, loss=loss, roles={"model": "net"})], Graph())).tick()["net"]
    assert result.metrics["logged_loss"].item() == pytest.approx(result.loss.item() / 2)
    assert net.seen[-1] == (7, 0, 0)
