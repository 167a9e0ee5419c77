"""The problems of a program by number: the loss of each as a function of tensors, and the solution of each.

The values of an evaluation are a list with one entry for each problem. `SolutionPlan.view` is what an algorithm is told
of a lower problem; `add` puts a solution into the values as tensors whose backward is the algorithm's pullback.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.gradient import full_precision
from mlotool.core.loss_output import LossOutput
from mlotool.core.messages import kind_of
from mlotool.core.random_stream import RandomStream
from mlotool.core.replay import LossTraits, RandomState
from mlotool.core.tangents import any_has_tangent, apart, joined
from mlotool.core.user_code import Call, note
from mlotool.problem import interface
from mlotool.problem.interface import LowerView, Pullback, Vector
from mlotool.problem.optimizers.registry import RULES, find_rule
from mlotool.problem.optimizers.rule import Hyperparameters, State
from mlotool.problem.problem import Problem
from mlotool.problem.rank_mean import RankMean, Reduce
from mlotool.problem.streams.batches import Share
from mlotool.problem.streams.stream import SameBatch, Stream
from mlotool.problem.tasks import TaskLosses, check_unmoved
from mlotool.problem.trajectory import LowerSnapshot, LowerSnapshots
from mlotool.program.algorithms import SolutionNode, algorithm_of

# The trained parameters of one problem, in the order of its `theta`.
Tensors = Sequence[Tensor]

# Takes the name of a problem, that of a method of its module, and what this has returned.
See = Callable[[str, str, Any], Any]

# By number of the problem, the tensors in its parameters' places; None is the current ones, as constants.
Values = list[Tensors | None]


@dataclass(frozen=True)
class Moment:
    """What takes the place of current batches and parameters in an evaluation: at an earlier step, or as given.

    Args:
        batches: by problem, in the place of its stream's last batch.
        lower_snapshots: by problem, lower problems as they were at an earlier step.
        parameters: by number of the problem, constants in the place of its current parameters; None takes these.
    """

    batches: Mapping[str, Any] = field(default_factory=dict)
    lower_snapshots: LowerSnapshots = field(default_factory=dict)
    parameters: Sequence[Tensors] | None = None

    def values(self, num_problems: int) -> Values:
        """Return one entry per problem: its tensors here, or None for its current parameters; constants both."""
        return [None] * num_problems if self.parameters is None else list(self.parameters)


# The current parameters of all problems, and the last batches of their streams.
NOW = Moment()


class LossPlan:
    """Evaluates the loss of one problem.

    Args:
        number: of the problem.
        problems: all of the program, in order.
    """

    def __init__(self, number: int, problems: Sequence[Problem]) -> None:
        self.problem = problem = problems[number]
        self._problems = problems
        numbers = {other.name: position for position, other in enumerate(problems)}
        self._roles = [
            (role, numbers[player.problem], problems[numbers[player.problem]], player.training)
            for role, player in problem.roles.items()
        ]
        # Those that play a role and have a task axis, and its length.
        self._stacked = sorted({place for _, place, other, _ in self._roles if other.settings.tasks is not None})
        num_tasks = None if not self._stacked else problems[self._stacked[0]].settings.tasks
        self._tasks = None if num_tasks is None else TaskLosses(problem.name, num_tasks, problem.devices)
        # Until its first evaluation has shown it.
        self._keeps_buffers = False
        self._see: See | None = None
        self._synced = [(other, other.parallel) for other in problems if other.parallel is not None]

    def __call__(self, values: Values, batch: Any, *, live: bool = False) -> LossOutput:
        """Return the loss.

        Args:
            values: tensors by problem.
            batch: of the problem; a Share is weighted.
            live: whether it is that of a training step, in which the problem's own buffers move; else a pure function.
        """
        return self._evaluate(self._whole if self._tasks is None else self._of_tasks, values, batch, live)

    def by_task(self, values: Values, batch: Any) -> Tensor:
        """Return the losses of the problem's own tasks, 1-D. Arguments as for the call."""
        losses = self._evaluate(self._tasks_apart, values, batch, False).loss
        return losses if self.problem.settings.tasks is not None else losses.mean()

    @contextmanager
    def watched(self, see: See) -> Iterator[None]:
        """Inside the block, outputs of the other problems' modules are replaced by what `see` makes of them.

        Args:
            see: takes the problem's name, the name of its method ("" for a call of the module), and what that returned.
        """
        self._see = see
        try:
            yield
        finally:
            self._see = None

    def call_of(self, batch: Any) -> Call:
        """Return in words what the loss is called with, for messages."""
        given = {"batch": batch, **{role: other.module for role, _, other, _ in self._roles}}
        expected, advice = "the loss of such a batch", "Correct the loss, the module or the data."
        return Call(f"problems.{self.problem.name}.loss", self.problem.loss, given, expected, advice)

    def _evaluate(
        self, call: Callable[[Values, Any, bool], LossOutput], values: Values, shared: Any, live: bool
    ) -> LossOutput:
        for other, parallel in self._synced:
            # Its own training step runs the stages where they are.
            if not live or other is not self.problem:
                parallel.sync(None)
        batch, weight = Share.opened(shared)
        try:
            output = call(values, batch, live)
        except Exception as error:
            note(error, lambda: self.call_of(batch))
            raise
        return output if weight == 1.0 else Share.weigh(output, weight)

    def _whole(self, values: Values, batch: Any, live: bool) -> LossOutput:
        return self.problem.evaluated(batch, self._players(values, live))

    def _players(self, values: Values, live: bool) -> dict[str, BoundModule]:
        own, see = self.problem, self._see
        players = {
            role: (other.live if live and other is own else other.pure)(values[place], training)
            for role, place, other, training in self._roles
        }
        if see is None:
            return players
        return {
            role: players[role] if other is own else players[role].watched(partial(see, other.name))
            for role, _, other, _ in self._roles
        }

    def _of_tasks(self, values: Values, batch: Any, live: bool) -> LossOutput:
        output = self._tasks_apart(values, batch, live)
        # Tasks do not share their own parameters: the gradient of the sum is each one's.
        total = output.loss.sum() if self.problem.settings.tasks is not None else output.loss.mean()
        return LossOutput(total, output.metrics)

    def _tasks_apart(self, values: Values, batch: Any, live: bool) -> LossOutput:
        assert self._tasks is not None
        stacked: dict[int, tuple[Tensor, ...]] = {}
        for place in self._stacked:
            tensors = values[place]
            stacked[place] = self._problems[place].current() if tensors is None else tuple(tensors)

        def one(parameters: dict[int, tuple[Tensor, ...]], part: Any) -> LossOutput:
            task = list(values)
            for place, tensors in parameters.items():
                task[place] = tensors
            players = self._players(task, False)
            output = self.problem.evaluated(part, players)
            if not self._keeps_buffers:
                for role, _, other, _ in self._roles:
                    if other is self.problem:
                        check_unmoved(other.name, players[role])
            return output

        output = self._tasks(one, stacked, batch, with_metrics=live)
        self._keeps_buffers = True
        return output


