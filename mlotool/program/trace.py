"""Steps of problems as a flat program of tensor operations: traced once, run without autograd, held to their plans.

A trace takes the parameters and buffers of all problems, the state of the optimizers and the batches. It writes what
the steps change into its place, and returns losses, metrics and norms. Common subexpressions of all losses and
pullbacks are shared, across the problems too.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from mlotool.core.errors import RunError
from mlotool.core.loss_output import LossOutput
from mlotool.core.private import AutoDispatchBelowAutograd, guards, tree_flatten, tree_map_only
from mlotool.core.replay import RandomState
from mlotool.core.tracing import Course, ExamplesMode, TraceableFunctions, ValuesLeaveError, tracing
from mlotool.core.unchanged import SameForms, SameObjects
from mlotool.problem.compatibility import Case, broken, reason
from mlotool.problem.interface import AbstractDirector, AbstractStepwise
from mlotool.problem.optimizers.optimizer_step import aligned
from mlotool.problem.optimizers.registry import RULES, find_rule, has_step_hooks, parts_of_step
from mlotool.problem.optimizers.rule import COUNTER, Hyperparameters, OptimizerRule
from mlotool.problem.problem import Problem
from mlotool.problem.settings import ProblemSettings
from mlotool.program.agreement import Kind, Rounding, Values, distances
from mlotool.program.backends import BACKENDS, Run
from mlotool.program.decompositions import HONEST_BATCH_NORMS, without_mutations
from mlotool.program.gradient_plan import Gradient, GradientPlan, StepResult, averaged, norm_of, result_of
from mlotool.program.guard import ChangeGuard, PythonState, is_known, why_foreign, why_unseen
from mlotool.program.program import Program
from mlotool.program.solution_plan import NOW, Engine, Moment, SolutionPlan, all_plans

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
        self._states: list[dict[str, Any]] = [optimizer.state.get(parameter, {}) for parameter in problem.own]
        self._names = [tuple(key for key, value in held.items() if isinstance(value, Tensor)) for held in self._states]
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
        return [((self._problem.name, name), tensor) for name, tensor in zip(names, tensors, strict=True)]

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
            gradient: one tensor per parameter, clipped; None where it is unused.
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
        # The kernels read a gradient in the parameter's order, whatever its own strides are.
        pairs = [(gradient[position], self._problem.own[position]) for position in used]
        slopes = [aligned(slope, parameter) for slope, parameter in pairs if slope is not None]
        names = rule.names(hyperparameters)
        if any(name not in states[position] for name in names for position in used):
            raise LookupError(_NO_STATE)
        vectors = {name: [states[position][name] for position in used] for name in names}
        if COUNTER in vectors:
            vectors[COUNTER] = [*torch._foreach_add(vectors[COUNTER], 1)]
        kernel, settings = rule.kernel(hyperparameters)
        moved, _, *kept = kernel.pure(theta, slopes, *[vectors.get(name, []) for name in rule.state], **settings)
        vectors |= {name: tensors for name, tensors in zip(rule.vectors, kept, strict=True) if name in vectors}
        for place, position in enumerate(used):
            after[position] = moved[place]
            states[position].update({name: tensors[place] for name, tensors in vectors.items()})


# By problem: of the one whose gradient it is, and of those whose solutions it passes through: the batch of a pullback,
# or (in a program of several runs) the steps that it differentiates.
Batches = Mapping[str, Any]

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
        self, traced: Traced, parameters: Sequence[Sequence[Tensor]], batches: Sequence[Batches]
    ) -> tuple[LossOutput, Gradient]:
        """Return the loss and the gradient of one problem, before clipping: means over its batches.

        Args:
            traced: the problem.
            parameters: by number of the problem, those of all problems.
            batches: those that the gradient is averaged over.

        Raises:
            UntraceableError: the losses draw random numbers.
        """
        self.problem = name = traced.problem.name
        devices = tuple({device for problem in self._engine.problems for device in problem.devices})
        with disable_proxy_modes_tracing():
            before = RandomState(devices)
        with TraceableFunctions():
            mean = averaged(traced.plan(entry[name], self._moment(entry, parameters), live=True) for entry in batches)
        with disable_proxy_modes_tracing():
            if not before.equals(RandomState(devices)):
                raise UntraceableError("the losses draw random numbers")
        return mean

    def _moment(self, entry: Batches, parameters: Sequence[Sequence[Tensor]]) -> Moment:
        # The steps of an unroll, in a program of several runs.
        steps = {name: value for name, value in entry.items() if hasattr(value, "as_lower_snapshot")}
        snapshots = {}
        for name, number in [(name, self._engine.numbers[name]) for name in steps]:
            problem = self._engine.problems[number]
            snapshots[name] = steps[name].as_lower_snapshot(parameters[number], problem.stream, problem.devices)
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

    def __init__(self, traced: "TracedRounds", batches: Sequence[Sequence[Batches]], *, is_fused: bool) -> None:
        self._rounds, self._engine, self.gradients = traced.rounds, traced.engine, MemberGradients(traced.engine)
        self._stepping, self._buffered, self._batches = traced.stepping, traced.buffered, batches
        self._is_fused, self.num_moved = is_fused, 0
        self.names: list[tuple[str, ...]] = []
        self.course = Course()

    def __call__(self, *arguments: Tensor) -> list[Tensor]:
        """Take the steps; return what is described above."""
        given = iter(arguments)
        parameters = [[next(given) for _ in problem.own] for problem in self._engine.problems]
        states = [[next(given) for _ in step.tensors] for step in self._stepping]
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
        self.gradients.problem = None
        return [output.detach() for output in outputs]

    def _stepped(
        self, parameters: list[list[Tensor]], states: list[list[Tensor]], batches: list[list[Batches]]
    ) -> list[StepResult]:
        """Take all steps; `parameters` and `states` move."""
        results: list[StepResult] = []
        for together in self._rounds:
            begin = len(results)
            gradients: list[Gradient] = []
            for position, traced in enumerate(together, begin):
                gradient, result = self._gradient(traced, parameters, batches[position])
                gradients.append(gradient)
                results.append(result)
            for position, (traced, gradient) in enumerate(zip(together, gradients, strict=True), begin):
                step, theta, state = self._stepping[position], parameters[traced.number], states[position]
                with torch.no_grad():
                    parameters[traced.number], after = step(theta, gradient, state, is_fused=self._is_fused)
                state[: step.num_states] = after
        return results

    def _gradient(
        self, traced: Traced, parameters: Sequence[Sequence[Tensor]], batches: Sequence[Batches]
    ) -> tuple[Gradient, StepResult]:
        """Return a problem's gradient, clipped, and its results."""
        problem = traced.problem
        output, gradient = self.gradients(traced, parameters, batches)
        with torch.no_grad():
            hypergradient_norm = norm_of(problem, gradient) if traced.with_norm else None
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
    # The usual batch, in each tick: looking it up in torch's table of containers takes longer.
    if type(value) is dict:
        return dict, *[(key, kinds_of(part, tensors, seen)) for key, part in value.items()]
    leaves, structure = tree_flatten(value)
    if structure.is_leaf():
        if not isinstance(value, _PLAIN):
            # It may hold tensors, which a trace would take for constants.
            raise UntraceableError(f"a batch holds a {type(value).__name__}")
        return value
    return structure, *[kinds_of(leaf, tensors, seen) for leaf in leaves]


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


