"""A gradient as a flat program of tensor operations: traced once, then run without autograd and without the plan.

The trace takes the parameters and buffers of all problems and the batches, and returns the loss, its metrics and the
gradient. Common subexpressions of the passes that a pullback makes are shared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from mlotool.core.loss_output import LossOutput
from mlotool.core.tracing import tracing
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


class UntraceableError(Exception):
    """A gradient cannot be traced, or takes another course than its trace did; the text says why."""


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
    """Traces the gradient of one problem, once for each kind of batches, and runs the traces.

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
        self._traces: dict[Any, Trace] = {}

    def __call__(self, batches: Batches) -> tuple[LossOutput, Gradient]:
        """Return the loss of a training step and its gradient; buffers move as in the plan.

        Args:
            batches: by problem.

        Raises:
            UntraceableError: the gradient cannot be traced, or takes another course than the trace did.
        """
        leaves, structure = pytree.tree_flatten(batches)
        key = self._key(leaves, structure)
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = self._traced(leaves, structure)
        with torch._C._AutoDispatchBelowAutograd():
            outputs = list(trace.run(*self._arguments(leaves)))
        if trace.has_conditions and not bool(outputs.pop()):
            raise UntraceableError("a solver ended otherwise than when it was traced")
        for who in reversed(trace.reporters):
            who.reported(outputs.pop())
        loss, found = outputs[0], iter(outputs[1 + len(trace.names) :])
        metrics = dict(zip(trace.names, outputs[1:], strict=False))
        return LossOutput(loss, metrics), [next(found) if is_used else None for is_used in trace.used]

    def _arguments(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return what a trace takes: all parameters, all buffers, the tensors of the batches."""
        found: list[Tensor] = []
        for problem in self._engine.problems:
            found += problem.own
        for problem in self._engine.problems:
            if problem.slots.has_buffers:
                found += problem.slots.buffers()
        return found + [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def _key(self, leaves: Sequence[Any], structure: Any) -> Any:
        """Return what a trace holds for: shapes and kinds of tensors, other values of batches, modes of modules."""
        kinds = [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        modes = [child.training for problem in self._engine.problems for child in problem.submodules]
        return structure, tuple(kinds), tuple(modes)

    def _traced(self, leaves: Sequence[Any], structure: Any) -> Trace:
        problems, problem = self._engine.problems, self._problem
        found: list[Any] = []

        def function(*arguments: Tensor) -> list[Tensor]:
            given = iter(arguments)
            parameters = [[next(given) for _ in each.own] for each in problems]
            buffers = [[next(given) for _ in each.slots.buffers()] for each in problems]
            batches = pytree.tree_unflatten(
                [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
            )
            own = [each.slots.buffers() for each in problems]
            try:
                for each, inside in zip(problems, buffers, strict=True):
                    each.slots.put_buffers(inside)
                with tracing() as course:
                    output, gradient = self._plan.live(batches[problem.name], Moment(batches, parameters=parameters))
            finally:
                for each, outside in zip(problems, own, strict=True):
                    each.slots.put_buffers(outside)
            used = [each is not None for each in gradient]
            reporters = [who for who, _ in course.reports]
            found[:] = [tuple(output.metrics), tuple(used), tuple(reporters), bool(course.conditions)]
            outputs = [output.loss, *output.metrics.values(), *(each for each in gradient if each is not None)]
            outputs += [value for _, value in course.reports]
            if course.conditions:
                outputs.append(torch.stack(course.conditions).all())
            return [each.detach() for each in outputs]

        arguments = [tensor.detach() for tensor in self._arguments(leaves)]
        # Tracing runs the operations: buffers are to move in the trace's own runs alone.
        arguments = [tensor.clone() for tensor in arguments]
        before = torch.get_rng_state()
        try:
            # The second pass has no autograd in it, and takes steps in place apart, which sharing would repeat.
            flat = make_fx(functionalize(make_fx(function)(*arguments)))(*arguments)
            run = self._program(flat, arguments)
        except Exception as error:
            raise UntraceableError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
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
