"""Steps of problems as a flat program of tensor operations: traced once, then run without autograd and without plans.

A trace takes the parameters and buffers of all problems, the state of the optimizers and the batches. It writes what
the steps change into its place, and returns losses, metrics and norms. Common subexpressions of all losses and
pullbacks are shared, across the problems too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.core.private import AutoDispatchBelowAutograd, FakeTensorMode, guards
from mlotool.core.replay import RandomState
from mlotool.core.tracing import ValuesLeaveError
from mlotool.core.unchanged import SameForms
from mlotool.problem.optimizers.registry import RULES, has_step_hooks
from mlotool.program.agreement import Kind
from mlotool.program.backends import BACKENDS, Backend, Run
from mlotool.program.decompositions import HONEST_BATCH_NORMS
from mlotool.program.guard import Guard, PythonState, is_known, why_foreign, why_unseen
from mlotool.program.prepared_step import StepResult
from mlotool.program.solution_plan import Engine
from mlotool.program.traced_function import (
    Batches,
    Traced,
    TracedFunction,
    TracedStep,
    UntraceableError,
    copied,
    kinds_of,
)

MOST_TRACES = 8
"""Of the same steps: one for each kind of batches, and for each course of their solvers' decisions."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Traced steps.

    Args:
        run: runs them.
        unit: the relative error of one rounding, in the lowest precision in which it computes.
        names: by problem, of its metrics.
        writes: positions of the arguments that the steps change, where that is left to the caller.
        reporters: those who want to hear of their numbers after each run.
        has_conditions: whether the last output says if the trace holds.
    """

    run: Run
    unit: float
    names: tuple[tuple[str, ...], ...]
    writes: tuple[int, ...]
    reporters: tuple[Any, ...]
    has_conditions: bool


Place = tuple[Kind, Tensor]
"""A tensor that steps change, without autograd; those of one kind are compared as one vector, since a part of it may be
nothing but rounding (a bias before a BatchNorm)."""


class Tracer:
    """Traces the steps of some problems, and runs the traces.

    There is one for each kind of batches, and for each course that the solvers' decisions have taken: what a step gets
    is the same whichever steps were before it.

    Args:
        rounds: the problems, round after round; those of one round take their gradients before any of them steps.
        engine: of the program.
        backend: one of BACKENDS.
        traces_users_code: whether a user's losses and modules may take part.
    """

    def __init__(
        self, rounds: Sequence[Sequence[Traced]], engine: Engine, backend: str, *, traces_users_code: bool = True
    ) -> None:
        self.steps = [each for together in rounds for each in together]
        self._rounds = rounds
        self._engine = engine
        self._backend: Backend = BACKENDS[backend]
        self._traces_users_code = traces_users_code
        self._same_forms = SameForms([])
        self._traces: dict[Any, list[Trace]] = {}
        self._num_traces = 0
        self._bind()
        self._guard = Guard([engine.problems])

    def __call__(self, batches: Sequence[Sequence[Batches]]) -> list[StepResult]:
        """Take the steps; parameters, buffers and optimizers move, but for schedulers and counts of steps.

        Args:
            batches: by problem that steps, those of each batch that its gradient is averaged over.

        Returns:
            By problem, its loss and metrics.

        Raises:
            UntraceableError: the steps cannot be traced; nothing has moved.
        """
        arguments, traces = self._found(batches)
        for trace in traces:
            if (results := self._run(trace, arguments)) is not None:
                return results
        self._check_optimizers()
        if self._num_traces == MOST_TRACES:
            raise UntraceableError(f"batches, settings of optimizers or ends of solves are of over {MOST_TRACES} kinds")
        traces.append(self._traced(batches, arguments))
        self._guard.renew()
        self._num_traces += 1
        if (results := self._run(traces[-1], arguments)) is None:
            raise UntraceableError("a solver decides by a number that rounding alone sets apart")
        return results

    def again(self, batches: Sequence[Sequence[Batches]]) -> list[StepResult] | None:
        """Take the steps along a trace that is there; None, with nothing moved, where none holds."""
        arguments, traces = self._found(batches)
        return next((found for trace in traces if (found := self._run(trace, arguments)) is not None), None)

    def renew_guard(self) -> None:
        """Take what Python holds now for what traces hold fixed, after an evaluation that may have kept results."""
        self._guard.settle()

    def _found(self, batches: Sequence[Sequence[Batches]]) -> tuple[list[Tensor], list[Trace]]:
        """Return what a trace takes, and the traces for arguments of that kind."""
        self.look()
        tensors: list[Tensor] = []
        # What a trace holds for: kinds of tensors, other values in the batches, optimizers' settings.
        kinds = self._kinds(batches, tensors)
        key = kinds, *[each.refresh() for each in self._stepping]
        return self._arguments() + tensors, self._traces.setdefault(key, [])

    def look(self) -> None:
        """Drop traces of what is no more; raise an UntraceableError where there are hooks, which no trace calls."""
        if hook := self._guard.hook():
            raise UntraceableError(hook)
        is_changed = self._guard.change() is not None
        if is_changed:
            for problem in self._engine.problems:
                problem.look_at_module()
            self._traces.clear()
            self._guard.renew()
        if is_changed or not all(step.is_current() for step in self._stepping):
            self._check_optimizers()
            before = [each.structure for each in self._stepping]
            self._bind()
            if [each.structure for each in self._stepping] != before:
                self._traces.clear()
        if not self._same_forms(self._arguments()):
            # Kernels go through parameters in their order in memory.
            self._bind()
            self._same_forms = SameForms(self._arguments())
            self._traces.clear()

    def _check_optimizers(self) -> None:
        """Raise an UntraceableError where a trace cannot take an optimizer's steps."""
        for each in self.steps:
            if has_step_hooks(each.problem.optimizer):
                raise UntraceableError("its optimizer has hooks", each.problem.name)
            if type(each.problem.optimizer) not in RULES:
                raise UntraceableError("its optimizer is another one", each.problem.name)

    def places(self) -> list[Place]:
        """Return what the steps change."""
        self._bind()
        places: list[Place] = []
        for step in self._stepping:
            places += step.places()
        for problem in self._buffered:
            places += [((problem.name, "buffers"), tensor) for tensor in problem.slots.buffers()]
        return places

    def unit(self) -> float:
        """Return the relative error of one rounding, in the lowest precision in which a trace computes."""
        return max(trace.unit for traces in self._traces.values() for trace in traces)

    def _kinds(self, batches: Sequence[Sequence[Batches]], tensors: list[Tensor]) -> tuple[Any, ...]:
        kinds, seen = [], dict[int, int]()
        for each, entries in zip(self.steps, batches, strict=True):
            try:
                kinds.append(tuple([kinds_of(entry, tensors, seen) for entry in entries]))
            except UntraceableError as error:
                error.problem = each.problem.name
                raise
        return tuple(kinds)

    def _bind(self) -> None:
        """Look up modules, parameters and the state of the optimizers."""
        self._buffered = [problem for problem in self._engine.problems if problem.slots.has_buffers]
        for step in self.steps:
            step.problem.optimizer_step.align_state()
        self._stepping = [TracedStep(each.problem) for each in self.steps]
        own = [problem.own for problem in self._engine.problems]
        self._fixed = [*chain.from_iterable([*own, *[each.tensors for each in self._stepping]])]

    def _arguments(self) -> list[Tensor]:
        """Return what a trace takes, but for the batches."""
        return [*self._fixed, *chain.from_iterable([problem.slots.buffers() for problem in self._buffered])]

    def _run(self, trace: Trace, arguments: list[Tensor]) -> list[StepResult] | None:
        """Run a trace; None, with nothing moved, where it does not hold."""
        with AutoDispatchBelowAutograd():
            outputs = [*trace.run(*arguments)]
            if trace.has_conditions:
                if not bool(outputs.pop()):
                    return None
                values = outputs[-len(trace.writes) :]
                torch._foreach_copy_([arguments[position] for position in trace.writes], values)
                del outputs[-len(trace.writes) :]
        for who in reversed(trace.reporters):
            who.reported(outputs.pop())
        found = iter(outputs)
        return [StepResult(next(found), {name: next(found) for name in names}) for names in trace.names]

    def _traced(self, batches: Sequence[Sequence[Batches]], arguments: Sequence[Tensor]) -> Trace:
        # Tracing runs the operations, and nothing is to move yet: modules may change batches and buffers in place.
        num_fixed = len(self._fixed)
        arguments = [tensor.detach() for tensor in arguments]
        arguments[num_fixed:] = [copied(tensor) for tensor in arguments[num_fixed:]]
        foreign = () if self._traces_users_code else map(why_foreign, self._engine.problems)
        if reason := next(filter(None, foreign), None) or why_unseen(self._engine.problems):
            raise UntraceableError(reason)
        for each in self.steps:
            if not is_known(each.problem.scheduler):
                raise UntraceableError("its scheduler is code of yours", each.problem.name)
        devices = tuple({device for each in self._engine.problems for device in each.devices})
        before, state = RandomState(devices), PythonState(self._engine.problems)
        kept = [memory.value for memory in self._engine.memories]
        is_fused = self._backend.has_fused_steps
        traced = TracedFunction(self._rounds, self._stepping, self._engine, self._buffered, batches, is_fused=is_fused)
        try:
            # The second pass has no autograd in it, and takes steps in place apart, which sharing would repeat. Without
            # the context torch makes a new mode for each operation whose shape it notes: half the time of tracing.
            with guards.tracing(guards.TracingContext(FakeTensorMode())):
                first = make_fx(traced, HONEST_BATCH_NORMS)(*arguments)
                if change := state.change():
                    raise UntraceableError(change, traced.problem)
                refuse_shapes_by_values(first)
                flat = make_fx(functionalize(first), {**self._backend.decompositions})(*arguments)
            run, writes = self._backend.made(flat, arguments, traced.num_moved, in_place=not traced.course.conditions)
        except Exception as error:
            before.restore()
            state.restore()
            raise UntraceableError(reason_of(error), traced.problem) from error
        finally:
            for memory, value in zip(self._engine.memories, kept, strict=True):
                memory.value = value
        reporters = tuple(who for who, _ in traced.course.reports)
        return Trace(run, rounding_unit(flat), tuple(traced.names), writes, reporters, bool(traced.course.conditions))


