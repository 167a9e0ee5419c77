"""Losses: pure functions of a batch and the roles that they play with; and analyses of finished runs."""

from mlotool.losses.analyses import sample_weight_analysis, weight_against_loss
from mlotool.losses.corrected import corrected_cross_entropy, correction_analysis, correction_loss
from mlotool.losses.cross_entropy import cross_entropy
from mlotool.losses.decayed import decay_analysis, decayed_cross_entropy
from mlotool.losses.depth import depth_regularized_cross_entropy
from mlotool.losses.domains import (
    domain_weight_analysis,
    input_weighted_cross_entropy,
    joint_cross_entropy,
    proximal_cross_entropy,
)
from mlotool.losses.episodes import episode_cross_entropy, episode_mean_squared_error, episode_next_token
from mlotool.losses.few_shot import few_shot_adaptation
from mlotool.losses.mean_squared_error import mean_squared_error
from mlotool.losses.next_token import mixture_next_token, next_token, next_token_of_both, weighted_next_token
from mlotool.losses.paths import expected_path_cross_entropy, path_analysis, path_cross_entropy
from mlotool.losses.poisoning import (
    attack_analysis,
    attack_cross_entropy,
    negated_cross_entropy,
    poisoned_cross_entropy,
)
from mlotool.losses.reweighted import reweighted_cross_entropy, sample_weighted_cross_entropy
from mlotool.losses.shared_weight import shared_weight_accuracy
from mlotool.losses.text_weights import mixture_analysis, text_weight_analysis

__all__ = [
    "attack_analysis",
    "attack_cross_entropy",
    "corrected_cross_entropy",
    "correction_analysis",
    "correction_loss",
    "cross_entropy",
    "decay_analysis",
    "decayed_cross_entropy",
    "depth_regularized_cross_entropy",
    "domain_weight_analysis",
    "episode_cross_entropy",
    "episode_mean_squared_error",
    "episode_next_token",
    "expected_path_cross_entropy",
    "few_shot_adaptation",
    "input_weighted_cross_entropy",
    "joint_cross_entropy",
    "mean_squared_error",
    "mixture_analysis",
    "mixture_next_token",
    "negated_cross_entropy",
    "next_token",
    "next_token_of_both",
    "path_analysis",
    "path_cross_entropy",
    "poisoned_cross_entropy",
    "proximal_cross_entropy",
    "reweighted_cross_entropy",
    "sample_weight_analysis",
    "sample_weighted_cross_entropy",
    "shared_weight_accuracy",
    "text_weight_analysis",
    "weight_against_loss",
    "weighted_next_token",
]
