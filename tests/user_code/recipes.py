"""The recipe of a case."""

from tests.user_code.programs import Case

RECIPE = """\
# @package _global_
name: fuzzed
data: {{_target_: fuzzed.parts.Data, seed: "${{seed}}"}}
problems:
  model:
    module: {{_target_: fuzzed.parts.module, seed: "${{seed}}"}}
    loss: {{_target_: {loss}, roles: {{model: model{weigher}}}{settings}}}
    stream: {{split: train, batch_size: 8, shuffle: false}}
    optimizer: {{_target_: fuzzed.parts.optimizer, seed: "${{seed}}", by_hook: {by_hook}}}
    scheduler: {scheduler}
{above}\
evaluate: {{problem: model, metrics: [cross_entropy], splits: {{meta: 1000}}}}
runner: {{max_ticks: {ticks}, num_threads: 1, report: false, progress_bar: false, accelerator: cpu}}
logger: {{wandb: false}}
"""
ABOVE = """\
    hypergradient: {solver}
    unroll_steps: {unroll_steps}
  weigher:
    module: {{_target_: fuzzed.parts.weigher, seed: "${{seed}}"}}
    loss: {{_target_: mlotool.losses.cross_entropy, roles: {{model: model}}}}
    stream: {{split: meta, batch_size: 8, shuffle: false}}
    optimizer: {{_target_: torch.optim.Adam, lr: 0.01, eps: 0.001}}
graph: {{upper_to_lower: {{weigher: [model]}}, lower_to_upper: {{model: [weigher]}}}}
"""
_IMPLICIT = "{{_target_: mlotool.hypergradient.Implicit, solver: {{_target_: mlotool.hypergradient.{}}}}}"
_SOLVERS = {
    "identity": "Identity, step_size: 0.1",
    "neumann": "Neumann, num_terms: 3, step_size: 0.05",
    "cg": "ConjugateGradient, max_iterations: 3, tolerance: 0.0, damping: 5.0",
}


def recipe_of(case: Case, *, is_by_hook: bool) -> str:
    """Return the recipe of a case; a loss without transforms is mlotool's own.

    Args:
        case: the program.
        is_by_hook: whether a hook of the optimizer runs the user's code, or a scheduler.
    """
    is_users, is_bilevel, by_hook = bool(case.transforms), case.is_bilevel, str(is_by_hook).lower()
    kind = "reweighted_cross_entropy" if is_bilevel else "cross_entropy"
    ticked = f'{{_target_: fuzzed.parts.Ticked, seed: "${{seed}}", by_hook: {by_hook}}}'
    solver = _IMPLICIT.format(_SOLVERS[case.solver])
    return RECIPE.format(
        loss=f"fuzzed.parts.{kind}" if is_users else f"mlotool.losses.{kind}",
        settings=', seed: "${seed}"' if is_users else ", normalize: false" if is_bilevel else "",
        weigher=", weigher: weigher" if is_bilevel else "",
        by_hook=by_hook,
        scheduler="null" if case.scheduler is None and is_by_hook else ticked,
        above=ABOVE.format(solver=solver, unroll_steps=case.unroll_steps) if is_bilevel else "",
        ticks=case.ticks,
    )
