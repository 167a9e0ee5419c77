"""Unrolled hypergradients against finite differences of plain torch loops with torch's own optimizers."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as rates

from mlotool.hypergradient import Unrolled
from mlotool.program import Graph, Problem, Program, Stream
from tests.hypergradient.two_levels import ticked, two_levels
from tests.program.small import numbers, samples
from tests.programs import Point

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.3),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": partial(torch.optim.SGD, lr=0.1, momentum=0.5, maximize=True, fused=True),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adam_decay": partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.2, foreach=True),
}
START = numbers(0.5, -0.3, 0.8)
BATCHES = [samples(4, seed) for seed in range(4)]


class Rate(nn.Module):
    """One learning rate, or one a parameter."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.x = nn.Parameter(numbers(*values))

    def forward(self) -> Tensor:
        return torch.exp(self.x)


class Pair(nn.Module):
    """Two parameters of different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(START.clone())
        self.bias = nn.Parameter(numbers(0.2))

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias


WAYS = {"reverse": Unrolled(), "kept graphs": Unrolled(remat=False), "forward": Unrolled(product="forward")}


def fit(theta: Sequence[Tensor], u: Tensor, batch: Tensor) -> Tensor:
    weight, bias = theta
    return ((batch @ weight + bias - 1) ** 2).mean() + (torch.exp(u) * weight**2).sum() + 0.1 * (weight**4).sum()


def goal(theta: Sequence[Tensor]) -> Tensor:
    weight, bias = theta
    return ((weight - 1) ** 3).sum() + (bias - 0.5).square().sum()


def lower_loss(batch: Tensor, *, w: Any, u: Any = None) -> Tensor:
    return fit(w(), torch.zeros(3, dtype=torch.float64) if u is None else u(), batch)


def upper_loss(batch: Any, *, w: Any) -> Tensor:
    return goal(w())


def program(
    way: str,
    optimizer: Callable[..., torch.optim.Optimizer],
    hypergradient: Any = None,
    *,
    rates: int = 1,
    num_steps: int = len(BATCHES),
    **settings: Any,
) -> Program:
    """Return an upper problem `u` that shapes `w` by its loss, its start or its learning rate."""
    upper = {"loss": Point(numbers(0.1, 0.2, -0.4)), "start": Pair(), "lr": Rate(*[-2.0, -2.5][:rates])}[way]
    roles = {"w": "w", "u": "u"} if way == "loss" else {"w": "w"}
    ways = {"start": {"reset_to": "u"}, "lr": {"optimizer_roles": {"lr": "u"}}}
    lower = Problem(
        "w",
        Pair(),
        lower_loss,
        roles=roles,
        optimizer=optimizer,
        unroll_steps=num_steps,
        hypergradient=hypergradient or Unrolled(),
        **ways.get(way, {}),
        **settings,
    )
    top = Problem("u", upper, upper_loss, roles={"w": "w"}, optimizer=partial(torch.optim.SGD, lr=0.01))
    return Program([lower, top], Graph({"u": ["w"]}, {"w": ["u"]}))


def by_loop(way: str, make: Callable[..., torch.optim.Optimizer], values: Tensor) -> Tensor:
    """Return the upper loss after a loop of torch's own optimizer; `values` are the upper parameters, flat."""
    start = [values[:3], values[3:]] if way == "start" else [START, numbers(0.2)]
    theta = [each.detach().clone().requires_grad_() for each in start]
    u = values if way == "loss" else torch.zeros(3, dtype=torch.float64)
    if way == "lr":
        lrs = torch.exp(values).tolist() * (3 - len(values))
        optimizer = make([{"params": [each], "lr": lr} for each, lr in zip(theta, lrs, strict=True)])
    else:
        optimizer = make(theta)
    for batch in BATCHES:
        optimizer.zero_grad()
        fit(theta, u, batch).backward()
        optimizer.step()
    return goal(theta).detach()


