"""Losses: functions of a batch and of the modules of problems, which are keyword arguments (roles).

The recipe says which problem fills which role. A role is called like a module. The result is the mean over the batch.
"""

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Role = Callable[..., Tensor]


def clean_loss(batch: Mapping[str, Tensor], *, model: Role) -> Tensor:
    """Cross-entropy on samples with right labels."""
    return F.cross_entropy(model(batch["input"]), batch["target"])


def noisy_loss(batch: Mapping[str, Tensor], *, model: Role, rates: Role) -> Tensor:
    """Cross-entropy of the recorded labels, some of which are wrong.

    p_c is the model's probability that the true class is c, and r_c is the rate of wrong labels in class c. A label is
    then recorded as class c with the probability `p_c (1 - r_c) + p_other r_other` (forward correction; Patrini et al.
    2017, arXiv 1609.03683).
    """
    p, r = model(batch["input"]).softmax(dim=1), rates()
    recorded = p * (1 - r) + (p * r).flip(1)
    return F.nll_loss(recorded.log(), batch["target"])
