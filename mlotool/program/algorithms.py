"""Which hypergradient a program can use where, and the order in which solutions are made for it.

A solution theta*_p is a function of its inputs: every problem that shapes p, and every lower solution that p
reads but does not influence. A lower problem that p both influences and reads is eliminated inside p, so what
that one depends on is an input of p as well. The same holds of all that p reads where p is differentiated through
several steps: each of them read another solution.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import refuse_scripted
from mlotool.problem.compatibility import Case, check
from mlotool.problem.interface import AbstractDirector, AbstractHypergradient, AbstractStepwise, AbstractZerothOrder
from mlotool.problem.optimizers.registry import find_rule
from mlotool.problem.problem import Problem
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.shards import matched_names
from mlotool.program.graph import Graph


@dataclass(frozen=True)
class SolutionNode:
    """One solution node to make.

    Args:
        problem: whose solution it is.
        inputs: the problems whose tensors it takes.
        constants: those inputs through which no gradient passes (the partial rule cuts them).
        inner: the nodes to make inside it, each time its loss is evaluated.
    """

    problem: str
    inputs: tuple[str, ...]
    constants: frozenset[str]
    inner: "tuple[SolutionNode, ...]" = ()


class SolutionOrder:
    """Answers what the solutions of a graph depend on.

    Args:
        graph: a valid graph.
        partial: problems whose stationarity holds the lower solutions fixed (`curvature: partial`).
        stepwise: problems that are differentiated step by step, each of which reads solutions as they were then: all
            that such a problem reads is eliminated inside it.
    """

    def __init__(self, graph: Graph, partial: Iterable[str] = (), stepwise: Iterable[str] = ()) -> None:
        self._graph = graph
        self._partial = frozenset(partial)
        self._stepwise = frozenset(stepwise)
        self._influenced: dict[str, frozenset[str]] = {}
        self._inputs: dict[str, tuple[str, ...]] = {}

    def influenced(self, name: str) -> frozenset[str]:
        """Return the problems below `name` whose solutions depend on its parameters."""
        if name not in self._influenced:
            below, influenced = self._graph.below(name), set[str]()
            while new := {lower for lower in below - influenced if self._reached(lower, name, influenced)}:
                influenced |= new
            self._influenced[name] = frozenset(influenced)
        return self._influenced[name]

    def inputs(self, name: str) -> tuple[str, ...]:
        """Return the problems whose tensors the solution of `name` takes."""
        if name not in self._inputs:
            eliminated = self._eliminated(name)
            # A dict keeps the order of discovery, so that runs are reproducible.
            inputs = dict.fromkeys(self._graph.uppers(name))
            stack, seen = list(self._graph.lowers(name)), set()
            while stack:
                other = stack.pop()
                if other in seen or other == name:
                    continue
                seen.add(other)
                if other in eliminated:
                    stack.extend(self.inputs(other))
                else:
                    inputs[other] = None
            self._inputs[name] = tuple(inputs)
        return self._inputs[name]

    def steps_of(self, name: str) -> tuple[SolutionNode, ...]:
        """Return the solution nodes that the loss of `name` needs, each after its inputs."""
        return self._order(self._graph.lowers(name), self.influenced(name), name)

    def steps_to(self, name: str) -> tuple[SolutionNode, ...]:
        """Return the solution nodes that the solution of `name` needs, itself last."""
        return self._order((name,), frozenset(self._graph.below(name) | {name}), None)

    def read_by(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what an evaluation of the loss of `name` reads that may move on later.

        Returns:
            Problems that are constants there, or inputs of its solution; and those whose nodes are made inside.
        """
        solved: dict[str, None] = {}
        read = dict.fromkeys(self._graph.lowers(name))

        def visit(steps: Iterable[SolutionNode]) -> None:
            # What depends on nothing carries no gradient.
            for step in (node for node in steps if node.inputs):
                solved[step.problem] = None
                # The steps of a stepwise one hold what they read themselves.
                if step.problem not in self._stepwise:
                    read.update(dict.fromkeys(self._graph.lowers(step.problem)))
                    visit(step.inner)

        visit(self.steps_to(name)[-1].inner)
        read.update(dict.fromkeys(self.inputs(name)))
        apart = {name, *self._graph.uppers(name), *solved}
        return tuple(other for other in read if other not in apart), tuple(solved)

    def _eliminated(self, name: str) -> frozenset[str]:
        if name in self._partial:
            return frozenset()
        return frozenset(self._graph.below(name)) if name in self._stepwise else self.influenced(name)

    def _inner(self, name: str, solved: frozenset[str]) -> tuple[SolutionNode, ...]:
        """Return the nodes inside the solution of `name`, where the solutions of `solved` carry a gradient."""
        if name in self._partial:
            return ()
        if name not in self._stepwise:
            return self.steps_of(name)
        inside = self.influenced(name) | (solved & self._eliminated(name))
        return self._order(self._graph.lowers(name), inside, name, outside=solved)

    def _reached(self, lower: str, owner: str, influenced: set[str]) -> bool:
        return any(
            source == owner or (source in influenced and not self._cut(source, lower, influenced))
            for source in self.inputs(lower)
        )

    def _cut(self, source: str, lower: str, solved: Iterable[str]) -> bool:
        # The owner of a scope is never cut: its own total gradient passes through all it influences.
        return source in self._partial and source in solved and lower in self._graph.below(source)

    def _order(
        self, targets: Iterable[str], solved: frozenset[str], owner: str | None, outside: frozenset[str] = frozenset()
    ) -> tuple[SolutionNode, ...]:
        steps: dict[str, SolutionNode] = {}
        open_: list[str] = []

        def visit(name: str) -> None:
            if name in steps or name not in solved or name == owner:
                return
            if name in open_:
                self._refuse_circle([*open_[open_.index(name) :], name])
            open_.append(name)
            inputs = self.inputs(name)
            constants = frozenset(other for other in inputs if self._cut(other, name, solved | outside))
            for other in inputs:
                if other not in constants:
                    visit(other)
            open_.pop()
            steps[name] = SolutionNode(name, inputs, constants, self._inner(name, solved | outside))

        for target in targets:
            visit(target)
        return tuple(steps.values())

    def _refuse_circle(self, circle: list[str]) -> None:
        fault = f"graph: the solutions {' -> '.join(circle)} depend on each other; expected one above the other"
        raise ConfigError(f"{fault}. Join them into one problem, or add a lower_to_upper edge between them.")


