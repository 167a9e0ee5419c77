"""The gradients of a round of all members as one flat program.

`make_fx` makes a flat program without autograd of one member's gradients (`RoundFunction`); `torch.vmap` of that,
traced again, is one of all members. So finite differences, solvers, tasks and several levels are stacked like anything
else.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch import _guards as guards
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlotool.core.user_code import is_out_of_memory
from mlotool.fusion.errors import NotFusedError
from mlotool.fusion.feed import JointBatch
from mlotool.fusion.own_values import OwnValue
from mlotool.fusion.round_function import RoundFunction
from mlotool.fusion.stack import Stack
from mlotool.fusion.stacked_outputs import Flat, Found
from mlotool.program import Schedule
from mlotool.program.backends import BACKENDS, Run
from mlotool.program.decompositions import FOREACH, HONEST_BATCH_NORMS, STACKABLE_BATCH_NORMS
from mlotool.program.flat_graph import simplified
from mlotool.program.trace import MOST_TRACES, reason_of, refuse_shapes_by_values, rounding_unit
from mlotool.program.traced_function import (
    Batches,
    UntraceableError,
    copied,
    kinds_of,
    put_together,
)
from mlotool.program.traced_rounds import why_untraceable

_LOGGER = logging.getLogger(__name__)

JointBatches = dict[str, JointBatch | None]
"""By problem: of the one whose gradient it is, and of those whose solutions it passes through."""


class StackedGradients:
    """Takes the gradients of a round of all members of a stack.

    Args:
        names: of the problems that step together.
        schedules: those of the members, of which one that takes part is traced; None has left.
        stack: their tensors.
        own: values in which members differ.
        courses: by kind of the batches, how solvers decided when it was traced; what is traced anew repeats that.

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
        own: Sequence[OwnValue],
        courses: dict[str, tuple[bool, ...]],
    ) -> None:
        self._names, self._schedules = names, schedules
        self._stack, self._own = stack, own
        first = next(each for each in schedules if each is not None).program
        # Alone each would run along a trace from its first steps on, and not by its plans.
        is_traced = first.trace is not None and first.trace_from == 0
        self._backend = BACKENDS[first.trace or "eager" if is_traced else "eager"]
        # But what passes through recorded steps is not traced alone.
        self._has_traces = is_traced and not any(
            why_untraceable(first.engine.numbers[name], first.engine) for name in names
        )
        self.courses = courses
        self._modules = [module for problem in first.engine.problems for module in problem.submodules]
        self._known: dict[Any, Flat] = {}
        self.num_traces = 0
        self._num_members = len(schedules)
        self.at_once = self._num_members

    def limit(self, at_once: int | None) -> None:
        """Take so many members at once; None is all."""
        wanted = self._num_members if at_once is None else min(at_once, self._num_members)
        if wanted != self.at_once:
            self.at_once = wanted
            self._known.clear()

    def __call__(self, live: Sequence[bool], batches: Sequence[Sequence[JointBatches]]) -> Found:
        """Return the gradients of all members; nothing moves.

        Where they do not fit into memory they are taken for half as many members at once, and so on.

        Args:
            live: which members take part.
            batches: by problem of the round, those of each batch that its gradient is averaged over.

        Raises:
            NotFusedError: they cannot be traced, or do not fit for one member at once.
        """
        tensors: list[Tensor] = []
        dims: list[int | None] = []
        key = self._kinds(batches, tensors, dims)
        arguments = [*self._stack.tensors, *[each.values for each in self._own], *tensors]
        while True:
            try:
                return self._taken(key, live, batches, arguments, dims)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                if self.at_once == 1:
                    raise NotFusedError("the gradients of one member at once do not fit into memory") from error
            self.at_once = (self.at_once + 1) // 2
            self._known.clear()
            _LOGGER.info("Out of memory: gradients are taken for %d runs at once from now on.", self.at_once)

    def _taken(
        self,
        key: Any,
        live: Sequence[bool],
        batches: Sequence[Sequence[JointBatches]],
        arguments: Sequence[Tensor],
        dims: Sequence[int | None],
    ) -> Found:
        flat = self._known.get(key)
        in_dims = [*[0] * (len(arguments) - len(dims)), *dims]
        if flat is None:
            kind = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            if kind not in self.courses and len(self.courses) >= MOST_TRACES:
                raise NotFusedError(f"their batches are of over {MOST_TRACES} kinds")
            # Of those that stand at this tick: what the others hold in Python may be that of another one.
            leader, part = live.index(True), _part(arguments, in_dims, 0, self.at_once)
            flat = self._known[key] = self._traced(leader, batches, part, in_dims, len(dims), self.courses.get(kind))
            self.num_traces += 1
            self.courses[kind] = tuple(flat.function.course.outcomes)
        with torch._C._AutoDispatchBelowAutograd():
            if self.at_once == self._num_members:
                return Found(flat, [*flat.run(*arguments)])
            parts: list[list[Tensor]] = []
            for begin in range(0, self._num_members, self.at_once):
                # The last part begins earlier where it would be too short.
                start = min(begin, self._num_members - self.at_once)
                outputs = flat.run(*_part(arguments, in_dims, start, self.at_once))
                parts.append([each[begin - start :] for each in outputs])
            return Found(flat, [torch.cat(each) for each in zip(*parts, strict=True)])

    def single(self, batches: Sequence[Sequence[JointBatches]]) -> Callable[[], Any] | None:
        """Return what takes one member's gradients as its own trace would; None where it has no trace.

        Args:
            batches: those for which the gradients of all were taken before.
        """
        tensors: list[Tensor] = []
        dims: list[int | None] = []
        flat = self._known[self._kinds(batches, tensors, dims)]
        if flat.single is None:
            return None
        fixed = [*self._stack.tensors, *[each.values for each in self._own]]
        arguments = [each[0] for each in fixed]
        arguments += [each if dim is None else each[0] for each, dim in zip(tensors, dims, strict=True)]
        run = flat.single

        def take() -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return run(*arguments)

        return take

    def commit(self, found: Found, live: Sequence[bool]) -> None:
        """Let buffers move, and report what solvers have reported, for the members whose numbers count.

        Args:
            found: of the gradients.
            live: which members take part.
        """
        counts = [is_live and (found.holds is None or found.holds[number]) for number, is_live in enumerate(live)]
        own = self._stack.tensors[self._stack.num_parameters :]
        places = [own[position] for position in found.flat.moved]
        with torch.no_grad():
            if places and all(counts):
                torch._foreach_copy_(places, found.moved)
            else:
                for place, value in zip(places, found.moved, strict=True):
                    for number in compress(range(len(live)), counts):
                        place[number].copy_(value[number])
        for (who, _), values in zip(found.flat.function.course.reports, found.reported, strict=True):
            problem = next(place for place, memory in enumerate(found.flat.memories) if memory is who.memory)
            for schedule, value, is_valid in zip(self._schedules, values.unbind(), counts, strict=True):
                if schedule is not None and is_valid:
                    engine = schedule.program.engine
                    who.of(engine.memories[problem], engine.traits[problem].warned_of).reported(value)

    def _kinds(self, batches: Sequence[Sequence[JointBatches]], tensors: list[Tensor], dims: list[int | None]) -> Any:
        found, seen = [], dict[int, int]()
        for entries in batches:
            for entry in entries:
                for name, batch in entry.items():
                    value = None if batch is None else batch.value
                    try:
                        found.append((name, kinds_of(value, tensors, seen), batch is not None and batch.is_shared))
                    except UntraceableError as error:
                        raise NotFusedError(str(error)) from error
                    dims += [None if batch is None or batch.is_shared else 0] * (len(tensors) - len(dims))
        return tuple(found), tuple([module.training for module in self._modules])

    def _traced(
        self,
        leader: int,
        batches: Sequence[Sequence[JointBatches]],
        arguments: Sequence[Tensor],
        in_dims: Sequence[int | None],
        num_tensors: int,
        course: Sequence[bool] | None,
    ) -> Flat:
        """Return the program of arguments, of which the last so many are the tensors of the batches."""
        schedule = self._schedules[leader]
        assert schedule is not None
        engine = schedule.program.engine
        num_fixed = len(arguments) - num_tensors
        whole = [copied(tensor) for tensor in arguments]
        member = [tensor if dim is None else tensor[0] for tensor, dim in zip(whole, in_dims, strict=True)]
        parts, placed = iter(member[num_fixed:]), dict[int, Tensor]()
        of_first = [[_of_first(entry, parts, placed) for entry in entries] for entries in batches]
        together = [schedule.traced(name) for name in self._names]
        function = RoundFunction(together, engine, self._own, of_first, leader, course)
        kept, random = [memory.value for memory in engine.memories], engine.random.state_dict()
        try:
            with guards.tracing(guards.TracingContext(FakeTensorMode())), engine.random:
                # The kernel of a CPU has no form for several runs.
                on_cpu = all(each.device.type == "cpu" for each in member)
                with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
                    first = make_fx(function, HONEST_BATCH_NORMS)(*member)
                refuse_shapes_by_values(first)
                # Nothing in place, which vmap refuses where a value of one member goes into one of all.
                pure = simplified(make_fx(functionalize(first), FOREACH | STACKABLE_BATCH_NORMS)(*member))
                stacked = torch.vmap(pure, in_dims=tuple(in_dims), randomness="error")
                flat = make_fx(functionalize(stacked), {**self._backend.decompositions})(*whole)
            graph = simplified(flat)
            moved = _moved(graph, function, num_fixed - len(self._own))
            unit = rounding_unit(graph)
            run = self._backend.finish(graph, whole, num_fixed)
            single = self._single(first, member, num_fixed) if self._has_traces else None
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NotFusedError(f"{reason_of(error)}{self._hint(function.gradients.problem)}") from error
        finally:
            engine.random.load_state_dict(random)
            for memory, value in zip(engine.memories, kept, strict=True):
                memory.value = value
        return Flat(run, function, engine.memories, moved, unit, single)

    def _hint(self, problem: str | None) -> str:
        """Return which numbers of a problem's loss are tensors here, which takes them as more than numbers."""
        keys = [each.key for each in self._own if each.key.startswith(f"problems.{problem}.loss.")]
        return f"; {', '.join(keys)}, in which runs differ, may do arithmetic alone" if keys else ""

    def _single(self, first: GraphModule, member: Sequence[Tensor], num_fixed: int) -> Run:
        flat = make_fx(functionalize(first), {**self._backend.decompositions})(*member)
        return self._backend.finish(simplified(flat), member, num_fixed)


def _moved(graph: GraphModule, function: RoundFunction, num_places: int) -> tuple[int, ...]:
    """Return which buffers are other values after the round than before it."""
    nodes = [*graph.graph.nodes]
    places = [node for node in nodes if node.op == "placeholder"][:num_places]
    outputs = nodes[-1].args[0]
    begin = sum(sum(used) + 1 + len(names) for used, names in zip(function.used, function.names, strict=True))
    own = places[num_places - function.num_buffers :]
    return tuple(position for position, place in enumerate(own) if outputs[begin + position] is not place)


def _part(arguments: Sequence[Tensor], in_dims: Sequence[int | None], start: int, count: int) -> list[Tensor]:
    """Return the rows of some members."""
    return [
        each if dim is None or len(each) == count else each[start : start + count]
        for each, dim in zip(arguments, in_dims, strict=True)
    ]


def _of_first(entry: JointBatches, values: Iterator[Tensor], placed: dict[int, Tensor]) -> Batches:
    """Return the batches of the first member."""
    return {name: None if each is None else put_together(each.value, values, placed) for name, each in entry.items()}
