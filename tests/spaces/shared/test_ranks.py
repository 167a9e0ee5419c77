"""Two ranks that run different paths through a shared space, against steps that are averaged by hand."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Identity, Implicit, Problem, Program, Stream
from mlotool.core.errors import ConfigError
from mlotool.data.splits import InMemoryTensors
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import SABA, Neumann, Penalty, Unrolled
from mlotool.problem.shards import gathered
from mlotool.program import Schedule
from mlotool.runner.records import trained_paths
from mlotool.runner.run_config import World, joined
from mlotool.spaces import FairPaths, Operator, SharedSpace
from mlotool.spaces.shared.shared_graph import AbstractPaths
from mlotool.spaces.shared.shared_graph import Path as Choice
from tests.over_ranks import over
from tests.runner.processes import run_ranks

WIDTH, BATCH, NUM_TICKS = 3, 5, 6
OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.05),
}
# By tick and rank, the candidates of the first and the second place. At last none uses `a` at the first.
PATHS = [
    [("a", "a"), ("a", "b")],
    [("a", "b"), ("b", "b")],
    [("b", "a"), ("a", "b")],
    [("b", "b"), ("b", "a")],
    [("b", "a"), ("b", "a")],
    [("b", "b"), ("b", "b")],
]
TOLERANCE = 1e-12
# Of a batch, the rows of each rank.
SHARES = (0, 2), (2, 5)
# At the second place both use `b`.
OF_RANKS = ("a", "b"), ("b", "b")
IMPLICIT = {
    "identity": partial(Implicit, Identity()),
    "neumann": partial(Implicit, Neumann(4, 0.05)),
    "differences": partial(Implicit, Neumann(4, 0.05), "finite_difference"),
    "penalty": partial(Penalty, 20.0, num_steps=5, step_size=0.1),
}
LARGE = ["*@b.*"]
"""What is divided among ranks, of which the second one has one row of three."""
# Nothing is used by both.
APART = [[("a", "a"), ("b", "b")], [("b", "b"), ("a", "a")]] * (NUM_TICKS // 2)


class Given(AbstractPaths):
    """Paths that are told, one after the other."""

    def __init__(self, paths: Iterable[tuple[str, ...]]) -> None:
        super().__init__()
        self._paths = iter(paths)

    def forward(self, decisions: Any) -> Choice:
        return dict(zip([each.name for each in decisions], next(self._paths), strict=True))


ROWS = torch.randn(2, BATCH * NUM_TICKS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = InMemoryTensors({"input": ROWS[0], "target": ROWS[1]})


def space(paths: AbstractPaths | None) -> SharedSpace:
    """Return two places with two linear layers each."""

    def base() -> nn.Module:
        return nn.Sequential(nn.Tanh(), nn.Tanh())

    # Candidates of one factory would be one layer.
    linears = {name: partial(nn.Linear, WIDTH, WIDTH) for name in "ab"}
    places = Operator("place", {"type": "Tanh"}, linears)
    torch.manual_seed(0)
    return SharedSpace(base, [places], inputs=[WIDTH], seed=1, paths=paths).double()


def loss(batch: Mapping[str, Tensor], *, w: Any) -> Tensor:
    return (w(batch["input"]) - batch["target"]).square().mean()


def build(optimizer: str, paths: AbstractPaths, **settings: Any) -> Program:
    made = {"stream": Stream(DATA, BATCH, shuffle=False), "optimizer": OPTIMIZERS[optimizer], **settings}
    return Program([Problem("w", space(paths), loss, roles={"w": "w"}, **made)], Graph())


def trained(
    ranks: Ranks, optimizer: str, paths: Sequence[Sequence[tuple[str, str]]], **settings: Any
) -> dict[str, Any]:
    """Return parameters by tick, and how many numbers this rank holds; batches of 5 are shares of 2 and 3."""
    made = over(ranks, build(optimizer, Given([each[ranks.rank] for each in paths]), **settings))
    schedule, found = Schedule(made), []
    problem = made.problems["w"]
    for _ in paths:
        schedule.tick()
        found.append(gathered({name: value.detach().clone() for name, value in problem.theta.items()}, is_kept=True))
    assert problem.optimizer is not None
    state = [each for kept in problem.optimizer.state.values() for each in kept.values() if each.dim()]
    held = {"parameters": _held(problem.theta.values()), "state": _held(state)}
    # All ranks take part, in whichever order they read paths.
    read = problem.reading(training=False)(ROWS[0, :1], path={"place_0": "b", "place_1": "a"}).detach()
    return {
        "theta": found,
        "held": held,
        "read": read,
        "counts": problem.module.counts.clone(),
        "total": trained_paths(made, ranks),
    }


def _held(tensors: Iterable[Any]) -> int:
    return sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in tensors)


def lower_loss(batch: Any, *, w: Any, u: Any) -> Tensor:
    return loss(batch, w=w) * u(batch["input"]).square().mean()


def of_both_ranks(function: Any, batch: Any, *, w: Any, **roles: Any) -> Tensor:
    """Return what the mean over two ranks would be, each with its rows and its path."""
    total = torch.zeros((), dtype=torch.float64)
    for (begin, end), choice in zip(SHARES, OF_RANKS, strict=True):
        part = {name: rows[begin:end] for name, rows in batch.items()}
        path = {"place_0": choice[0], "place_1": choice[1]}
        total = total + function(part, w=partial(w, path=path), **roles) * (end - begin) / BATCH
    return total


def levels(algorithm: Any, paths: AbstractPaths | None, upper: Any, lower: Any) -> Program:
    """Return a program whose upper problem passes through a shared space."""
    torch.manual_seed(5)
    weigher, step = nn.Linear(WIDTH, 1).double(), OPTIMIZERS["momentum"]
    streams = [Stream(DATA, BATCH, shuffle=False) for _ in range(2)]
    roles = {"w": "w", "u": "u"}
    problems = [
        Problem("u", weigher, upper, roles={"w": "w"}, stream=streams[0], optimizer=step),
        Problem("w", space(paths), lower, roles=roles, stream=streams[1], optimizer=step, hypergradient=algorithm),
    ]
    return Program(problems, Graph(lower_to_upper={"w": ["u"]}, upper_to_lower={"u": ["w"]}))


def refusal(ranks: Ranks, algorithm: Any) -> str:
    try:
        over(ranks, levels(algorithm, Given(repeat(OF_RANKS[ranks.rank])), loss, lower_loss))
    except ConfigError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Be one of two ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found: dict[str, Any] = {}
        for name in OPTIMIZERS:
            found[name] = trained(ranks, name, PATHS)
            found[f"{name} apart"] = trained(ranks, name, APART)
            found[f"{name} in shards"] = trained(ranks, name, PATHS, shard=LARGE)
            found[f"{name} in shards apart"] = trained(ranks, name, APART, shard=LARGE)
        fair = over(ranks, build("adam", FairPaths()))
        schedule = Schedule(fair)
        for _ in range(3):
            schedule.tick()
        found["left"] = fair.problems["w"].module.paths.left.clone()
        found["refused"] = refusal(ranks, Unrolled()), refusal(ranks, SABA(step_size=0.1))
        for name, make in IMPLICIT.items():
            made = levels(make(), Given(repeat(OF_RANKS[ranks.rank])), loss, lower_loss)
            found[f"{name} hypergradient"] = dict(over(ranks, made).gradient("u"))
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return what each of two ranks has found."""
    return run_ranks(main, 2, tmp_path_factory.mktemp("ranks"), meanwhile=lambda: None)[1]


