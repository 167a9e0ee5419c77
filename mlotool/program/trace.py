"""Steps of problems as a flat program of tensor operations: traced once, then run without autograd and without plans.

A trace takes the parameters and buffers of all problems, the state of the optimizers and the batches. It writes what
the steps change into its place, and returns losses, metrics and norms. Common subexpressions of all losses and
pullbacks are shared, across the problems too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from mlotool.core.loss_output import LossOutput
from mlotool.core.private import AutoDispatchBelowAutograd, FakeTensorMode, guards, tree_flatten, tree_map_only
from mlotool.core.replay import RandomState
from mlotool.core.tracing import Course, TraceableFunctions, ValuesLeaveError, tracing
from mlotool.core.unchanged import SameForms, SameObjects
from mlotool.problem.optimizers.registry import RULES, find_rule, has_step_hooks, parts_of_step
from mlotool.problem.optimizers.rule import COUNTER, Hyperparameters, OptimizerRule
from mlotool.problem.problem import Problem
from mlotool.problem.stream import SameBatch, Stream
from mlotool.problem.trajectory import LowerSnapshot, StepRecord
from mlotool.program.agreement import Kind
from mlotool.program.backends import BACKENDS, Run
from mlotool.program.decompositions import HONEST_BATCH_NORMS
from mlotool.program.gradient_plan import Gradient, GradientPlan, averaged
from mlotool.program.guard import Guard, PythonState, is_known, why_foreign, why_unseen
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
        listed = [map(id, group["params"]) for group in self._groups]
        self._positions = [[positions[key] for key in keys if key in positions] for keys in listed]
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
        pairs = zip(self.settings, self.places, strict=True)
        given = tuple(_with_numbers(settings, places, self.numbers) for settings, places in pairs)
        draws = tuple((batch, random) for batch in self.batches)
        return StepRecord(tuple(self.theta), tuple(self.state), given, draws, {}, buffers=tuple(self.buffers))


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
    given = dict(settings)
    for (name, position), number in places.items():
        value = numbers[number]
        given[name] = value if position is None else (*given[name][:position], value, *given[name][position + 1 :])
    return given


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
        self.problem = name = each.problem.name
        devices = tuple({device for problem in self._engine.problems for device in problem.devices})
        with disable_proxy_modes_tracing():
            before = RandomState(devices)
        with TraceableFunctions():
            mean = averaged(each.plan(entry[name], self._moment(entry, parameters), live=True) for entry in batches)
        with disable_proxy_modes_tracing():
            if not before.equals(RandomState(devices)):
                raise UntraceableError("the losses draw random numbers")
        return mean

    def _moment(self, entry: Batches, parameters: Sequence[Sequence[Tensor]]) -> Moment:
        steps = {name: value for name, value in entry.items() if isinstance(value, TakenSteps)}
        snapshots = {}
        for name, number in [(name, self._engine.numbers[name]) for name in steps]:
            problem = self._engine.problems[number]
            snapshots[name] = steps[name].snapshot(parameters[number], problem.stream, problem.devices)
        batches = {name: value for name, value in entry.items() if name not in steps}
        return Moment(batches, snapshots, [*parameters])


class TracedFunction:
    """A function of all parameters, the state of the optimizers, all buffers and the batches.

    Its outputs: what each of its arguments but the batches is after the steps; losses, metrics and norms; what is
    reported; and, where there are decisions, whether they are those of the course that was traced.

    Attributes:
        names: by problem, of its metrics.
        course: the decisions.
        num_moved: how many arguments may change.
    """

    def __init__(self, tracer: "Tracer", batches: Sequence[Sequence[Batches]], *, is_fused: bool) -> None:
        self._rounds, self._engine, self._gradients = tracer.rounds, tracer.engine, MemberGradients(tracer.engine)
        self._stepping, self._buffered, self._batches = tracer.stepping, tracer.buffered, batches
        self._is_fused, self.num_moved = is_fused, 0
        self.names: list[tuple[str, ...]] = []
        self.course = Course()

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
                step, theta, state = self._stepping[position], parameters[each.number], states[position]
                with torch.no_grad():
                    parameters[each.number], after = step(theta, gradient, state, is_fused=self._is_fused)
                state[: step.num_states] = after
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
    leaves, structure = tree_flatten(value)
    kinds: list[Any] = [structure]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            # It may hold tensors, which a trace would take for constants.
            raise UntraceableError(f"a batch holds a {type(leaf).__name__}")
        if not isinstance(leaf, Tensor) or id(leaf) in seen:
            kinds.append(("again", seen[id(leaf)]) if isinstance(leaf, Tensor) else leaf)
            continue
        seen[id(leaf)] = len(tensors)
        tensors.append(leaf)
        # A view that holds for these strides may not hold for others.
        kinds.append((leaf.shape, _strides(leaf), leaf.dtype, leaf.device))
    return tuple(kinds)


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

    def placed_for(tensor: Tensor) -> Tensor:
        if id(tensor) not in placed:
            placed[id(tensor)] = next(tensors)
        return placed[id(tensor)]

    return tree_map_only(Tensor, placed_for, value)


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
        self.rounds = rounds
        self.engine = engine
        self._backend = BACKENDS[backend]
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
        key = kinds, *[each.refresh() for each in self.stepping]
        return self._arguments() + tensors, self._traces.setdefault(key, [])

    def look(self) -> None:
        """Drop traces of what is no more; raise an UntraceableError where there are hooks, which no trace calls."""
        if hook := self._guard.hook():
            raise UntraceableError(hook)
        is_changed = self._guard.change() is not None
        if is_changed:
            for problem in self.engine.problems:
                problem.look_at_module()
            self._traces.clear()
            self._guard.renew()
        if is_changed or not all(step.is_current() for step in self.stepping):
            self._check_optimizers()
            before = [each.structure for each in self.stepping]
            self._bind()
            if [each.structure for each in self.stepping] != before:
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
        for step in self.stepping:
            places += step.places()
        for problem in self.buffered:
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
        self.buffered = [problem for problem in self.engine.problems if problem.slots.has_buffers]
        for step in self.steps:
            step.problem.optimizer_step.align_state()
        self.stepping = [TracedStep(each.problem) for each in self.steps]
        own = [problem.own for problem in self.engine.problems]
        self._fixed = [*chain.from_iterable([*own, *[each.tensors for each in self.stepping]])]

    def _arguments(self) -> list[Tensor]:
        """Return what a trace takes, but for the batches."""
        return [*self._fixed, *chain.from_iterable([problem.slots.buffers() for problem in self.buffered])]

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
        foreign = () if self._traces_users_code else map(why_foreign, self.engine.problems)
        if reason := next(filter(None, foreign), None) or why_unseen(self.engine.problems):
            raise UntraceableError(reason)
        for each in self.steps:
            if not is_known(each.problem.scheduler):
                raise UntraceableError("its scheduler is code of yours", each.problem.name)
        devices = tuple({device for each in self.engine.problems for device in each.devices})
        before, state = RandomState(devices), PythonState(self.engine.problems)
        kept = [memory.value for memory in self.engine.memories]
        is_fused = self._backend.has_fused_steps
        traced = TracedFunction(self, batches, is_fused=is_fused)
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
            for memory, value in zip(self.engine.memories, kept, strict=True):
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
