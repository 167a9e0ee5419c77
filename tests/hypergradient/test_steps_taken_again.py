"""Steps that are computed again are the steps that were taken, to the bit, or a run stops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Problem, Program, Schedule, Stream, Unrolled
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.hypergradient import Binomial, KeepEvery
from tests.hypergradient.modules_with_buffers import MOVING, Born, Momentum, Sparse
from tests.hypergradient.test_compared_products import OldStyle
from tests.hypergradient.test_unrolled import BATCHES, Pair, lower_loss, upper_loss
from tests.hypergradient.two_levels import two_levels
from tests.program.small import numbers, samples
from tests.programs import Point

WAYS = {
    "reverse": Unrolled(),
    "first order": Unrolled(second_order=False),
    "forward": Unrolled(product="forward"),
    "every": Unrolled(trajectory=KeepEvery(steps=2)),
    "every, forward": Unrolled(trajectory=KeepEvery(steps=2), product="forward"),
    "binomial": Unrolled(trajectory=Binomial(checkpoints=2)),
}


class Counting:
    """A loss that weighs its k-th evaluation with k."""

    def __init__(self) -> None:
        self.num_calls = 0

    def factor(self) -> float:
        self.num_calls += 1
        return 1 + 0.1 * self.num_calls

    def __call__(self, batch: Tensor, *, w: Any, u: Any) -> Tensor:
        return self.factor() * lower_loss(BATCHES[0], w=w, u=u)


class OfNumpy(Counting):
    """A loss with a random weight."""

    def factor(self) -> float:
        return 1 + float(numpy.random.rand())


class OfGenerator(Counting):
    """A loss with a random weight."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def factor(self) -> float:
        return 1 + float(torch.rand((), generator=self.generator))


def scheduled(loss: Any, hypergradient: Unrolled) -> Schedule:
    slow = {"optimizer": partial(torch.optim.SGD, lr=0.01)}
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.05), "unroll_steps": 4, "of_upper": slow}
    return Schedule(two_levels((Pair(), loss), (Point(numbers(0.1, 0.2, -0.4)), upper_loss), hypergradient, **settings))


@pytest.mark.parametrize("loss", [Counting, OfNumpy, OfGenerator])
@pytest.mark.parametrize("way", [each for each in WAYS if each != "first order"])
def test_a_loss_that_is_no_function_is_refused(loss: type[Counting], way: str) -> None:
    schedule = scheduled(loss(), WAYS[way])
    # The rehearsal before the first step puts numbers in Python back, but not a generator.
    with pytest.raises(MlotoolError, match=r"problems\.w\.loss: (found another gradient|.* for the same batch)"):
        for _ in range(4):
            schedule.tick()


def test_a_converged_problem_goes_on() -> None:
    """Its gradients are rounding alone: none is like the other."""

    class Converging(Counting):
        """Falls to a size at which noise is all that there is."""

        def factor(self) -> float:
            self.num_calls += 1
            return 1.0 if self.num_calls <= 8 else 1e-16 * (1 + self.num_calls % 7)

    schedule = scheduled(Converging(), Unrolled(horizon=1))
    for _ in range(40):
        schedule.tick()


def test_a_resumed_run_knows_the_size_of_its_gradients() -> None:
    first, second = scheduled(Counting(), Unrolled()), scheduled(Counting(), Unrolled())
    first.program.problems["w"].trajectory.largest_norm.value = 3.0
    saved = first.program.state_dict()
    second.program.load_state_dict(saved)
    assert second.program.problems["w"].trajectory.largest_norm.value == 3.0


def network(module: nn.Module, hypergradient: Unrolled, **settings: Any) -> Program:
    def fit(batch: Tensor, *, w: Any, u: Any) -> Tensor:
        return (w(batch) - torch.sin(batch)).square().mean() + 0.01 * (
            torch.exp(u()) * torch.cat([each.reshape(-1) for each in w.parameters()])[:3] ** 2
        ).sum()

    upper = Point(numbers(0.1, 0.2, -0.4)), lambda batch, *, w: (w(batch) - 1).square().mean()
    of_upper = {"stream": Stream(samples(12, 2), 4, seed=2), "optimizer": partial(torch.optim.SGD, lr=1.0)}
    settings |= {"stream": Stream(samples(20, 1), 5, seed=1), "unroll_steps": 4}
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return two_levels((module, fit), upper, hypergradient, of_upper=of_upper, optimizer=optimizer, **settings)


def after(program: Program, num_ticks: int = 12) -> Tensor:
    schedule = Schedule(program)
    for _ in range(num_ticks):
        schedule.tick()
    return torch.cat([each.detach().reshape(-1) for each in program.problems["u"].current()])


