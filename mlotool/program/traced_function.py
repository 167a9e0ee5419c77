"""The function that is traced: rounds of steps, of all tensors that they take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mlotool.core.loss_output import LossOutput
from mlotool.core.replay import RandomState
from mlotool.core.tracing import Course, TraceableFunctions, tracing
from mlotool.problem.problem import Problem
from mlotool.problem.rank_mean import averaged
from mlotool.program.engine import Engine
from mlotool.program.gradient_plan import Gradient, GradientPlan
from mlotool.program.moment import Moment
from mlotool.program.step_result import StepResult, norm_of, result_of
from mlotool.program.taken_steps import TakenSteps
from mlotool.program.traced_step import TracedStep

Batches = Mapping[str, Any]
"""By problem: of the one whose gradient it is, and of those whose solutions it passes through: the batch of a pullback,
or the TakenSteps that it differentiates."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class UntraceableError(Exception):
    """Steps cannot be traced.

    Args:
        reason: why.
        problem: whose step it is; None where it is not known.
    """

    def __init__(self, reason: str, problem: str | None = None) -> None:
        super().__init__(reason)
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Traced:
    """A problem whose step is traced.

    Args:
        number: of the problem.
        problem: the problem.
        plan: of its gradient.
        with_norm: whether the gradient's norm is a result.
    """

    number: int
    problem: Problem
    plan: GradientPlan
    with_norm: bool

    @classmethod
    def of(cls, name: str, engine: Engine, plan: GradientPlan, *, with_norms: bool) -> "Traced":
        """Return what is traced of a problem.

        Args:
            name: of the problem.
            engine: of the program.
            plan: of the problem's gradient.
            with_norms: whether norms of gradients that pass through solutions are results.
        """
        number = engine.numbers[name]
        with_norm = with_norms and bool(engine.solutions[number])
        return cls(number, engine.problems[number], plan, with_norm)


