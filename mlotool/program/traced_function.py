"""The function that is traced: rounds of steps, of all tensors that they take."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mlotool.core.loss_output import LossOutput
from mlotool.core.replay import RandomState
from mlotool.core.tracing import Course, TraceableFunctions, tracing
from mlotool.core.unchanged import SameObjects
from mlotool.problem.optimizers.registry import RULES, find_rule, parts_of_step
from mlotool.problem.optimizers.rule import COUNTER, Hyperparameters, OptimizerRule
from mlotool.problem.problem import Problem
from mlotool.problem.stream import SameBatch, Stream
from mlotool.problem.trajectory import LowerSnapshot, StepRecord
from mlotool.program.agreement import Kind
from mlotool.program.gradient_plan import Gradient, GradientPlan, averaged
from mlotool.program.loss_plan import Moment
from mlotool.program.prepared_step import StepResult, norm_of, result_of
from mlotool.program.solution_plan import Engine

_NO_STATE = "a parameter has its first gradient, for which its optimizer keeps nothing yet"


class TracedStep:
    """Steps one problem's optimizer inside a trace.

    Learning rates are inputs of the trace, which a scheduler may change; the other hyperparameters are fixed by it.

    Args:
        problem: its optimizer has a rule, and its state.

    Attributes:
        tensors: what a step takes beside parameters and gradient: the optimizer's state of each parameter, then a
            learning rate for each group of parameters, 0-D of type float64.
        num_states: how many of them are state, which a step changes.
    """

    def __init__(self, problem: Problem) -> None:
        optimizer: Any = problem.optimizer
        self._problem, self._optimizer = problem, optimizer
        self._groups: list[dict[str, Any]] = optimizer.param_groups
        self._fixed = [name for name in (*RULES[type(optimizer)].settings, "fused") if name != "lr"]
        positions = {id(parameter): position for position, parameter in enumerate(problem.own)}
        self._positions = [
            [positions[id(each)] for each in group["params"] if id(each) in positions] for group in self._groups
        ]
        self._states: list[dict[str, Any]] = [optimizer.state.get(each, {}) for each in problem.own]
        self._names = [tuple(key for key, value in each.items() if isinstance(value, Tensor)) for each in self._states]
        kept = [state[name] for state, names in zip(self._states, self._names, strict=True) for name in names]
        self.num_states = len(kept)
        device = problem.own[0].device
        self._rates = [torch.zeros((), dtype=torch.float64, device=device) for _ in self._groups]
        self._numbers: list[Any] = [None] * len(self._groups)
        self.tensors = [*kept, *self._rates]
        self._same = SameObjects(partial(parts_of_step, optimizer))

    def is_current(self) -> bool:
        """Return whether the optimizer still has the groups, the parameters and the state whose tensors these are."""
        return self._optimizer is self._problem.optimizer and self._same()

    @property
    def structure(self) -> Any:
        """Where the tensors belong, which a trace holds fixed: parameters by group, and by parameter names of state."""
        return self._positions, self._names

    def places(self) -> list[tuple[Kind, Tensor]]:
        """Return the parameters and the state, each with what it is."""
        names = ["parameters"] * len(self._problem.own) + [name for names in self._names for name in names]
        tensors = [*self._problem.current(), *self.tensors[: self.num_states]]
        return [((self._problem.name, name), each) for name, each in zip(names, tensors, strict=True)]

    def refresh(self) -> tuple[Any, ...]:
        """Take the current learning rates over; return the other hyperparameters, for which a trace holds."""
        for number, group in enumerate(self._groups):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self._rates[number].copy_(rate)
            elif rate != self._numbers[number]:
                self._rates[number].fill_(rate)
                self._numbers[number] = rate
        return tuple([tuple(map(group.get, self._fixed)) for group in self._groups])

    def __call__(
        self, theta: Sequence[Tensor], gradient: Sequence[Tensor | None], tensors: Sequence[Tensor], *, is_fused: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters and the state after a step.

        Args:
            theta: the parameters.
            gradient: one tensor a parameter, clipped; None where it is unused.
            tensors: as `tensors` has them.
            is_fused: by torch's fused kernels where the optimizer takes them; else by plain operations.

        Raises:
            LookupError: a parameter has its first gradient here, and the optimizer no state for it.
        """
        given = iter(tensors)
        states = [{name: next(given) for name in names} for names in self._names]
        after = [*theta]
        rule = find_rule(self._problem.name, self._optimizer)
        for group, positions, rate in zip(self._groups, self._positions, given, strict=True):
            used = [position for position in positions if gradient[position] is not None]
            hyperparameters = {**group, "lr": rate}
            # A GPU's kernels read the rate as float32, which is too coarse beside parameters of float64.
            is_exact = not rate.is_cuda or theta[0].dtype != torch.float64
            if is_fused and is_exact and rule.kernel is not None and group.get("fused") and used:
                hyperparameters["lr"] = rate.float() if rate.is_cuda else rate
                self._by_kernel(rule, after, gradient, states, hyperparameters, used)
                continue
            for position in used:
                slope = gradient[position]
                assert slope is not None
                after[position], state = rule.update(after[position], slope, states[position], hyperparameters)
                states[position] = dict(state)
        if any(set(state) != set(names) for state, names in zip(states, self._names, strict=True)):
            raise LookupError(_NO_STATE)
        return after, [state[name] for state, names in zip(states, self._names, strict=True) for name in names]

    def _by_kernel(
        self,
        rule: OptimizerRule,
        after: list[Tensor],
        gradient: Sequence[Tensor | None],
        states: list[dict[str, Tensor]],
        hyperparameters: Hyperparameters,
        used: Sequence[int],
    ) -> None:
        """Step the parameters at the positions `used`; `after` and `states` are changed."""
        theta = [after[position] for position in used]
        slopes = [_aligned(gradient[position], self._problem.own[position]) for position in used]
        names = rule.names(hyperparameters)
        if any(name not in states[position] for name in names for position in used):
            raise LookupError(_NO_STATE)
        vectors = {name: [states[position][name] for position in used] for name in names}
        if COUNTER in vectors:
            vectors[COUNTER] = [*torch._foreach_add(vectors[COUNTER], 1)]
        assert rule.kernel is not None
        kernel, settings = rule.kernel(hyperparameters)
        moved, _, *kept = kernel.pure(theta, slopes, *[vectors.get(name, []) for name in rule.state], **settings)
        vectors |= {name: tensors for name, tensors in zip(rule.vectors, kept, strict=True) if name in vectors}
        for place, position in enumerate(used):
            after[position] = moved[place]
            states[position].update({name: tensors[place] for name, tensors in vectors.items()})


