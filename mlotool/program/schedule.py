"""When each problem steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.loss_output import LossOutput
from mlotool.core.plain_state import ADVICE, check_count, check_form, check_list, check_mapping
from mlotool.core.replay import RandomState
from mlotool.core.user_code import Call, is_of_user, note
from mlotool.problem.interface import AbstractStepwise
from mlotool.problem.problem import Evaluate, Problem
from mlotool.problem.rank_mean import mean_gradient
from mlotool.problem.saved_form import check_learned
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.trajectory import StepGraph
from mlotool.program.algorithms import ticks_per_step
from mlotool.program.gradient_plan import PreparedStep, StepResult, averaged
from mlotool.program.graph import Graph
from mlotool.program.program import Program
from mlotool.program.solution_plan import NOW, Moment
from mlotool.program.trace import Drawn, TickParts, Traced

# A batch, its position in the stream where every epoch has the same batches, and what is read beside it.
_Draw = tuple[Any, int | None, Moment]


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of tick.

    Args:
        rounds: problems that step together, round after round; each problem is in one of them at most.
        waited: afterwards, by edge of `TickOrder.edges`, the lower problem's steps since the upper one's last, up to
            its `unroll_steps`.
    """

    rounds: tuple[tuple[str, ...], ...]
    waited: tuple[int, ...]


class TickOrder:
    """Tells the rounds of a tick from how long each problem has waited for those that it reads.

    Every leaf problem (one that reads no other) is in the first round; a problem above is in the round after the one in
    which the last problem that it reads has taken its `unroll_steps`.

    Args:
        settings: by problem.
        graph: the edges between them.

    Attributes:
        edges: pairs of an upper problem and a lower one that it reads.
        start: `waited` before the first tick, one count an edge.

    Example:
        A classifier that takes two steps for one of its weights::

            order = TickOrder(settings, graph)
            order(order.start, frozenset())      # rounds (("classifier",),), waited (1,)
            order((1,), frozenset())             # rounds (("classifier",), ("weights",)), waited (0,)
    """

    def __init__(self, settings: Mapping[str, ProblemSettings], graph: Graph) -> None:
        self._settings = settings
        self._leaves = tuple(graph.leaves(settings))
        self._lowers = {name: tuple(graph.lowers(name)) for name in settings if graph.lowers(name)}
        self.edges = tuple((upper, lower) for upper, lowers in self._lowers.items() for lower in lowers)
        self.start = (0,) * len(self.edges)
        self._known: dict[tuple[tuple[int, ...], frozenset[str]], Order] = {}

    def __call__(self, waited: tuple[int, ...], warming_up: frozenset[str]) -> Order:
        """Return a tick's rounds.

        Args:
            waited: one count an edge, as `Order.waited` has them.
            warming_up: problems whose step of this tick does not count for those above.
        """
        key = waited, warming_up
        if key not in self._known:
            counts = dict(zip(self.edges, waited, strict=True))
            rounds = tuple(self._rounds(counts, warming_up))
            self._known[key] = Order(rounds, tuple(counts.values()))
        return self._known[key]

    def _rounds(self, waited: dict[tuple[str, str], int], warming_up: frozenset[str]) -> Iterator[tuple[str, ...]]:
        """Yield the rounds; the counts move along."""
        due, stepped = self._leaves, set[str]()
        while due:
            yield due
            stepped.update(due)
            for name in due:
                for lower in self._lowers.get(name, ()):
                    waited[name, lower] = 0
                for edge in self.edges if name not in warming_up else ():
                    if edge[1] == name:
                        # No more than counts: so there are few kinds of ticks.
                        waited[edge] = min(waited[edge] + 1, self._settings[name].unroll_steps)
            late = {upper for (upper, lower), count in waited.items() if count < self._settings[lower].unroll_steps}
            due = tuple(name for name in self._lowers if name not in stepped | late)


