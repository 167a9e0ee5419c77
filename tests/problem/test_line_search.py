"""An optimizer that evaluates the loss itself: torch's LBFGS with its line search."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Exact, Implicit, Unrolled
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.program.small import assert_resumes, numbers, pair, parameters, samples
from tests.programs import Point

lbfgs = partial(torch.optim.LBFGS, max_iter=1, max_eval=25, history_size=5, line_search_fn="strong_wolfe")


def rosenbrock(batch: Tensor, *, x: Any) -> Tensor:
    a, b, c = x()
    return 100 * (b - a**2) ** 2 + (1 - a) ** 2 + 100 * (c - b**2) ** 2 + (1 - b) ** 2 + 0 * batch.mean()


def single(loss: Any = rosenbrock, **settings: Any) -> Program:
    point = Point(numbers(-1.2, 1.0, 0.5))
    stream = Stream(samples(8), settings.pop("batch_size", 8), seed=0)
    settings = {"optimizer": lbfgs, **settings}
    return Program([Problem("x", point, loss, roles={"x": "x"}, stream=stream, **settings)], Graph())


def test_the_steps_are_those_of_torch_alone():
    program = single()
    schedule = Schedule(program)
    point = numbers(-1.2, 1.0, 0.5).requires_grad_()
    optimizer, zero = lbfgs([point]), torch.zeros(1, dtype=torch.float64)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = rosenbrock(zero, x=lambda: point)
        loss.backward()
        return loss

    for _ in range(60):
        schedule.tick()
        optimizer.step(closure)
    torch.testing.assert_close(parameters(program)["x.x"], point.detach(), rtol=1e-12, atol=0)
    assert rosenbrock(zero, x=lambda: point).detach() < 1e-2


def test_a_search_sees_the_same_batch_and_noise():
    seen: list[Tensor] = []

    def noisy(batch: Tensor, *, x: Any) -> Tensor:
        noise = torch.rand(3)
        seen.append(torch.cat([batch.flatten(), noise]))
        return ((x() - batch).square().mean(0) * noise).sum() + x().exp().sum()

    program = single(noisy, batch_size=2)
    schedule, counts = Schedule(program), []
    torch.manual_seed(0)
    for _ in range(3):
        seen.clear()
        schedule.tick()
        counts.append(len(seen))
        assert all(torch.equal(each, seen[0]) for each in seen)
        counts.append(seen[0])
    assert not torch.equal(counts[1], counts[3])
    assert min(counts[::2]) > 1


def test_the_first_evaluation_is_not_repeated():
    calls = []

    def counted(batch: Tensor, *, x: Any) -> Tensor:
        calls.append(1)
        return rosenbrock(batch, x=x)

    program = single(counted, optimizer=partial(torch.optim.LBFGS, lr=1e-3, max_iter=1))
    for _ in range(3):
        Schedule(program).tick()
    assert len(calls) == 3


def test_it_goes_on_bit_by_bit():
    assert_resumes(single, num_ticks=5, num_more=5)


def test_a_lower_problem_may_search():
    program = pair({"optimizer": lbfgs}, {"optimizer": partial(torch.optim.SGD, lr=0.2)}, size=4, batch_size=4)
    schedule = Schedule(program)
    losses = [float(schedule.tick()["u"].loss) for _ in range(50)]
    assert program.gradient("w")["x"].abs().max() < 0.01
    assert losses[-1] < losses[0]


def test_what_has_no_pure_form_is_refused():
    with pytest.raises(ConfigError, match="LBFGS"):
        pair({"optimizer": lbfgs}, hypergradient=Unrolled)
    with pytest.raises(ConfigError, match=r"problems\.u\.optimizer: found line search with .*; expected adam"):
        pair(upper={"optimizer": lbfgs})
    assert (
        pair({"optimizer": lbfgs}, hypergradient=lambda: Implicit(Exact())).problems["w"].optimizer_step.evaluates_again
    )
