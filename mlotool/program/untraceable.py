"""Which problems' steps cannot be traced, and why: one line each."""

from collections.abc import Iterator

from mlotool.problem.interface import identity_reduce
from mlotool.program.engine import Engine
from mlotool.program.solution_plan import all_plans
from mlotool.program.traced_step import has_traced_step


def why_untraceable(number: int, engine: Engine) -> str | None:
    """Return why a problem's steps cannot be traced; None where nothing is known against it.

    Args:
        number: of the problem.
        engine: of the program.
    """
    return next(_reasons(number, engine), None)


def _reasons(number: int, engine: Engine) -> Iterator[str]:
    problem = engine.problems[number]
    played = [engine.problems[engine.numbers[role.problem]] for role in problem.roles.values()]
    own = problem.hypergradient
    if engine.reduce is not identity_reduce:
        yield "its gradient is a mean over ranks"
    if problem.parallel is not None:
        yield "its training is layer-parallel"
    if problem.loss_scale is not None:
        yield "in fp16 a step decides by its gradient whether it is taken"
    if not has_traced_step(problem):
        yield f"its optimizer is {type(problem.optimizer).__name__}, and none of SGD, Adam and AdamW"
    if problem.settings.optimizer_roles:
        yield "another problem gives settings of its optimizer"
    if problem.settings.reset_to is not None:
        yield "each of its unrolls begins anew (reset_to)"
    if problem.settings.roll_back:
        yield "its steps are a look-ahead (roll_back)"
    if own is not None and own.directs_steps:
        yield "its hypergradient directs its steps"
    if own is not None and own.keeps_graphs and problem.trajectory.is_kept:
        yield "its hypergradient keeps the graphs of its steps"
    for each in played:
        if each.compiled is not None:
            yield f"the module of '{each.name}' is compiled by itself"
        if each.shards is not None:
            yield f"the parameters of '{each.name}' are in shards"
    for solution in all_plans(engine.solutions[number]):
        if not solution.algorithm.is_traceable:
            yield f"the hypergradient of '{solution.problem.name}' keeps something from one use to the next, or decides"
