"""The gradients of a round of all members as one flat program.

`make_fx` makes a flat program without autograd of one member's gradients (`RoundFunction`); `torch.vmap` of that,
traced again, is one of all members. So finite differences, solvers, tasks and several levels are stacked like anything
else.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlotool.core.private import AutoDispatchBelowAutograd, guards
from mlotool.core.tracing import Course, ExamplesMode, tracing
from mlotool.core.unchanged import RACES, SAME_OPERATIONS
from mlotool.core.user_code import is_out_of_memory
from mlotool.fusion.stack import NotFusedError, OwnValue, Stack, StackedBatch, TakenSteps, with_values
from mlotool.problem.interface import Memory
from mlotool.program import Schedule, trace
from mlotool.program.agreement import Kind, Rounding, distances
from mlotool.program.backends import BACKENDS, Run, simplified
from mlotool.program.decompositions import FOREACH, HONEST_BATCH_NORMS, STACKABLE_BATCH_NORMS, without_mutations
from mlotool.program.gradient_plan import Gradient, PreparedStep, StepResult, norm_of, result_of
from mlotool.program.guard import PythonState, why_unseen
from mlotool.program.solution_plan import Engine
from mlotool.program.trace import Batches, Drawn, Traced, UntraceableError, copied, kinds_of, put_together

_LOGGER = logging.getLogger(__name__)

# By problem of a round, for each batch that its gradient is averaged over, by problem: that batch, and those of the
# problems whose solutions the gradient passes through.
Drawings = Sequence[Sequence[dict[str, StackedBatch | None]]]


# What the steps of one member have given, or its error.
Outcome = dict[str, StepResult] | Exception

# By member and problem of the round, where its stream stands; None where it has none.
Positions = dict[int, list[dict[str, int] | None]]


class RoundMembers:
    """Takes the steps of a round of single members by their own plans.

    Args:
        names: of the problems that step together.
        schedules: those of the members; None has left.
        stack: their tensors.
        values: those in which members differ.

    Attributes:
        programs: those of the members.
        schedules: by member, of those that are there.
        problems: by member those of the round, in their order.
    """

    def __init__(
        self, names: tuple[str, ...], schedules: Sequence[Schedule | None], stack: Stack, values: Sequence[OwnValue]
    ) -> None:
        self.names, self.stack, self.values = names, stack, values
        self.programs = [None if schedule is None else schedule.program for schedule in schedules]
        self.schedules = {number: schedule for number, schedule in enumerate(schedules) if schedule is not None}
        self.problems = {
            number: [schedule.program.problems[name] for name in names] for number, schedule in self.schedules.items()
        }
        self.leader = next(iter(self.schedules.values()))
        problems = self.leader.program.problems
        self._recorded = [name for name in names if problems[name].trajectory.is_kept]

    def drop(self, number: int) -> None:
        """Forget a member that has left."""
        self.schedules.pop(number, None)
        self.problems.pop(number, None)

    @contextmanager
    def unmoved(self, number: int) -> Iterator[Callable[[], None]]:
        """Put back what the plan of a member's gradient moves: buffers, random numbers, what hypergradients keep.

        Yields:
            What does so at once.
        """
        program = self.schedules[number].program
        buffers = [buffer.clone() for buffer in self.stack.buffers(number)]
        state, places = program.random.state_dict(), list[tuple[Any, str]]()
        places += [(memory, "value") for memory in program.internals.engine.memories]
        places += [(problem.trajectory, "largest_norm") for problem in program.internals.engine.problems]
        values = [getattr(holder, name) for holder, name in places]

        def restore() -> None:
            self.stack.put_buffers(number, buffers)
            program.random.load_state_dict(state)
            for (holder, name), value in zip(places, values, strict=True):
                setattr(holder, name, value)

        try:
            yield restore
        finally:
            restore()

    def planned(self, there: Sequence[int]) -> dict[int, Outcome]:
        """Take the steps of some members by their plans, which draw their batches; return what each gives."""
        outcomes: dict[int, Outcome] = {}
        for number in there:
            schedule = self.schedules[number]
            try:
                with schedule.program.random:
                    outcomes[number] = schedule.step_round(self.names)
                self.stack.changes += 1
                self.stack.refresh_member(number)
            except Exception as error:
                outcomes[number] = error
        return outcomes

    def prepared(self, number: int, batches: Drawings) -> list[PreparedStep]:
        """Return a member's steps on batches that were drawn, with their gradients; they are yet to be taken."""
        schedule = self.schedules[number]
        self.stack.changes += 1
        with schedule.program.random:
            return schedule.prepared_round(self.names, self.drawn(number, batches))

    def positions(self) -> Positions:
        """Return where the streams of all members stand."""
        return {
            number: [None if problem.stream is None else problem.stream.state_dict() for problem in problems]
            for number, problems in self.problems.items()
        }

    def go_back(self, positions: Positions, there: Sequence[int]) -> None:
        """Let the streams of some members stand where they stood before they were drawn from."""
        for number in there:
            for problem, position in zip(self.problems[number], positions[number], strict=True):
                if problem.stream is not None and position is not None:
                    problem.stream.load_state_dict(position)

    def drawn(self, number: int, batches: Drawings, *, with_steps: bool = False) -> Drawn:
        """Return the batches of one member; where asked for, with the recorded steps, which a plan finds by itself."""

        def of_member(entry: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: None if batch is None else batch.of(number)
                for name, batch in entry.items()
                if with_steps or batch is None or not isinstance(batch.value, TakenSteps)
            }

        return {name: [*map(of_member, entries)] for name, entries in zip(self.names, batches, strict=True)}

    def record(self, number: int, batches: Drawings) -> None:
        """Record a member's steps where its hypergradients want to see them."""
        program, drawn = self.schedules[number].program, self.drawn(number, batches) if self._recorded else {}
        for name in self._recorded:
            with program.random:
                states = [program.internals.recorder.state(name) for _ in drawn[name]]
                program.internals.recorder.record(name, [entry[name] for entry in drawn[name]], states)


