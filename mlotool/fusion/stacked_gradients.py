"""The gradients of a round of all members as one flat program.

`make_fx` makes a flat program without autograd of one member's gradients (`RoundFunction`); `torch.vmap` of that,
traced again, is one of all members. So finite differences, solvers, tasks and several levels are stacked like anything
else.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlotool.core.private import AutoDispatchBelowAutograd, FakeTensorMode, guards
from mlotool.core.tracing import Course, tracing
from mlotool.core.user_code import is_out_of_memory
from mlotool.fusion.stack import NotFusedError, OwnValue, Stack, with_values
from mlotool.fusion.stacked_batches import StackedBatch
from mlotool.problem.interface import Memory
from mlotool.program import Schedule
from mlotool.program.backends import BACKENDS, Run, simplified
from mlotool.program.decompositions import FOREACH, HONEST_BATCH_NORMS, STACKABLE_BATCH_NORMS
from mlotool.program.gradient_plan import Gradient, StepResult, norm_of, result_of
from mlotool.program.solution_plan import Engine
from mlotool.program.trace import (
    MOST_TRACES,
    Batches,
    MemberGradients,
    Traced,
    UntraceableError,
    copied,
    kinds_of,
    put_together,
    reason_of,
    refuse_shapes_by_values,
    rounding_unit,
)

_LOGGER = logging.getLogger(__name__)

Drawings = Sequence[Sequence[dict[str, StackedBatch | None]]]
"""By problem of a round, for each batch that its gradient is averaged over, by problem: that batch, and those of the
problems whose solutions the gradient passes through."""


class RoundFunction:
    """The gradients of a round of one member, as a function of all tensors that they depend on.

    Arguments: all parameters, all buffers, the values of the member's own, the tensors of the batches. Outputs: by
    problem its gradient, loss and metrics; the buffers after it; what is reported; and, where there are decisions,
    whether they are those of the course that was traced.

    Args:
        together: the problems that step together, of the member.
        engine: of the member.
        values: those in which members differ.
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
        values: Sequence[OwnValue],
        batches: Sequence[Sequence[Batches]],
        member: int,
        known_course: Sequence[bool] | None = None,
    ) -> None:
        self._together, self._engine, self._values, self._batches = together, engine, values, batches
        self._member, self._known_course = member, known_course
        self.gradients = MemberGradients(engine)
        self.used: list[tuple[bool, ...]] = []
        self.names: list[tuple[str, ...]] = []
        self.num_buffers, self.course = 0, Course()

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return what is described above."""
        rest, problems = iter(arguments), self._engine.problems
        parameters = [[next(rest) for _ in problem.own] for problem in problems]
        buffers = [[next(rest) for _ in problem.slots.buffers()] for problem in problems]
        values, placed = [next(rest) for _ in self._values], dict[int, Tensor]()
        batches = [[put_together(entry, rest, placed) for entry in entries] for entries in self._batches]
        outputs: list[Tensor] = []
        self.used, self.names = [], []
        kept = [problem.slots.buffers() for problem in problems]
        try:
            for problem, tensors in zip(problems, buffers, strict=True):
                problem.slots.put_buffers([tensor.clone() for tensor in tensors])
            with (
                tracing(is_joint=True, known=self._known_course) as self.course,
                with_values(self._values, values, self._member),
            ):
                for traced, entries in zip(self._together, batches, strict=True):
                    output, gradient = self.gradients(traced, parameters, entries)
                    with torch.no_grad():
                        norm = norm_of(traced.problem, gradient) if traced.with_norm else None
                        result = result_of(traced.problem, output, None, norm)
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
        outputs += [*moved, *[value for _, value in self.course.reports]]
        if self.course.conditions:
            outputs.append(torch.stack(self.course.conditions).all())
        self.gradients.problem = None
        return [output.detach() for output in outputs]

    def parts(self, outputs: Sequence[Tensor]) -> tuple[list["Stacked"], list[Tensor], list[Tensor]]:
        """Return by problem the gradient, loss and metrics; the buffers; and what is reported, with any conditions."""
        values = iter(outputs)
        gradients = []
        for used, names in zip(self.used, self.names, strict=True):
            gradient = [next(values) if is_used else None for is_used in used]
            gradients.append(Stacked(gradient, next(values), {name: next(values) for name in names}))
        return gradients, [next(values) for _ in range(self.num_buffers)], list(values)


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat program of all members.

    Args:
        run: runs it.
        function: what it was made of.
        memories: by problem, what the algorithms of the member keep that was traced.
        moved: the positions of the buffers that change.
        unit: the relative error of one rounding, in the lowest precision in which it computes.
    """

    run: Run
    function: RoundFunction
    memories: Sequence[Memory]
    moved: tuple[int, ...]
    unit: float


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

    def gradients(self) -> list[Gradient]:
        """Return the gradient of each member."""
        rows = [[None] * len(self.loss) if each is None else each.unbind() for each in self.gradient]
        return [*map(list, zip(*rows, strict=True))]

    def results(self) -> list[StepResult]:
        """Return the result of each member."""
        rows = zip(self.loss.unbind(), *[each.unbind() for each in self.metrics.values()], strict=True)
        return [StepResult(loss, dict(zip(self.metrics, numbers, strict=True))) for loss, *numbers in rows]


