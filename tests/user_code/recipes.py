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
    optimizer: {{_target_: fuzzed.parts.optimizer, seed: "${{seed}}"}}
    scheduler: {{_target_: fuzzed.parts.Ticked, seed: "${{seed}}"}}
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
_SOLVERS = {"identity": "Identity, step_size: 0.1", "neumann": "Neumann, num_terms: 3, step_size: 0.05"}


def recipe_of(case: Case) -> str:
    """Return the recipe of a case; a loss without transforms is mlotool's own. A scheduler runs the user's code."""
    is_users, is_bilevel = bool(case.transforms), case.is_bilevel
    kind = "reweighted_cross_entropy" if is_bilevel else "cross_entropy"
    solver = _IMPLICIT.format(_SOLVERS[case.solver])
    return RECIPE.format(
        loss=f"fuzzed.parts.{kind}" if is_users else f"mlotool.losses.{kind}",
        settings=', seed: "${seed}"' if is_users else ", normalize: false" if is_bilevel else "",
        weigher=", weigher: weigher" if is_bilevel else "",
        above=ABOVE.format(solver=solver, unroll_steps=case.unroll_steps) if is_bilevel else "",
        ticks=case.ticks,
    )