def start_of(problem: Problem, engine: "Engine", values: Values) -> tuple[Tensor, ...]:
    """Return the parameters of the problem that `problem` is reset to, once for each of its tasks."""
    number = engine.numbers[str(problem.settings.reset_to)]
    source, given = engine.problems[number], values[number]
    tensors = dict(zip(source.theta, source.current() if given is None else given, strict=True))
    for key, tensor in problem.theta.items():
        shape = tensor.shape if problem.num_tasks is None else tensor.shape[1:]
        is_right = key in tensors and tensors[key].shape == shape
        expected = f"a problem whose module has a parameter '{key}' of shape {tuple(shape)}"
        require(is_right, f"problems.{problem.name}.reset_to", source.name, expected, "Give both the same module.")
    num_tasks = problem.num_tasks
    if num_tasks is None:
        return tuple(tensors[key] for key in problem.theta)
    return tuple(tensors[key].expand(num_tasks, *tensors[key].shape) for key in problem.theta)


def learned_hyperparameters(
    problem: Problem, engine: "Engine", hyperparameters: Sequence[Hyperparameters], values: Values
) -> tuple[Hyperparameters, ...]:
    """Return the hyperparameters of a problem's optimizer with those values that other problems give."""
    if not problem.settings.optimizer_roles:
        return tuple(hyperparameters)
    learned: dict[str, Sequence[Any]] = {}
    for key, name in problem.settings.optimizer_roles.items():
        number = engine.numbers[name]
        value = engine.problems[number].pure(values[number], None)()
        learned[key] = _spread(f"problems.{problem.name}.optimizer.{key}", value, problem.theta)
    of_parameters = [dict(zip(learned, numbers, strict=True)) for numbers in zip(*learned.values(), strict=True)]
    return tuple({**settings, **own} for settings, own in zip(hyperparameters, of_parameters, strict=True))