@pytest.mark.parametrize(
    ("way", "settings"),
    [*[(way, {}) for way in WAYS if way != "first order"], ("every, forward", {"accumulate_batches": 2})],
    ids=str,
)
@pytest.mark.parametrize("kind", MOVING)
def test_buffers_that_move_are_those_of_each_step(kind: str, way: str, settings: dict[str, Any]) -> None:
    made = []
    for each in (Unrolled(remat=False), WAYS[way]):
        torch.manual_seed(0)
        made.append(network(MOVING[kind]().double(), each, **settings))
    whole, again = made
    assert torch.allclose(after(again), after(whole), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_dropped", [True, False])
@pytest.mark.parametrize("way", ["reverse", "every", "binomial"])
def test_buffers_that_are_none_at_first_or_later(way: str, is_dropped: bool) -> None:
    found = []
    for each in (Unrolled(remat=False), WAYS[way]):
        torch.manual_seed(0)
        found.append(after(network(Born(is_dropped).double(), each)))
    assert torch.allclose(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_compressed_sparse_buffer() -> None:
    """Forward mode has none: torch does not copy them there."""
    found = []
    for way in (Unrolled(remat=False), Unrolled()):
        torch.manual_seed(0)
        found.append(after(network(Sparse(torch.sparse_csr).double(), way)))
    assert torch.allclose(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_buffers_are_there_after_a_resume_in_the_middle_of_an_unroll() -> None:
    def make() -> Program:
        torch.manual_seed(0)
        return network(MOVING["running mean"]().double(), Unrolled(trajectory=Binomial(checkpoints=2)))

    whole, first, second = make(), make(), make()
    run, resumed = Schedule(first), Schedule(second)
    for _ in range(6):
        run.tick()
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(run.state_dict())
    for _ in range(6):
        resumed.tick()
    assert torch.equal(second.problems["u"].current()[0], after(whole))


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(OldStyle.apply(self.layer(x)))


@pytest.mark.parametrize(("block", "is_saved"), [(Squared, False), (lambda: nn.Linear(3, 3), True)])
def test_gradients_are_saved_while_forward_mode_reads_them(block: Callable[[], nn.Module], is_saved: bool) -> None:
    program = network(nn.Sequential(block(), nn.Linear(3, 3)).double(), Unrolled(product="auto"), remat=["0"])
    schedule = Schedule(program)
    for _ in range(7):
        schedule.tick()
    assert [record.gradient is not None for record in program.problems["w"].trajectory] == [is_saved] * 3


def test_one_that_changes_later_is_refused_later() -> None:
    """Of the first, second, fourth and eighth unroll the steps are looked at."""

    class Late(Counting):
        def factor(self) -> float:
            return max(super().factor(), 5.0)

    schedule = scheduled(Late(), Unrolled())
    with pytest.raises(ConfigError, match="found another gradient"):
        for _ in range(40):
            schedule.tick()


def test_a_teacher_that_trains_beside_is_named() -> None:
    """Buffers of other problems' modules are today's in steps that are taken again."""
    teacher = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    def fit(batch: Tensor, *, w: Any, t: Any, u: Any) -> Tensor:
        return (w(batch) - t(batch)).square().mean() * torch.exp(u()).sum()

    sgd = partial(torch.optim.SGD, lr=0.1)
    problems = [
        Problem(
            "t",
            teacher,
            lambda batch, *, t: (t(batch) - torch.cos(batch)).square().mean(),
            roles={"t": "t"},
            stream=Stream(samples(20, 7), 5, seed=4),
            optimizer=sgd,
        ),
        Problem(
            "w",
            nn.Linear(3, 3).double(),
            fit,
            roles={"w": "w", "u": "u", "t": {"problem": "t", "mode": "eval"}},
            stream=Stream(samples(20, 1), 5, seed=1),
            optimizer=sgd,
            unroll_steps=4,
            hypergradient=Unrolled(),
        ),
        Problem(
            "u",
            Point(numbers(0.1, 0.2, -0.4)),
            lambda batch, *, w: (w(batch) - 1).square().mean(),
            roles={"w": "w"},
            stream=Stream(samples(12, 2), 4, seed=2),
            optimizer=sgd,
        ),
    ]
    schedule = Schedule(Program(problems, Graph({"u": ["w"]}, {"w": ["u"], "t": ["w"]})))
    with pytest.raises(ConfigError, match="read no moving buffers of other problems"):
        for _ in range(12):
            schedule.tick()


def test_buffers_that_stay_are_not_copied() -> None:
    program = network(Momentum().double(), Unrolled())
    schedule = Schedule(program)
    for _ in range(3):
        schedule.tick()
    records = [record.buffers[0] for record in program.problems["w"].trajectory]
    assert len({id(record["mean"]) for record in records}) == 3
