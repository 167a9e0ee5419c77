"""A schedule written out by hand: which problem steps on which batch is said by the test."""

from typing import Any

from torch import Tensor

from mlotool.program import Program


class ByHand:
    """Steps the problems of a program of its own, by `Program.gradient` and their optimizers alone."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.batches: dict[str, Any] = {}

    def gradients(self, *names: str, draw: bool = True) -> dict[str, dict[str, Tensor]]:
        """Return the gradients of `names` at this moment, each on its stream's next batch."""
        for name in names:
            if draw:
                stream = self.program.problems[name].stream
                assert stream is not None
                self.batches[name] = stream.next()
        return {name: self.program.gradient(name, self.batches) for name in names}

    def apply(self, gradients: dict[str, dict[str, Tensor]]) -> None:
        """Take one optimizer step along each."""
        for name, gradient in gradients.items():
            problem = self.program.problems[name]
            assert problem.optimizer is not None
            for key, parameter in problem.module.named_parameters():
                parameter.grad = gradient[key]
            problem.optimizer.step()
            problem.optimizer.zero_grad()
            if problem.scheduler is not None:
                problem.scheduler.step()

    def step(self, *names: str, draw: bool = True) -> None:
        """Step `names` together: all gradients first."""
        self.apply(self.gradients(*names, draw=draw))
