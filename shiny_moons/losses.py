"""Losses: functions of a batch and of the problems that they read, which are keyword arguments (roles).

A recipe says which problem plays which role. A role is called like its module. The result is the mean over the batch.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Role = Callable[..., Tensor]


def clean_loss(batch: Mapping[str, Tensor], *, model: Role) -> Tensor:
    """Cross-entropy on samples whose labels are right."""
    return F.cross_entropy(model(batch["input"]), batch["target"])


def noisy_loss(batch: Mapping[str, Tensor], *, model: Role, rates: Role) -> Tensor:
    """Cross-entropy of the labels as they were recorded, some of them wrong.

    With the probability p of the true class and the rate r, a label is recorded as class c with probability
    `p_c (1 - r_c) + p_other r_other` (forward correction; Patrini et al. 2017, arXiv 1609.03683).
    """
    p, r = model(batch["input"]).softmax(dim=1), rates()
    recorded = p * (1 - r) + (p * r).flip(1)
    return F.nll_loss(recorded.log(), batch["target"])
