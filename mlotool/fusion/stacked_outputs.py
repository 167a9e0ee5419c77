"""What the flat program of the gradients of all members gives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from mlotool.fusion.round_function import RoundFunction
from mlotool.problem.interface import Memory
from mlotool.program.backends import Run
from mlotool.program.gradient_plan import Gradient
from mlotool.program.prepared_step import StepResult


@dataclass(frozen=True, slots=True)
class Stacked:
    """The gradients of one problem of all members.

    Args:
        gradient: one tensor a parameter, (members, ...); None where it is unused.
        loss: (members,).
        metrics: (members,) each, by name.
    """

    gradient: list[Tensor | None]
    loss: Tensor
    metrics: dict[str, Tensor]

    def of(self, number: int) -> Gradient:
        """Return the gradient of one member."""
        return [None if each is None else each[number] for each in self.gradient]

    def gradients(self) -> Iterator[Gradient]:
        """Yield the gradient of each member."""
        rows = [[None] * len(self.loss) if each is None else each.unbind() for each in self.gradient]
        return map(list, zip(*rows, strict=True))

    def results(self) -> Iterator[StepResult]:
        """Yield the result of each member."""
        names, losses = [*self.metrics], self.loss.unbind()
        columns = [each.unbind() for each in self.metrics.values()]
        metrics = zip(*columns, strict=True) if columns else iter([()] * len(losses))
        for loss, numbers in zip(losses, metrics, strict=True):
            yield StepResult(loss, dict(zip(names, numbers, strict=True)))


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat program of all members.

    Args:
        run: runs it.
        function: what it was made of.
        memories: by problem, what the algorithms of the member keep that was traced.
        moved: the positions of the buffers that change.
        unit: the relative error of one rounding, in the lowest precision in which it computes.
        single: runs one member's gradients as its own trace would; None where it has none.
    """

    run: Run
    function: RoundFunction
    memories: Sequence[Memory]
    moved: tuple[int, ...]
    unit: float
    single: Run | None = None


class Found:
    """What one run of a flat program gives.

    Args:
        flat: the program.
        outputs: its outputs.

    Attributes:
        gradients: by problem of the round.
        holds: by member, whether its solvers decided as in the trace: only then do its numbers count. None where
            nothing is decided.
        moved: what the buffers that move become.
        reported: what solvers report.
    """

    def __init__(self, flat: Flat, outputs: list[Tensor]) -> None:
        function = flat.function
        self.flat = flat
        self.holds: list[bool] | None = outputs.pop().tolist() if function.course.conditions else None
        self.gradients: list[Stacked] = []
        values = iter(outputs)
        for used, names in zip(function.used, function.names, strict=True):
            gradient = [next(values) if is_used else None for is_used in used]
            self.gradients.append(Stacked(gradient, next(values), {name: next(values) for name in names}))
        buffers = [next(values) for _ in range(function.num_buffers)]
        self.moved = [buffers[position] for position in flat.moved]
        self.reported = list(values)