def by_hand(optimizer: str, paths: list[Any]) -> list[dict[str, Tensor]]:
    """Return parameters by tick: each one's gradient is the mean over the samples of the ranks that used it."""
    model, seen = space(None), []
    names, theta = zip(*model.named_parameters(), strict=True)
    step = OPTIMIZERS[optimizer](theta)
    for tick, chosen in enumerate(paths):
        totals: list[Any] = [None] * len(theta)
        sizes = [0] * len(theta)
        for (begin, end), choice in zip(SHARES, chosen, strict=True):
            part = slice(tick * BATCH + begin, tick * BATCH + end)
            batch = {"input": ROWS[0, part], "target": ROWS[1, part]}
            path = dict(zip([each.name for each in model.table], choice, strict=True))
            value = loss(batch, w=lambda x, path=path: model(x, path=path))
            for place, each in enumerate(torch.autograd.grad(value, theta, allow_unused=True)):
                if each is not None:
                    totals[place] = each * (end - begin) + (0 if totals[place] is None else totals[place])
                    sizes[place] += end - begin
        for x, total, size in zip(theta, totals, sizes, strict=True):
            x.grad = None if total is None else total / size
        step.step()
        seen.append({name: x.detach().clone() for name, x in zip(names, theta, strict=True)})
    return seen


