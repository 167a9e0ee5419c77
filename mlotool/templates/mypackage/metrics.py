"""Metrics: functions of a module and a batch that return values by name: a number, or one number for each sample."""

from collections.abc import Mapping

from torch import Tensor, nn


def confidence(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the probability that the module gives to the true class of each sample, (b,); a run logs the mean."""
    probability = module(batch["input"]).softmax(dim=1)
    return {"confidence": probability.gather(1, batch["target"][:, None]).squeeze(1)}
