"""Which hypergradient a program can use where, and the order in which solutions are made for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import refuse_scripted
from mlotool.core.messages import shown
from mlotool.problem.compatibility import Case, check
from mlotool.problem.interface import AbstractHypergradient, AbstractZerothOrder
from mlotool.problem.optimizers.registry import find_rule
from mlotool.problem.problem import Problem
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.shards import matched_names
from mlotool.program.graph import Graph
from mlotool.program.solution_order import SolutionNode, SolutionOrder
from mlotool.program.tick_order import takes_several_steps

Steps = Mapping[str, Sequence[SolutionNode]]
"""By problem, the solution nodes that its total gradient needs."""

_MISSING = (
    "problems.{name}.hypergradient: nothing is set, but a gradient has to pass through the solution of '{name}'; "
    "expected an algorithm. Write hypergradient: finite_difference in the recipe's defaults, or pass "
    "hypergradient=Implicit(Identity()) to Problem('{name}', ...)."
)


def algorithm_of(problem: Problem) -> AbstractHypergradient:
    """Return a problem's hypergradient.

    Raises:
        ConfigError: it has none.
    """
    if problem.hypergradient is None:
        raise ConfigError(_MISSING.format(name=problem.name))
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
        _find_needed(nodes, problems, steps, needed, is_differentiated=False)
    for name, is_differentiated in needed.items():
        problem, algorithm = problems[name], algorithm_of(problems[name])
        is_nested = _is_nested(problem, steps)
        case = Case(
            name,
            # Whether it is divided concerns those that play a role in its loss; see below.
            replace(problem.settings, shard=False),
            problem.parallel,
            problem.optimizer,
            algorithm=algorithm,
            is_nested=is_nested,
            is_differentiated=is_differentiated,
            module=problem.module,
        )
        check(case)
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
    nodes: Sequence[SolutionNode],
    problems: Mapping[str, Problem],
    steps: Steps,
    needed: dict[str, bool],
    is_differentiated: bool,
) -> None:
    """Find the problems whose pullbacks are needed, and whether their derivatives are."""
    for node in nodes:
        needed[node.problem] = needed.get(node.problem, False) or is_differentiated
        algorithm = algorithm_of(problems[node.problem])
        # Those that it shapes and reads are differentiated with its loss; those that it reads alone, only above it.
        shaped = {each.problem for each in steps[node.problem]}
        for inner in node.inner:
            # A difference of pullbacks differentiates none, unless there is another total gradient inside.
            is_moved = algorithm.moves_solutions and not _is_nested(problems[inner.problem], steps)
            is_below = inner.problem in shaped and not is_moved
            _find_needed([inner], problems, steps, needed, is_differentiated or is_below)


def _is_nested(problem: Problem, steps: Steps) -> bool:
    return algorithm_of(problem).curvature == "total" and bool(steps[problem.name])


def _check_moved(problem: Problem, problems: Mapping[str, Problem], steps: Steps) -> None:
    """Refuse derivatives of a total gradient along directions where it is not known how the solutions inside move."""
    product = getattr(algorithm_of(problem), "product", None)
    for node in steps[problem.name]:
        algorithm = algorithm_of(problems[node.problem])
        if not algorithm.can_push:
            raise ConfigError(
                f"problems.{problem.name}.hypergradient.product: found {product}, but '{problem.name}' both "
                f"shapes and reads '{node.problem}', and {type(algorithm).__name__} does not tell how the solution "
                f"of '{node.problem}' moves; expected an implicit hypergradient there, or reverse products here. "
                f"Write +hypergradient@problems.{problem.name}.hypergradient=cg."
            )


def find_zeroth_order(name: str, problems: Mapping[str, Problem], steps: Steps) -> AbstractZerothOrder | None:
    """Return what estimates the gradient of `name`; None where it is differentiated.

    Raises:
        ConfigError: only a part of the solutions below would be estimated.
    """
    below = {step.problem: problems[step.problem].hypergradient for step in _all_nodes(steps[name])}
    found = next((each for each in below.values() if isinstance(each, AbstractZerothOrder)), None)
    for lower, algorithm in below.items():
        if found is not None and algorithm != found:
            raise ConfigError(
                f"problems.{lower}.hypergradient: found {algorithm}, but the gradient of '{name}' passes through "
                f"another solution by {found}, which estimates it as a whole; expected the same for both. Write "
                "the same hypergradient for all problems below."
            )
    if found is not None and found.is_persistent:
        for step in steps[name]:
            read = [other for other in step.inputs if other in below]
            if read:
                raise ConfigError(
                    f"problems.{step.problem}.hypergradient.persistent: found true, but '{step.problem}' reads the "
                    f"solution of '{read[0]}', which its rollouts would need as it was at each step; expected false in "
                    "a chain of solutions. Set persistent=false."
                )
    return found


def _all_nodes(nodes: Sequence[SolutionNode]) -> Iterator[SolutionNode]:
    for node in nodes:
        yield node
        yield from _all_nodes(node.inner)


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
            if other in sharded:
                value = problems[other].settings.shard
                raise ConfigError(
                    f"problems.{other}.shard: found {'true' if value is True else shown(value)}, but it gives "
                    f"problems.{name}.{use}; expected false, as that needs whole parameters. Write "
                    f"problems.{other}.shard: false."
                )
        for node in _all_nodes(steps[name]):
            algorithm = algorithm_of(problems[node.problem])
            played = {role.problem for role in problems[node.problem].roles.values()}
            inside = sorted(sharded & {name, node.problem, *node.inputs, *played})
            for other in inside:
                settings = problems[other].settings
                check(Case(other, settings, algorithm=algorithm, solution=node.problem, reader=name))


def _check_steps(problem: Problem, algorithm: AbstractHypergradient) -> None:
    """Refuse what shapes an optimizer's steps where the hypergradient does not see them."""
    if algorithm.sees_steps:
        find_rule(problem.name, problem.optimizer)
        horizon, is_from_another = algorithm.horizon, problem.settings.starts_from is not None
        if is_from_another and horizon is not None and horizon < problem.settings.unroll_steps:
            raise ConfigError(
                f"problems.{problem.name}.hypergradient.horizon: found {horizon} with unroll_steps="
                f"{problem.settings.unroll_steps}; expected null or at least that, since the gradient has to reach the "
                f"start that '{problem.settings.reset_to}' gives. Set horizon=null."
            )
        return
    in_loss = {role.problem for role in problem.roles.values()}
    for use, other in problem.node.other_uses.items():
        # A start that also enters the loss (implicit MAML) shapes the solution through it.
        if use != "reset_to" or other not in in_loss:
            raise ConfigError(
                f"problems.{problem.name}.{use}: '{other}' shapes '{problem.name}' through its steps, but "
                f"{type(algorithm).__name__} takes the solution for a stationary point, which does not depend on "
                f"them; expected Unrolled. Write hypergradient: unrolled, or give '{other}' a role in the loss of "
                f"'{problem.name}'."
            )


def find_order(problems: Mapping[str, Problem], graph: Graph) -> SolutionOrder:
    """Return which solutions depend on which parameters, as the problems' hypergradients differentiate them.

    Args:
        problems: by name.
        graph: between them, valid.
    """
    settings = {name: each.settings for name, each in problems.items()}
    partial, stepwise = [], []
    for name, problem in problems.items():
        algorithm = problem.hypergradient
        if algorithm is None:
            continue
        if algorithm.curvature == "partial":
            partial.append(name)
        is_differentiated = algorithm.sees_steps and algorithm.horizon != 1
        is_estimated = isinstance(algorithm, AbstractZerothOrder)
        if is_differentiated and not is_estimated and takes_several_steps(name, settings, graph):
            stepwise.append(name)
    return SolutionOrder(graph, partial, stepwise)
