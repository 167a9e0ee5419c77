"""Metrics: functions of a module and a batch that return numbers by name, each for the batch or for its samples."""

from collections.abc import Mapping

from torch import Tensor, nn


def confidence(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the probability (b,) that the module gives each sample's true class; a run logs the mean."""
    probability = module(batch["input"]).softmax(dim=1)
    return {"confidence": probability.gather(1, batch["target"][:, None]).squeeze(1)}
