"""The gradients of a round of one member as a function of tensors: what is traced and stacked."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from mlotool.core.tracing import Course, tracing
from mlotool.fusion.stack import OwnValue, given
from mlotool.program.prepared_step import norm_of, result_of
from mlotool.program.solution_plan import Engine
from mlotool.program.traced_function import Batches, MemberGradients, Traced, UntraceableError, put_together


class RoundFunction:
    """The gradients of a round of one member, as a function of all tensors that they depend on.

    Arguments: all parameters, all buffers, the values of the member's own, the tensors of the batches. Outputs: by
    problem its gradient, loss and metrics; the buffers after it; what is reported; and, where there are decisions,
    whether they are those of the course that was traced.

    Args:
        together: the problems that step together, of the member.
        engine: of the member.
        own: values in which members differ.
        batches: by problem of the round, those of each batch that its gradient is averaged over.
        member: its number.
        known_course: how its solvers are to decide, where an earlier trace is repeated.

    Attributes:
        gradients: takes them.
        used: by problem, which of its parameters have a gradient.
        names: by problem, of its metrics.
        num_buffers: how many there are.
        course: the decisions.
    """

    def __init__(
        self,
        together: Sequence[Traced],
        engine: Engine,
        own: Sequence[OwnValue],
        batches: Sequence[Sequence[Batches]],
        member: int,
        known_course: Sequence[bool] | None = None,
    ) -> None:
        self._known_course = known_course
        self._together, self._engine, self._own, self._batches = together, engine, own, batches
        self._member = member
        self.gradients = MemberGradients(engine)
        self.used: list[tuple[bool, ...]] = []
        self.names: list[tuple[str, ...]] = []
        self.num_buffers = 0
        self.course = Course()

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return what is described above."""
        values = iter(arguments)
        problems = self._engine.problems
        parameters = [[next(values) for _ in problem.own] for problem in problems]
        buffers = [[next(values) for _ in problem.slots.buffers()] for problem in problems]
        own = [next(values) for _ in self._own]
        placed: dict[int, Tensor] = {}
        batches = [[put_together(entry, values, placed) for entry in entries] for entries in self._batches]
        outputs: list[Tensor] = []
        self.used, self.names = [], []
        kept = [problem.slots.buffers() for problem in problems]
        try:
            for problem, tensors in zip(problems, buffers, strict=True):
                problem.slots.put_buffers([tensor.clone() for tensor in tensors])
            with tracing(is_joint=True, known=self._known_course) as self.course, given(self._own, own, self._member):
                for each, entries in zip(self._together, batches, strict=True):
                    output, gradient = self.gradients(each, parameters, entries)
                    with torch.no_grad():
                        norm = norm_of(each.problem, gradient) if each.with_norm else None
                        result = result_of(each.problem, output, None, norm)
                    outputs += [value for value in gradient if value is not None]
                    outputs += [result.loss, *result.metrics.values()]
                    self.used.append(tuple(value is not None for value in gradient))
                    self.names.append(tuple(result.metrics))
            moved = [tensor for problem in problems for tensor in problem.slots.buffers()]
        finally:
            for problem, tensors in zip(problems, kept, strict=True):
                problem.slots.put_buffers(tensors)
        if any(before.shape != after.shape for before, after in zip(chain(*kept), moved, strict=True)):
            raise UntraceableError("a buffer of a module changes its shape")
        self.num_buffers = len(moved)
        outputs += moved
        outputs += [value for _, value in self.course.reports]
        if self.course.conditions:
            outputs.append(torch.stack(self.course.conditions).all())
        self.gradients.problem = None
        return [each.detach() for each in outputs]
