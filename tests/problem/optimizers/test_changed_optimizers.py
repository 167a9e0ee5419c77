"""What a user changes between two steps counts in the next one, as in a loop of plain torch; or is refused."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from mlotool import Graph, Problem, Program, Schedule, Stream
from mlotool.core.errors import RunError

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)
Change = Callable[[nn.Module, Any], Any]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = [*parameters]
    return torch.optim.SGD([{"params": [first], "lr": 0.2}, {"params": others}], lr=0.05, momentum=0.9)


def samples() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return [(each, torch.tensor(number % 2)) for number, each in enumerate(inputs)]


def loss(batch: Any, *, model: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def scaled_state(model: nn.Module, optimizer: Any) -> None:
    state = optimizer.state[model[2].bias]
    state["exp_avg"] = 0.5 * state["exp_avg"]


def transposed_state(model: nn.Module, optimizer: Any) -> None:
    state = optimizer.state[model[2].weight]
    state["momentum_buffer"] = state["momentum_buffer"].t().contiguous().t()


def transposed_parameter(model: nn.Module, optimizer: Any) -> None:
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def moved_between_groups(model: nn.Module, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["params"].append(second["params"].pop())


def new_group(model: nn.Module, optimizer: Any) -> None:
    bias = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [bias], "lr": 0.5})


def wrapped_step(model: nn.Module, optimizer: Any) -> None:
    step = optimizer.step

    def half(*args: Any) -> Any:
        before = [each.detach().clone() for each in model.parameters()]
        step(*args)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.lerp_(value, 0.5)

    optimizer.step = half


def clamped(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.1, 0.1)


def halved_gradient(model: nn.Module, optimizer: Any) -> None:
    def hook(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(hook)


def averaged_state(model: nn.Module, optimizer: Any) -> None:
    """Another optimizer's state, as a file or a colleague gives it."""
    state = optimizer.state_dict()
    for each in state["state"].values():
        each["momentum_buffer"] = torch.ones_like(each["momentum_buffer"])
    optimizer.load_state_dict(state)


CHANGES: dict[str, tuple[Any, Change]] = {
    "a state of the last parameter is scaled": (ADAM, scaled_state),
    "a state is emptied": (ADAM, lambda model, optimizer: optimizer.state.update({model[0].bias: {}})),
    "all state is cleared": (SGD, lambda model, optimizer: optimizer.state.clear()),
    "a state is loaded": (SGD, averaged_state),
    "a state has other strides": (SGD, transposed_state),
    "a parameter has other strides": (SGD, transposed_parameter),
    "a parameter is given other data": (SGD, lambda model, _: setattr(model[0].bias, "data", torch.zeros(4).double())),
    "momentum is turned off": (SGD, lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.0)),
    "Nesterov is turned on": (SGD, lambda model, optimizer: optimizer.param_groups[0].update(nesterov=True)),
    "a parameter moves between groups": (in_groups, moved_between_groups),
    "a group is added": (SGD, new_group),
    "a hook after steps": (SGD, lambda model, optimizer: optimizer.register_step_post_hook(clamped)),
    "a hook of all optimizers": (SGD, lambda model, optimizer: register_optimizer_step_post_hook(clamped)),
    "its step is wrapped": (SGD, wrapped_step),
    "a hook after gradients": (SGD, halved_gradient),
    "a hook of a gradient": (SGD, lambda model, _: model[2].weight.register_hook(lambda gradient: 0.1 * gradient)),
    "an activation is exchanged": (SGD, lambda model, _: model.__setitem__(1, nn.Softsign())),
}


@contextlib.contextmanager
def change_of(change: Change, model: nn.Module, optimizer: Any) -> Iterator[None]:
    handle = change(model, optimizer)
    try:
        yield
    finally:
        if hasattr(handle, "remove"):
            handle.remove()


def by_hand(make: Any, change: Change) -> list[Tensor]:
    model = network()
    optimizer = make(model.parameters())
    kept = contextlib.ExitStack()
    for tick in range(12):
        if tick == 5:
            kept.enter_context(change_of(change, model, optimizer))
        pairs = samples()[4 * (tick % 2) : 4 * (tick % 2) + 4]
        batch = tuple(torch.stack(each) for each in zip(*pairs, strict=True))
        optimizer.zero_grad()
        loss(batch, model=model).backward()
        optimizer.step()
    kept.close()
    return [*model.parameters()]


def scheduled(make: Any, trace: str | None = None) -> tuple[Problem, Schedule]:
    stream = Stream(samples(), 4, shuffle=False)
    problem = Problem("p", network(), loss, roles={"model": "p"}, stream=stream, optimizer=make)
    return problem, Schedule(Program([problem], Graph(), trace=trace))


@pytest.mark.filterwarnings("ignore:problems.p. its steps are not traced")
@pytest.mark.parametrize("trace", [None, "eager"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts_in_the_next_step(name: str, trace: str | None) -> None:
    make, change = CHANGES[name]
    problem, schedule = scheduled(make, trace)
    kept = contextlib.ExitStack()
    for tick in range(12):
        if tick == 5:
            kept.enter_context(change_of(change, problem.module, problem.optimizer))
        schedule.tick()
    kept.close()
    for found, expected in zip(problem.module.parameters(), by_hand(make, change), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def replaced(model: nn.Module, _: Any) -> None:
    model[0].bias = nn.Parameter(torch.zeros(4).double())


REFUSED: dict[str, tuple[Change, str]] = {
    "frozen": (lambda model, _: model[0].requires_grad_(False), "0.weight"),
    "replaced": (replaced, "0.bias"),
    "parametrized": (lambda model, _: nn.utils.parametrizations.weight_norm(model[0]), "0.weight"),
    "removed": (lambda model, _: model.__delitem__(2), "2.weight"),
}


@pytest.mark.parametrize("trace", [None, "eager"])
@pytest.mark.parametrize("name", REFUSED)
def test_other_parameters_are_refused_where_they_come(name: str, trace: str | None) -> None:
    change, parameter = REFUSED[name]
    problem, schedule = scheduled(SGD, trace)
    for _ in range(6):
        schedule.tick()
    change(problem.module, problem.optimizer)
    with pytest.raises(RunError, match=rf"problems\.p\.module: its parameter '{parameter}' was replaced"):
        schedule.tick()


def test_an_unfrozen_parameter_is_refused() -> None:
    model = network()
    model[0].requires_grad_(False)
    problem = Problem("p", model, loss, roles={"model": "p"}, stream=Stream(samples(), 4), optimizer=SGD)
    schedule = Schedule(Program([problem], Graph()))
    schedule.tick()
    model[0].requires_grad_(True)
    with pytest.raises(RunError, match=r"'0\.weight' was replaced, added"):
        schedule.tick()
