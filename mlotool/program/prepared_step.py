"""An optimizer step with its gradient, before it is taken."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mlotool.core.loss_output import LossOutput
from mlotool.core.user_code import Call, is_of_user, note, passed_through
from mlotool.problem.optimizers.rule import Hyperparameters
from mlotool.problem.problem import Evaluate, Problem
from mlotool.program.step_result import StepResult, norm_of, result_of


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
