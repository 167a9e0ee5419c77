"""The warning about values that only finite differences see: it comes where it should, and nowhere else."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlotool.core import LossOutput, stop_gradient
from mlotool.core.replay import LossTraits
from mlotool.hypergradient import Identity, Implicit, Neumann, Penalty
from mlotool.program import AbstractHypergradient, Program, Schedule
from tests.hypergradient.every_algorithm import Batch, program, sample_losses, weighted
from tests.program.small import Mlp, assert_identical

Constant = Callable[[Tensor], Any]
DIFFERENCE: dict[str, Callable[[], AbstractHypergradient]] = {
    "identity": lambda: Implicit(Identity(0.1), "finite_difference"),
    "neumann": lambda: Implicit(Neumann(3, 0.02), "finite_difference"),
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    "barrier": lambda: Penalty(rule="barrier", barrier=0.5, num_steps=2, step_size=0.1),
}
FD = DIFFERENCE["identity"]


def traits_of(program: Program, name: str) -> LossTraits:
    return program._engine.traits[program._engine.numbers[name]]


def no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return 1.0 * x


def in_place(x: Tensor) -> Tensor:
    found = x.detach()
    found += 0.0
    return found


def numbers(x: Tensor) -> Tensor:
    return torch.stack([torch.as_tensor(each.detach().item(), dtype=x.dtype) for each in x])


HIDING: dict[str, Constant] = {
    "detach": lambda x: x.detach(),
    "function": torch.detach,
    "data": lambda x: x.data,
    "no_grad": no_grad,
    "in_place": in_place,
    "item": numbers,
}


def weighted_by(constant: Constant) -> Callable[..., Tensor]:
    def loss(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        losses = sample_losses(batch, model)
        return (torch.sigmoid(weigher(constant(losses)[:, None])) * losses).mean()

    return loss


def to_float32(built: Program) -> Program:
    for problem in built.problems.values():
        problem.module.float()
        problem.stream.to("cpu", torch.float32)
    return built


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("constant", HIDING)
def test_what_is_hidden_is_found_once(constant: str, dtype: torch.dtype) -> None:
    built = program(FD, lower=weighted_by(HIDING[constant]))
    if dtype is torch.float32:
        to_float32(built)
    found = r"problems.model.loss: \d\d% of a finite difference comes from .*; expected .*Write mlotool.stop_gradient"
    with pytest.warns(UserWarning, match=found) as caught:
        for _ in range(3):
            built.gradient("weigher")
    assert len(caught) == 1


@pytest.mark.parametrize("name", DIFFERENCE)
def test_every_algorithm_of_differences_looks(name: str) -> None:
    with pytest.warns(UserWarning, match=r"problems.model.loss: \d\d% of a finite difference"):
        program(DIFFERENCE[name], lower=weighted_by(HIDING["detach"])).gradient("weigher")


def test_what_is_hidden_from_the_hessian_alone() -> None:
    """The cross product agrees: only a solver that takes products with H is wrong."""

    def rescaled(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        fit = sample_losses(batch, model).mean()
        return weighted(batch, model=model, weigher=weigher) + 3 * fit.detach() * fit

    program(DIFFERENCE["identity"], lower=rescaled).gradient("weigher")
    with pytest.warns(UserWarning, match=r"problems.model.loss"):
        program(DIFFERENCE["neumann"], lower=rescaled).gradient("weigher")


class Doubled(torch.autograd.Function):
    """Its forward pass runs without gradients, and hides nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # What is detached here is no constant either.
        return 2 * x.detach()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * slopes[0]


class Once(torch.autograd.Function):
    """Has no second derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * slopes[0]


def with_metrics(batch: Batch, *, model: Any, weigher: Any) -> LossOutput:
    loss = weighted(batch, model=model, weigher=weigher)
    with torch.no_grad():
        error = sample_losses(batch, model).sqrt().mean()
    return LossOutput(loss, {"loss": loss.detach(), "error": error, "number": torch.tensor(loss.detach().item())})


def through(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def loss(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        weights = torch.sigmoid(weigher(stop_gradient(sample_losses(batch, model))[:, None]))
        return (weights * function(model(batch["input"]) - batch["target"])).mean()

    return loss


def of_another(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
    """Hides what does not depend on the lower problem."""
    return weighted({**batch, "target": batch["target"].detach() + 1}, model=model, weigher=weigher)


CORRECT: dict[str, Callable[..., Any]] = {
    "stop_gradient": weighted,
    "metrics": with_metrics,
    "function": through(Doubled.apply),
    "once": through(Once.apply),
    "checkpoint": through(lambda x: checkpoint(torch.square, x, use_reentrant=False)),
    "batch": of_another,
}


@pytest.mark.parametrize("loss", CORRECT)
@pytest.mark.parametrize(
    ("name", "dtype"), [*[(name, torch.float64) for name in DIFFERENCE], ("identity", torch.float32)], ids=str
)
def test_correct_losses_are_let_alone(name: str, loss: str, dtype: torch.dtype) -> None:
    built = program(DIFFERENCE[name], Mlp(nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2)), lower=CORRECT[loss])
    if dtype is torch.float32:
        to_float32(built)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule = Schedule(built)
        for _ in range(4):
            schedule.tick()
    assert traits_of(built, "model").has_searched_hidden_values


@pytest.mark.parametrize("constant", [stop_gradient, torch.detach], ids=["stop_gradient", "detach"])
def test_looking_changes_nothing(constant: Constant) -> None:
    """The first pullback is the one that looks; random numbers, buffers and results are those of a second one."""
    made = [
        program(FD, Mlp(nn.BatchNorm1d(5, eps=1.0), nn.Dropout(0.2)), lower=weighted_by(constant)) for _ in range(2)
    ]
    traits_of(made[1], "model").has_searched_hidden_values = True
    traits_of(made[1], "model").has_measured_radius = True
    results, states, buffers = [], [], []
    for built in made:
        built.random.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(built.gradient("weigher"))
        states.append({"state": built.random.state_dict()["cpu"]})
        buffers.append(dict(built.problems["model"].module.named_buffers()))
    assert_identical(results[0], results[1])
    assert_identical(states[0], states[1])
    assert_identical(buffers[0], buffers[1])


def test_a_loss_without_a_second_derivative_is_judged_as_well() -> None:
    def hidden(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        weights = torch.sigmoid(weigher(sample_losses(batch, model).detach()[:, None]))
        return (weights * Once.apply(model(batch["input"]) - batch["target"])).mean()

    with pytest.warns(UserWarning, match=r"problems.model.loss: \d\d% of a finite difference"):
        program(FD, lower=hidden).gradient("weigher")