# By problem, the solution nodes that its total gradient needs.
Steps = Mapping[str, Sequence[SolutionNode]]


def algorithm_of(problem: Problem) -> AbstractHypergradient:
    """Return a problem's hypergradient.

    Raises:
        ConfigError: it has none.
    """
    if problem.hypergradient is None:
        fault = f"problems.{problem.name}.hypergradient: nothing is set; expected one, since a gradient passes"
        advice = "Write hypergradient: finite_difference, or hypergradient=Implicit(Identity()) in Python."
        raise ConfigError(f"{fault} through the solution of '{problem.name}'. {advice}")
    return problem.hypergradient


def check_algorithms(problems: Mapping[str, Problem], steps: Steps) -> None:
    """Refuse what an algorithm cannot do in the graph at hand.

    Args:
        problems: by name.
        steps: the solution nodes of each problem.

    Raises:
        ConfigError: an algorithm is missing, or refuses.
    """
    needed: dict[str, bool] = {}
    for name, nodes in steps.items():
        problem, read = problems[name], next((node.problem for node in nodes), "")
        check(Case(name, problem.settings, optimizer=problem.optimizer, read=read, module=problem.module))
        # An estimate moves the parameters above a solution as well.
        estimate = find_zeroth_order(name, problems, steps)
        check(Case(name, ProblemSettings(), algorithm=estimate, module=problem.module))
        _find_needed(nodes, problems, steps, needed, False)
    for name, is_differentiated in needed.items():
        problem, algorithm = problems[name], algorithm_of(problems[name])
        is_nested = _is_nested(problem, steps)
        # Whether it is divided concerns those that play a role in its loss; see below.
        settings = replace(problem.settings, shard=False)
        case = Case(name, settings, problem.parallel, problem.optimizer, algorithm=algorithm, module=problem.module)
        check(replace(case, is_nested=is_nested, is_differentiated=is_differentiated))
        if getattr(algorithm, "product", None) == "forward":
            refuse_scripted([problems[role.problem].module for role in problem.roles.values()], name)
        _check_steps(problem, algorithm)
        if is_nested and algorithm.pushes_solutions:
            _check_moved(problem, problems, steps)
        algorithm.check_problem(name, problem.settings.tasks)
        num_draws = problem.settings.unroll_steps * problem.settings.accumulate_batches
        algorithm.check_batches(name, problem.stream, num_draws)
    _check_sharded(problems, steps)