def reason_of(error: Exception) -> str:
    """Return in words why steps cannot be traced.

    Args:
        error: that tracing has raised.
    """
    if isinstance(error, UntraceableError | ValuesLeaveError | LookupError):
        return str(error.args[0])
    if "_local_scalar_dense" in str(error):
        return "a loss or a module takes the value of a tensor (item, float, if), which a trace does not know"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def refuse_shapes_by_values(graph: GraphModule) -> None:
    """Raise an UntraceableError where the shape of a result depends on values: a trace would keep that of one time.

    Args:
        graph: of operations, each with an example of its result.
    """
    for node in graph.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in target.tags:
            continue
        indices = [each for each in node.args[1] if each is not None] if target is torch.ops.aten.index.Tensor else []
        if indices and not any(each.meta["val"].dtype in (torch.bool, torch.uint8) for each in indices):
            continue
        raise UntraceableError(f"the shape of a result depends on values ({target.name().partition('.')[0]})")


def rounding_unit(graph: GraphModule) -> float:
    """Return the relative error of one rounding, in the lowest precision in which a graph computes."""
    kinds = [
        (each.dtype, each.is_cuda) for node in graph.graph.nodes if isinstance(each := node.meta.get("val"), Tensor)
    ]
    # TF32 has the ten bits of fp16.
    has_tf32 = (torch.float32, True) in kinds and torch.backends.cuda.matmul.allow_tf32
    dtypes = {dtype for dtype, _ in kinds if dtype.is_floating_point} | ({torch.float16} if has_tf32 else set())
    return float(max(torch.finfo(dtype).eps for dtype in dtypes))