def _aligned(slope: Tensor | None, parameter: Tensor) -> Tensor:
    # The kernels read a gradient in the parameter's order, whatever its own strides are.
    assert slope is not None
    if slope.stride() == parameter.stride():
        return slope
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=slope.dtype, device=slope.device).copy_(slope)


NumberPlace = tuple[str, int | None]
"""A hyperparameter by name, and its position in one that is a tuple."""


class TakenStep(NamedTuple):
    """One step, without random numbers and lower problems, of which it has none.

    Args:
        theta: the parameters before it.
        state: the optimizer's state before it, one mapping a parameter.
        batches: of its gradient.
        buffers: before each evaluation; empty where there are none.
        settings: hyperparameters, one mapping a parameter.
        numbers: those of them that are arguments, (n,) float64.
        places: by parameter, where among the numbers a hyperparameter stands.
    """

    theta: list[Tensor]
    state: list[dict[str, Tensor]]
    batches: list[Any]
    buffers: list[dict[str, Tensor | None]]
    settings: list[dict[str, Any]]
    numbers: Tensor
    places: list[dict[NumberPlace, int]]

    def record(self, devices: Sequence[Any]) -> StepRecord:
        """Return it as a record.

        Args:
            devices: CUDA devices of the problem.
        """
        # What draws random numbers is not traced: any state will do.
        random = RandomState(tuple(devices))
        hyperparameters = tuple(
            _with_numbers(settings, places, self.numbers)
            for settings, places in zip(self.settings, self.places, strict=True)
        )
        draws = tuple((batch, random) for batch in self.batches)
        return StepRecord(tuple(self.theta), tuple(self.state), hyperparameters, draws, {}, buffers=tuple(self.buffers))


class TakenSteps(NamedTuple):
    """The steps of an unroll, oldest first.

    Args:
        kind: what runs whose steps are one function share beside containers.
        has_all: whether the first of them is the first of its unroll.
        steps: the steps.
    """

    kind: str
    has_all: bool
    steps: list[TakenStep]

    def snapshot(
        self, theta: Sequence[Tensor], stream: Stream | SameBatch | None, devices: Sequence[Any]
    ) -> LowerSnapshot:
        """Return the problem as its reader finds it.

        Args:
            theta: its parameters now.
            stream: its own.
            devices: its CUDA devices.
        """
        return LowerSnapshot(theta, stream, tuple(step.record(devices) for step in self.steps), self.has_all)


def _with_numbers(settings: Mapping[str, Any], places: Mapping[NumberPlace, int], numbers: Tensor) -> Hyperparameters:
    found = dict(settings)
    for (name, position), number in places.items():
        if position is None:
            found[name] = numbers[number]
        else:
            found[name] = tuple(numbers[number] if i == position else each for i, each in enumerate(found[name]))
    return found


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
                each.plan(entry[each.problem.name], self._moment(entry, parameters), live=True) for entry in batches
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