@dataclass
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

    together: Sequence[Traced]
    engine: Engine
    values: Sequence[OwnValue]
    batches: Sequence[Sequence[Batches]]
    member: int
    known_course: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        self.gradients = trace.MemberGradients(self.engine)
        self.used: list[tuple[bool, ...]] = []
        self.names: list[tuple[str, ...]] = []
        self.num_buffers, self.course = 0, Course()

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Return what is described above."""
        rest, problems = iter(arguments), self.engine.problems
        parameters = [[next(rest) for _ in problem.own] for problem in problems]
        buffers = [[next(rest) for _ in problem.slots.buffers()] for problem in problems]
        values, placed = [next(rest) for _ in self.values], dict[int, Tensor]()
        batches = [[put_together(entry, rest, placed) for entry in entries] for entries in self.batches]
        outputs: list[Tensor] = []
        self.used, self.names = [], []
        kept = [problem.slots.buffers() for problem in problems]
        try:
            for problem, tensors in zip(problems, buffers, strict=True):
                problem.slots.put_buffers([tensor.clone() for tensor in tensors])
            with (
                tracing(is_joint=True, known=self.known_course) as self.course,
                with_values(self.values, values, self.member),
            ):
                for traced, entries in zip(self.together, batches, strict=True):
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
        gradient: one tensor per parameter, (members, ...); None where it is unused.
        loss: (members,).
        metrics: (members,) each, by name.
    """

    gradient: list[Tensor | None]
    loss: Tensor
    metrics: dict[str, Tensor]

    def of(self, number: int) -> Gradient:
        """Return the gradient of one member."""
        return [None if slope is None else slope[number] for slope in self.gradient]

    def gradients(self) -> list[Gradient]:
        """Return the gradient of each member."""
        rows = [[None] * len(self.loss) if slope is None else slope.unbind() for slope in self.gradient]
        return [*map(list, zip(*rows, strict=True))]

    def results(self) -> list[StepResult]:
        """Return the result of each member."""
        rows = zip(self.loss.unbind(), *[metric.unbind() for metric in self.metrics.values()], strict=True)
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
        members: of the round, of which one that takes part is traced.
        courses: by round and kind of its batches, how solvers decided when it was traced; what is traced anew repeats
            that.

    Attributes:
        at_once: how many members are taken at once: all, until they do not fit into memory.
        courses: the same, of which there is one more with each trace.
        num_traces: how many were made.
    """

    def __init__(self, members: RoundMembers, courses: dict[str, tuple[bool, ...]]) -> None:
        self._members, self._stack, self._values, self.courses = members, members.stack, members.values, courses
        self._prefix, first = f"{'+'.join(members.names)}:", members.leader.program
        # Alone each would run along a trace from its first steps on, and not by its plans.
        tracing = first.internals.tracing
        is_traced = tracing.backend is not None and tracing.begins_at == 0
        self._backend = BACKENDS[tracing.backend or "eager" if is_traced else "eager"]
        self._modules = [module for problem in first.internals.engine.problems for module in problem.submodules]
        self._known: dict[Any, Flat] = {}
        self.num_traces = 0
        self.at_once = self._num_members = len(members.programs)

    def limit(self, at_once: int | None) -> None:
        """Take so many members at once; None is all."""
        wanted = min(at_once or self._num_members, self._num_members)
        if wanted != self.at_once:
            self.at_once = wanted
            self._known.clear()

    def __call__(self, there: Sequence[int], batches: Drawings) -> FlatResult:
        """Return the gradients of all members; nothing moves.

        Where they do not fit into memory they are taken for half as many members at once, and so on.

        Args:
            there: the members that take part.
            batches: by problem of the round, those of each batch that its gradient is averaged over.

        Raises:
            NotFusedError: they cannot be traced, or do not fit for one member at once.
        """
        key, tensors, dims = self._kinds(batches)
        fixed = self._fixed()
        arguments, in_dims = [*fixed, *tensors], [*[0] * len(fixed), *dims]
        while True:
            try:
                return self._taken(key, there[0], batches, arguments, in_dims)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.at_once == 1:
                    raise NotFusedError("the gradients of one member at once do not fit into memory") from error
            self.limit((self.at_once + 1) // 2)
            _LOGGER.info("Out of memory: gradients are taken for %d runs at once from now on.", self.at_once)

    def _taken(
        self, key: Any, leader: int, batches: Drawings, arguments: Sequence[Tensor], in_dims: Sequence[int | None]
    ) -> FlatResult:
        flat = self._known.get(key)
        if flat is None:
            kind = f"{self._prefix}{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
            known = [other for other in self.courses if other.startswith(self._prefix)]
            if kind not in known and len(known) >= trace.MOST_TRACES:
                raise NotFusedError(f"their batches are of over {trace.MOST_TRACES} kinds")
            # The leader stands at this tick: what others hold in Python may be that of another one.
            course = self.courses.get(kind)
            flat = self._known[key] = self._traced(leader, batches, arguments, in_dims, course)
            self.num_traces += 1
            self.courses[kind] = tuple(flat.function.course.outcomes)
        with AutoDispatchBelowAutograd():
            return FlatResult(flat, [*flat.run(*arguments)])

    def commit(self, fused: FlatResult, there: Sequence[int]) -> None:
        """Let buffers move, and report what solvers have reported, for members whose numbers count."""
        buffers = self._stack.tensors[self._stack.num_parameters :]
        places = [buffers[position] for position in fused.flat.moved]
        with torch.no_grad():
            if places and len(there) == self._num_members:
                torch._foreach_copy_(places, fused.moved)
            else:
                for place, value in zip(places, fused.moved, strict=True):
                    for number in there:
                        place[number].copy_(value[number])
        for (who, _), values in zip(fused.flat.function.course.reports, fused.reported, strict=True):
            problem = next(place for place, memory in enumerate(fused.flat.memories) if memory is who.memory)
            for number in there:
                engine = self._members.schedules[number].program.internals.engine
                who.of(engine.memories[problem], engine.traits[problem].warned_of).reported(values[number])

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
        schedule = self._members.schedules[leader]
        engine, num_fixed = schedule.program.internals.engine, len(self._fixed())
        whole = [copied(tensor) for tensor in arguments]
        member = [tensor if dim is None else tensor[0] for tensor, dim in zip(whole, in_dims, strict=True)]
        parts, placed = iter(member[num_fixed:]), dict[int, Tensor]()
        of_first = [[_of_first(entry, parts, placed) for entry in entries] for entries in batches]
        together = [schedule.traced(name) for name in self._members.names]
        function = RoundFunction(together, engine, self._values, of_first, leader, course)
        kept, random = [memory.value for memory in engine.memories], engine.random.state_dict()
        # The kernel of a CPU has no form for several runs.
        on_cpu = all(tensor.device.type == "cpu" for tensor in member)
        try:
            with guards.tracing(guards.TracingContext(ExamplesMode())), engine.random:
                with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
                    first = make_fx(function, HONEST_BATCH_NORMS | FOREACH)(*member)
                trace.refuse_shapes_by_values(first)
                # Nothing in place, which vmap refuses where a value of one member goes into one of all.
                pure = simplified(without_mutations(first, member, FOREACH | STACKABLE_BATCH_NORMS))
                chunk = self.at_once if self.at_once < self._num_members else None
                stacked = torch.vmap(pure, in_dims=tuple(in_dims), randomness="error", chunk_size=chunk)
                flat = make_fx(functionalize(stacked), {**self._backend.decompositions})(*whole)
            graph = simplified(flat)
            moved = _moved(graph, function, num_fixed - len(self._values))
            unit = trace.rounding_unit(graph)
            run = self._backend.finish(graph, whole, num_fixed)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            begin = f"problems.{function.gradients.problem}.loss."
            numbers = [value.key for value in self._values if value.key.startswith(begin)]
            hint = f"; {', '.join(numbers)}, in which runs differ, may be used in arithmetic only" if numbers else ""
            raise NotFusedError(f"{trace.reason_of(error)}{hint}") from error
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
    return {name: None if batch is None else put_together(batch.value, values, placed) for name, batch in entry.items()}


# Times that each way is measured; the shortest counts.
REPEATS = 3

Tick = Annotated[int, Ge(0), Lt(2**53)]
Seconds = Annotated[float, Ge(0), Lt(float("inf"))]


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients of a round are taken as one program.

    Args:
        is_fused: whether they are.
        fused_s: seconds of a round of all members, their gradients as one program; None where that was not measured.
        alone_s: seconds of it with their gradients one by one.
        reason: why they are taken one by one; "" where they are not.
        at_once: how many members' gradients one program takes, where those of all did not fit into memory.
        since_tick: how many ticks had been taken when it was decided.
        before: what held until then; None where nothing was known.
    """

    is_fused: bool
    fused_s: Seconds | None = None
    alone_s: Seconds | None = None
    reason: str = ""
    at_once: Annotated[int, Ge(1), Lt(2**53)] | None = None
    since_tick: Tick = 0
    before: "Verdict | None" = None

    def at(self, tick: int) -> "Verdict":
        """Return what holds after so many ticks: runs that go on from an older checkpoint take those anew."""
        verdict = self
        while verdict.before is not None and tick < verdict.since_tick:
            verdict = verdict.before
        return verdict

    def changed(self, tick: int, **changes: Any) -> "Verdict":
        """Return what holds from a tick on, in the place of what held then; what was decided for later ones is dropped.

        Args:
            tick: how many ticks have been taken.
            changes: the fields that are others.
        """
        held = self.at(tick)
        return replace(held, **changes, since_tick=tick, before=held)