class Engine:
    """What all plans of a program share.

    Args:
        problems: in order; a problem's position is its number.
        reduce: a mean over ranks of a list of tensors; None in one process.
        steps: by problem, the solution nodes that its total gradient needs.
        random: the program's random numbers.

    Attributes:
        memories: by number, what the problem's algorithm keeps.
        rank_mean: the mean over ranks.
        means: by number, that of the problem's gradients and losses; of tasks, which ranks divide, there is none.
        losses: by number, the problem's loss.
        solutions: by number, the solutions that the problem's total gradient passes through, each after its inputs.
        traits: by number, what was found out about the problem's loss.
        traced_from: by number, the step from which on a schedule traces the problem's steps; none for the others.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        reduce: Reduce | None,
        steps: Mapping[str, Sequence[SolutionNode]],
        random: RandomStream,
    ) -> None:
        self.problems = list(problems)
        self.rank_mean = RankMean() if reduce is None else RankMean(reduce)
        # A rank's tasks are its own: nobody else has them.
        self.means = [RankMean() if problem.num_tasks is not None else self.rank_mean for problem in self.problems]
        algorithms = [problem.hypergradient for problem in self.problems]
        self.memories = [interface.Memory(None if method is None else method.initial_state()) for method in algorithms]
        self.random = random
        self.numbers = {problem.name: number for number, problem in enumerate(self.problems)}
        self.losses = [LossPlan(number, self.problems) for number in range(len(self.problems))]
        self.traits = [LossTraits() for _ in self.problems]
        self.traced_from: dict[int, int] = {}
        self.solutions = [
            [SolutionPlan(step, problem.name, self) for step in steps[problem.name]] for problem in self.problems
        ]

    def is_traced(self, number: int) -> bool:
        """Return whether the next steps of a problem run as a trace."""
        begin = self.traced_from.get(number)
        return begin is not None and self.problems[number].num_steps >= begin

    def nothing(self) -> Values:
        """Return values of which every problem has its current ones, as constants."""
        return [None] * len(self.problems)

    def own(self, number: int) -> Values:
        """Return values in which one problem has its parameters themselves."""
        values = self.nothing()
        values[number] = self.problems[number].own
        return values

    def loss_with(
        self, loss: LossPlan, solutions: Sequence["SolutionPlan"], values: Values, batch: Any, moment: Moment
    ) -> Tensor:
        """Return a loss with solutions inside it, which are put into `values`, each after its inputs."""
        for plan in solutions:
            plan.add(values, moment, lambda given: loss(given, batch).loss)
        return loss(values, batch).loss


def _spread(key: str, value: Any, theta: Mapping[str, Tensor]) -> list[Any]:
    """Return a hyperparameter for each parameter of `theta`.

    Args:
        key: where it is set, for messages.
        value: a tensor of one element; a 1-D tensor with one element per parameter; or tensors by parameter name that
            broadcast to the parameter.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, Mapping) and set(value) == set(theta):
        return [value[name] for name in theta]
    if isinstance(value, Tensor) and value.numel() == 1:
        return [value.reshape(())] * len(theta)
    if isinstance(value, Tensor) and value.shape == (len(theta),):
        return list(value)
    expected = f"one value, {len(theta)} values (one per parameter), or a mapping with the keys {', '.join(theta)}"
    raise ConfigError(f"{key}: its problem's module gives {kind_of(value)}; expected {expected}. Correct its forward.")


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
        self.algorithm: interface.AbstractHypergradient = lower.hypergradient
        self.inner = [SolutionPlan(inner, lower.name, engine) for inner in step.inner]
        self._engine = engine
        self._loss = engine.losses[self.number]
        self._is_full = lower.settings.precision != "fp32" and self.algorithm.needs_full_precision
        self._is_mean = lower.num_tasks is not None and engine.problems[engine.numbers[reader]].num_tasks is None
        rule = RULES.get(type(lower.optimizer))
        has_linear_step = rule is not None and rule.is_linear and lower.settings.gradient_clip_norm is None
        self._told = interface.LowerProblem(
            lower.name,
            reader,
            None,
            lower.module,
            engine.means[self.number],
            lower.settings.precision,
            is_nested=bool(step.inner),
            has_blocks=lower.has_blocks,
            has_linear_step=has_linear_step,
            traits=engine.traits[self.number],
            memory=engine.memories[self.number],
            random=engine.random,
        )
        steps = lower.settings.unroll_steps
        horizon = self.algorithm.horizon if isinstance(self.algorithm, interface.AbstractStepwise) else None
        self._num_recorded = min(steps, horizon or steps)
        players = [engine.problems[engine.numbers[role.problem]].module for role in lower.roles.values()]
        self._modules = tuple(dict.fromkeys([lower.module, *players]))
        # By input: its number, whether it is a constant, and where its tensors stand among those of all inputs.
        self.inputs: list[tuple[int, bool, slice]] = []
        begin = 0
        for number, is_constant in [(engine.numbers[other], other in step.constants) for other in step.inputs]:
            end = begin + len(engine.problems[number].own)
            self.inputs.append((number, is_constant, slice(begin, end)))
            begin = end

    @property
    def _lower(self) -> interface.LowerProblem:
        """What the algorithm is told at every pullback; ranks divide the tasks once the plans are made."""
        if self._told.num_tasks != (num_tasks := self.problem.num_tasks):
            share, is_mean = self.problem.task_share, self._is_mean
            scale, num_parts = float(num_tasks or 1) if is_mean else 1.0, share.ranks.size if share and is_mean else 1
            self._told = replace(self._told, num_tasks=num_tasks, cotangent_scale=scale, num_parts=num_parts)
        return self._told

    def is_simulated(self, moment: Moment) -> bool:
        """Return whether the values of the solution come from steps that are taken functionally."""
        return self.algorithm.sees_steps and self.problem.name not in moment.lower_snapshots

    def flat_inputs(self, values: Values) -> list[Tensor]:
        """Return the tensors that the solution takes, of all inputs."""
        flat: list[Tensor] = []
        for number, is_constant, _ in self.inputs:
            tensors = values[number]
            tensors = self._engine.problems[number].current() if tensors is None else tensors
            flat += [tensor.detach() for tensor in tensors] if is_constant else tensors
        return flat

    def add(self, values: Values, moment: Moment, direct: Callable[[Values], Tensor] | None = None) -> None:
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
            return
        node = Node(self._engine.means[self.number], self._engine.random, pullback, view.devices)
        # The pullback's own has its random numbers.
        own = getattr(pullback, "push", None)
        push = partial(self.algorithm.push, view) if own is None else partial(own, pullback.outputs)
        values[self.number] = solution(node, inputs, push)

    def roll_out(self, values: Values, moment: Moment, particle: interface.Particle | None) -> None:
        """Put into `values` what theta*_l would have been for the values of its inputs."""
        assert isinstance(self.algorithm, interface.AbstractZerothOrder)
        inputs = self.flat_inputs(values)
        view = replace(self.view(values, inputs, moment, None), particle=particle)
        values[self.number] = self.algorithm.rollout(view, inputs)

    def view(
        self, values: Values, inputs: Sequence[Tensor], moment: Moment, direct: Callable[[Values], Tensor] | None
    ) -> LowerView:
        """Return the problem as its algorithm sees it. Arguments as for `add`, with the flat inputs."""
        lower, batches = self.problem, moment.batches
        snapshot = moment.lower_snapshots.get(lower.name)
        stream = lower.stream if snapshot is None else snapshot.stream
        is_unrolled = self.algorithm.sees_steps
        batch = None if is_unrolled else self.pullback_batch(moment)
        samples, weight = Share.opened(batch)
        return LowerView(
            self._lower,
            self._theta(moment),
            lambda theta, flat: self._at(theta, self._placed(flat, moment), batch, moment),
            samples,
            self._batch_number(stream, batches),
            weight,
            self._unroll(snapshot, moment) if is_unrolled else None,
            self._step_pullback,
            None if direct is None else lambda flat: direct(self._placed(flat, Moment(parameters=moment.parameters))),
            eliminated=self._eliminated(batch, moment) if self.inner else None,
        )

    def _batch_number(self, stream: Stream | SameBatch | None, batches: Mapping[str, Any]) -> int | None:
        if self.problem.stream is None:
            return 0
        is_drawn = batches.get(self.problem.name) is None and self.algorithm.batch == "last"
        return getattr(stream, "last_number", None) if is_drawn else None

    def pullback_batch(self, moment: Moment) -> Any:
        """Return the batch on which the pullback is taken."""
        lower, snapshot = self.problem, moment.lower_snapshots.get(self.problem.name)
        batch = moment.batches.get(lower.name)
        stream = lower.stream if snapshot is None else snapshot.stream
        if batch is not None or stream is None:
            return batch
        return stream.peek() if self.algorithm.batch == "fresh" else stream.last()

    def _theta(self, moment: Moment) -> tuple[Tensor, ...]:
        snapshot = moment.lower_snapshots.get(self.problem.name)
        if snapshot is not None:
            return tuple(tensor.detach() for tensor in snapshot.theta)
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
        if not self._is_full:
            return self._engine.loss_with(self._loss, self.inner, values, batch, moment)
        with full_precision():
            return self._engine.loss_with(self._loss, self.inner, values, batch, moment)

    def _eliminated(self, batch: Any, moment: Moment) -> interface.Eliminated:
        """Return how the solutions inside the loss move, and the loss at moved ones."""
        now = Moment(parameters=moment.parameters)

        def push(solutions: Sequence[SolutionPlan], values: Values, moves: dict[int, Vector]) -> None:
            """Add to `moves` how solutions move with those problems that are there already."""
            for inner in solutions:
                moving = {number for number, is_constant, _ in inner.inputs if number in moves and not is_constant}
                if inner.number in moves or not moving:
                    continue
                inputs = inner.flat_inputs(values)
                view = inner.view(values, inputs, moment, None)
                directions: list[Tensor] = []
                for number, _, part in inner.inputs:
                    directions += moves[number] if number in moving else [*map(torch.zeros_like, inputs[part])]
                moves[inner.number] = inner.algorithm.push(view, inputs, directions)
                values[inner.number] = view.theta
                push(inner.inner, values, moves)

        def push_from(theta: Vector, flat: Vector, direction: Vector) -> dict[int, Vector]:
            values = self._placed(flat, now)
            values[self.number] = theta
            moves: dict[int, Vector] = {self.number: direction}
            push(self.inner, values, moves)
            del moves[self.number]
            return moves

        def own_loss(theta: Vector, flat: Vector, moves: Mapping[int, Vector]) -> Tensor:
            after = dict(moment.lower_snapshots)
            for number, move in moves.items():
                problem = self._engine.problems[number]
                before = after.get(problem.name) or LowerSnapshot(problem.current(), problem.stream)
                moved = tuple(tensor + shift for tensor, shift in zip(before.theta, move, strict=True))
                after[problem.name] = replace(before, theta=moved)
            return self._at(theta, self._placed(flat, moment), batch, replace(moment, lower_snapshots=after))

        return interface.Eliminated(push_from, own_loss)

    def _step_pullback(self, theta: Vector, gradient: Vector, cotangent: Vector) -> list[Tensor]:
        lower, engine = self.problem, self._engine
        find_rule(lower.name, lower.optimizer)  # refuses before anything asks for the optimizer's state
        lower.sync()
        assert lower.optimizer is not None
        # As it is, and no copy: it is only read.
        state = [lower.optimizer.state.get(parameter, {}) for parameter in lower.own]
        given = learned_hyperparameters(lower, engine, lower.optimizer_step.hyperparameters(), engine.nothing())
        pulled = lower.optimizer_step.pull_back(theta, gradient, state, given, [*cotangent])
        return [pulled.factor * slope for slope in pulled.gradient if slope is not None]

    def _unroll(self, snapshot: LowerSnapshot | None, moment: Moment) -> interface.Unroll:
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
        has_start = lower.settings.starts_from is not None

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

        def begin() -> tuple[Vector, Sequence[State]]:
            if lower.settings.reset_to is None:
                return lower.current(), lower.optimizer_state()
            state: tuple[State, ...] = tuple({} for _ in lower.theta)
            if has_start:
                return start_of(lower, engine, engine.nothing()), state
            # The problem may have been moved since it was made.
            return tuple(x.to(now.device) for x, now in zip(lower.initial, lower.own, strict=True)), state

        return interface.Unroll(
            records,
            not records or has_all,
            simulated,
            loss,
            step,
            None if lower.settings.optimizer_roles else lower.optimizer_step.pull_back,
            (lambda flat: start_of(lower, engine, self._placed(flat, NOW))) if has_start else None,
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


def simulated_batches(problem: Problem, given: Any) -> tuple[tuple[Any, ...], ...]:
    """Return the batches of each step that is simulated where none were recorded.

    Args:
        problem: the problem.
        given: a list of the steps' batches, `accumulate_batches` for each, or one batch for all; None takes the last
            one of its stream.

    Raises:
        ConfigError: the list does not fit.
    """
    # A list is one of batches; a tuple may be a batch.
    if not isinstance(given, list):
        batch = problem.stream.last() if given is None and problem.stream is not None else given
        return ((batch,),) * problem.settings.unroll_steps
    count = problem.settings.accumulate_batches
    if not given or len(given) % count:
        text = f"found a list of {len(given)} for '{problem.name}'; expected a multiple of accumulate_batches={count}."
        raise ConfigError(f"batches: {text} Give the batches of the steps one after the other.")
    return tuple(tuple(given[start : start + count]) for start in range(0, len(given), count))


def check_simulation(problem: Problem, below: Iterable[Problem], batches: Mapping[str, Any]) -> None:
    """Refuse several steps of which each changes a solution that it reads, but not its value.

    Raises:
        ConfigError: one of those `below`, which the problem both shapes and reads, is not simulated as well.
    """
    for lower in below:
        if not algorithm_of(lower).sees_steps or (lower.name not in batches and len(lower.trajectory)):
            fault = f"batches: found several steps of '{problem.name}', whose loss reads '{lower.name}'"
            expected = f"one step, or a list of batches for '{lower.name}' as well, with Unrolled"
            raise ConfigError(f"{fault}; expected {expected}. Give these.")


class Node(NamedTuple):
    """What a solution node needs beside its inputs.

    It is for those who differentiate a pullback, in reverse or forward mode, and for `Program.solution`. The node saves
    its OUTPUTS: differentiating the pullback with respect to theta leads back into the node. On several ranks the
    pullback gets the mean cotangent: where its factors are means of their own, their product would not be the mean of
    the ranks' products.

    Args:
        ranks: the mean over ranks, of the problem.
        random: what random numbers are drawn from in the backward pass.
        pullback: of the solution.
        devices: the CUDA devices that the problem runs on.
        tangents: of the inputs, then of the solution, where forward mode is taken over the pullback; else empty.
    """

    ranks: RankMean
    random: RandomStream
    pullback: Pullback
    devices: tuple[torch.device, ...] = ()
    tangents: Sequence[Tensor | None] = ()


def solution(
    node: Node, inputs: Sequence[Tensor], push: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """Return theta*_l of the inputs, with tangents where these have some.

    Args:
        node: of the solution.
        inputs: what it depends on.
        push: `(inputs, their tangents) -> tangents of theta*_l`.
    """
    if not any_has_tangent(inputs):
        return Solution.apply(node, *inputs)
    values, tangents = apart(inputs)
    whole = [torch.zeros_like(x) if tangent is None else tangent for x, tangent in zip(values, tangents, strict=True)]
    still = [value.detach() for value in values]
    # What is drawn after the solution is what it would be without tangents.
    with node.random, RandomState(node.devices).replayed(), torch.no_grad():
        moves = push(still, [tangent.detach() for tangent in whole])
    return joined(Solution.apply(node._replace(tangents=[*tangents, *moves]), *values), moves)


class Solution(torch.autograd.Function):
    """theta*_l of the inputs x."""

    @staticmethod
    def forward(ctx: Any, node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Hand on the current parameters; the pullback will draw the random numbers of the program."""
        outputs = tuple(tensor.view_as(tensor) for tensor in node.pullback.outputs)
        ctx.node = node
        ctx.num_inputs = len(inputs)
        ctx.save_for_backward(*inputs, *outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, *cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Pull a cotangent of theta*_l back to the inputs."""
        node, count = ctx.node, ctx.num_inputs
        inputs, theta = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        wanted = ctx.needs_input_grad[1:]
        with node.random:
            if node.tangents:
                pulled = _moving_pullback(node, theta, inputs, wanted, cotangent)
            elif torch.is_grad_enabled():
                pulled = node.pullback.differentiable(theta, inputs, wanted, node.ranks.mean(cotangent))
            else:
                pulled = node.pullback.first_order(theta, inputs, wanted, [*node.ranks.mean(cotangent)])
        values = iter(pulled)
        return (None, *(next(values) if flag else None for flag in wanted))


def _moving_pullback(
    node: Node, theta: Sequence[Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool], cotangent: Sequence[Tensor]
) -> list[Tensor]:
    """Return the cotangents of the wanted inputs, and as their tangents how they move.

    A pullback calls autograd, so its own derivative is taken by autograd as well: `J^T p` is linear in p, and its
    derivative transposed is J.
    """
    values, of_cotangent = apart(cotangent)
    whole = [torch.zeros_like(x) if move is None else move for x, move in zip(values, of_cotangent, strict=True)]
    given = [*inputs, *theta, *node.ranks.mean(values)]
    tangents = [*node.tangents, *node.ranks.mean(whole)]
    with torch.enable_grad():
        points = [tensor.detach().requires_grad_() for tensor in given]
        last = len(inputs) + len(theta)
        slopes = node.pullback.differentiable(points[len(inputs) : last], points[: len(inputs)], wanted, points[last:])
        probe = [torch.zeros_like(slope, requires_grad=True) for slope in slopes]
        moving = [(x, tangent.detach()) for x, tangent in zip(points, tangents, strict=True) if tangent is not None]
        pulled = torch.autograd.grad(slopes, [x for x, _ in moving], probe, create_graph=True, materialize_grads=True)
        pairs = [(y, tangent) for y, (_, tangent) in zip(pulled, moving, strict=True) if y.requires_grad]
        moves = torch.autograd.grad(
            [y for y, _ in pairs], probe, [tangent for _, tangent in pairs], allow_unused=True, materialize_grads=True
        )
    return joined([slope.detach() for slope in slopes], moves)
