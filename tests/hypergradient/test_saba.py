"""SABA against the full-batch linear system, and against SOBA's noise."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import SABA, Exact, Implicit
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.program.small import assert_identical, numbers, parameters, samples
from tests.program.test_reduce import BILEVEL, batches, two_ranks
from tests.program.test_reduce import program as ranked
from tests.programs import Point, nested

NUM_BATCHES = 4
DATA = samples(3 * NUM_BATCHES, 1)


def fit(batch: Tensor, *, w: Any, u: Any) -> Tensor:
    """A quadratic whose Hessian and cross derivative differ from batch to batch."""
    return 0.5 * ((batch @ w() - (batch**2) @ u()) ** 2).mean() + 0.25 * w().square().sum()


def goal(batch: Any, *, w: Any) -> Tensor:
    return (w() - 1).square().sum()


def program(hypergradient: Any, stream: Any = None, **settings: Any) -> Program:
    stream = Stream(DATA, 3, shuffle=False) if stream is None else stream
    lower = Problem(
        "w",
        Point(numbers(0.5, -0.3, 0.8)),
        fit,
        roles={"w": "w", "u": "u"},
        stream=stream,
        hypergradient=hypergradient,
        **settings,
    )
    upper = Problem("u", Point(numbers(0.1, 0.2, -0.4)), goal, roles={"w": "w"})
    return Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}))


def full_batch() -> tuple[Tensor, Tensor]:
    """Return `H^-1 v` and the hypergradient `-M^T H^-1 v` of the mean over all data."""
    built = program(Implicit(Exact()), Stream(DATA, len(DATA), shuffle=False))
    hessian = DATA.T @ DATA / len(DATA) + 0.5 * torch.eye(3, dtype=torch.float64)
    v = 2 * (built.problems["w"].module.x.detach() - 1)
    return torch.linalg.solve(hessian, v), built.gradient("u")["x"]


def errors(built: Program, algorithm: SABA, num_epochs: int) -> tuple[list[float], list[float]]:
    """Return the relative errors of q and of the hypergradient after each epoch, the largest within it."""
    solution, expected = full_batch()
    of_solution, of_gradient = [], []
    for _ in range(num_epochs):
        inside: tuple[list[float], list[float]] = ([], [])
        for _ in range(NUM_BATCHES):
            built.problems["w"].stream.next()
            found = built.gradient("u")["x"]
            kept = algorithm.readers["u"].solution
            assert kept is not None
            inside[0].append(float((kept[0] - solution).norm() / solution.norm()))
            inside[1].append(float((found - expected).norm() / expected.norm()))
        of_solution.append(max(inside[0]))
        of_gradient.append(max(inside[1]))
    return of_solution, of_gradient


def test_it_converges_linearly_to_the_full_batch_solution() -> None:
    algorithm = SABA(step_size=0.1)
    of_solution, of_gradient = errors(program(algorithm), algorithm, 60)
    for found in (of_solution, of_gradient):
        assert found[-1] < 1e-7
        rates = [(later / earlier) ** 0.1 for earlier, later in zip(found[10::10], found[20::10], strict=False)]
        assert max(rates) < 0.75


class Soba(SABA):
    """The same without tables: each pullback's own products."""

    def solution(self, *arguments: Any) -> Any:
        for averages in self.readers.values():
            averages.hessian, averages.cross = type(averages.hessian)(), type(averages.cross)()
        return super().solution(*arguments)


def test_without_the_tables_the_noise_stays() -> None:
    algorithm = Soba(step_size=0.1)
    of_solution, of_gradient = errors(program(algorithm), algorithm, 120)
    assert min(of_solution[20:]) > 1e-2
    assert min(of_gradient[20:]) > 1e-1


def test_one_batch_is_gradient_descent_on_the_linear_system() -> None:
    algorithm = SABA(step_size=0.3)
    built = program(algorithm, Stream(DATA, len(DATA), shuffle=False))
    solution, expected = full_batch()
    for _ in range(200):
        found = built.gradient("u")["x"]
    assert torch.allclose(algorithm.readers["u"].solution[0], solution, rtol=1e-10)
    assert torch.allclose(found, expected, rtol=1e-10)


