"""Which hypergradient a program can use where."""

from collections.abc import Mapping, Sequence

from mlotool.core.errors import ConfigError
from mlotool.program.dependence import SolutionStep
from mlotool.program.differentiation import AbstractHypergradient, AbstractZerothOrder
from mlotool.program.problem import Problem
from mlotool.program.update import find_update

Steps = Mapping[str, Sequence[SolutionStep]]
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


def check_algorithms(problems: Mapping[str, Problem], steps: Steps, partial: frozenset[str]) -> None:
    """Refuse what an algorithm cannot do in the graph at hand.

    Args:
        problems: by name.
        steps: the solution nodes of each problem.
        partial: the problems whose stationarity holds lower solutions fixed.

    Raises:
        ConfigError: an algorithm is missing, or refuses.
    """
    differentiated = {
        step.problem
        for nodes in steps.values()
        for upper in nodes
        if upper.problem not in partial
        for step in steps[upper.problem]
    }
    for name in {step.problem: None for nodes in steps.values() for step in nodes}:
        problem = problems[name]
        algorithm = algorithm_of(problem)
        _check_steps(problem, algorithm)
        _check_readings(problem, algorithm, steps)
        is_nested = name not in partial and bool(steps[name])
        _check_precision(problem, algorithm, is_higher=is_nested or name in differentiated)
        _check_compiled(problem, problems, algorithm, is_differentiated=name in differentiated)
        algorithm.check(name, is_nested=is_nested, is_differentiated=name in differentiated)
        algorithm.check_batches(name, problem.stream, problem.unroll_steps * problem.accumulate_batches)


def find_zeroth_order(name: str, problems: Mapping[str, Problem], steps: Steps) -> AbstractZerothOrder | None:
    """Return what estimates the gradient of `name`; None where it is differentiated.

    Raises:
        ConfigError: only a part of the solutions below would be estimated.
    """
    below = {step.problem: problems[step.problem].hypergradient for step in steps[name]}
    found = next((each for each in below.values() if isinstance(each, AbstractZerothOrder)), None)
    for lower, algorithm in below.items():
        if found is not None and algorithm != found:
            raise ConfigError(
                f"problems.{lower}.hypergradient: found {algorithm}, but the gradient of '{name}' passes through "
                f"another solution by {found}, which estimates it as a whole; expected the same for both. Write "
                "the same hypergradient for all problems below."
            )
    return found


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


def _check_readings(problem: Problem, algorithm: AbstractHypergradient, steps: Steps) -> None:
    """Refuse several steps that each read another solution as it was then, where the gradient goes on through it."""
    if not algorithm.sees_steps or isinstance(algorithm, AbstractZerothOrder) or problem.unroll_steps == 1:
        return
    for nodes in steps.values():
        made = {step.problem for step in nodes}
        for step in nodes:
            read = [other for other in step.inputs if other in made and other not in step.constants]
            if step.problem == problem.name and read:
                raise ConfigError(
                    f"problems.{problem.name}.hypergradient: found {type(algorithm).__name__} with unroll_steps="
                    f"{problem.unroll_steps}, but each of these steps reads the solution of '{read[0]}' as it was "
                    "then, and only the last one is known; expected unroll_steps: 1 or an implicit hypergradient. "
                    f"Write +hypergradient@problems.{problem.name}.hypergradient=cg."
                )


def _check_steps(problem: Problem, algorithm: AbstractHypergradient) -> None:
    """Refuse what shapes an optimizer's steps where the hypergradient does not see them."""
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