def _find_needed(
    nodes: Sequence[SolutionNode], problems: Mapping[str, Problem], steps: Steps, needed: dict[str, bool], above: bool
) -> None:
    """Find the problems whose pullbacks are needed, and whether their derivatives are, as `above`."""
    for node in nodes:
        needed[node.problem] = needed.get(node.problem, False) or above
        algorithm = algorithm_of(problems[node.problem])
        # Those that it shapes and reads are differentiated with its loss; those that it reads alone, only above it.
        shaped = {below.problem for below in steps[node.problem]}
        for inner in node.inner:
            # A difference of pullbacks differentiates none, unless there is another total gradient inside.
            is_moved = algorithm.moves_solutions and not _is_nested(problems[inner.problem], steps)
            _find_needed([inner], problems, steps, needed, above or (inner.problem in shaped and not is_moved))


def _is_nested(problem: Problem, steps: Steps) -> bool:
    return algorithm_of(problem).curvature == "total" and bool(steps[problem.name])


def _check_moved(problem: Problem, problems: Mapping[str, Problem], steps: Steps) -> None:
    """Refuse derivatives of a total gradient along directions where it is not known how the solutions inside move."""
    product, key = getattr(algorithm_of(problem), "product", None), f"problems.{problem.name}.hypergradient"
    for node in steps[problem.name]:
        algorithm, lower = algorithm_of(problems[node.problem]), node.problem
        reason = (
            f"since {type(algorithm).__name__} does not compute the derivative of the solution of '{lower}', which it "
            "shapes"
        )
        advice = f"Write +hypergradient@{key}=cg."
        require(algorithm.can_push, f"{key}.product", product, f"another one, {reason} and reads", advice)


def find_zeroth_order(name: str, problems: Mapping[str, Problem], steps: Steps) -> AbstractZerothOrder | None:
    """Return what estimates the gradient of `name`; None where it is differentiated.

    Raises:
        ConfigError: only a part of the solutions below would be estimated.
    """
    below = {step.problem: problems[step.problem].hypergradient for step in all_nodes(steps[name])}
    estimate = next((x for x in below.values() if isinstance(x, AbstractZerothOrder)), None)
    for lower, algorithm in below.items():
        is_right, key = estimate is None or algorithm == estimate, f"problems.{lower}.hypergradient"
        expected = f"{estimate} for all problems below '{name}', since it estimates the whole gradient at once"
        require(is_right, key, f"{algorithm}", expected)
    for step in steps[name] if estimate is not None and estimate.is_persistent else ():
        is_right, key = not any(other in below for other in step.inputs), f"problems.{step.problem}.hypergradient"
        expected = (
            "false in a chain of solutions, since rollouts would need earlier states of the solutions that they read"
        )
        require(is_right, f"{key}.persistent", True, expected)
    return estimate


def all_nodes(nodes: Sequence[SolutionNode]) -> Iterator[SolutionNode]:
    """Yield solution nodes, each followed by those inside it."""
    for node in nodes:
        yield node
        yield from all_nodes(node.inner)


