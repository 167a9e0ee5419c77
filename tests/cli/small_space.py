"""A recipe of small models on digits: two activations, and what follows the first layer."""

RECIPE = """# @package _global_
# A network with three decisions.
defaults:
  - /optimizer@problems.classifier.optimizer: sgd
  - _self_
  - override /data: digits
  - override /sweep: optuna
name: small
data: {sizes: {train: 100, meta: 0, val: 50, test: 50}}
problems:
  classifier:
    module:
      _target_: mlotool.spaces.Space
      base: {_target_: mlotool.models.MLP, image_shape: "${data.image_shape}", num_classes: 10, hidden: [8, 8]}
      inputs: ${data.image_shape}
      mutators:
        - {_target_: mlotool.spaces.Operator, name: activation, at: {type: ReLU}, candidates: {ACTIVATIONS}}
        - {_target_: mlotool.spaces.Insert, name: norm, at: layers.1, candidates: {NORMS}}
    loss: {_target_: mlotool.losses.cross_entropy, roles: {model: classifier}}
    stream: {split: train, batch_size: 20}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 3, test: end}}
objective: val/accuracy
runner: {max_ticks: 6, report: false, progress_bar: false}
logger: {mode: disabled, wandb: false}
sweep: {sampler: SAMPLER, pruner: none}
"""
EVOLUTION = "evolution, sampler_options: {population_size: 5, sample_size: 3}"


def small_space(activations: str, norms: str, sampler: str = EVOLUTION) -> str:
    """Return its text.

    Args:
        activations: candidates, as YAML has them between braces.
        norms: likewise.
        sampler: with its options.
    """
    filled = RECIPE.replace("ACTIVATIONS", activations).replace("NORMS", norms)
    return filled.replace("SAMPLER", sampler)