class Schedule:
    """Takes the optimizer steps of a program's problems, tick by tick.

    In a tick, each problem that reads no other takes one step. A problem above then takes a step as soon as each
    problem that it reads has taken `unroll_steps` since the last step above; lower problems that are ready earlier go
    on stepping meanwhile. Problems that step at the same moment all compute their gradients before any of them steps,
    so the order of declaration does not matter.

    Args:
        program: the problems and their graph; every problem needs an optimizer.
        with_norms: whether results include the norms of hypergradients, for logs; this costs 1% of the time with small
            networks.

    Raises:
        ConfigError: `program` is not a Program, or one of its problems has no optimizer.

    Example:
        Two steps of `classifier` for one of `reweight`, with `unroll_steps=2` on `classifier`::

            schedule = Schedule(program)
            for _ in range(100):
                results = schedule.tick()
    """

    def __init__(self, program: Program, *, with_norms: bool = False) -> None:
        advice = "Write Schedule(Program(problems, graph))."
        require(isinstance(program, Program), "Schedule.program", program, "a Program", advice)
        for name, problem in program.problems.items():
            advice = f"Write problems.{name}.optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}."
            require(problem.optimizer is not None, f"problems.{name}.optimizer", None, "an optimizer", advice)
        self.program, self.num_ticks, self._with_norms = program, 0, with_norms
        graph = program.graph
        self._lowers = {name: graph.lowers(name) for name in program.problems if graph.lowers(name)}
        self._settings = {name: problem.settings for name, problem in program.problems.items()}
        self._order = TickOrder(self._settings, graph)
        self._waited = self._order.start
        # Those of whose steps something is set up.
        self._beginners = {
            name: problem
            for name, problem in program.problems.items()
            if problem.settings.roll_back or problem.settings.reset_to is not None or problem.trajectory.is_kept
        }
        self._snapshots: dict[str, dict[str, Any]] = {}
        # Problems whose next step begins an unroll.
        self._at_start = set(program.problems)
        self._parts = TickParts(program, self.traced, self.step_round, lambda: self.num_ticks)
        # Modules may have been moved since the program was made.
        program.random.cover(program.devices)

    def tick(self) -> dict[str, StepResult]:
        """Take the steps of one tick: one step of each lowest problem, then those of the problems above that are due.

        Returns:
            By name, the loss, metrics and norms of each problem that has taken a step.
        """
        self.program.rehearse()
        with self.program.random:
            return self._tick()

    def _tick(self) -> dict[str, StepResult]:
        results: dict[str, StepResult] = {}
        order = self.order()
        for rounds, traced in self._parts(order.rounds):
            self.begin_round(rounds[0])
            results.update(self.step_round(rounds[0]) if traced is None else traced())
            for names in rounds:
                results.update(self.end_round(names))
        self.end_tick(order)
        return results

    def traced(self, name: str) -> Traced:
        """Return what is needed to trace a problem's gradient.

        Args:
            name: of the problem.
        """
        engine, plan = self.program.internals.engine, self.program.internals.plan_of(name)
        number = engine.numbers[name]
        return Traced(number, engine.problems[number], plan, self._with_norms and bool(engine.solutions[number]))

    def order(self) -> Order:
        """Return which problems step in the next tick, round after round."""
        problems = self.program.problems.values()
        warming_up = [problem.name for problem in problems if problem.num_steps < problem.settings.warmup_steps]
        return self._order(self._waited, frozenset(warming_up))

    def begin_round(self, names: Sequence[str]) -> None:
        """Prepare a round of steps: take snapshots for `roll_back`, and begin unrolls.

        Args:
            names: of the problems that step together.
        """
        for problem in [self._beginners[name] for name in names if name in self._beginners]:
            # Warm-up steps are real: no upper step follows that could take them back.
            is_warm = problem.num_steps >= problem.settings.warmup_steps
            looks_ahead = problem.settings.roll_back and is_warm and self.program.graph.readers(problem.name)
            if looks_ahead and problem.name not in self._snapshots:
                self._snapshots[problem.name] = problem.snapshot()
            # The first step that counts begins an unroll; those of the warm-up belong to none.
            is_counted = problem.num_steps > problem.settings.warmup_steps
            if not is_counted or problem.name in self._at_start:
                problem.trajectory.clear()
            if problem.settings.reset_to is not None and problem.name in self._at_start:
                problem.reset(self.program.internals.start(problem.name))
        self._at_start.difference_update(names)

    def step_round(self, names: Sequence[str], drawn: Drawn | None = None) -> dict[str, StepResult]:
        """Take the steps of a round without tracing; return their results.

        Args:
            names: of the problems that step together.
            drawn: the batches, if the steps have been recorded before; None draws them from the streams.
        """
        held = self.program.internals.held.intersection(names)
        results = {name: self._held(self.program.problems[name]) for name in names if name in held}
        stepping = [name for name in names if name not in held]
        return results | {step.problem.name: step.take() for step in self.prepared_round(stepping, drawn)}

    def prepared_round(self, names: Sequence[str], drawn: Drawn | None = None) -> list[PreparedStep]:
        """Compute the gradients of a round, and return its steps without taking them. Arguments as for `step_round`.

        Raises:
            RunError: a module no longer has the parameters that are trained.
        """
        for problem in self.program.internals.engine.problems:
            problem.look_at_module()
        problems = [self.program.problems[name] for name in names]
        # All gradients, and all hyperparameters that other problems give, are those before any of these steps.
        if drawn is None:
            steps = [self._prepared(problem, self._next_batches(problem)) for problem in problems]
        else:
            again = {name: [(entry[name], None, Moment(entry)) for entry in drawn[name]] for name in names}
            steps = [self._prepared(problem, again[problem.name], is_recorded=False) for problem in problems]
        # A line search evaluates its loss again, and sees the other problems as they were if it goes first.
        return sorted(steps, key=lambda step: not step.problem.optimizer_step.evaluates_again)

    def end_round(self, names: Sequence[str]) -> dict[str, StepResult]:
        """Finish a round of steps; return the results of the steps that `roll_back` takes for it."""
        for name in names:
            # What shapes the problems below has moved, or they were read: they begin new unrolls. One further above may
            # still have to differentiate their steps, which are forgotten at the next one.
            self._at_start.update(self._lowers.get(name, ()), self.program.graph.upper_to_lower.get(name, ()))
        return self._roll_back(names) if self._snapshots else {}

    def end_tick(self, order: Order) -> None:
        """Finish a tick, after all its rounds."""
        self._waited = order.waited
        self.num_ticks += 1

    def cycle_length(self) -> int:
        """Return the number of ticks after which every problem has taken a step, not counting warm-up."""
        return max(ticks_per_step(self._settings, self.program.graph).values())

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and look-ahead snapshots, in plain containers."""
        return {
            "num_ticks": self.num_ticks,
            "waited": [[*edge, steps] for edge, steps in zip(self._order.edges, self._waited, strict=True)],
            "snapshots": dict(self._snapshots),
            "at_start": [name for name in self.program.problems if name in self._at_start],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state.

        Raises:
            ConfigError: the state does not fit the program.
        """
        own, problems = self.state_dict(), self.program.problems
        check_mapping("state", state, tuple(own))
        check_count("state.num_ticks", state["num_ticks"])
        check_form("state.waited", state["waited"], own["waited"])
        check_list("state.at_start", state["at_start"])
        check_mapping("state.snapshots", state["snapshots"])
        for name in (*state["at_start"], *state["snapshots"]):
            require(name in problems, "state", name, f"one of {', '.join(problems)}", ADVICE)
        for name, snapshot in state["snapshots"].items():
            check_learned(f"state.snapshots.{name}", snapshot, problems[name])
        waited = {(upper, lower): steps for upper, lower, steps in state["waited"]}
        wanted = "the steps that each problem has waited for"
        require(waited.keys() == {*self._order.edges}, "state.waited", state["waited"], wanted, ADVICE)
        self.num_ticks = state["num_ticks"]
        self._waited = tuple(waited[edge] for edge in self._order.edges)
        self._snapshots = dict(state["snapshots"])
        self._at_start = set(state["at_start"])

    def _held(self, problem: Problem) -> StepResult:
        """Return the loss of a problem that takes no step, on the batches of the step."""
        engine = self.program.internals.engine
        number = engine.numbers[problem.name]
        draws = self._next_batches(problem)
        output = LossOutput.mean([engine.losses[number](engine.own(number), batch) for batch, *_ in draws])
        return StepResult(output.loss, output.metrics)

    def _prepared(self, problem: Problem, batches: Iterable[_Draw], *, is_recorded: bool = True) -> PreparedStep:
        """Return a step that is yet to be taken, and record it where its hypergradient wants to see it."""
        random = RandomState(problem.devices) if problem.optimizer_step.evaluates_again else None
        try:
            output, gradient = self._gradient(problem, batches, is_recorded=is_recorded)
        except Exception as error:
            code = [part for owner in self.program.problems.values() for part in (owner.loss, *owner.module.modules())]
            note(error, lambda: Call(f"problems.{problem.name}", "its gradient", is_foreign=is_of_user(*code)))
            raise
        evaluate = None if random is None else self._evaluate(problem, output, gradient, random)
        # Ranks that hold parts of a problem would each see the norm of their own.
        is_whole = problem.shards is None and problem.parallel is None and problem.task_share is None
        with_norm = self._with_norms and is_whole and bool(self.program.internals.solutions_read_by(problem.name))
        given = self.program.internals.hyperparameters(problem.name) if problem.settings.optimizer_roles else None
        return PreparedStep(problem, output, gradient, given, evaluate, with_norm)

    def _evaluate(
        self, problem: Problem, output: LossOutput, gradient: list[Tensor | None], random: RandomState
    ) -> Evaluate:
        """Return what evaluates the step's loss at other parameters: same batches, same random numbers."""
        first = [(output, gradient)]

        def evaluate() -> tuple[Tensor, list[Tensor | None]]:
            if first:
                output, gradient = first.pop()
            else:
                with random.replayed():
                    output, gradient = self._gradient(problem, _recent_batches(problem))
            # All ranks search alike, since they decide on means.
            return self.program.internals.engine.rank_mean.mean([output.loss.detach()])[0], gradient

        return evaluate

    def _next_batches(self, problem: Problem) -> Iterator[_Draw]:
        stream = problem.stream
        for _ in range(problem.settings.accumulate_batches):
            batch = None if stream is None else stream.next()
            yield batch, 0 if stream is None else getattr(stream, "last_number", None), NOW

    def _gradient(
        self, problem: Problem, batches: Iterable[_Draw], *, is_recorded: bool = True
    ) -> tuple[LossOutput, list[Tensor | None]]:
        """Return the mean direction over `batches`, which are drawn one at a time; a record of the step may be kept."""
        name, algorithm, recorder = problem.name, problem.hypergradient, self.program.internals.recorder
        if not (isinstance(algorithm, AbstractStepwise) and is_recorded and problem.trajectory.is_kept):
            return averaged(self.program.internals.training_gradient(name, *draw) for draw in batches)
        drawn: list[Any] = []
        states: list[Any] = []

        def noted() -> Iterator[_Draw]:
            for draw in batches:
                drawn.append(draw[0])
                states.append(recorder.state(name))
                yield draw

        if recorder.makes_solutions(name) or not algorithm.records_graphs(self.program.internals.algorithm_state(name)):
            output, gradient = averaged(self.program.internals.training_gradient(name, *draw) for draw in noted())
            recorder.record(name, drawn, states, gradient=gradient)
            return output, gradient
        # The graph of the gradient is kept in the record.
        leaves = recorder.leaves(name)
        pairs = [recorder.kept_gradient(name, batch, leaves) for batch, *_ in noted()]
        theta, *inputs = leaves.values()
        engine = self.program.internals.engine
        mean = mean_gradient([slopes for _, slopes in pairs], theta, engine.means[engine.numbers[name]])
        recorder.record(name, drawn, states, StepGraph(theta, [x for tensors in inputs for x in tensors], mean))
        output = pairs[0][0] if len(pairs) == 1 else LossOutput.mean([loss for loss, _ in pairs])
        return output, [None if slope is None else slope.detach() for slope in mean]

    def _roll_back(self, stepped: Iterable[str]) -> dict[str, StepResult]:
        """Return the look-ahead problems below `stepped` to where they were, and let each take one real step."""
        lowers = {lower: None for name in stepped for lower in self._lowers.get(name, ()) if lower in self._snapshots}
        problems = [self.program.problems[lower] for lower in lowers]
        for problem in problems:
            problem.restore(self._snapshots.pop(problem.name))
            problem.trajectory.clear()
        steps = [self._prepared(problem, _recent_batches(problem)) for problem in problems]
        # The real step leads to where the next look-ahead begins.
        self._at_start.update(lowers)
        return {step.problem.name: step.take() for step in steps}


def _recent_batches(problem: Problem) -> list[_Draw]:
    stream, count = problem.stream, problem.settings.accumulate_batches
    if stream is None:
        return [(None, 0, NOW)]
    batches = stream.recent(count)
    numbers = stream.recent_numbers(count) if hasattr(stream, "recent_numbers") else [None] * len(batches)
    return [(batch, number, NOW) for batch, number in zip(batches, numbers, strict=True)]
