"""Unrolled hypergradients against finite differences of plain torch loops with torch's own optimizers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import ConjugateGradient, Exact, Implicit, Unrolled
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.program.small import assert_identical, numbers, parameters, samples
from tests.programs import Point

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.3),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.2),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": partial(torch.optim.SGD, lr=0.1, momentum=0.5, maximize=True),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adam_decay": partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2),
    "amsgrad": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.2),
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


def by_loop(
    way: str, make: Callable[..., torch.optim.Optimizer], values: Tensor, *, clip: float | None = None, rates: int = 1
) -> Tensor:
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
        if clip is not None:
            nn.utils.clip_grad_norm_(theta, clip)
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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["loss", "start", "lr"])
@pytest.mark.parametrize("kind", WAYS)
def test_against_differences_of_a_plain_loop(name: str, way: str, kind: str) -> None:
    built = program(way, OPTIMIZERS[name], WAYS[kind])
    expected = by_differences(lambda values: by_loop(way, OPTIMIZERS[name], values), upper_values(built))
    found = flat(built.gradient("u", {"w": BATCHES}))
    assert torch.allclose(found, expected, rtol=1e-8, atol=1e-8 * float(expected.norm()))


def test_one_learning_rate_a_parameter() -> None:
    built = program("lr", OPTIMIZERS["momentum"], rates=2)
    expected = by_differences(lambda values: by_loop("lr", OPTIMIZERS["momentum"], values), upper_values(built))
    assert torch.allclose(flat(built.gradient("u", {"w": BATCHES})), expected, rtol=1e-8)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("way", ["loss", "start"])
def test_clipping_is_part_of_the_step(way: str, kind: str) -> None:
    built = program(way, OPTIMIZERS["sgd"], WAYS[kind], gradient_clip_norm=0.7)
    expected = by_differences(lambda values: by_loop(way, OPTIMIZERS["sgd"], values, clip=0.7), upper_values(built))
    assert torch.allclose(flat(built.gradient("u", {"w": BATCHES})), expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", ["nesterov", "adamw"])
@pytest.mark.parametrize("way", ["loss", "start", "lr"])
@pytest.mark.parametrize("kind", WAYS)
def test_the_steps_of_a_schedule_are_those_that_are_differentiated(name: str, way: str, kind: str) -> None:
    """The gradient of the upper step is that of a functional run on the same batches from the same state."""
    stream = lambda: Stream(samples(12, 1), 4, seed=1)  # noqa: E731
    trained, twin = (program(way, OPTIMIZERS[name], WAYS[kind], stream=stream()) for _ in range(2))
    schedule = Schedule(trained)
    for _ in range(len(BATCHES)):
        schedule.tick()
    moved = [after - before for after, before in zip(upper_values(trained), upper_values(twin), strict=True)]
    reference = stream()
    expected = flat(twin.gradient("u", {"w": [reference.next() for _ in BATCHES]}))
    assert torch.allclose(torch.stack(moved), -0.01 * expected, rtol=1e-9, atol=1e-12)


def test_nothing_is_updated() -> None:
    built = program("lr", OPTIMIZERS["adam"])
    before = parameters(built)
    for _ in range(3):
        built.gradient("u", {"w": BATCHES})
    assert_identical(parameters(built), before)
    assert not built.problems["w"].optimizer.state


def test_fewer_steps_are_the_gradient_from_a_constant_start() -> None:
    built = program("loss", OPTIMIZERS["momentum"], Unrolled(horizon=2))
    found = flat(built.gradient("u", {"w": BATCHES}))
    u = upper_values(built).requires_grad_()
    theta, buffers = [START.clone(), numbers(0.2)], [None, None]
    for number, batch in enumerate(BATCHES):
        if number == 2:
            theta, buffers = [each.detach() for each in theta], [each.detach() for each in buffers]
        theta = [each if each.requires_grad else each.requires_grad_() for each in theta]
        slopes = torch.autograd.grad(fit(theta, u, batch), theta, create_graph=True)
        buffers = [g if b is None else 0.9 * b + 0.8 * g for b, g in zip(buffers, slopes, strict=True)]
        theta = [each - 0.1 * buffer for each, buffer in zip(theta, buffers, strict=True)]
    assert torch.allclose(found, torch.autograd.grad(goal(theta), u)[0], rtol=1e-10)


def test_first_order_maml_hands_the_cotangent_to_the_start() -> None:
    built = program("start", OPTIMIZERS["sgd"], Unrolled(second_order=False), stream=Stream(BATCHES[0], 4))
    end = built.solution("w")
    theta = [each.detach().requires_grad_() for each in end.values()]
    expected = torch.cat([each.reshape(-1) for each in torch.autograd.grad(goal(theta), theta)])
    assert torch.allclose(flat(built.gradient("u")), expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_resumed_run_is_bit_identical_in_the_middle_of_an_unroll(kind: str) -> None:
    def make() -> Program:
        stream = Stream(samples(12, 1), 4, seed=1)
        return program("start", OPTIMIZERS["adam"], WAYS[kind], stream=stream, accumulate_batches=2)

    whole, first, second = make(), make(), make()
    runs = Schedule(whole), Schedule(first), Schedule(second)
    for _ in range(7):
        runs[0].tick()
    for _ in range(6):
        runs[1].tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    for _ in range(6):
        runs[0].tick()
    for _ in range(7):
        runs[2].tick()
    assert_identical(parameters(second), parameters(whole))


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_dropout_is_replayed_and_the_generator_left_alone(kind: str) -> None:
    def noisy(batch: Tensor, *, w: Any, u: Any) -> Tensor:
        weight, bias = w()
        return fit((nn.functional.dropout(weight, 0.5), bias), u(), batch)

    built = program("loss", OPTIMIZERS["sgd"], WAYS[kind])
    built.problems["w"].loss = noisy
    built.random.manual_seed(0)
    first = flat(built.gradient("u", {"w": BATCHES}))
    state = built.random.state_dict()["cpu"]
    built.random.manual_seed(0)
    assert torch.equal(flat(built.gradient("u", {"w": BATCHES})), first)
    assert torch.equal(built.random.state_dict()["cpu"], state)

    def loop(values: Tensor) -> Tensor:
        torch.manual_seed(0)
        theta = [START.clone().requires_grad_(), numbers(0.2).requires_grad_()]
        for batch in BATCHES:
            loss = fit((nn.functional.dropout(theta[0], 0.5), theta[1]), values, batch)
            slopes = torch.autograd.grad(loss, theta)
            theta = [(each - 0.1 * slope).detach().requires_grad_() for each, slope in zip(theta, slopes, strict=True)]
        return goal(theta).detach()

    assert torch.allclose(first, by_differences(loop, upper_values(built)), rtol=1e-6)


def test_below_an_implicit_middle_problem() -> None:
    """The middle problem shapes and reads an unrolled one: its curvature is the derivative of the reverse pass."""
    steps, rate = 3, 0.2

    def low(batch: Any, *, w: Any, v: Any) -> Tensor:
        return 0.5 * (w() - v()).square().sum() + 0.1 * (w() ** 4).sum()

    def middle(batch: Any, *, v: Any, w: Any, u: Any) -> Tensor:
        return 0.5 * (w() - 1).square().sum() + 0.5 * (torch.exp(u()) * v() ** 2).sum()

    def top(batch: Any, *, v: Any) -> Tensor:
        return (v() - 0.3).square().sum()

    optimizer = partial(torch.optim.SGD, lr=rate)
    problems = [
        Problem(
            "w",
            Point(numbers(0.1, 0.4)),
            low,
            roles={"w": "w", "v": "v"},
            optimizer=optimizer,
            unroll_steps=steps,
            reset_to="initial",
            hypergradient=Unrolled(),
        ),
        Problem(
            "v",
            Point(numbers(0.3, -0.2)),
            middle,
            roles={"v": "v", "w": "w", "u": "u"},
            hypergradient=Implicit(Exact()),
        ),
        Problem("u", Point(numbers(0.2, -0.1)), top, roles={"v": "v"}),
    ]
    built = Program(problems, Graph({"v": ["w"], "u": ["v"]}, {"w": ["v"], "v": ["u"]}))
    u = numbers(0.2, -0.1).requires_grad_()
    v = numbers(0.3, -0.2).requires_grad_()

    def total(v: Tensor) -> Tensor:
        w = numbers(0.1, 0.4)
        for _ in range(steps):
            w = w - rate * (w - v + 0.4 * w**3)
        return 0.5 * (w - 1).square().sum() + 0.5 * (torch.exp(u) * v**2).sum()

    slope = torch.autograd.grad(total(v), v, create_graph=True)[0]
    hessian = torch.stack([torch.autograd.grad(each, v, retain_graph=True)[0] for each in slope])
    q = torch.linalg.solve(hessian, 2 * (v - 0.3).detach())
    expected = -torch.autograd.grad(slope, u, q)[0]
    assert torch.allclose(flat(built.gradient("u")), expected, rtol=1e-9)


@pytest.mark.parametrize("way", ["start", "lr"])
def test_what_an_implicit_hypergradient_cannot_see_is_refused(way: str) -> None:
    with pytest.raises(ConfigError, match="expected Unrolled"):
        program(way, OPTIMIZERS["sgd"], Implicit(ConjugateGradient()))


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
    schedule = Schedule(built)
    for _ in range(3):
        schedule.tick()
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


@pytest.mark.parametrize("remat", [True, False])
def test_simulated_steps_follow_the_scheduler(remat: bool) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.OneCycleLR:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=len(BATCHES))

    built = program("loss", OPTIMIZERS["momentum"], Unrolled(remat=remat), scheduler=schedule)
    before = built.problems["w"].scheduler.state_dict()

    def loop(values: Tensor) -> Tensor:
        theta = [START.clone().requires_grad_(), numbers(0.2).requires_grad_()]
        optimizer = OPTIMIZERS["momentum"](theta)
        scheduler = schedule(optimizer)
        for batch in BATCHES:
            optimizer.zero_grad()
            fit(theta, values, batch).backward()
            optimizer.step()
            scheduler.step()
        return goal(theta).detach()

    found = flat(built.gradient("u", {"w": BATCHES}))
    assert torch.allclose(found, by_differences(loop, upper_values(built)), rtol=1e-7)
    assert built.problems["w"].scheduler.state_dict() == before


def test_steps_of_the_warm_up_belong_to_no_unroll() -> None:
    built = program("loss", OPTIMIZERS["sgd"], stream=Stream(BATCHES[0], 4), warmup_steps=3)
    schedule = Schedule(built)
    stepped = [set(schedule.tick()) for _ in range(3 + len(BATCHES))]
    assert ["u" in each for each in stepped].index(True) == len(stepped) - 1
    assert len(built.problems["w"].trajectory) == len(BATCHES)
