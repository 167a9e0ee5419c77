"""An optimizer step with its gradient, before it is taken."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import Call, is_of_user, note, passed_through
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Evaluate, Problem


@dataclass(slots=True)
class StepResult:
    """What one step of a problem yields to log.

    Args:
        loss: 0-D, detached; the mean over accumulated batches, and over tasks.
        metrics: 0-D tensors by name, detached; `gradient_norm` where the gradient is clipped, before it is;
            `hypergradient_norm`, of the total gradient, before clipping too, where it passes through solutions and the
            schedule is asked for it.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


def norm_of(problem: Problem, gradient: Sequence[Tensor | None]) -> Tensor | None:
    """Return the norm of a gradient, of which nothing is read from the device; None of an overflow in fp16."""
    tensors = [tensor for tensor in gradient if tensor is not None]
    if not tensors:
        return None
    norms = torch._foreach_norm(tensors)
    norm = torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]
    norm = norm.detach()
    return norm if problem.optimizer_step.loss_scale is None or math.isfinite(norm) else None


def result_of(
    problem: Problem, output: LossOutput, norm: Tensor | None, hypergradient_norm: Tensor | None = None
) -> StepResult:
    """Return the result of a step.

    Args:
        problem: that has stepped.
        output: its loss.
        norm: of its gradient before clipping; None where it is not clipped.
        hypergradient_norm: of its total gradient; None where it passes through no solution.
    """
    metrics = {name: value.detach() for name, value in output.metrics.items()}
    if norm is not None:
        metrics["gradient_norm"] = norm.detach()
    if hypergradient_norm is not None:
        metrics["hypergradient_norm"] = hypergradient_norm
    loss = output.loss.detach()
    return StepResult(loss if problem.settings.tasks is None else loss / problem.settings.tasks, metrics)


@dataclass(slots=True)
class PreparedStep:
    """An optimizer step that is yet to be taken.

    Args:
        problem: that steps.
        output: its loss.
        gradient: one tensor a parameter; None where it is unused.
        hyperparameters: those of each parameter, where another problem gives some of them.
        evaluate: for an optimizer that evaluates the loss itself.
        with_norm: whether the norm of the gradient is to be reported.
    """

    problem: Problem
    output: LossOutput
    gradient: list[Tensor | None]
    hyperparameters: tuple[Hyperparameters, ...] | None
    evaluate: Evaluate | None
    with_norm: bool = False

    def take(self) -> StepResult:
        """Take it."""
        hypergradient_norm = norm_of(self.problem, self.gradient) if self.with_norm else None
        norm = stepped(self.problem, self.gradient, self.hyperparameters, self.evaluate)
        try:
            return result_of(self.problem, self.output, norm, hypergradient_norm)
        except Exception as error:
            note(error, lambda: Call(f"problems.{self.problem.name}.loss", self.problem.loss))
            raise


def stepped(
    problem: Problem,
    gradient: list[Tensor | None],
    hyperparameters: Sequence[Hyperparameters] | None = None,
    evaluate: Evaluate | None = None,
) -> Tensor | None:
    """Take an optimizer step; return the gradient's norm before clipping, if it is clipped.

    Args:
        problem: that steps.
        gradient: one tensor a parameter; None where it is unused.
        hyperparameters: those of each parameter, where another problem gives some of them.
        evaluate: for an optimizer that evaluates the loss itself.
    """
    try:
        return problem.step(gradient, hyperparameters, evaluate)
    except Exception as error:
        # torch's optimizers refuse gradients and rates that code of the user's has made.
        is_sparse = any(each is not None and each.is_sparse for each in gradient)
        is_foreign = is_sparse or passed_through(error, "/torch/optim/") or is_of_user(problem.optimizer)
        note(error, lambda: Call(f"problems.{problem.name}", "its step", is_foreign=is_foreign))
        raise
