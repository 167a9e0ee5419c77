"""Traces beside code of a user's: what is traced unasked, what is noticed, and what a trace cannot keep."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from mlotool import Graph, Identity, Implicit, Problem, Program, Schedule, Stream, losses
from mlotool.config.user_data import LimitedDataset
from mlotool.program.guard import may_change_between_ticks, why_foreign

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *between, nn.Tanh(), nn.Linear(4, 2)).double()


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return [{"input": each, "target": torch.tensor(number % 2)} for number, each in enumerate(inputs)]


def plain(batch: Any, *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch["input"]), batch["target"])


def problem(module: nn.Module, loss: Any = plain, optimizer: Any = SGD, **settings: Any) -> Problem:
    stream = Stream(samples(), 4, shuffle=False)
    return Problem("p", module, loss, roles={"model": "p"}, stream=stream, optimizer=optimizer, **settings)


def trained(module: nn.Module, loss: Any, trace: str | None, change: Any = None, count: int = 12) -> list[Tensor]:
    made = problem(module, loss)
    schedule = Schedule(Program([made], Graph(), trace=trace))
    for tick in range(count):
        if tick == 7 and change is not None:
            change(module)
        schedule.tick()
    return [each.detach().clone() for each in module.state_dict().values()]


class Doubled(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * tensor


class Slow(torch.optim.SGD):
    pass


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def with_hook(register: Callable[[nn.Module], Any]) -> Callable[[], Problem]:
    def make() -> Problem:
        register(module := network())
        return problem(module, OURS)

    return make


OURS = losses.cross_entropy
LAMBDA = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step)
FOREIGN: dict[str, tuple[Callable[[], Problem], str]] = {
    "a loss": (lambda: problem(network(), plain), "the loss of problems.p is code of yours"),
    "a module": (lambda: problem(network(Doubled()), OURS), "the module of problems.p (1) is code of yours"),
    "an activation": (
        lambda: problem(nn.TransformerEncoderLayer(4, 2, 4, activation=lambda tensor: tensor.relu()), OURS),
        "the module of problems.p",
    ),
    "an optimizer's class": (lambda: problem(network(), OURS, Slow), "the optimizer of problems.p is code of yours"),
    "an optimizer's hook": (lambda: problem(network(), OURS, hooked), "the optimizer of problems.p has hooks"),
    "a scheduler": (lambda: problem(network(), OURS, scheduler=LAMBDA), "the scheduler of problems.p is code of yours"),
    "a forward hook": (with_hook(lambda each: each[0].register_forward_hook(lambda *_: None)), "(0) has a hook"),
    "a backward hook": (with_hook(lambda each: each[2].register_full_backward_hook(lambda *_: None)), "(2) has a hook"),
    "a hook of a parameter": (with_hook(lambda each: each[0].bias.register_hook(lambda x: x)), "(0) has a hook"),
    "a parametrization": (
        with_hook(lambda each: nn.utils.parametrize.register_parametrization(each[0], "weight", Doubled())),
        "the module of problems.p",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_users_code_is_not_traced_unasked(name: str) -> None:
    make, reason = FOREIGN[name]
    assert reason in (why_foreign(make()) or "")


def test_code_of_torch_and_mlotool_is() -> None:
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    for module in (network(nn.BatchNorm1d(4)), nn.utils.spectral_norm(nn.Linear(3, 2))):
        assert why_foreign(problem(module, OURS, scheduler=scheduler, hypergradient=Implicit(Identity()))) is None


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "an attribute": (lambda: network(nn.BatchNorm1d(4)), lambda module: setattr(module[1], "momentum", 0.01)),
    "a constant of a norm": (lambda: network(nn.LayerNorm(4)), lambda module: setattr(module[1], "eps", 0.1)),
    "a mode": (lambda: network(nn.BatchNorm1d(4)), lambda module: module[1].eval()),
    "a buffer": (lambda: network(nn.BatchNorm1d(4)), lambda module: module[1].reset_running_stats()),
    "a buffer's type": (
        lambda: network(nn.BatchNorm1d(4)),
        lambda module: module[1].register_buffer("running_mean", torch.ones(4).double()),
    ),
    "a submodule": (network, lambda module: module.__setitem__(1, nn.Softsign())),
    "a slope": (lambda: network(nn.LeakyReLU(0.1)), lambda module: setattr(module[1], "negative_slope", 0.5)),
    "a forward": (network, lambda module: setattr(module[1], "forward", lambda tensor: tensor)),
    "a forward hook": (network, lambda module: module[0].register_forward_hook(lambda _, __, out: 0.5 * out)),
    "a pre-hook": (network, lambda module: module[2].register_forward_pre_hook(lambda _, given: (2 * given[0],))),
    "a hook of gradients": (
        network,
        lambda module: module[2].register_full_backward_hook(lambda _, grads, __: (0.5 * grads[0],)),
    ),
}


@pytest.mark.filterwarnings("ignore:problems.p. its steps are not traced")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_module_counts_in_the_next_traced_step(name: str) -> None:
    make, change = CHANGES[name]
    expected, found = (trained(make(), plain, trace, change) for trace in (None, "eager"))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_a_hook_of_all_modules_ends_a_trace() -> None:
    handles = []

    def change(module: nn.Module) -> None:
        handles.append(register_module_forward_hook(lambda module, _, out: 0.5 * out))

    try:
        with pytest.warns(UserWarning, match="its steps are not traced: all modules of torch have a hook"):
            found = trained(network(), plain, "eager", change)
        handles.pop().remove()
        expected = trained(network(), plain, None, change)
    finally:
        handles.pop().remove()
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def kept(value: Callable[[Tensor], Any]) -> Callable[..., Tensor]:
    """Return a loss that takes a number from its logits by code that is none of torch's."""

    def loss(batch: Any, *, model: Any) -> Tensor:
        logits = model(batch["input"])
        return functional.cross_entropy(logits, batch["target"]) + 0.01 * float(value(logits)) * logits.square().mean()

    return loss


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda logits: numpy.median(logits.detach().numpy()),
    "a list": lambda logits: logits.detach().tolist()[0][0],
    "DLPack": lambda logits: numpy.from_dlpack(logits.detach()).min(),
    "an if": lambda logits: 1.0 if logits.sum() > 0 else 2.0,
    "memory": lambda logits: numpy.frombuffer(bytes(logits.detach().untyped_storage()), dtype=float)[0],
}

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda logits: logits[logits > 0].sum(),
    "unique": lambda logits: logits.mean() * len(torch.unique(logits.argmax(1))),
    "repeats": lambda logits: torch.repeat_interleave(logits, 1 + logits.argmax(1), dim=0).mean(),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_leave_torch_are_left_to_the_plan(name: str) -> None:
    loss = kept(VALUES[name])
    expected = trained(network(), loss, None)
    with pytest.warns(UserWarning, match=r"takes values out of torch|takes the value of a tensor|not traced"):
        found = trained(network(), loss, "eager")
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_depend_on_values_are_left_to_the_plan(name: str) -> None:
    def loss(batch: Any, *, model: Any) -> Tensor:
        logits = model(batch["input"])
        return functional.cross_entropy(logits, batch["target"]) + 0.05 * SHAPES[name](logits)

    expected = trained(network(), loss, None)
    with pytest.warns(UserWarning, match="the shape of a result depends on values"):
        found = trained(network(), loss, "eager")
    assert all(map(torch.equal, expected, found))


