"""A layer-parallel stand-in: it takes the training steps of its problem, and nothing else sees it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.loss_output import LossOutput
from mlotool.problem.parallel import AbstractParallel
from mlotool.program import Schedule
from tests.program.small import assert_identical, numbers, pair, parameters


class Doubled(AbstractParallel):
    """Steps along twice the gradient, and counts."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.batches: list[Any] = []

    def attach(self, name: str, module: nn.Module) -> None:
        self.module = module

    def begin(self, batch: Any, weight: float) -> None:
        self.batches.append((batch, weight))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        self.num_steps += 1
        return [2 * tensor for tensor in torch.autograd.grad(loss, list(theta))]

    def statistics(self) -> Mapping[str, float]:
        return {"count": float(self.num_steps)}

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class Elsewhere(Doubled):
    """A rank whose stage is not the last one."""

    def evaluate(self, loss: Callable[[], LossOutput]) -> LossOutput:
        return LossOutput(numbers(7.0).sum())

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        return [torch.ones_like(tensor) for tensor in theta]


def test_it_takes_the_steps_of_its_own_problem():
    sgd = partial(torch.optim.SGD, lr=0.1)
    twice = partial(torch.optim.SGD, lr=0.2)
    parallel = Doubled()
    ours, other = pair({"optimizer": sgd, "parallel": parallel}), pair({"optimizer": twice})
    for program in (ours, other):
        schedule = Schedule(program)
        for _ in range(5):
            schedule.tick()
    torch.testing.assert_close(parameters(ours), parameters(other), rtol=1e-12, atol=0)
    assert parallel.num_steps == 5
    assert [weight for _, weight in parallel.batches] == [1.0] * 5
    assert ours.statistics()["w/count"] == 5.0
    loaded = pair({"parallel": Doubled()})
    loaded.load_state_dict(ours.state_dict())
    assert loaded.problems["w"].parallel.num_steps == 5


def test_hypergradients_and_losses_do_not_see_it():
    ours, other = pair({"parallel": Doubled()}), pair()
    for program in (ours, other):
        for problem in program.problems.values():
            problem.stream.next()
    for name in ("u", "w"):
        assert_identical(ours.gradient(name), other.gradient(name))
    assert torch.equal(ours.loss("w").loss, other.loss("w").loss)


def test_a_rank_without_the_last_stage_leaves_the_loss():
    program = pair({"optimizer": partial(torch.optim.SGD, lr=0.1), "parallel": Elsewhere()})
    before = [tensor.detach().clone() for tensor in program.problems["w"].theta.values()]
    results = Schedule(program).tick()
    assert results["w"].loss == 7.0
    for old, new in zip(before, program.problems["w"].theta.values(), strict=True):
        torch.testing.assert_close(new.detach(), old - 0.1)
