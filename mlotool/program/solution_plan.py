"""The solution of one problem, compiled once: which tensors it takes, and its loss as a function of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mlotool.core.precision import full_precision
from mlotool.core.tangents import any_has_tangent
from mlotool.problem.batches import Share
from mlotool.problem.interface import (
    AbstractHypergradient,
    AbstractZerothOrder,
    Connected,
    Eliminated,
    LowerProblem,
    LowerView,
    Particle,
    Pullback,
    Unroll,
    Vector,
)
from mlotool.problem.optimizers.registry import RULES, find_rule
from mlotool.problem.optimizers.rule import Hyperparameters, State
from mlotool.problem.problem import Problem
from mlotool.problem.stream import SameBatch, Stream
from mlotool.problem.trajectory import LowerSnapshot, LowerSnapshots
from mlotool.program.engine import Engine
from mlotool.program.learned_hyperparameters import learned_hyperparameters, start_of
from mlotool.program.loss_plan import Tensors, Values
from mlotool.program.moment import NOW, Moment
from mlotool.program.simulated_steps import check_simulation, simulated_batches
from mlotool.program.solution_node import Node, solution
from mlotool.program.solution_order import SolutionNode
from mlotool.program.solution_tangents import moved, push


class SolutionPlan:
    """Makes the view of one lower problem that its algorithm needs, for one reader.

    Args:
        step: the solution.
        reader: the problem whose gradient it is for.
        engine: of the program.
    """

    def __init__(self, step: SolutionNode, reader: str, engine: Engine) -> None:
        self.number = engine.numbers[step.problem]
        self.problem = lower = engine.problems[self.number]
        assert lower.hypergradient is not None
        self.algorithm: AbstractHypergradient = lower.hypergradient
        self.inner = [SolutionPlan(each, lower.name, engine) for each in step.inner]
        self._engine = engine
        self._loss = engine.losses[self.number]
        self._full_precision: Callable[[], AbstractContextManager[None]] = nullcontext
        if lower.settings.precision != "fp32" and self.algorithm.needs_full_precision:
            self._full_precision = full_precision
        self._is_plain = not step.inner and self._full_precision is nullcontext
        is_mean = lower.settings.tasks is not None and engine.problems[engine.numbers[reader]].settings.tasks is None
        rule = RULES.get(type(lower.optimizer))
        has_linear_step = rule is not None and rule.is_linear and lower.settings.gradient_clip_norm is None
        self._lower = LowerProblem(
            lower.name,
            reader,
            lower.settings.tasks,
            lower.module,
            engine.rank_mean,
            lower.settings.precision,
            is_nested=bool(step.inner),
            has_blocks=lower.has_blocks,
            has_linear_step=has_linear_step,
            cotangent_scale=float(lower.settings.tasks or 1) if is_mean else 1.0,
            traits=engine.traits[self.number],
            memory=engine.memories[self.number],
            random=engine.random,
        )
        steps, horizon = lower.settings.unroll_steps, self.algorithm.horizon
        self._num_recorded = steps if horizon is None else min(steps, horizon)
        players = [engine.problems[engine.numbers[role.problem]].module for role in lower.roles.values()]
        self._modules = tuple(dict.fromkeys([lower.module, *players]))
        # By input: its number, whether it is a constant, and where its tensors stand among those of all inputs.
        self.inputs: list[tuple[int, bool, slice]] = []
        begin = 0
        for other in step.inputs:
            number = engine.numbers[other]
            end = begin + len(engine.problems[number].own)
            self.inputs.append((number, other in step.constants, slice(begin, end)))
            begin = end

    def is_simulated(self, moment: Moment) -> bool:
        """Return whether the values of the solution come from steps that are taken functionally."""
        return self.algorithm.sees_steps and self.problem.name not in moment.lower_snapshots

    def flat_inputs(self, values: Values) -> list[Tensor]:
        """Return the tensors that the solution takes, of all inputs."""
        found: list[Tensor] = []
        for number, is_constant, _ in self.inputs:
            tensors = values[number]
            if tensors is None:
                found += self._engine.problems[number].current()
            else:
                found += [tensor.detach() for tensor in tensors] if is_constant else tensors
        return found

    def add(
        self,
        values: Values,
        moment: Moment,
        direct: Callable[[Values], Tensor] | None = None,
    ) -> None:
        """Put the solution into `values`, as tensors whose backward is the pullback.

        Args:
            values: tensors by problem, those of all inputs among them.
            moment: batches, earlier snapshots and parameters that take the place of the current ones.
            direct: the reader's loss at other values, without solutions.
        """
        inputs = self.flat_inputs(values)
        is_constant = not (any(tensor.requires_grad for tensor in inputs) or any_has_tangent(inputs))
        if is_constant and not self.is_simulated(moment):
            values[self.number] = self._theta(moment)
            return
        view = self.view(values, inputs, moment, direct)
        pullback = self.algorithm.pullback(view, inputs)
        if pullback is None:
            values[self.number] = self._theta(moment)
        elif isinstance(pullback, Connected):
            values[self.number] = pullback.outputs
        else:
            node = Node(self._engine.rank_mean, self._engine.random, pullback, view.devices)
            values[self.number] = solution(node, inputs, partial(self._push, view, pullback))

    def _push(self, view: LowerView, pullback: Pullback, inputs: Vector, directions: Vector) -> list[Tensor]:
        # The pullback's own has its random numbers.
        own = getattr(pullback, "push", None)
        if own is None:
            return self.algorithm.push(view, inputs, directions)
        return list(own(pullback.outputs, inputs, directions))

    def roll_out(self, values: Values, moment: Moment, particle: Particle | None) -> None:
        """Put into `values` what theta*_l would have been for the values of its inputs."""
        assert isinstance(self.algorithm, AbstractZerothOrder)
        inputs = self.flat_inputs(values)
        view = replace(self.view(values, inputs, moment, None), particle=particle)
        values[self.number] = self.algorithm.rollout(view, inputs)

    def view(
        self,
        values: Values,
        inputs: Sequence[Tensor],
        moment: Moment,
        direct: Callable[[Values], Tensor] | None,
    ) -> LowerView:
        """Return the problem as its algorithm sees it. Arguments as for `add`, with the flat inputs."""
        lower, batches = self.problem, moment.batches
        snapshot = moment.lower_snapshots.get(lower.name)
        stream = lower.stream if snapshot is None else snapshot.stream
        is_unrolled = self.algorithm.sees_steps
        batch = None if is_unrolled else self.pullback_batch(moment)
        samples, weight = Share.opened(batch)

        def own_loss(theta: Vector, flat: Vector) -> Tensor:
            return self._at(theta, self._placed(flat, moment), batch, moment)

        return LowerView(
            self._lower,
            self._theta(moment),
            own_loss,
            samples,
            None if stream is None and lower.stream is not None else _batch_number(lower, stream, batches),
            weight,
            self._unroll(snapshot, moment) if is_unrolled else None,
            self._step_pullback,
            None if direct is None else lambda flat: direct(self._placed(flat, Moment(parameters=moment.parameters))),
            eliminated=self._eliminated(batch, moment) if self.inner else None,
        )

    def pullback_batch(self, moment: Moment) -> Any:
        """Return the batch on which the pullback is taken."""
        lower, snapshot = self.problem, moment.lower_snapshots.get(self.problem.name)
        batch = moment.batches.get(lower.name)
        stream = lower.stream if snapshot is None else snapshot.stream
        if batch is None and stream is not None:
            batch = stream.peek() if self.algorithm.batch == "fresh" else stream.last()
        return batch

    def _theta(self, moment: Moment) -> tuple[Tensor, ...]:
        snapshot = moment.lower_snapshots.get(self.problem.name)
        if snapshot is not None:
            return tuple(each.detach() for each in snapshot.theta)
        return self.problem.current() if moment.parameters is None else tuple(moment.parameters[self.number])

    def _placed(self, flat: Vector, moment: Moment) -> Values:
        """Return values with the inputs, and the lower problems that are not as they are now, in their places."""
        engine = self._engine
        values = moment.values(len(engine.problems))
        for name, snapshot in moment.lower_snapshots.items():
            values[engine.numbers[name]] = snapshot.theta
        for number, _, part in self.inputs:
            values[number] = flat[part]
        return values

    def _at(self, theta: Vector, values: Values, batch: Any, moment: Moment) -> Tensor:
        """Return the loss at theta, with the solutions inside it."""
        values[self.number] = theta
        if self._is_plain:
            return self._loss(values, batch).loss
        with self._full_precision():
            return self._engine.loss_with(self._loss, self.inner, values, batch, moment)

    def _eliminated(self, batch: Any, moment: Moment) -> Eliminated:
        engine = self._engine

        def at(inner: "SolutionPlan", values: Values) -> tuple[list[Tensor], LowerView]:
            inputs = inner.flat_inputs(values)
            return inputs, inner.view(values, inputs, moment, None)

        def push_from(theta: Vector, flat: Vector, direction: Vector) -> dict[int, Vector]:
            values = self._placed(flat, Moment(parameters=moment.parameters))
            values[self.number] = theta
            moves: dict[int, Vector] = {self.number: direction}
            push(self.inner, values, moves, at)
            del moves[self.number]
            return moves

        def own_loss(theta: Vector, flat: Vector, moves: Mapping[int, Vector]) -> Tensor:
            problems = [engine.problems[number] for number in moves]
            after = {
                each.name: moved(each, moment.lower_snapshots.get(each.name), move)
                for each, move in zip(problems, moves.values(), strict=True)
            }
            there = replace(moment, lower_snapshots={**moment.lower_snapshots, **after})
            return self._at(theta, self._placed(flat, moment), batch, there)

        return Eliminated(push_from, own_loss)

    def _step_pullback(self, theta: Vector, gradient: Vector, cotangent: Vector) -> list[Tensor]:
        lower = self.problem
        find_rule(lower.name, lower.optimizer)  # refuses before anything asks for the optimizer's state
        lower.sync()
        assert lower.optimizer is not None
        # As it is, and no copy: it is only read.
        state = [lower.optimizer.state.get(parameter, {}) for parameter in lower.own]
        given = learned_hyperparameters(
            lower, self._engine, lower.optimizer_step.hyperparameters(), self._engine.nothing()
        )
        found = lower.optimizer_step.pull_back(theta, gradient, state, given, [*cotangent])
        return [found.factor * each for each in found.gradient if each is not None]

    def _unroll(self, snapshot: LowerSnapshot | None, moment: Moment) -> Unroll:
        lower, engine = self.problem, self._engine
        given = moment.batches.get(lower.name)
        if snapshot is not None:
            records, has_all = snapshot.steps, snapshot.has_all
        else:
            records, has_all = () if given is not None else tuple(lower.trajectory), lower.trajectory.has_all
        simulated = () if records else simulated_batches(lower, given)
        if len(simulated) > 1:
            below = [plan.problem for plan in engine.solutions[self.number]]
            check_simulation(lower, below, moment.batches)
        is_reset, has_start = lower.settings.reset_to is not None, lower.settings.starts_from is not None

        def loss(theta: Vector, flat: Vector, batch: Any, lower_snapshots: LowerSnapshots) -> Tensor:
            values = self._placed(flat, moment)
            inputs = {number for number, _, _ in self.inputs}
            for name, then in lower_snapshots.items():
                number = engine.numbers[name]
                now = values[number] if number in inputs else None
                values[number] = then.theta if now is None else _as_then(now, then.theta)
            # Batches that are given belong to the lower problems as they are now.
            batches = {} if lower_snapshots else moment.batches
            there = replace(moment, batches=batches, lower_snapshots={**moment.lower_snapshots, **lower_snapshots})
            return self._at(theta, values, batch, there)

        def step(
            theta: Vector,
            gradient: Sequence[Tensor | None],
            state: Sequence[State],
            hyperparameters: Sequence[Hyperparameters],
            flat: Vector,
        ) -> tuple[list[Tensor], list[State]]:
            learned = learned_hyperparameters(lower, engine, hyperparameters, self._placed(flat, NOW))
            return lower.optimizer_step.pure(theta, gradient, state, learned)

        def start(flat: Vector) -> Vector:
            return start_of(lower, engine, self._placed(flat, NOW))

        def begin() -> tuple[Vector, Sequence[State]]:
            if not is_reset:
                return lower.current(), lower.optimizer_state()
            state: tuple[State, ...] = tuple({} for _ in lower.theta)
            if has_start:
                return start_of(lower, engine, engine.nothing()), state
            # The problem may have been moved since it was made.
            return tuple(x.to(now.device) for x, now in zip(lower.initial, lower.own, strict=True)), state

        return Unroll(
            records,
            not records or has_all,
            simulated,
            loss,
            step,
            None if lower.settings.optimizer_roles else lower.optimizer_step.pull_back,
            start if has_start else None,
            begin,
            lower.optimizer_step.next_hyperparameters,
            self._num_recorded,
            step if lower.settings.optimizer_roles else lower.optimizer_step.again,
            engine.is_traced(self.number),
            self._modules,
        )


def all_plans(plans: Sequence[SolutionPlan]) -> Iterator[SolutionPlan]:
    """Yield the plans and those inside them."""
    for plan in plans:
        yield plan
        yield from all_plans(plan.inner)


def _as_then(tensors: Tensors, values: Tensors) -> list[Tensor]:
    """Return `values`, of an earlier step, with the derivatives of `tensors`, which have moved on."""
    return [
        value + (tensor - tensor.detach()) if tensor.requires_grad else value
        for tensor, value in zip(tensors, values, strict=True)
    ]


def _batch_number(problem: Problem, stream: Stream | SameBatch | None, batches: Mapping[str, Any]) -> int | None:
    if problem.stream is None:
        return 0
    is_drawn = batches.get(problem.name) is None and _batch_rule(problem) == "last"
    return getattr(stream, "last_number", None) if is_drawn else None


def _batch_rule(problem: Problem) -> str:
    return "last" if problem.hypergradient is None else problem.hypergradient.batch
