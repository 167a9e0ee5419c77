"""Which problems' steps cannot be traced, and why: rows of the table of what does not go together."""

from collections.abc import Iterator
from dataclasses import replace

from mlotool.problem.compatibility import Case, broken, reason
from mlotool.problem.settings import ProblemSettings
from mlotool.program.engine import Engine
from mlotool.program.solution_plan import all_plans


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
    own = problem.hypergradient
    if own is not None and (
        own.directs_steps or (problem.trajectory.is_kept and (own.keeps_graphs or not own.trajectory.is_whole))
    ):
        yield Case(problem.name, ProblemSettings(), algorithm=own)
    for role in problem.roles.values():
        player = engine.problems[engine.numbers[role.problem]]
        held = ProblemSettings(
            compile=player.compiled is not None, shard=player.shards is not None, remat=player.settings.remat
        )
        yield Case(player.name, held, module=player.module)
    for plan in all_plans(engine.solutions[number]):
        yield Case(plan.problem.name, ProblemSettings(), algorithm=plan.algorithm)
