"""A gradient as a flat program of tensor operations: traced once, then run without autograd and without the plan.

The trace takes the parameters and buffers of all problems and the batches, and returns the loss, its metrics and the
gradient. Common subexpressions of the passes that a pullback makes are shared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from mlotool.core.loss_output import LossOutput
from mlotool.core.replay import RandomState
from mlotool.core.tracing import tracing
from mlotool.program.batch_norms import HONEST_BATCH_NORMS
from mlotool.program.engine import Engine
from mlotool.program.flat_graph import simplified
from mlotool.program.gradient_plan import Gradient, GradientPlan
from mlotool.program.moment import Moment

Batches = Mapping[str, Any]
"""By problem: of the one whose gradient it is, and of those whose solutions it passes through."""

Run = Callable[..., Sequence[Tensor]]
"""`(parameters, buffers, tensors of the batches) -> outputs`."""

BACKENDS = ("eager", "inductor")
"""How a trace is run: operation by operation, or as kernels that PyTorch's compiler has fused."""


MOST_TRACES = 8
"""Of one gradient: one for each kind of batches, and for each course of its solver's decisions."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class UntraceableError(Exception):
    """A gradient cannot be traced; the text says why."""


@dataclass(slots=True)
class Trace:
    """A traced gradient.

    Args:
        run: evaluates it.
        names: of the metrics.
        used: which parameters have a gradient.
        reporters: those who want to hear of their numbers after each run.
        has_conditions: whether the last output says if the trace holds.
    """

    run: Run
    names: tuple[str, ...]
    used: tuple[bool, ...]
    reporters: tuple[Any, ...]
    has_conditions: bool


class Tracer:
    """Traces the gradient of one problem, and runs the traces.

    There is one for each kind of batches, and for each course that a solver's decisions have taken: what a step gets is
    the same whichever steps were before it.

    Args:
        number: of the problem.
        engine: of the program.
        plan: of the gradient.
        backend: one of BACKENDS.
    """

    def __init__(self, number: int, engine: Engine, plan: GradientPlan, backend: str) -> None:
        self._problem = engine.problems[number]
        self._engine = engine
        self._plan = plan
        self._backend = backend
        self._modules = [module for problem in engine.problems for module in problem.submodules]
        self._traces: dict[Any, list[Trace]] = {}
        self._num_traces = 0

    def __call__(self, batches: Batches) -> tuple[LossOutput, Gradient]:
        """Return the loss of a training step and its gradient; buffers move as in the plan.

        Args:
            batches: by problem.

        Raises:
            UntraceableError: the gradient cannot be traced; no buffer has moved.
        """
        tensors: list[Tensor] = []
        # What a trace holds for: kinds of tensors, other values in the batches, modes of modules.
        key = _taken_apart(batches, tensors), tuple([module.training for module in self._modules])
        traces = self._traces.setdefault(key, [])
        for trace in traces:
            if (outputs := self._outputs(trace, tensors)) is not None:
                return self._taken(trace, outputs)
        if self._num_traces == MOST_TRACES:
            raise UntraceableError(
                f"its batches are of more than {MOST_TRACES} kinds, or its solver ends in as many ways"
            )
        trace = self._traced(batches, tensors)
        self._num_traces += 1
        traces.append(trace)
        found = self._outputs(trace, tensors)
        if found is None:
            raise UntraceableError("its solver decides by a number that rounding alone sets apart")
        return self._taken(trace, found)

    def _outputs(self, trace: Trace, tensors: list[Tensor]) -> list[Tensor] | None:
        """Return what a trace gives, without its last output; None where it does not hold."""
        with torch._C._AutoDispatchBelowAutograd():
            outputs = list(trace.run(*self._arguments(tensors)))
        if trace.has_conditions and not bool(outputs.pop()):
            return None
        return outputs

    def _taken(self, trace: Trace, outputs: list[Tensor]) -> tuple[LossOutput, Gradient]:
        """Return loss and gradient, move the buffers, and tell those who want to hear of their numbers."""
        for who in reversed(trace.reporters):
            who.reported(outputs.pop())
        slots = self._problem.slots
        if slots.has_buffers:
            buffers = slots.buffers()
            with torch.no_grad():
                torch._foreach_copy_(buffers, outputs[-len(buffers) :])
            del outputs[-len(buffers) :]
        loss, found = outputs[0], iter(outputs[1 + len(trace.names) :])
        metrics = dict(zip(trace.names, outputs[1:], strict=False))
        return LossOutput(loss, metrics), [next(found) if is_used else None for is_used in trace.used]

    def _arguments(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return what a trace takes: all parameters, all buffers, the tensors of the batches."""
        found: list[Tensor] = []
        for problem in self._engine.problems:
            found += problem.own
        for problem in self._engine.problems:
            if problem.slots.has_buffers:
                found += problem.slots.buffers()
        return found + tensors

    def _traced(self, batches: Batches, tensors: list[Tensor]) -> Trace:
        problems, problem = self._engine.problems, self._problem
        found: list[Any] = []

        def function(*arguments: Tensor) -> list[Tensor]:
            given = iter(arguments)
            parameters = [[next(given) for _ in each.own] for each in problems]
            buffers = [[next(given) for _ in each.slots.buffers()] for each in problems]
            inside = _put_together(batches, given)
            own = [each.slots.buffers() for each in problems]
            try:
                for each, its in zip(problems, buffers, strict=True):
                    # Copies: a run that is not used leaves the buffers as they were.
                    each.slots.put_buffers([buffer.clone() for buffer in its])
                with tracing() as course:
                    output, gradient = self._plan.live(inside[problem.name], Moment(inside, parameters=parameters))
                moved = problem.slots.buffers()
            finally:
                for each, its in zip(problems, own, strict=True):
                    each.slots.put_buffers(its)
            used = [each is not None for each in gradient]
            reporters = [who for who, _ in course.reports]
            found[:] = [tuple(output.metrics), tuple(used), tuple(reporters), bool(course.conditions)]
            outputs = [output.loss, *output.metrics.values(), *(each for each in gradient if each is not None)]
            outputs += [*moved, *(value for _, value in course.reports)]
            if course.conditions:
                outputs.append(torch.stack(course.conditions).all())
            return [each.detach() for each in outputs]

        # Tracing runs the operations: buffers are to move in the trace's own runs alone.
        arguments = [tensor.detach().clone() for tensor in self._arguments(tensors)]
        devices = tuple({device for each in problems for device in each.devices})
        before = RandomState(devices)
        try:
            # The second pass has no autograd in it, and takes steps in place apart, which sharing would repeat.
            flat = make_fx(functionalize(make_fx(function, HONEST_BATCH_NORMS)(*arguments)))(*arguments)
            run = self._program(flat, arguments)
        except Exception as error:
            raise UntraceableError(_reason(error)) from error
        if not before.equals(RandomState(devices)):
            before.restore()
            raise UntraceableError("its losses draw random numbers")
        return Trace(run, *found)

    def _program(self, flat: GraphModule, arguments: list[Tensor]) -> Run:
        if self._backend == "eager":
            run: Run = simplified(flat).forward
            return run
        import torch._inductor

        with torch.no_grad():
            compiled: Run = torch._inductor.compile(flat, [*arguments])
        return compiled


def _reason(error: Exception) -> str:
    if "_local_scalar_dense" in str(error):
        return "a loss or a module takes the value of a tensor (item, float, if), which a trace does not know"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """Add the tensors in nested containers to a list; return what is left: kinds, keys and other values."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype, value.device
    if isinstance(value, dict):
        return (dict, *[(key, _taken_apart(each, tensors)) for key, each in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), *[_taken_apart(each, tensors) for each in value])
    if not isinstance(value, _PLAIN):
        # It may hold tensors, which a trace would take for constants.
        raise UntraceableError(f"a batch holds a {type(value).__name__}")
    return value


def _put_together(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the same containers with other tensors in their order."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _put_together(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        parts = [_put_together(each, tensors) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