def _check_sharded(problems: Mapping[str, Problem], steps: Steps) -> None:
    """Refuse a gradient that passes through a solution where one of the parameters at hand is in shards.

    A pullback computes with whole parameters, and most differentiate twice: FSDP2 frees what that needs.
    """
    sharded = {name for name, problem in problems.items() if problem.settings.shard}
    for name in sharded:
        patterns = problems[name].settings.shard
        if not isinstance(patterns, bool):
            matched_names(f"problems.{name}.shard", problems[name].module, patterns)
    for name, problem in problems.items():
        for use, other in problem.node.other_uses.items():
            expected = f"false, since '{other}' gives problems.{name}.{use}, which needs whole parameters"
            require(other not in sharded, f"problems.{other}.shard", problems[other].settings.shard, expected)
        for node in all_nodes(steps[name]):
            algorithm = algorithm_of(problems[node.problem])
            played = {role.problem for role in problems[node.problem].roles.values()}
            for other in sorted(sharded & {name, node.problem, *node.inputs, *played}):
                settings = problems[other].settings
                check(Case(other, settings, algorithm=algorithm, solution=node.problem, reader=name))


# What is asked of an algorithm alone that derives from a class: elsewhere it would be left out in silence.
_BASES = {"sees_steps": AbstractStepwise, "step_direction": AbstractDirector, "rollout": AbstractZerothOrder}


def _check_steps(problem: Problem, algorithm: AbstractHypergradient) -> None:
    """Refuse what shapes an optimizer's steps where the hypergradient does not see them."""
    for member, base in _BASES.items():
        expected = f"a subclass of mlotool.program.{base.__name__}, as it has {member}"
        is_right = bool(getattr(algorithm, member, False)) == isinstance(algorithm, base)
        require(is_right, f"problems.{problem.name}.hypergradient", algorithm, expected, "Derive it from that.")
    if isinstance(algorithm, AbstractStepwise):
        find_rule(problem.name, problem.optimizer)
        horizon, is_from_another = algorithm.horizon, problem.settings.starts_from is not None
        is_right = not is_from_another or horizon is None or horizon >= problem.settings.unroll_steps
        expected = f"null, or at least unroll_steps, as '{problem.settings.reset_to}' gives the start (reset_to)"
        require(is_right, f"problems.{problem.name}.hypergradient.horizon", horizon, expected)
        return
    in_loss = {role.problem for role in problem.roles.values()}
    for use, other in problem.node.other_uses.items():
        # A start that also enters the loss (implicit MAML) shapes the solution through it.
        if use != "reset_to" or other not in in_loss:
            fault = f"problems.{problem.name}.{use}: '{other}' shapes '{problem.name}' through its steps, which"
            advice = f"Write hypergradient: unrolled, or give '{other}' a role in the loss of '{problem.name}'."
            raise ConfigError(f"{fault} {type(algorithm).__name__} does not see; expected Unrolled. {advice}")


def find_order(problems: Mapping[str, Problem], graph: Graph) -> SolutionOrder:
    """Return which solutions depend on which parameters, as the problems' hypergradients differentiate them.

    Args:
        problems: by name.
        graph: between them, valid.
    """
    settings = {name: problem.settings for name, problem in problems.items()}
    algorithms = {name: owner.hypergradient for name, owner in problems.items() if owner.hypergradient is not None}
    partial = [name for name, algorithm in algorithms.items() if algorithm.curvature == "partial"]
    stepwise = [
        name
        for name, algorithm in algorithms.items()
        if isinstance(algorithm, AbstractStepwise) and algorithm.horizon != 1
        if not isinstance(algorithm, AbstractZerothOrder)
        if takes_several_steps(name, settings, graph)
    ]
    return SolutionOrder(graph, partial, stepwise)


def ticks_per_step(settings: Mapping[str, ProblemSettings], graph: Graph) -> dict[str, int]:
    """Return, by problem, the ticks from one step to the next, warm-up aside; `settings` are by problem."""

    @cache
    def ticks(name: str) -> int:
        return max([ticks(lower) * settings[lower].unroll_steps for lower in graph.lowers(name)], default=1)

    return {name: ticks(name) for name in settings}


def takes_several_steps(name: str, settings: Mapping[str, ProblemSettings], graph: Graph) -> bool:
    """Return whether a problem may take more than one step before one that reads it does."""
    ticks = ticks_per_step(settings, graph)
    siblings = {name, *(lower for reader in graph.readers(name) for lower in graph.lowers(reader))}
    return any(
        ticks[peer] * settings[peer].unroll_steps > ticks[name] or (peer != name and settings[peer].warmup_steps > 0)
        for peer in siblings
    )