class FlatResult:
    """What one run of a flat program gives.

    Args:
        flat: the program.
        outputs: its outputs.

    Attributes:
        gradients: by problem of the round.
        holds: by member, whether its solvers decided as in the trace: only then do its numbers count.
        moved: what the buffers that move become.
        reported: what solvers report.
    """

    def __init__(self, flat: Flat, outputs: list[Tensor]) -> None:
        function = flat.function
        self.flat = flat
        holds = outputs.pop() if function.course.conditions else None
        self.gradients, buffers, self.reported = function.parts(outputs)
        self.holds: list[bool] = [True] * len(self.gradients[0].loss) if holds is None else holds.tolist()
        self.moved = [buffers[position] for position in flat.moved]


class StackedGradients:
    """Takes the gradients of a round of all members of a stack.

    Args:
        names: of the problems that step together.
        schedules: those of the members, of which one that takes part is traced; None has left.
        stack: their tensors.
        values: those in which members differ.
        courses: by round and kind of its batches, how solvers decided when it was traced; what is traced anew repeats
            that.

    Attributes:
        at_once: how many members are taken at once: all, until they do not fit into memory.
        courses: the same, of which there is one more with each trace.
        num_traces: how many were made.
    """

    def __init__(
        self,
        names: Sequence[str],
        schedules: Sequence[Schedule | None],
        stack: Stack,
        values: Sequence[OwnValue],
        courses: dict[str, tuple[bool, ...]],
    ) -> None:
        self._names, self._schedules, self._values, self.courses = names, schedules, values, courses
        self._stack, self._prefix = stack, f"{'+'.join(names)}:"
        first = next(schedule for schedule in schedules if schedule is not None).program
        # Alone each would run along a trace from its first steps on, and not by its plans.
        is_traced = first.trace is not None and first.trace_from == 0
        self._backend = BACKENDS[first.trace or "eager" if is_traced else "eager"]
        self._modules = [module for problem in first.engine.problems for module in problem.submodules]
        self._known: dict[Any, Flat] = {}
        self.num_traces = 0
        self.at_once = self._num_members = len(schedules)

    def limit(self, at_once: int | None) -> None:
        """Take so many members at once; None is all."""
        wanted = min(at_once or self._num_members, self._num_members)
        if wanted != self.at_once:
            self.at_once = wanted
            self._known.clear()

    def __call__(self, live: Sequence[bool], batches: Drawings) -> FlatResult:
        """Return the gradients of all members; nothing moves.

        Where they do not fit into memory they are taken for half as many members at once, and so on.

        Args:
            live: which members take part.
            batches: by problem of the round, those of each batch that its gradient is averaged over.

        Raises:
            NotFusedError: they cannot be traced, or do not fit for one member at once.
        """
        key, tensors, dims = self._kinds(batches)
        fixed = self._fixed()
        arguments, in_dims = [*fixed, *tensors], [*[0] * len(fixed), *dims]
        while True:
            try:
                return self._taken(key, live, batches, arguments, in_dims)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.at_once == 1:
                    raise NotFusedError("the gradients of one member at once do not fit into memory") from error
            self.limit((self.at_once + 1) // 2)
            _LOGGER.info("Out of memory: gradients are taken for %d runs at once from now on.", self.at_once)

    def _taken(
        self,
        key: Any,
        live: Sequence[bool],
        batches: Drawings,
        arguments: Sequence[Tensor],
        in_dims: Sequence[int | None],
    ) -> FlatResult:
        flat = self._known.get(key)
        if flat is None:
            kind = f"{self._prefix}{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
            known = [other for other in self.courses if other.startswith(self._prefix)]
            if kind not in known and len(known) >= MOST_TRACES:
                raise NotFusedError(f"their batches are of over {MOST_TRACES} kinds")
            # Of those that stand at this tick: what the others hold in Python may be that of another one.
            leader, course = live.index(True), self.courses.get(kind)
            flat = self._known[key] = self._traced(leader, batches, arguments, in_dims, course)
            self.num_traces += 1
            self.courses[kind] = tuple(flat.function.course.outcomes)
        with AutoDispatchBelowAutograd():
            return FlatResult(flat, [*flat.run(*arguments)])

    def commit(self, fused: FlatResult, live: Sequence[bool]) -> None:
        """Let buffers move, and report what solvers have reported, for the live members whose numbers count."""
        counts = [is_live and holds for is_live, holds in zip(live, fused.holds, strict=True)]
        buffers = self._stack.tensors[self._stack.num_parameters :]
        places = [buffers[position] for position in fused.flat.moved]
        with torch.no_grad():
            if places and all(counts):
                torch._foreach_copy_(places, fused.moved)
            else:
                for place, value in zip(places, fused.moved, strict=True):
                    for number in compress(range(len(live)), counts):
                        place[number].copy_(value[number])
        for (who, _), values in zip(fused.flat.function.course.reports, fused.reported, strict=True):
            problem = next(place for place, memory in enumerate(fused.flat.memories) if memory is who.memory)
            for schedule, value, is_valid in zip(self._schedules, values.unbind(), counts, strict=True):
                if schedule is not None and is_valid:
                    engine = schedule.program.engine
                    who.of(engine.memories[problem], engine.traits[problem].warned_of).reported(value)

    def _fixed(self) -> list[Tensor]:
        """Return the arguments that stay where they are."""
        return [*self._stack.tensors, *[value.values for value in self._values]]

    def _kinds(self, batches: Drawings) -> tuple[Any, list[Tensor], list[int | None]]:
        """Return the kind of batches, their tensors, and where these have the axis of members."""
        kinds, tensors = list[Any](), list[Tensor]()
        dims, seen = list[int | None](), dict[int, int]()
        for entry in chain(*batches):
            for name, batch in entry.items():
                is_shared = batch is not None and batch.is_shared
                try:
                    kinds.append((name, kinds_of(None if batch is None else batch.value, tensors, seen), is_shared))
                except UntraceableError as error:
                    raise NotFusedError(str(error)) from error
                dims += [None if is_shared else 0] * (len(tensors) - len(dims))
        return (tuple(kinds), tuple([module.training for module in self._modules])), tensors, dims

    def _traced(
        self,
        leader: int,
        batches: Drawings,
        arguments: Sequence[Tensor],
        in_dims: Sequence[int | None],
        course: Sequence[bool] | None,
    ) -> Flat:
        """Return the program of arguments, of which the last are the tensors of the batches."""
        schedule = self._schedules[leader]
        assert schedule is not None
        engine, num_fixed = schedule.program.engine, len(self._fixed())
        whole = [copied(tensor) for tensor in arguments]
        member = [tensor if dim is None else tensor[0] for tensor, dim in zip(whole, in_dims, strict=True)]
        parts, placed = iter(member[num_fixed:]), dict[int, Tensor]()
        of_first = [[_of_first(entry, parts, placed) for entry in entries] for entries in batches]
        together = [schedule.traced(name) for name in self._names]
        function = RoundFunction(together, engine, self._values, of_first, leader, course)
        kept, random = [memory.value for memory in engine.memories], engine.random.state_dict()
        # The kernel of a CPU has no form for several runs.
        on_cpu = all(each.device.type == "cpu" for each in member)
        try:
            with guards.tracing(guards.TracingContext(FakeTensorMode())), engine.random:
                with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
                    first = make_fx(function, HONEST_BATCH_NORMS)(*member)
                refuse_shapes_by_values(first)
                # Nothing in place, which vmap refuses where a value of one member goes into one of all.
                pure = simplified(make_fx(functionalize(first), FOREACH | STACKABLE_BATCH_NORMS)(*member))
                chunk = self.at_once if self.at_once < self._num_members else None
                stacked = torch.vmap(pure, in_dims=tuple(in_dims), randomness="error", chunk_size=chunk)
                flat = make_fx(functionalize(stacked), {**self._backend.decompositions})(*whole)
            graph = simplified(flat)
            moved = _moved(graph, function, num_fixed - len(self._values))
            unit = rounding_unit(graph)
            run = self._backend.finish(graph, whole, num_fixed)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            begin = f"problems.{function.gradients.problem}.loss."
            numbers = [value.key for value in self._values if value.key.startswith(begin)]
            hint = f"; {', '.join(numbers)}, in which runs differ, may do arithmetic alone" if numbers else ""
            raise NotFusedError(f"{reason_of(error)}{hint}") from error
        finally:
            engine.random.load_state_dict(random)
            for memory, value in zip(engine.memories, kept, strict=True):
                memory.value = value
        return Flat(run, function, engine.memories, moved, unit)


def _moved(graph: GraphModule, function: RoundFunction, num_places: int) -> tuple[int, ...]:
    """Return which buffers are other values after the round than before it."""
    nodes = [*graph.graph.nodes]
    places = [node for node in nodes if node.op == "placeholder"][:num_places]
    outputs = nodes[-1].args[0]
    begin = sum(sum(used) + 1 + len(names) for used, names in zip(function.used, function.names, strict=True))
    own = places[num_places - function.num_buffers :]
    return tuple(position for position, place in enumerate(own) if outputs[begin + position] is not place)


def _of_first(entry: dict[str, StackedBatch | None], values: Iterator[Tensor], placed: dict[int, Tensor]) -> Batches:
    """Return the batches of the first member."""
    return {name: None if each is None else put_together(each.value, values, placed) for name, each in entry.items()}
