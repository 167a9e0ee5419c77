"""Losses: pure functions of a batch and the roles that they play with; and analyses of finished runs."""

from mlotool.losses.analyses import sample_weight_analysis, weight_against_loss
from mlotool.losses.cross_entropy import cross_entropy
from mlotool.losses.mean_squared_error import mean_squared_error
from mlotool.losses.reweighted import reweighted_cross_entropy, sample_weighted_cross_entropy

__all__ = [
    "cross_entropy",
    "mean_squared_error",
    "reweighted_cross_entropy",
    "sample_weight_analysis",
    "sample_weighted_cross_entropy",
    "weight_against_loss",
]