def test_not_finite_in_both_ways_is_equal() -> None:
    """A loss that is NaN from a tick on is no fault of the trace."""
    dtype = torch.float64

    def loss(batch: Any, *, model: Any) -> Tensor:
        return plain(batch, model=model) * batch["scale"].mean()

    rows = [{**each, "input": each["input"].to(dtype), "scale": torch.ones((), dtype=dtype)} for each in samples()]
    rows[9]["scale"] = torch.full((), float("nan"), dtype=dtype)
    module = network().to(dtype)
    made = Problem("p", module, loss, roles={"model": "p"}, stream=Stream(rows, 4, shuffle=False), optimizer=SGD)
    schedule = Schedule(Program([made], Graph(), trace="eager"))
    for _ in range(12):
        schedule.tick()
    assert all(each.isnan().all() for each in module.parameters())


class OwnSamples(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)


CODE_OF_TICKS: dict[str, tuple[Callable[[], Problem], bool]] = {
    "losses and modules are not run": (lambda: problem(network(Doubled()), plain), False),
    "a scheduler of torch's": (lambda: with_scheduler(partial(torch.optim.lr_scheduler.StepLR, step_size=2)), False),
    "a function in one": (lambda: with_scheduler(partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=abs)), False),
    "a function of a user's": (lambda: with_scheduler(LAMBDA), True),
    "an optimizer": (lambda: problem(network(), optimizer=partial(Slow, lr=0.1)), True),
    "data": (lambda: with_data(OwnSamples(samples())), True),
    "data inside of ours": (lambda: with_data(LimitedDataset(OwnSamples(samples()), 8)), True),
    "a reset": (lambda: problem(network(), reset_to="initial"), True),
}


def with_scheduler(scheduler: Any) -> Problem:
    return problem(network(), scheduler=scheduler)


def with_data(data: Any) -> Problem:
    return Problem("p", network(), plain, roles={"model": "p"}, stream=Stream(data, 4), optimizer=SGD)


@pytest.mark.parametrize("name", CODE_OF_TICKS)
def test_whose_code_runs_between_steps_is_known(name: str) -> None:
    make, is_foreign = CODE_OF_TICKS[name]
    assert may_change_between_ticks(make()) == is_foreign