# Of the same steps: one for each kind of batches, and for each course of their solvers' decisions.
MOST_TRACES = 8


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


# A tensor that steps change, without autograd; those of one kind are compared as one vector, since a part of it may be
# nothing but rounding (a bias before a BatchNorm).
TensorPlace = tuple[Kind, Tensor]


# Names of problems that step together, round after round.
Rounds = tuple[tuple[str, ...], ...]

# By problem, for each batch that its gradient is averaged over: that batch and those of its pullbacks.
Drawn = dict[str, list[Batches]]

# Where the length of a run is not known; a comparison takes a planned step beside the traced one.
STEPS_BETWEEN_LOOKS = 100

_EARLY_LOOKS = (1, 2, 3, 5, 10, 20, 50, 100)

_DIFFERENT = (
    "after {count} steps its traced steps differ from steps without a trace by {difference:.1e} ({kind}, relative); "
    "expected at most {rounding:.1e}. A trace takes Python values of a loss or a module as constants (a counter, a "
    "rate that changes). Keep them in a buffer, or write runner.trace=false."
)


class TracedRounds:
    """Takes rounds of a tick as one flat program; where that cannot be, by their plans.

    There is a trace for each kind of batches, and for each course that the solvers' decisions have taken: what a step
    gets is the same whichever steps were before it.

    At its first steps, and then once in a hundredth of the run, the plans take the steps as well, and all that steps
    move is compared: parameters, buffers, what optimizers keep. What the trace gives counts at all times, so that a
    resumed run, which begins with a comparison, goes on bit by bit; but not one that has given its trace up after some
    steps, which a resumed one tries anew.

    Args:
        names: of problems, round after round; only those of the first one may have steps that are recorded.
        parts: of the ticks, which hear of what cannot be traced.
    """

    def __init__(self, names: Rounds, parts: "TickParts") -> None:
        self._names, self._parts, self._program = names, parts, parts.program
        self.engine, backend = self._program.internals.engine, self._program.internals.tracing.backend
        assert backend is not None
        self._backend, self._same_forms = BACKENDS[backend], SameForms([])
        # Problems of one round take their gradients before any of them steps.
        self.rounds = [[parts.traced(name) for name in together] for together in names]
        self._steps = [step for together in self.rounds for step in together]
        self._problems = [step.problem for step in self._steps]
        self._solutions = [[*all_plans(self.engine.solutions[step.number])] for step in self._steps]
        self._recorded = [name for name in names[0] if self._program.problems[name].trajectory.is_kept]
        self._traces: dict[Any, list[Trace]] = {}
        self._num_traces = self._num_steps = self._last_look = 0
        self._looks = Looks(self._program.internals.tracing.run_length)
        self._rounding = Rounding()
        self._bind()
        self._guard = ChangeGuard([self.engine.problems])

    def __call__(self) -> dict[str, StepResult]:
        """Take the steps; return their results by problem."""
        drawn = {
            problem.name: [_drawn(problem, solutions) for _ in range(problem.settings.accumulate_batches)]
            for problem, solutions in zip(self._problems, self._solutions, strict=True)
        }
        for name in self._recorded:
            states = [self._program.internals.recorder.state(name) for _ in drawn[name]]
            self._program.internals.recorder.record(name, [entry[name] for entry in drawn[name]], states)
        self._num_steps += 1
        try:
            if self._looks.is_due(self._parts.num_ticks()) or self._program.internals.is_watched(drawn):
                return self._compared(drawn)
            results = self._taken([*drawn.values()])
        except UntraceableError as error:
            self._parts.give_up(self._names, error)
            return self._planned(drawn)
        for problem in self._problems:
            problem.advance()
        return dict(zip(drawn, results, strict=True))

    def _planned(self, drawn: Drawn) -> dict[str, StepResult]:
        """Take the rounds by their plans; the steps are recorded already."""
        return {name: x for names in self._names for name, x in self._parts.planned(names, drawn).items()}

    def _compared(self, drawn: Drawn) -> dict[str, StepResult]:
        """Take the steps in both ways.

        Raises:
            RunError: they differ, and so may those have since the last comparison.
        """
        batches = [*drawn.values()]
        # First: where `places` binds what is there now, a change since the last step would not be seen.
        self._look()
        places = self._places()
        before = _copies(places)
        results = dict(zip(drawn, self._taken(batches), strict=True))
        traced = _copies(places)
        _put(places, before)
        # The plans' steps count, and whoever watches sees them; then all is as the trace has it.
        planned = self._planned(drawn)
        ends = _by_kind(self._places(), planned)
        problem, difference = self._difference(ends, _by_kind(places, results, traced), places, before, batches)
        was_compared, self._last_look = self._last_look == self._num_steps - 1, self._num_steps
        if difference and not was_compared:
            raise RunError(f"problems.{problem}: {difference}")
        if difference:
            # Nothing is lost: all steps until now were compared, and this one is the plan's.
            self._parts.give_up(self._names, UntraceableError(difference, problem))
            return planned
        _put(self._places(), traced)
        # What the evaluation of the plans may have kept is no change.
        self._guard.settle()
        return results

    def _difference(
        self,
        planned: Values,
        traced: Values,
        places: Sequence[TensorPlace],
        before: Sequence[Tensor],
        batches: Sequence[Sequence[Batches]],
    ) -> tuple[str, str]:
        """Return the problem whose planned and traced steps are further apart than rounding takes them, and a text."""
        # The relative error of one rounding, in the lowest precision in which a trace computes.
        unit = max(trace.unit for traces in self._traces.values() for trace in traces)
        start = _by_kind(places, {}, before)
        apart, kinds = distances(planned, traced, start, unit), [kind for (_, kind), _ in places]

        def take(parameters: Sequence[Tensor]) -> Values | None:
            others, kept = iter(parameters), [memory.value for memory in self.engine.memories]
            start = [next(others) if x == "parameters" else y for x, y in zip(kinds, before, strict=True)]
            _put(self._places(), start)
            arguments, traces = self._found(batches)
            results = next((x for trace in traces if (x := self._run(trace, arguments)) is not None), None)
            for memory, value in zip(self.engine.memories, kept, strict=True):
                memory.value = value
            names = [problem.name for problem in self._problems]
            return None if results is None else _by_kind(self._places(), dict(zip(names, results, strict=True)))

        if self._rounding.beyond(apart, unit):
            end = _copies(self._places())
            # Of the trace, which is a function of tensors: a plan's step is one of modules, optimizers and schedulers.
            parameters = [tensor for kind, tensor in zip(kinds, before, strict=True) if kind == "parameters"]
            self._rounding.measure(take, parameters, start, unit)
            _put(self._places(), end)
        for kind, distance in self._rounding.beyond(apart, unit).items():
            values = {"difference": distance, "kind": kind[1], "rounding": self._rounding.limit(kind, unit)}
            return kind[0], _DIFFERENT.format(count=self._num_steps, **values)
        return "", ""

    def _taken(self, batches: Sequence[Sequence[Batches]]) -> list[StepResult]:
        """Take the steps along a trace; parameters, buffers and optimizers move, not schedulers and counts of steps.

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

    def _found(self, batches: Sequence[Sequence[Batches]]) -> tuple[list[Tensor], list[Trace]]:
        """Return what a trace takes, and the traces for arguments of that kind."""
        self._look()
        tensors: list[Tensor] = []
        # What a trace holds for: kinds of tensors, other values in the batches, optimizers' settings.
        kinds = self._kinds(batches, tensors)
        key = kinds, *[step.refresh() for step in self.stepping]
        return self._arguments() + tensors, self._traces.setdefault(key, [])

    def _look(self) -> None:
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
            before = [step.structure for step in self.stepping]
            self._bind()
            if [step.structure for step in self.stepping] != before:
                self._traces.clear()
        if not self._same_forms(self._arguments()):
            # Kernels go through parameters in their order in memory.
            self._bind()
            self._same_forms = SameForms(self._arguments())
            self._traces.clear()

    def _check_optimizers(self) -> None:
        """Raise an UntraceableError where a trace cannot take an optimizer's steps."""
        for problem in self._problems:
            if has_step_hooks(problem.optimizer) or type(problem.optimizer) not in RULES:
                raise UntraceableError("its optimizer has hooks, or is another one", problem.name)

    def _places(self) -> list[TensorPlace]:
        """Return what the steps change."""
        self._bind()
        places: list[TensorPlace] = []
        for step in self.stepping:
            places += step.places()
        for problem in self.buffered:
            places += [((problem.name, "buffers"), tensor) for tensor in problem.slots.buffers()]
        return places

    def _kinds(self, batches: Sequence[Sequence[Batches]], tensors: list[Tensor]) -> tuple[Any, ...]:
        kinds, seen = [], dict[int, int]()
        for step, entries in zip(self._steps, batches, strict=True):
            try:
                kinds.append(tuple([kinds_of(entry, tensors, seen) for entry in entries]))
            except UntraceableError as error:
                error.problem = step.problem.name
                raise
        return tuple(kinds)

    def _bind(self) -> None:
        """Look up modules, parameters and the state of the optimizers."""
        self.buffered = [problem for problem in self.engine.problems if problem.slots.has_buffers]
        for step in self._steps:
            step.problem.optimizer_step.align_state()
        self.stepping = [TracedStep(step.problem) for step in self._steps]
        own = [problem.own for problem in self.engine.problems]
        self._fixed = [*chain.from_iterable([*own, *[step.tensors for step in self.stepping]])]

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
        remaining = iter(outputs)
        return [StepResult(next(remaining), {name: next(remaining) for name in names}) for names in trace.names]

    def _traced(self, batches: Sequence[Sequence[Batches]], arguments: Sequence[Tensor]) -> Trace:
        # Tracing runs the operations, and nothing is to move yet: modules may change batches and buffers in place.
        num_fixed = len(self._fixed)
        arguments = [tensor.detach() for tensor in arguments]
        arguments[num_fixed:] = [copied(tensor) for tensor in arguments[num_fixed:]]
        foreign = () if self._program.internals.tracing.of_users_code else map(why_foreign, self.engine.problems)
        if reason := next(filter(None, foreign), None) or why_unseen(self.engine.problems):
            raise UntraceableError(reason)
        if users := next((x.name for x in self._problems if not is_known(x.scheduler)), None):
            raise UntraceableError("its scheduler is code of yours", users)
        devices = tuple({device for problem in self.engine.problems for device in problem.devices})
        before, state = RandomState(devices), PythonState(self.engine.problems)
        kept = [memory.value for memory in self.engine.memories]
        traced = TracedFunction(self, batches, is_fused=self._backend.has_fused_steps)
        try:
            # Without it torch makes a new mode for each operation whose shape it notes: half the time of tracing.
            with guards.tracing(guards.TracingContext(ExamplesMode())):
                first = make_fx(traced, HONEST_BATCH_NORMS)(*arguments)
                if change := state.change():
                    raise UntraceableError(change, traced.gradients.problem)
                refuse_shapes_by_values(first)
                flat = without_mutations(first, arguments, self._backend.decompositions)
            run, writes = self._backend.made(flat, arguments, traced.num_moved, in_place=not traced.course.conditions)
        except Exception as error:
            before.restore()
            state.restore()
            raise UntraceableError(reason_of(error), traced.gradients.problem) from error
        finally:
            for memory, value in zip(self.engine.memories, kept, strict=True):
                memory.value = value
        reporters = tuple(who for who, _ in traced.course.reports)
        return Trace(run, rounding_unit(flat), tuple(traced.names), writes, reporters, bool(traced.course.conditions))