def test_a_key_numbers_the_batches_of_any_stream() -> None:
    """Groups of samples that always come together, in an order that changes."""

    class Groups:
        def __len__(self) -> int:
            return NUM_BATCHES

        def __getitem__(self, index: int) -> Mapping[str, Any]:
            return {"data": DATA[3 * index : 3 * index + 3], "group": index}

    def keyed(batch: Mapping[str, Tensor], *, w: Any, u: Any) -> Tensor:
        return fit(batch["data"][0], w=w, u=u)

    algorithm = SABA(step_size=0.1, key="group")
    built = program(algorithm, Stream(Groups(), 1, seed=3))
    built.problems["w"].loss = keyed
    of_solution, of_gradient = errors(built, algorithm, 120)
    assert of_solution[-1] < 1e-8
    assert of_gradient[-1] < 1e-8


def test_a_resumed_run_is_bit_identical() -> None:
    optimizer = partial(torch.optim.SGD, lr=0.05)

    def make() -> Program:
        built = program(SABA(step_size=0.1), optimizer=optimizer, unroll_steps=3)
        upper = Problem("u", Point(numbers(0.1, 0.2, -0.4)), goal, roles={"w": "w"}, optimizer=optimizer)
        return Program([built.problems["w"], upper], built.graph)

    whole, first, second = make(), make(), make()
    runs = [Schedule(each) for each in (whole, first, second)]
    for schedule, num_ticks in ((runs[0], 40), (runs[1], 25)):
        for _ in range(num_ticks):
            schedule.tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    runs[1].tick()
    for _ in range(15):
        runs[2].tick()
    assert_identical(parameters(second), parameters(whole))


def test_two_ranks_equal_the_joined_batch() -> None:
    first, second = two_ranks(BILEVEL, lambda: SABA(step_size=0.1), "u")
    assert_identical(first, second)
    joined = ranked(BILEVEL, lambda: SABA(step_size=0.1)).gradient("u", batches(BILEVEL))
    assert torch.allclose(first["x"], joined["x"], rtol=1e-11)


def test_a_stream_that_shuffles_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"problems.w.hypergradient: found SABA.*stream.shuffle: false"):
        program(SABA(step_size=0.1), Stream(DATA, 3))


@pytest.mark.parametrize(("unroll_steps", "num_seen"), [(2, 2), (4, 1), (6, 2)])
def test_batches_that_no_pullback_would_meet_are_refused(unroll_steps: int, num_seen: int) -> None:
    with pytest.raises(ConfigError, match=rf"found 4 batches an epoch, of which every {unroll_steps}th.*: {num_seen} "):
        program(SABA(step_size=0.1), unroll_steps=unroll_steps)


def test_a_batch_that_is_handed_over_has_no_number() -> None:
    with pytest.raises(ConfigError, match=r"handed to Program.gradient"):
        program(SABA(step_size=0.1)).gradient("u", {"w": DATA[:3]})


@pytest.mark.parametrize("entry", [torch.tensor([0, 1]), torch.tensor([0.5]), None])
def test_a_key_that_is_no_number_is_refused(entry: Any) -> None:
    built = program(SABA(step_size=0.1, key="group"))
    built.problems["w"].loss = lambda batch, *, w, u: fit(DATA, w=w, u=u)
    with pytest.raises(ConfigError, match=r"hypergradient.key: found 'group'"):
        built.gradient("u", {"w": {"group": entry}})


def test_a_differentiated_pullback_is_refused() -> None:
    with pytest.raises(ConfigError, match="found SABA, but a problem above 'low'"):
        nested().program(lambda: SABA(step_size=0.1))


@pytest.mark.parametrize("step_size", [0.0, -1.0, float("nan")])
def test_bad_settings(step_size: float) -> None:
    with pytest.raises(ConfigError, match="step_size"):
        SABA(step_size=step_size)
