"""Losses and distances."""

from functools import partial
from math import inf

import torch
from torch.nn import functional as F

from tests.core.operators.building import LABELS, SIGNS, Operators, ones

_NAMES = {
    "r3,4 r3,4": "mse_loss huber_loss l1_loss smooth_l1_loss cosine_similarity pairwise_distance",
    "r3,4 u3,4": "binary_cross_entropy_with_logits cross_entropy",
    "u3,4 u3,4": "binary_cross_entropy",
    "r3,4 p3,4": "poisson_nll_loss",
    "r3,4 r3,4 p3,4": "gaussian_nll_loss",
}
_WAYS = {"with mm": "use_mm_for_euclid_dist", "without mm": "donot_use_mm_for_euclid_dist"}
LOSSES: Operators = {name: (spec, getattr(F, name)) for spec, names in _NAMES.items() for name in names.split()} | {
    "mse_loss sum": ("r3,4 r3,4", lambda x, y: F.mse_loss(x, y, reduction="sum")),
    "mse_loss none": ("r3,4 r3,4", lambda x, y: F.mse_loss(x, y, reduction="none")),
    "mse_loss weight": ("r3,4 r3,4 p3,4", lambda x, y, w: F.mse_loss(x, y, weight=w)),
    "huber_loss none": ("r3,4 r3,4", lambda x, y: F.huber_loss(x, y, reduction="none", delta=0.7)),
    "nll_loss": ("r3,4", lambda x: F.nll_loss(F.log_softmax(x, -1), LABELS)),
    "cross_entropy smoothed": ("r3,4", lambda x: F.cross_entropy(x, LABELS, ones(x[0]), label_smoothing=0.1)),
    "kl_div": ("r3,4 r3,4", lambda x, y: F.kl_div(F.log_softmax(x, -1), F.softmax(y, -1), reduction="batchmean")),
    "soft_margin_loss": ("r3", lambda x: F.soft_margin_loss(x, SIGNS.to(x.dtype))),
    "multi_margin_loss": ("r3,4", lambda x: F.multi_margin_loss(x, LABELS)),
    "multi_margin_loss p 2": ("r3,4", lambda x: F.multi_margin_loss(x, LABELS, 2, 0.5, 2 * ones(x[0]))),
    "multi_margin_loss of one": ("r4", lambda x: F.multi_margin_loss(x, LABELS[1])),
    "multilabel_margin_loss": ("r2,3", lambda x: F.multilabel_margin_loss(x, torch.tensor([[1, -1, 0], [0, 2, -1]]))),
    "triplet_margin_loss": ("r3,4 r3,4 r3,4", lambda a, p, n: F.triplet_margin_loss(a, p, n, margin=9.0)),
    "ctc_loss": (
        "r4,2,3",
        lambda x: F.ctc_loss(
            F.log_softmax(x, -1), torch.tensor([[1, 2], [2, 1]]), torch.tensor([4, 4]), torch.tensor([2, 2])
        ),
    ),
    "cdist": ("r3,4 r2,4", torch.cdist),
    "pdist": ("r3,4", F.pdist),
    "pdist p 3": ("r3,4", lambda x: F.pdist(x, 3.0)),
    "cdist at zero": ("r3,4", lambda x: torch.cdist(x, x)),
    "cdist of many": ("r26,2 r3,2", torch.cdist),
    "cdist of a batch": ("r2,3,4 r2,2,4", torch.cdist),
    "cdist of equal entries": ("r3,2 r2,2", lambda x, y: torch.cdist(F.pad(x, (0, 1)), F.pad(y, (0, 1)), p=1.5)),
    **{f"cdist {p}": ("r3,4 r2,4", partial(torch.cdist, p=p)) for p in (1.0, 3.0, inf)},
    **{f"cdist {way}": ("r3,4 r2,4", partial(torch.cdist, compute_mode=mode)) for way, mode in _WAYS.items()},
}