class MemberGradients:
    """Takes the gradients of problems at tensors that are given.

    Args:
        engine: of the program.

    Attributes:
        problem: whose gradient is being taken.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.problem: str | None = None

    def __call__(
        self, each: Traced, parameters: Sequence[Sequence[Tensor]], batches: Sequence[Batches]
    ) -> tuple[LossOutput, Gradient]:
        """Return the loss and the gradient of one problem, before clipping: means over its batches.

        Args:
            each: the problem.
            parameters: by number of the problem, those of all problems.
            batches: those that the gradient is averaged over.

        Raises:
            UntraceableError: the losses draw random numbers.
        """
        self.problem = each.problem.name
        before = self._random()
        with TraceableFunctions():
            found = averaged(
                each.plan.live(entry[each.problem.name], self._moment(entry, parameters)) for entry in batches
            )
        if not before.equals(self._random()):
            raise UntraceableError("the losses draw random numbers")
        return found

    def _moment(self, entry: Batches, parameters: Sequence[Sequence[Tensor]]) -> Moment:
        snapshots = {}
        for name, value in entry.items():
            if isinstance(value, TakenSteps):
                number = self._engine.numbers[name]
                problem = self._engine.problems[number]
                snapshots[name] = value.snapshot(parameters[number], problem.stream, problem.devices)
        batches = {name: value for name, value in entry.items() if name not in snapshots}
        return Moment(batches, snapshots, [*parameters])

    def _random(self) -> RandomState:
        with disable_proxy_modes_tracing():
            return RandomState(tuple({device for each in self._engine.problems for device in each.devices}))


class TracedFunction:
    """A function of all parameters, the state of the optimizers, all buffers and the batches.

    Its outputs: what each of its arguments but the batches is after the steps; losses, metrics and norms; what is
    reported; and, where there are decisions, whether they are those of the course that was traced.

    Attributes:
        names: by problem, of its metrics.
        course: the decisions.
        num_moved: how many arguments may change.
    """

    def __init__(
        self,
        rounds: Sequence[Sequence[Traced]],
        stepping: Sequence[TracedStep],
        engine: Engine,
        buffered: Sequence[Problem],
        batches: Sequence[Sequence[Batches]],
        *,
        is_fused: bool,
    ) -> None:
        self._rounds, self._stepping, self._engine = rounds, stepping, engine
        self._buffered, self._batches, self._is_fused = buffered, batches, is_fused
        self._gradients = MemberGradients(engine)
        self.names: list[tuple[str, ...]] = []
        self.course = Course()
        self.num_moved = 0

    @property
    def problem(self) -> str | None:
        """Whose step is being traced."""
        return self._gradients.problem

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Take the steps; return what is described above."""
        given = iter(arguments)
        parameters = [[next(given) for _ in problem.own] for problem in self._engine.problems]
        states = [[next(given) for _ in each.tensors] for each in self._stepping]
        buffers = [[next(given) for _ in problem.slots.buffers()] for problem in self._buffered]
        placed: dict[int, Tensor] = {}
        batches = [[put_together(entry, given, placed) for entry in entries] for entries in self._batches]
        own = [problem.slots.buffers() for problem in self._buffered]
        try:
            for problem, tensors in zip(self._buffered, buffers, strict=True):
                problem.slots.put_buffers([tensor.clone() for tensor in tensors])
            with tracing() as self.course:
                results = self._stepped(parameters, states, batches)
            moved = [tensor for problem in self._buffered for tensor in problem.slots.buffers()]
        finally:
            for problem, tensors in zip(self._buffered, own, strict=True):
                problem.slots.put_buffers(tensors)
        after = [tensor for tensors in (*parameters, *states) for tensor in tensors] + moved
        self.num_moved = len(after)
        self.names = [tuple(result.metrics) for result in results]
        outputs = after + [value for result in results for value in (result.loss, *result.metrics.values())]
        outputs += [value for _, value in self.course.reports]
        if self.course.conditions:
            outputs.append(torch.stack(self.course.conditions).all())
        self._gradients.problem = None
        return [each.detach() for each in outputs]

    def _stepped(
        self, parameters: list[list[Tensor]], states: list[list[Tensor]], batches: list[list[Batches]]
    ) -> list[StepResult]:
        """Take all steps; `parameters` and `states` move."""
        results: list[StepResult] = []
        for together in self._rounds:
            begin = len(results)
            gradients: list[Gradient] = []
            for position, each in enumerate(together, begin):
                gradient, result = self._gradient(each, parameters, batches[position])
                gradients.append(gradient)
                results.append(result)
            for position, (each, gradient) in enumerate(zip(together, gradients, strict=True), begin):
                step, before = self._stepping[position], states[position]
                with torch.no_grad():
                    parameters[each.number], after = step(
                        parameters[each.number], gradient, before, is_fused=self._is_fused
                    )
                states[position][: step.num_states] = after
        return results

    def _gradient(
        self, each: Traced, parameters: Sequence[Sequence[Tensor]], batches: Sequence[Batches]
    ) -> tuple[Gradient, StepResult]:
        """Return a problem's gradient, clipped, and its results."""
        problem = each.problem
        output, gradient = self._gradients(each, parameters, batches)
        with torch.no_grad():
            hypergradient_norm = norm_of(problem, gradient) if each.with_norm else None
            clipped, norm = problem.optimizer_step.clip(gradient)
        return [*clipped], result_of(problem, output, norm, hypergradient_norm)


def kinds_of(value: Any, tensors: list[Tensor], seen: dict[int, int]) -> Any:
    """Add the tensors in nested containers to a list; return what is left: kinds, keys and other values.

    A tensor that is there already is told by its number: a trace shares what it computes of it.
    """
    if isinstance(value, Tensor):
        if id(value) in seen:
            return "again", seen[id(value)]
        seen[id(value)] = len(tensors)
        tensors.append(value)
        # A view that holds for these strides may not hold for others.
        return value.shape, _strides(value), value.dtype, value.device
    if isinstance(value, dict):
        return (dict, *[(key, kinds_of(each, tensors, seen)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), *[kinds_of(each, tensors, seen) for each in value])
    if not isinstance(value, _PLAIN):
        # It may hold tensors, which a trace would take for constants.
        raise UntraceableError(f"a batch holds a {type(value).__name__}")
    return value


def copied(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, which `clone` has not where a tensor is a part of a larger one."""
    tensor = tensor.detach()
    copy = tensor.clone()
    if _strides(copy) == _strides(tensor):
        return copy
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _strides(tensor: Tensor) -> tuple[int, ...] | None:
    return tensor.stride() if tensor.layout is torch.strided and tensor.numel() else None


def put_together(value: Any, tensors: Iterator[Tensor], placed: dict[int, Tensor]) -> Any:
    """Return the same containers with other tensors, which come in the order of `kinds_of`.

    Args:
        value: nested containers.
        tensors: the others.
        placed: by the `id` of a tensor in `value`, what took its place.
    """
    if isinstance(value, Tensor):
        if id(value) not in placed:
            placed[id(value)] = next(tensors)
        return placed[id(value)]
    if isinstance(value, dict):
        return {key: put_together(each, tensors, placed) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [put_together(each, tensors, placed) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
