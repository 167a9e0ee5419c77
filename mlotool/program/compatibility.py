"""Which hypergradient a program can use where."""

from collections.abc import Iterator, Mapping, Sequence

from mlotool.core.errors import ConfigError
from mlotool.problem.interface import AbstractHypergradient
from mlotool.problem.problem import Problem
from mlotool.problem.update import find_update
from mlotool.problem.zeroth_order import AbstractZerothOrder
from mlotool.program.solution_order import SolutionNode

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
        _check_search(problems[name], nodes)
        _find_needed(nodes, problems, steps, needed, is_differentiated=False)
    for name, is_differentiated in needed.items():
        problem = problems[name]
        algorithm = algorithm_of(problem)
        _check_steps(problem, algorithm)
        is_nested = _is_nested(problem, steps)
        _check_precision(problem, algorithm, is_higher=is_nested or is_differentiated)
        _check_compiled(problem, problems, algorithm, is_differentiated=is_differentiated)
        _check_parallel(problem, algorithm)
        algorithm.check(name, is_nested=is_nested, is_differentiated=is_differentiated)
        if is_nested and algorithm.moves_solutions:
            _check_moved(problem, problems, steps)
        algorithm.check_problem(name, problem.tasks)
        algorithm.check_batches(name, problem.stream, problem.unroll_steps * problem.accumulate_batches)
    _check_sharded(problems, steps)


def _check_search(problem: Problem, nodes: Sequence[SolutionNode]) -> None:
    if problem.evaluates_again and nodes:
        raise ConfigError(
            f"problems.{problem.name}.optimizer: found {type(problem.optimizer).__name__}, which compares values of "
            f"the loss, but the gradient passes through the solution of '{nodes[0].problem}', which stays as it is "
            "where those values are taken; expected an optimizer that steps along the gradient. Write optimizer: adam."
        )


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
    """Refuse differences of a total gradient where it is not known how the solutions inside move along."""
    for node in steps[problem.name]:
        algorithm = algorithm_of(problems[node.problem])
        if not algorithm.can_push:
            raise ConfigError(
                f"problems.{problem.name}.hypergradient.product: found finite_difference, but '{problem.name}' both "
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


def _check_precision(problem: Problem, algorithm: AbstractHypergradient, *, is_higher: bool) -> None:
    if problem.precision == "fp16" and (algorithm.sees_steps or is_higher):
        reason = (
            f"{type(algorithm).__name__} differentiates its steps, of which an overflow skips some"
            if algorithm.sees_steps
            else "its pullback is differentiated, or contains another one, where no loss scale keeps from underflow"
        )
        raise ConfigError(
            f"problems.{problem.name}.precision: found fp16, but {reason}; expected bf16 or fp32. "
            f"Write problems.{problem.name}.precision: bf16."
        )


def _check_compiled(
    problem: Problem,
    problems: Mapping[str, Problem],
    algorithm: AbstractHypergradient,
    *,
    is_differentiated: bool,
) -> None:
    if not (algorithm.differentiates_twice or is_differentiated):
        return
    for role in problem.roles.values():
        if problems[role.problem].compiled is not None:
            raise ConfigError(
                f"problems.{role.problem}.compile: found true, but the hypergradient of '{problem.name}' takes second "
                f"derivatives of a loss that it plays in, which torch.compile does not have; expected false, or an "
                f"algorithm of first order. Write hypergradient: finite_difference, or remove compile."
            )


def _check_parallel(problem: Problem, algorithm: AbstractHypergradient) -> None:
    if problem.parallel is not None and algorithm.directs_steps:
        raise ConfigError(
            f"problems.{problem.name}.hypergradient: found {type(algorithm).__name__}, which makes the steps of "
            f"'{problem.name}' from gradients of its loss that it keeps, but problems.{problem.name}.parallel is set, "
            "and layer-parallel steps follow others; expected an implicit hypergradient. Write hypergradient: "
            "finite_difference, or remove parallel."
        )
    if problem.parallel is not None and algorithm.sees_steps:
        raise ConfigError(
            f"problems.{problem.name}.hypergradient: found {type(algorithm).__name__}, which takes the steps of "
            f"'{problem.name}' again, but problems.{problem.name}.parallel is set, and layer-parallel steps follow "
            "other gradients than the loss's; expected an implicit hypergradient. Write hypergradient: "
            "finite_difference, or remove parallel."
        )


def _check_sharded(problems: Mapping[str, Problem], steps: Steps) -> None:
    """Refuse a gradient that passes through a solution where one of the parameters at hand is in shards.

    A pullback computes with whole parameters, and most differentiate twice: FSDP2 frees what that needs.
    """
    sharded = {name for name, problem in problems.items() if problem.is_sharded}
    for name, problem in problems.items():
        for use, other in problem.node.other_uses.items():
            if other in sharded:
                raise ConfigError(
                    f"problems.{other}.shard: found true, but it gives problems.{name}.{use}; expected false, as that "
                    f"needs whole parameters. Write problems.{other}.shard: false."
                )
        for node in _all_nodes(steps[name]):
            algorithm = algorithm_of(problems[node.problem])
            played = {role.problem for role in problems[node.problem].roles.values()}
            found = sorted(sharded & {name, node.problem, *node.inputs, *played})
            if found and not algorithm.is_constant:
                raise ConfigError(
                    f"problems.{found[0]}.shard: found true, but the gradient of '{name}' passes through the solution "
                    f"of '{node.problem}' by {type(algorithm).__name__}; expected first_order, since sharded "
                    "parameters have no second derivatives (FSDP2 frees what they need). Write hypergradient: "
                    f"first_order, or problems.{found[0]}.shard: false."
                )


def _check_steps(problem: Problem, algorithm: AbstractHypergradient) -> None:
    """Refuse what shapes an optimizer's steps where the hypergradient does not see them."""
    if algorithm.is_persistent:
        for key, value in (("reset_to", problem.reset_to), ("roll_back", problem.roll_back or None)):
            if value is not None:
                raise ConfigError(
                    f"problems.{problem.name}.{key}: found {value!r} with persistent: true, whose rollouts go on where "
                    "the last ones ended, while the problem's own steps begin elsewhere; expected that they go on as "
                    f"well. Set persistent=false, or leave {key} out."
                )
    if algorithm.sees_steps:
        find_update(problem.name, problem.optimizer)
        horizon, is_from_another = algorithm.horizon, problem.reset_to not in (None, "initial")
        if is_from_another and horizon is not None and horizon < problem.unroll_steps:
            raise ConfigError(
                f"problems.{problem.name}.hypergradient.horizon: found {horizon} with unroll_steps="
                f"{problem.unroll_steps}; expected null or at least that, since the gradient has to reach the start "
                f"that '{problem.reset_to}' gives. Set horizon=null."
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
