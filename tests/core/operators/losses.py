"""Losses and distances."""

import torch
from torch.nn import functional as F

from tests.core.operators.building import LABELS, SIGNS, Operators, ones

LOSSES: Operators = {
    "mse_loss": ("r3,4 r3,4", F.mse_loss),
    "mse_loss sum": ("r3,4 r3,4", lambda x, y: F.mse_loss(x, y, reduction="sum")),
    "mse_loss none": ("r3,4 r3,4", lambda x, y: F.mse_loss(x, y, reduction="none")),
    "mse_loss weight": ("r3,4 r3,4 p3,4", lambda x, y, w: F.mse_loss(x, y, weight=w)),
    "huber_loss": ("r3,4 r3,4", F.huber_loss),
    "smooth_l1_loss": ("r3,4 r3,4", F.smooth_l1_loss),
    "cross_entropy": ("r3,4", lambda x: F.cross_entropy(x, LABELS)),
    "cross_entropy smoothed": ("r3,4", lambda x: F.cross_entropy(x, LABELS, ones(x[0]), label_smoothing=0.1)),
    "binary_cross_entropy_with_logits": ("r3,4 u3,4", F.binary_cross_entropy_with_logits),
    "kl_div": ("r3,4 r3,4", lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean")),
    "soft_margin_loss": ("r3", lambda x: F.soft_margin_loss(x, SIGNS.to(x.dtype))),
    "multi_margin_loss": ("r3,4", lambda x: F.multi_margin_loss(x, LABELS)),
    "multilabel_margin_loss": ("r2,3", lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, -1, 0], [0, 2, -1]]))),
    "triplet_margin_loss": ("r3,4 r3,4 r3,4", lambda a, p, n: F.triplet_margin_loss(a, p, n, margin=9.0)),
    "ctc_loss": (
        "r4,2,3",
        lambda x: F.ctc_loss(
            F.log_softmax(x, -1), torch.tensor([[1, 2], [2, 1]]), torch.tensor([4, 4]), torch.tensor([2, 2])
        ),
    ),
    "cosine_similarity": ("r3,4 r3,4", F.cosine_similarity),
    "cdist": ("r3,4 r2,4", torch.cdist),
    "pdist": ("r3,4", F.pdist),
    "cdist at zero": ("r3,4", lambda x: torch.cdist(x, x)),
    "cdist 1": ("r3,4 r2,4", lambda x, y: torch.cdist(x, y, p=1.0)),
}
