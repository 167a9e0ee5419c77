"""What learned weights of texts have found: analyses of finished runs."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mlotool.core import BoundModule
from mlotool.core.settings import target
from mlotool.losses.analyses import collected

# n: sequences of the whole split, d: domains

Batch = Mapping[str, Tensor]


@target("analysis")
def mixture_analysis(batches: Iterable[Batch], *, mixture: BoundModule) -> dict[str, Tensor]:
    """Return a learned mixture of domains, and how it differs from that of a split.

    Args:
        batches: of one pass over a split, with `domain`.
        mixture: role; called without arguments gives the shares (d,).

    Returns:
        1-D (d,): `share`, the learned one, and `share_of_split`. 0-D: `share_<k>` of each domain k, and `perplexity`,
        the exponential of the mixture's entropy: how many domains it amounts to.
    """
    share = mixture().detach()
    counts = torch.stack([torch.bincount(batch["domain"], minlength=len(share)) for batch in batches]).sum(0)
    found = {"share": share, "share_of_split": counts / counts.sum()}
    found |= {f"share_{number}": each for number, each in enumerate(share)}
    return found | {"perplexity": torch.special.entr(share).sum().exp()}


@target("analysis")
def text_weight_analysis(batches: Iterable[Batch], *, weigher: BoundModule) -> dict[str, Tensor]:
    """Return the weight that a weigher gives each text of a split, and its mean over each domain.

    Args:
        batches: of one pass over a split, with `input` (b, t) and `domain` (b,).
        weigher: role; maps tokens (b, t) to weights (b,) or (b, t), of which the mean over a text is taken.

    Returns:
        1-D (n,), in the order of the batches: `weight` and `domain`. 0-D: `mean_weight`, and `mean_weight_<k>` of each
        domain k of which the split has texts.
    """

    def rows(batch: Batch) -> dict[str, Tensor]:
        weight = weigher(batch["input"])
        return {"weight": weight if weight.dim() == 1 else weight.mean(dim=1), "domain": batch["domain"]}

    found = collected(batches, rows)
    means = {
        f"mean_weight_{number}": found["weight"][found["domain"] == number].mean()
        for number in found["domain"].unique().tolist()
    }
    return found | {"mean_weight": found["weight"].mean()} | means
