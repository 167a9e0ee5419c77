"""A composition that fails says all that is wrong, not the first thing alone."""

from collections.abc import Callable
from pathlib import Path

from mlotool.config import compose
from tests.config.conftest import message_of

MANY = """
defaults:
  - mwn
  - _self_
seed: -1
sede: 3
problems:
  classifier:
    optimizer: {lr: -0.1}
    scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 0}
    loss: {roles: {wieght: reweight}}
    unroll_steps: many
    warmup: 3
  reweight:
    stream: {split: mta}
graph:
  upper_to_lower: {reweight: [clasifier]}
evaluate:
  metrics: [accurcy]
objective: val/acc
sweep: {sampler: tpee}
logger: {project: [1]}
"""
KEYS = (
    *("sede", "problems.classifier.warmup", "problems.classifier.unroll_steps", "logger.project", "runner.max_ticks"),
    *("loger", "seed", "problems.classifier.optimizer.lr", "problems.classifier.scheduler.step_size"),
    *("graph.upper_to_lower", "problems.reweight.stream.split", "evaluate.metrics", "objective", "sweep.sampler"),
    "problems.classifier.loss.roles.wieght",
)


def test_a_recipe_with_many_faults_says_all_of_them(write_recipe: Callable[..., Path]) -> None:
    write_recipe(MANY)
    message = message_of(compose, "mine", ["runner.max_ticks=many", "loger.x=1", "runner.log_every=5"])
    found = [line.removeprefix("recipe/mine: ").partition(": ")[0] for line in message.splitlines()]
    assert found == list(KEYS)
    assert "seed: found -1" in message
    assert "Did you mean 'warmup_steps'?" in message


def test_one_fault_is_said_as_ever(write_recipe: Callable[..., Path]) -> None:
    write_recipe("defaults: [mwn, _self_]\nproblems: {classifier: {unroll_steps: many}}\n")
    assert message_of(compose, "mine") == (
        "recipe/mine: problems.classifier.unroll_steps: found 'many'; expected a whole number. Correct it."
    )


def test_very_many_faults_are_capped(write_recipe: Callable[..., Path]) -> None:
    write_recipe("defaults: [mwn, _self_]\n" + "".join(f"key_{index}: {index}\n" for index in range(500)))
    assert len(message_of(compose, "mine").splitlines()) <= 21