# By problem its gradient, None for a parameter that has none, and its buffers.
Ends = Mapping[Kind, Sequence[Tensor | None]]

# A problem, and how far apart its gradients or buffers are, relative to the first ones.
Difference = tuple[str, float]

_GRADIENT, _BUFFERS = "gradient", "buffers"


class GradientComparison:
    """Compares the gradients of a round as one program with those by the members' own plans.

    Args:
        members: of the round.
        gradients: takes them as one program.
    """

    def __init__(self, members: RoundMembers, gradients: StackedGradients) -> None:
        self._members, self._gradients = members, gradients
        self._stack, self._alike = members.stack, set[int]()
        self._rounding = Rounding()

    def check_pure(self, first: int, batches: Drawings) -> None:
        """Raise a NotFusedError if evaluating the losses of a member changes something in Python."""
        problems = self._members.schedules[first].program.internals.engine.problems
        if reason := why_unseen(problems):
            raise NotFusedError(reason)
        state = PythonState(problems)
        try:
            with self._members.unmoved(first):
                self._members.prepared(first, batches)
                if change := state.change():
                    raise NotFusedError(change)
        finally:
            state.restore()

    def check_alike(self, there: Sequence[int], batches: Drawings) -> None:
        """Raise a NotFusedError unless members compute one function; those that were looked at are not again.

        What they do not share is then no tensor: an attribute of a module, what an object that is a loss holds. Both
        are computed alike, so that any difference is one.
        """
        leader, like = there[0], self._stack.tensors[0]
        limit = (RACES if like.is_cuda else SAME_OPERATIONS).of(like.dtype)
        for number in [number for number in there if number not in {leader, *self._alike}]:
            with ExitStack() as unmoved:
                for member in (number, leader):
                    unmoved.enter_context(self._members.unmoved(member))
                try:
                    drawn = self._members.drawn(number, batches, with_steps=True)
                    ends, others = (self._ends_at(number, drawn, by) for by in (number, leader))
                except UntraceableError as error:
                    raise NotFusedError(str(error)) from error
                except Exception:
                    # A member's own: its plan raises it as well.
                    continue
            for (problem, _), difference in _distances(ends, others, {}, 0.0).items():
                if not difference <= limit:
                    raise NotFusedError(
                        f"the gradient of problems.{problem} is another function in other runs (relative difference "
                        f"{difference:.1e}): a loss or a module has a value, not a tensor, that differs or changes"
                    )
            self._alike.add(number)

    def __call__(self, there: Sequence[int], batches: Drawings, fused: FlatResult) -> Verdict:
        """Take the gradients in both ways, and decide; nothing moves.

        Args:
            there: the members that take part; the plans of all of them work.
            batches: theirs.
            fused: their gradients as one program.
        """
        fused_s, _ = _fastest(lambda: self._gradients(there, batches), lambda: None)
        with self._members.unmoved(there[0]) as restore:
            alone_s = len(there) * _fastest(lambda: self._members.prepared(there[0], batches), restore)[0]
        differences = (self.difference(number, batches, fused) for number in there)
        reason = "one program for all of these runs takes longer" if fused_s > alone_s else ""
        for problem, difference in filter(None, differences):
            reason = (
                f"the gradient of problems.{problem} in fused runs differs by {difference:.1e} (relative) from that of "
                "a run alone"
            )
            break
        at_once = self._gradients.at_once if self._gradients.at_once < len(there) else None
        return Verdict(not reason, fused_s, alone_s, reason, at_once)

    def difference(self, number: int, batches: Drawings, fused: FlatResult) -> Difference | None:
        """Return how a member's gradients or buffers differ from those of its plan but for rounding; nothing moves."""
        if not fused.holds[number]:
            return None
        rows = [parameter[number] for parameter in self._stack.tensors[: self._stack.num_parameters]]
        parameters, buffers = ([tensor.clone() for tensor in x] for x in (rows, self._stack.buffers(number)))
        before, unit = self._by_problem(number, buffers), fused.flat.unit
        for position, value in zip(fused.flat.moved, fused.moved, strict=True):
            buffers[position] = value[number]
        gradients = zip(self._members.names, fused.gradients, strict=True)
        ends = self._by_problem(number, buffers) | {(name, _GRADIENT): slopes.of(number) for name, slopes in gradients}
        with self._members.unmoved(number) as restore:

            def planned(values: Sequence[Tensor]) -> Ends:
                torch._foreach_copy_(rows, [*values])
                restore()
                steps = self._members.prepared(number, batches)
                buffers_now = [buffer.clone() for buffer in self._stack.buffers(number)]
                return self._by_problem(number, buffers_now) | {
                    (step.problem.name, _GRADIENT): step.gradient for step in steps
                }

            try:
                apart = _distances(planned(parameters), ends, before, unit)
                if wrong := self._rounding.beyond(apart, unit):
                    self._rounding.measure(lambda values: _tensors(planned(values)), parameters, before, unit)
                    wrong = self._rounding.beyond(wrong, unit)
            finally:
                torch._foreach_copy_(rows, parameters)
        return next(((problem, distance) for (problem, _), distance in wrong.items()), None)

    def _by_problem(self, number: int, buffers: Sequence[Tensor]) -> dict[Kind, Any]:
        values, rest = dict[Kind, Any](), iter(buffers)
        for problem in self._members.schedules[number].program.internals.engine.problems:
            if problem.slots.has_buffers:
                values[problem.name, _BUFFERS] = [next(rest) for _ in problem.slots.buffers()]
        return values

    def _ends_at(self, number: int, drawn: Drawn, by: int) -> Ends:
        """Return the gradients at a member's tensors and batches, as another member computes them.

        Raises:
            UntraceableError: they cannot be taken as functions of tensors.
        """
        schedule = self._members.schedules[by]
        batches, tensors, seen = [*drawn.values()], list[Tensor](), dict[int, int]()
        for entry in chain(*batches):
            kinds_of(entry, tensors, seen)
        rows = [tensor[number] for tensor in (*self._stack.tensors, *[value.values for value in self._members.values])]
        together = [schedule.traced(name) for name in drawn]
        function = RoundFunction(together, schedule.program.internals.engine, self._members.values, batches, by)
        with schedule.program.random:
            outputs = function(*rows, *map(copied, tensors))
        return {(name, _GRADIENT): part.gradient for name, part in zip(drawn, function.parts(outputs)[0], strict=True)}


