"""Small problems in float64 for the tests of program/ and for the robustness of hypergradients."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.hypergradient import Exact, Identity, Implicit
from mlotool.program import AbstractHypergradient, Graph, Problem, Program, Schedule, Stream
from tests.programs import Point

sgd = partial(torch.optim.SGD, lr=0.1)
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adam = partial(torch.optim.Adam, lr=0.05)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def samples(size: int, seed: int = 0) -> Tensor:
    """Return `size` samples of three features."""
    return torch.randn(size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def lower_loss(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    """Pull w to the batch's mean and to u."""
    return 0.5 * ((w() - batch) ** 2).sum(1).mean() + 0.5 * (torch.exp(u()) * w() ** 2).sum()


def upper_loss(batch: Tensor, *, w: Any) -> Tensor:
    return ((w() - batch) ** 4).sum(1).mean()


def pair(
    lower: Mapping[str, Any] | None = None,
    upper: Mapping[str, Any] | None = None,
    *,
    size: int = 12,
    batch_size: int = 4,
    hypergradient: Callable[[], AbstractHypergradient] = lambda: Implicit(Exact()),
    upper_first: bool = False,
) -> Program:
    """Return a program of a lower problem `w` and an upper one `u`; the mappings are settings of theirs."""
    settings: dict[str, Any] = {"optimizer": momentum, "hypergradient": hypergradient(), **(lower or {})}
    low = Problem(
        "w",
        Point(numbers(0.5, -0.3, 0.8)),
        lower_loss,
        roles={"w": "w", "u": "u"},
        stream=Stream(samples(size, 1), batch_size, seed=1),
        **settings,
    )
    high = Problem(
        "u",
        Point(numbers(0.1, 0.2, -0.4)),
        upper_loss,
        roles={"w": "w"},
        stream=Stream(samples(size, 2), batch_size, seed=2),
        **{"optimizer": adam, **(upper or {})},
    )
    problems = [high, low] if upper_first else [low, high]
    return Program(problems, Graph({"u": ["w"]}, {"w": ["u"]}))


def web(
    upper_to_lower: Mapping[str, Iterable[str]],
    lower_to_upper: Mapping[str, Iterable[str]],
    *,
    order: Iterable[str] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    hypergradient: Callable[[], AbstractHypergradient] = lambda: Implicit(Identity(0.1)),
) -> Program:
    """Return a program of any graph: each problem is pulled to a batch and to everything that it knows of."""
    graph = Graph(upper_to_lower, lower_to_upper)
    edges = [*upper_to_lower.items(), *lower_to_upper.items()]
    names = list(order or dict.fromkeys(name for start, ends in edges for name in (start, *ends)))
    problems = []
    for name in names:
        known = dict.fromkeys((name, *graph.uppers(name), *graph.lowers(name)))
        seed = sum(map(ord, name))
        problems.append(
            Problem(
                name,
                Point(samples(1, seed)[0]),
                partial(_web_loss, own=name),
                roles={other: other for other in known},
                stream=Stream(samples(10, seed + 1), 3, seed=seed),
                hypergradient=hypergradient(),
                **{"optimizer": momentum, **(settings or {}).get(name, {})},
            )
        )
    return Program(problems, graph)


def _web_loss(batch: Tensor, *, own: str, **roles: Any) -> Tensor:
    x = roles[own]()
    loss = 0.5 * ((x - batch) ** 2).sum(1).mean()
    # The square couples the roles: what one of them does to x depends on all the others.
    pull = sum(torch.sin(roles[name]() + shift) for shift, name in enumerate(sorted(set(roles) - {own})))
    return loss + 0.1 * (pull**2 * x).sum()


def parameters(program: Program) -> dict[str, Tensor]:
    """Return copies of all parameters, by problem and name."""
    return {
        f"{name}.{key}": tensor.detach().clone()
        for name, problem in program.problems.items()
        for key, tensor in problem.module.named_parameters()
    }


def assert_identical(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Check that the tensors are the same bit by bit."""
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def run_ticks(program: Program, num_ticks: int) -> Schedule:
    """Return the schedule of a program after some ticks."""
    schedule = Schedule(program)
    for _ in range(num_ticks):
        schedule.tick()
    return schedule


def assert_resumes(make: Callable[[], Program], *, num_ticks: int, num_more: int) -> None:
    """Assert that a run whose state is taken after `num_ticks` ends bit-identical to one that was not interrupted."""
    whole, first, second = make(), make(), make()
    run_ticks(whole, num_ticks + num_more)
    run, resumed = run_ticks(first, num_ticks), Schedule(second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(run.state_dict())
    # What the first one does from here on must not reach the second.
    run.tick()
    for _ in range(num_more):
        resumed.tick()
    assert_identical(parameters(second), parameters(whole))


class Mlp(nn.Module):
    """Two layers, with what a test puts between them."""

    def __init__(self, *between: nn.Module, num_inputs: int = 3, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(num_inputs, 5), *between, nn.Tanh(), nn.Linear(5, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).squeeze(1)