def by_differences(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Return the gradient by central differences of fourth order."""
    step = 1e-3
    rows = torch.eye(len(at), dtype=at.dtype) * step

    def derivative(row: Tensor) -> Tensor:
        return (8 * (loss(at + row) - loss(at - row)) - (loss(at + 2 * row) - loss(at - 2 * row))) / (12 * step)

    return torch.stack([derivative(row) for row in rows])


def flat(gradient: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([each.reshape(-1) for each in gradient.values()])


def upper_values(built: Program) -> Tensor:
    return flat({key: each.detach() for key, each in built.problems["u"].theta.items()})


@cache
def of_plain_loop(way: str, name: str) -> Tensor:
    start = upper_values(program(way, OPTIMIZERS[name]))
    return by_differences(lambda values: by_loop(way, OPTIMIZERS[name], values), start)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["loss", "start", "lr"])
@pytest.mark.parametrize("kind", WAYS)
def test_against_differences_of_a_plain_loop(name: str, way: str, kind: str) -> None:
    expected = of_plain_loop(way, name)
    found = flat(program(way, OPTIMIZERS[name], WAYS[kind]).gradient("u", {"w": BATCHES}))
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8 * float(expected.norm()))


def test_one_learning_rate_a_parameter() -> None:
    built = program("lr", OPTIMIZERS["momentum"], rates=2)
    expected = by_differences(lambda values: by_loop("lr", OPTIMIZERS["momentum"], values), upper_values(built))
    assert torch.allclose(flat(built.gradient("u", {"w": BATCHES})), expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("settings", "expected"), [({}, 8), ({"remat": False}, 4), ({"remat": False, "horizon": 2}, 4)]
)
def test_without_remat_a_simulated_step_is_evaluated_once(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: int
) -> None:
    built = program("loss", OPTIMIZERS["sgd"], Unrolled(**settings))
    built.gradient("u", {"w": BATCHES})
    evaluations, counted = list[int](), fit
    monkeypatch.setattr(f"{__name__}.fit", lambda *arguments: evaluations.append(1) or counted(*arguments))
    built.gradient("u", {"w": BATCHES})
    assert len(evaluations) == expected


def test_first_order_maml_hands_the_cotangent_to_the_start() -> None:
    built = program("start", OPTIMIZERS["sgd"], Unrolled(second_order=False), stream=Stream(BATCHES[0], 4))
    end = built.solution("w")
    theta = [each.detach().requires_grad_() for each in end.values()]
    expected = torch.cat([each.reshape(-1) for each in torch.autograd.grad(goal(theta), theta)])
    assert torch.allclose(flat(built.gradient("u")), expected, rtol=1e-12)


def test_a_problem_that_waits_for_a_slower_one_is_differentiated_through_all_its_steps() -> None:
    """`a` takes three steps while `b` takes its three: unroll_steps of `a` is only when its solution may be read."""

    def pull(batch: Any, *, own: Any, u: Any) -> Tensor:
        return 0.5 * (own() - u()).square().sum() + 0.1 * (own() ** 4).sum()

    def top(batch: Any, *, a: Any, b: Any) -> Tensor:
        return (a() - 1).square().sum() + (b() + 1).square().sum()

    def lower(name: str, steps: int, start: Tensor) -> Problem:
        return Problem(
            name,
            Point(start),
            pull,
            roles={"own": name, "u": "u"},
            optimizer=OPTIMIZERS["momentum"],
            unroll_steps=steps,
            hypergradient=Unrolled(),
        )

    starts = numbers(0.5, 0.3), numbers(-0.2, 0.9)
    upper = Problem(
        "u", Point(numbers(0.4, -0.6)), top, roles={"a": "a", "b": "b"}, optimizer=partial(torch.optim.SGD, lr=1.0)
    )
    problems = [lower("a", 1, starts[0]), lower("b", 3, starts[1]), upper]
    built = Program(problems, Graph({"u": ["a", "b"]}, {"a": ["u"], "b": ["u"]}))
    ticked(built, 3)
    moved = numbers(0.4, -0.6) - built.problems["u"].constants()["x"]

    def loop(u: Tensor) -> Tensor:
        ends = []
        for start in starts:
            theta = start.clone().requires_grad_()
            optimizer = OPTIMIZERS["momentum"]([theta])
            for _ in range(3):
                optimizer.zero_grad()
                (0.5 * (theta - u).square().sum() + 0.1 * (theta**4).sum()).backward()
                optimizer.step()
            ends.append(theta.detach())
        return (ends[0] - 1).square().sum() + (ends[1] + 1).square().sum()

    assert torch.allclose(moved, by_differences(loop, numbers(0.4, -0.6)), rtol=1e-8)


BATCH = samples(4, 1)
STEPS = 3
U = numbers(0.1, 0.2, -0.4)

Make = Callable[[Sequence[Tensor]], Optimizer]


def two_groups(kind: type[Optimizer], first: dict[str, Any], second: dict[str, Any], **shared: Any) -> Make:
    def make(parameters: Any) -> Optimizer:
        weight, bias = parameters
        return kind([{"params": [weight], **first}, {"params": [bias], **second}], **shared)

    return make


GROUPED: dict[str, Make] = {
    "sgd": two_groups(
        SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}, {"lr": 0.03, "nesterov": True}, momentum=0.5
    ),
    "adam": two_groups(Adam, {"lr": 0.1, "betas": (0.5, 0.9)}, {"lr": 0.02, "weight_decay": 0.5}),
    "adamw": two_groups(AdamW, {"lr": 0.1, "weight_decay": 0.5}, {"lr": 0.02, "weight_decay": 0.0}),
}  # fmt: skip
sgd: Make = partial(SGD, lr=0.1, momentum=0.5)

# Steps are recorded with their settings: a rate that falls, and one that goes up and down with the momentum.
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": partial(rates.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "cyclic": partial(rates.CyclicLR, base_lr=0.02, max_lr=0.2, step_size_up=2, cycle_momentum=True),
}


def scheduled_program(optimizer: Make, scheduler: Any = None, **settings: Any) -> Program:
    lower = Pair(), lambda batch, **roles: lower_loss(BATCH, **roles)
    upper = Point(U), lambda batch, *, w, u: goal(w()) + u().square().sum()
    # It stands still, so that the loop beside it needs no upper step.
    still = {"optimizer": partial(SGD, lr=0.0)}
    settings |= {"optimizer": optimizer, "scheduler": scheduler, "unroll_steps": STEPS}
    return two_levels(lower, upper, Unrolled(), of_upper=still, **settings)


def loop(make: Make, schedule: Any, num_steps: int, values: Tensor) -> Tensor:
    """Return the upper loss after steps of which the last `STEPS` are taken at `values`."""
    theta = list(Pair().parameters())
    optimizer = make(theta)
    scheduler = None if schedule is None else schedule(optimizer)
    for number in range(num_steps):
        optimizer.zero_grad()
        fit(theta, values if number >= num_steps - STEPS else U, BATCH).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return (goal(theta) + values.square().sum()).detach()


@pytest.mark.parametrize(
    ("make", "schedule"),
    [*[(make, None) for make in GROUPED.values()], *[(sgd, schedule) for schedule in SCHEDULERS.values()]],
    ids=[*GROUPED, *SCHEDULERS],
)
def test_each_parameter_and_step_has_the_settings_that_it_was_taken_with(make: Make, schedule: Any) -> None:
    """Of parameter groups and of schedulers of the learning rate."""
    found = ticked(scheduled_program(make, schedule), 6).gradient("u")["x"]
    assert torch.allclose(found, by_differences(partial(loop, make, schedule, 6), U), rtol=1e-7, atol=1e-9)