def _distances(expected: Ends, actual: Ends, before: Ends, unit: float) -> dict[Kind, float]:
    """Return how far ends are apart, as `distances` does; infinite where other parameters have a gradient.

    A gradient that is not finite is no difference: the other one is not, either.
    """
    other_use = [kind for kind in expected if [x is None for x in expected[kind]] != [x is None for x in actual[kind]]]
    kept = {
        kind: values
        for kind, values in _tensors(expected).items()
        if kind not in other_use and (kind[1] == _BUFFERS or all(value.isfinite().all() for value in values))
    }
    return distances(kept, _tensors(actual), _tensors(before), unit) | dict.fromkeys(other_use, float("inf"))


def _tensors(ends: Ends) -> dict[Kind, list[Tensor]]:
    return {kind: [value.detach() for value in values if value is not None] for kind, values in ends.items()}


def _fastest(take: Callable[[], Any], before: Callable[[], None]) -> tuple[float, Any]:
    """Return the seconds of the fastest of several times, and what the last one has given."""
    best = float("inf")
    for _ in range(REPEATS):
        before()
        began = _now()
        result = take()
        best = min(best, _now() - began)
    return best, result


def _now() -> float:
    """Return the time in seconds: that of this process where it computes in one thread, so that others do not count."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.get_num_threads() == 1:
        return time.process_time()
    return time.perf_counter()
