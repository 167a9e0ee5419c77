"""SABA against the full-batch linear system, and against SOBA's noise."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import SABA, Exact, Implicit
from mlotool.problem.interface import Memory
from mlotool.program import Program, Schedule, Stream
from tests.hypergradient.two_levels import two_levels
from tests.program.small import assert_identical, assert_resumes, numbers, samples
from tests.program.test_reduce import BILEVEL, batches, two_ranks
from tests.program.test_reduce import program as ranked
from tests.programs import Point

NUM_BATCHES = 4
DATA = samples(3 * NUM_BATCHES, 1)


def fit(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    """A quadratic whose Hessian and cross derivative differ from batch to batch."""
    return 0.5 * ((batch @ w() - (batch**2) @ u()) ** 2).mean() + 0.25 * w().square().sum()


def goal(batch: Any, *, w: Any) -> Tensor:
    return (w() - 1).square().sum()


def program(
    hypergradient: Any, stream: Any = None, *, upper: Any = goal, upper_rate: float | None = None, **settings: Any
) -> Program:
    stream = Stream(DATA, 3, shuffle=False) if stream is None else stream
    of_upper = {} if upper_rate is None else {"optimizer": partial(torch.optim.SGD, lr=upper_rate)}
    levels = (Point(numbers(0.5, -0.3, 0.8)), fit), (Point(numbers(0.1, 0.2, -0.4)), upper)
    return two_levels(*levels, hypergradient, of_upper=of_upper, stream=stream, **settings)


HESSIAN = DATA.T @ DATA / len(DATA) + 0.5 * torch.eye(3, dtype=torch.float64)


def trained(hypergradient: Any, stream: Any = None, **settings: Any) -> Program:
    """Return a program whose upper problem stands still, and whose solution has v != 0."""
    upper = lambda batch, *, w, u: goal(batch, w=w) + 0.1 * u().square().sum()  # noqa: E731
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return program(hypergradient, stream, upper=upper, upper_rate=0.0, optimizer=optimizer, **settings)


def full_batch() -> tuple[Tensor, Tensor]:
    """Return `H^-1 v` and the hypergradient `-M^T H^-1 v` of the mean over all data."""
    built = program(Implicit(Exact()), Stream(DATA, len(DATA), shuffle=False))
    v = 2 * (built.problems["w"].module.x.detach() - 1)
    return torch.linalg.solve(HESSIAN, v), built.gradient("u")["x"]


def errors(built: Program, num_epochs: int) -> tuple[list[float], list[float]]:
    """Return the relative errors of q and of the hypergradient after each epoch, the largest within it."""
    solution, expected = full_batch()
    of_solution, of_gradient = [], []
    for _ in range(num_epochs):
        inside: tuple[list[float], list[float]] = ([], [])
        for _ in range(NUM_BATCHES):
            built.problems["w"].stream.next()
            found = built.gradient("u")["x"]
            kept = built.internals.algorithm_state("w")["readers"]["u"]["solution"]
            inside[0].append(float((kept[0] - solution).norm() / solution.norm()))
            inside[1].append(float((found - expected).norm() / expected.norm()))
        of_solution.append(max(inside[0]))
        of_gradient.append(max(inside[1]))
    return of_solution, of_gradient


def test_it_converges_linearly_to_the_full_batch_solution() -> None:
    of_solution, of_gradient = errors(program(SABA(step_size=0.1)), 60)
    for found in (of_solution, of_gradient):
        assert found[-1] < 1e-7
        rates = [(later / earlier) ** 0.1 for earlier, later in zip(found[10::10], found[20::10], strict=False)]
        assert max(rates) < 0.75


def test_a_key_numbers_the_batches_of_any_stream() -> None:
    """Groups of samples that always come together, in an order that changes."""

    class Groups:
        def __len__(self) -> int:
            return NUM_BATCHES

        def __getitem__(self, index: int) -> Mapping[str, Any]:
            return {"data": DATA[3 * index : 3 * index + 3], "group": index}

    def keyed(batch: Mapping[str, Tensor], *, w: Any, u: Any) -> Tensor:
        return fit(batch["data"][0], w=w, u=u)

    built = program(SABA(step_size=0.1, key="group"), Stream(Groups(), 1, seed=3))
    built.problems["w"].loss = keyed
    of_solution, of_gradient = errors(built, 60)
    assert of_solution[-1] < 1e-4
    assert of_gradient[-1] < 1e-4


def test_the_variance_of_the_lower_step_vanishes_at_the_solution() -> None:
    """There the gradients of the batches are far from zero, and what the optimizer gets is not."""
    built = trained(SABA(step_size=0.1))
    schedule, lower = Schedule(built), built.problems["w"]
    taken: list[float] = []
    for _ in range(60 * NUM_BATCHES):
        before = lower.module.x.detach().clone()
        schedule.tick()
        taken.append(float((lower.module.x.detach() - before).norm()) / 0.1)
    u = built.problems["u"].module.x.detach()
    solution = torch.linalg.solve(HESSIAN, DATA.T @ (DATA**2 @ u) / len(DATA))
    assert torch.allclose(lower.module.x, solution, rtol=1e-6)
    assert max(taken[-NUM_BATCHES:]) < 1e-6
    losses = [built.internals.direct_loss("w", part).loss for part in DATA.split(3)]
    of_batches = [torch.autograd.grad(loss, lower.module.x)[0].norm() for loss in losses]
    assert float(min(of_batches)) > 0.1


def test_the_steps_are_those_of_saga_written_out() -> None:
    """Also where a step takes several batches, and where it is a look-ahead that is taken back."""
    stream = Stream(DATA, 4, shuffle=False)
    built = trained(SABA(step_size=0.1), stream, accumulate_batches=2, roll_back=True)
    schedule, lower = Schedule(built), built.problems["w"]
    u, w = (built.problems[name].module.x.detach().clone() for name in "uw")
    table: dict[int, Tensor] = {}

    def direction(w: Tensor, number: int) -> Tensor:
        batch = DATA[4 * number : 4 * number + 4]
        new = batch.T @ (batch @ w - batch**2 @ u) / 4 + 0.5 * w
        old, mean = table.get(number), torch.stack([*table.values()]).mean(0) if table else None
        table[number] = new
        return new if old is None else new - old + mean

    for tick in range(12):
        numbers_of_step = [2 * tick % 3, (2 * tick + 1) % 3]
        # The look-ahead fills the table; the step that stays meets the same batches again.
        for _ in range(2):
            moved = w - 0.1 * sum(direction(w, number) for number in numbers_of_step) / 2
        schedule.tick()
        w = moved
        assert torch.allclose(lower.module.x, w, rtol=1e-12), tick


def test_a_parameter_that_no_batch_uses_has_no_gradient_to_average() -> None:
    algorithm, x = SABA(step_size=0.1), numbers(1.0, 2.0)
    step = partial(algorithm.step_direction, "w", [x, x], memory=Memory(algorithm.initial_state()))
    first = step([x, None], None, 0)
    assert torch.equal(first[0], x)
    assert first[1] is None
    found = step([x, 3 * x], None, 1)
    # Once a batch has used it, the others count as zero.
    assert torch.equal(found[1], 3 * x)
    found = step([2 * x, None], None, 0)
    assert torch.equal(found[0], 2 * x - x + x)
    assert torch.equal(found[1], 1.5 * x)


@pytest.mark.parametrize("roll_back", [False, True])
def test_a_resumed_run_is_bit_identical(roll_back: bool) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.05)

    def make() -> Program:
        settings = {"upper_rate": 0.05, "optimizer": optimizer, "unroll_steps": 3}
        return program(SABA(step_size=0.1), roll_back=roll_back, **settings)

    assert_resumes(make, num_ticks=25, num_more=15)


def test_two_ranks_equal_the_joined_batch() -> None:
    first, second = two_ranks(BILEVEL, lambda: SABA(step_size=0.1), "u")
    assert_identical(first, second)
    joined = ranked(BILEVEL, lambda: SABA(step_size=0.1)).gradient("u", batches(BILEVEL))
    assert torch.allclose(first["x"], joined["x"], rtol=1e-11)


@pytest.mark.parametrize(("unroll_steps", "num_seen"), [(2, 2), (4, 1), (6, 2)])
def test_batches_that_no_pullback_would_meet_are_refused(unroll_steps: int, num_seen: int) -> None:
    with pytest.raises(ConfigError, match=rf"found {num_seen}; expected all 4 of an epoch\. .* one of {unroll_steps} "):
        program(SABA(step_size=0.1), unroll_steps=unroll_steps)