@pytest.mark.parametrize("kind", ["", " apart", " in shards", " in shards apart"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_equal_the_hand_averaged_steps(found: list[Any], optimizer: str, kind: str) -> None:
    expected = by_hand(optimizer, APART if kind.endswith("apart") else PATHS)
    for rank in found:
        for tick, values in zip(rank[optimizer + kind]["theta"], expected, strict=True):
            assert tick.keys() == values.keys()
            assert all(torch.allclose(tick[name], values[name], rtol=0, atol=TOLERANCE) for name in values)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_of_a_candidate_in_shards_each_rank_holds_its_rows(found: list[Any], optimizer: str) -> None:
    layer = WIDTH * WIDTH + WIDTH
    copies = 2 if optimizer == "adam" else 1
    for rank, rows in zip(found, (2, 1), strict=True):
        whole, some = (rank[f"{optimizer}{kind}"] for kind in ("", " in shards"))
        # Two places, of which each has one candidate whole and one in shards.
        expected = 2 * layer + 2 * rows * (WIDTH + 1)
        assert some["held"] == {"parameters": expected, "state": copies * expected}
        assert whole["held"]["parameters"] == 4 * layer
        assert torch.allclose(some["read"], whole["read"], rtol=0, atol=TOLERANCE)
        assert torch.equal(some["counts"], whole["counts"])


def test_a_run_counts_the_paths_of_all_ranks(found: list[Any]) -> None:
    first, second = (rank["adam"] for rank in found)
    assert first["counts"].tolist() != second["counts"].tolist()
    for each in (first, second):
        assert each["total"]["w"].tolist() == (first["counts"] + second["counts"]).tolist()
    assert sum(first["total"]["w"].tolist()) == 2 * 2 * NUM_TICKS


def test_what_is_left_of_fair_paths_is_each_ranks_own(found: list[Any]) -> None:
    for rank in found:
        # After three paths of two candidates one has its turn next.
        assert rank["left"].dtype == torch.bool
        assert rank["left"].sum(1).tolist() == [1, 1]


@pytest.mark.parametrize("name", IMPLICIT)
def test_implicit_hypergradients_are_those_of_the_mean_over_paths(found: list[Any], name: str) -> None:
    """As of one rank whose loss is the mean over both paths, each on its rows."""
    losses = partial(of_both_ranks, loss), partial(of_both_ranks, lower_loss)
    expected = levels(IMPLICIT[name](), None, *losses).gradient("u")
    assert all(each.norm() > 1e-3 for each in expected.values())
    for rank in found:
        for key, value in rank[f"{name} hypergradient"].items():
            assert torch.allclose(value, expected[key], rtol=0, atol=TOLERANCE), (value, expected[key])


def test_a_hypergradient_that_follows_the_steps_of_a_shared_space_is_refused(found: list[Any]) -> None:
    for rank in found:
        for refused in rank["refused"]:
            assert refused.startswith("problems.w.hypergradient: found ")
            assert "expected an implicit one, or first_order" in refused
            assert "since the gradient of a parameter is the mean over the ranks whose path used it" in refused