def _copies(places: Sequence[TensorPlace]) -> list[Tensor]:
    """Return copies of all that steps move, in the memory of the CPU (that of a GPU may be full)."""
    return [tensor.to("cpu", copy=True) for _, tensor in places]


def _put(places: Sequence[TensorPlace], tensors: Sequence[Tensor]) -> None:
    torch._foreach_copy_([tensor for _, tensor in places], [*tensors])


def _by_kind(
    places: Sequence[TensorPlace], results: Mapping[str, StepResult], tensors: Sequence[Tensor] | None = None
) -> dict[Kind, list[Tensor]]:
    """Return what is in the places, or others in their order, by problem and kind, and the losses of steps."""
    kinds: dict[Kind, list[Tensor]] = {(name, "loss"): [x.loss.detach().cpu()] for name, x in results.items()}
    for (kind, _), tensor in zip(places, _copies(places) if tensors is None else tensors, strict=True):
        kinds.setdefault(kind, []).append(tensor)
    return kinds


class Looks:
    """Tells at which of its steps a trace is compared with the plans.

    At its first steps, and then once in a hundredth of the ticks of a run, and at its last one. Where the length of the
    run is not known, every 100th tick, or hundredth of the ticks so far.

    Args:
        run_length: ticks of the whole run; None where that is not known.

    Example:
        >>> looks = Looks(run_length=2_500)
        >>> [tick for tick in range(100, 200) if looks.is_due(tick)]
        [100, 101, 102, 104, 109, 119, 144, 149, 174, 199]
    """

    def __init__(self, run_length: int | None) -> None:
        self._run_length = run_length
        self._num_steps = self._last_tick = 0

    def is_due(self, tick: int) -> bool:
        """Say whether the step that comes is one of them; called once a step.

        Args:
            tick: how many ticks were taken before.
        """
        self._num_steps += 1
        between = STEPS_BETWEEN_LOOKS if self._run_length is None else max(1, self._run_length // 100)
        is_late = tick - self._last_tick >= max(between, tick // 100)
        is_last = self._run_length is not None and tick + 1 == self._run_length
        is_due = self._num_steps in _EARLY_LOOKS or is_late or is_last
        if is_due:
            self._last_tick = tick
        return is_due


def _drawn(problem: Problem, solutions: Sequence[SolutionPlan]) -> Batches:
    """Return a problem's next batch, and those on which the pullbacks of its gradient are taken."""
    batches = {problem.name: None if problem.stream is None else problem.stream.next()}
    for solution in solutions:
        if solution.problem.name not in batches:
            batches[solution.problem.name] = solution.pullback_batch(NOW)
    return batches


def reason_of(error: Exception) -> str:
    """Return in words why steps cannot be traced.

    Args:
        error: that tracing has raised.
    """
    if isinstance(error, UntraceableError | ValuesLeaveError | LookupError):
        return str(error.args[0])
    if "_local_scalar_dense" in str(error):
        return "a loss or a module reads the value of a tensor (item, float, if), which a trace cannot follow"
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
        indices = [*filter(None, node.args[1])] if target is torch.ops.aten.index.Tensor else []
        if indices and not any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices):
            continue
        raise UntraceableError(f"the shape of a result depends on values ({target.name().partition('.')[0]})")


def rounding_unit(graph: GraphModule) -> float:
    """Return the relative error of one rounding, in the lowest precision in which a graph computes."""
    kinds = [
        (value.dtype, value.is_cuda) for node in graph.graph.nodes if isinstance(value := node.meta.get("val"), Tensor)
    ]
    # TF32 has the ten bits of fp16.
    has_tf32 = (torch.float32, True) in kinds and torch.backends.cuda.matmul.allow_tf32
    dtypes = {dtype for dtype, _ in kinds if dtype.is_floating_point} | ({torch.float16} if has_tf32 else set())
    return float(max(torch.finfo(dtype).eps for dtype in dtypes))


def why_untraceable(number: int, engine: Engine, *, is_fused: bool = False) -> str | None:
    """Return why a problem's gradients cannot be traced; None where nothing is known against it.

    Args:
        number: of the problem.
        engine: of the program.
        is_fused: for a program of several runs, beside which each takes its steps by itself; else for one that takes
            the steps too.
    """
    cases = (replace(case, is_traced=not is_fused, is_fused=is_fused) for case in _cases(number, engine))
    return next((reason(row, case) for case in cases for row in broken(case)), None)


def _cases(number: int, engine: Engine) -> Iterator[Case]:
    """Yield the problem itself, those that play a role in its loss, and the solutions that its gradient passes."""
    problem, num_ranks = engine.problems[number], 1 if engine.rank_mean.is_alone else 2
    # Whether a module is compiled, divided or evaluated again concerns every loss in which it plays a role; see below.
    settings = replace(problem.settings, compile=False, shard=False, remat=None)
    yield Case(problem.name, settings, problem.parallel, problem.optimizer, num_ranks=num_ranks, module=problem.module)
    own, is_kept = problem.hypergradient, problem.trajectory.is_kept
    is_seen = is_kept and isinstance(own, AbstractStepwise) and (own.keeps_graphs or not own.trajectory.is_whole)
    if is_seen or isinstance(own, AbstractDirector):
        yield Case(problem.name, ProblemSettings(), algorithm=own)
    for player in [engine.problems[engine.numbers[role.problem]] for role in problem.roles.values()]:
        is_compiled, is_sharded = player.compiled is not None, player.shards is not None
        held = ProblemSettings(compile=is_compiled, shard=is_sharded, remat=player.settings.remat)
        yield Case(player.name, held, module=player.module)
    for plan in all_plans(engine.solutions[number]):
        yield Case(plan.problem.name, ProblemSettings(), algorithm=plan.algorithm)


# Rounds of a tick that follow each other: several along a trace, which takes their steps, or one by its plan.
TickPart = tuple[Rounds, TracedRounds | None]


class TickParts:
    """Divides ticks into parts, made once for each kind of tick.

    Rounds that follow each other are one trace. A problem that cannot be traced steps by its plan, and so do those of
    its round; a warning says once why.

    Args:
        program: with a way of tracing, or none.
        traced: returns what a trace of a problem's gradient takes.
        planned: takes a round by its plan, on batches that were drawn, without a record of them.
        num_ticks: returns how many ticks have been taken.
    """

    def __init__(
        self,
        program: Program,
        traced: Callable[[str], Traced],
        planned: Callable[[Sequence[str], Drawn], dict[str, StepResult]],
        num_ticks: Callable[[], int],
    ) -> None:
        self.program, self.traced, self.planned, self.num_ticks = program, traced, planned, num_ticks
        # The first step is the optimizer's own, which makes its state.
        self._tracing = program.internals.tracing
        self._begin = max(self._tracing.begins_at, 1)
        self._engine = program.internals.engine
        self._known: dict[tuple[Rounds, tuple[bool, ...]], list[TickPart]] = {}
        self._traced: dict[Rounds, TracedRounds] = {}
        self._reasons: dict[str, str] = {}
        self._is_split = False
        for name, number in self._engine.numbers.items() if self._tracing.backend is not None else ():
            reason = why_untraceable(number, self._engine)
            if reason is None:
                self._engine.traced_from[number] = self._tracing.begins_at
                continue
            self._reasons[name] = reason
            # Where tracing begins late nobody has asked for it.
            if self._tracing.begins_at == 0:
                _warn(name, reason)

    def __call__(self, rounds: Rounds) -> list[TickPart]:
        """Return the parts of a tick."""
        problems = [] if self._tracing.backend is None else self._engine.problems
        key = rounds, tuple([problem.num_steps >= self._begin for problem in problems])
        if key not in self._known:
            self._known[key] = self._divided(*key)
        return self._known[key]

    def _divided(self, rounds: Rounds, has_begun: Sequence[bool]) -> list[TickPart]:
        # Rounds that follow each other, and whether they are traced.
        groups: list[tuple[list[tuple[str, ...]], bool]] = []
        problems, numbers, is_closed = self.program.problems, self._engine.numbers, True
        for names in rounds:
            is_traced = self._tracing.backend is not None and not any(name in self._reasons for name in names)
            is_traced = is_traced and all(has_begun[numbers[name]] for name in names) and self._may_trace()
            # What is recorded of a step is what there is before it.
            begins = is_closed or self._is_split or any(problems[name].trajectory.is_kept for name in names)
            if begins or not (is_traced and groups[-1][1]):
                groups.append(([], is_traced))
            groups[-1][0].append(names)
            # The problems below go back to where they were before anything else steps.
            lowers = [lower for name in names for lower in self.program.graph.lowers(name)]
            is_closed = any(problems[lower].settings.roll_back for lower in lowers)
        for rounds in [tuple(together) for together, is_traced in groups if is_traced]:
            if rounds not in self._traced:
                self._traced[rounds] = TracedRounds(rounds, self)
        return [(tuple(names), self._traced[tuple(names)] if is_traced else None) for names, is_traced in groups]

    def _may_trace(self) -> bool:
        """Return whether no code but torch's and mlotool's takes part, where a user's is not to be traced."""
        if self._tracing.of_users_code or self._traced:
            return True
        reasons = {problem.name: why_foreign(problem) for problem in self._engine.problems}
        self._reasons |= {name: reason for name, reason in reasons.items() if reason is not None}
        return not any(reasons.values())

    def give_up(self, rounds: Rounds, error: UntraceableError) -> None:
        """Leave rounds to their plans from now on, or to a trace each where it is not known which of them fails."""
        self._known.clear()
        del self._traced[rounds]
        if error.problem is None and len(rounds) > 1:
            # One by one they may do, or tell which of them does not.
            self._is_split = True
            return
        for name in [name for names in rounds for name in names] if error.problem is None else [error.problem]:
            self._reasons[name] = str(error)
            self._engine.traced_from.pop(self._engine.numbers[name], None)
            _warn(name, str(error))


def _warn(name: str, reason: str) -> None:
    text = f"problems.{name}: its steps are not traced: {reason}. Write runner.trace=false to keep it so."
    warnings.warn(text, stacklevel=2)
