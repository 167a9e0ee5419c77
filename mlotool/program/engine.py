"""The problems of a program by number, with the plans of their losses and solutions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import LossTraits
from mlotool.problem.interface import Memory
from mlotool.problem.problem import Problem
from mlotool.problem.rank_mean import RankMean, Reduce
from mlotool.program.loss_plan import LossPlan, Values

if TYPE_CHECKING:
    from mlotool.program.loss_plan import Moment
    from mlotool.program.solution_plan import SolutionPlan


class Engine:
    """What all plans of a program share.

    Args:
        problems: in order; a problem's position is its number.
        reduce: a mean over ranks of a list of tensors; None in one process.
        memories: by number, what the problem's algorithm keeps.
        random: the program's random numbers.

    Attributes:
        losses: by number, the problem's loss.
        solutions: by number, the solutions that the problem's total gradient passes through, each after its inputs.
        traits: by number, what was found out about the problem's loss.
        traced_from: by number, the step from which on a schedule traces the problem's steps; none for the others.
    """

    def __init__(
        self, problems: Sequence[Problem], reduce: Reduce | None, memories: Sequence[Memory], random: RandomStream
    ) -> None:
        self.problems = list(problems)
        self.rank_mean = RankMean() if reduce is None else RankMean(reduce)
        self.memories = list(memories)
        self.random = random
        self.numbers = {problem.name: number for number, problem in enumerate(self.problems)}
        self.losses = [LossPlan(number, self.problems) for number in range(len(self.problems))]
        self.traits = [LossTraits() for _ in self.problems]
        self.solutions: list[list[SolutionPlan]] = [[] for _ in self.problems]
        self.traced_from: dict[int, int] = {}

    def is_traced(self, number: int) -> bool:
        """Return whether the next steps of a problem run as a trace."""
        begin = self.traced_from.get(number)
        return begin is not None and self.problems[number].num_steps >= begin

    def nothing(self) -> Values:
        """Return values of which every problem has its current ones, as constants."""
        return [None] * len(self.problems)

    def own(self, number: int) -> Values:
        """Return values in which one problem has its parameters themselves."""
        values = self.nothing()
        values[number] = self.problems[number].own
        return values

    def loss_with(
        self, loss: LossPlan, solutions: Sequence["SolutionPlan"], values: Values, batch: Any, moment: "Moment"
    ) -> Tensor:
        """Return a loss with solutions inside it.

        Args:
            loss: the loss.
            solutions: to be put into `values`, each after its inputs.
            values: tensors by problem.
            batch: of the loss.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
        """

        def direct(given: Values) -> Tensor:
            return loss(given, batch).loss

        for each in solutions:
            each.add(values, moment, direct)
        return loss(values, batch).loss
