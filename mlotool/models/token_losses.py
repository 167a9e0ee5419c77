"""Cross-entropy of every token of a language model, without the logits of all tokens at once."""

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.rematerialization import remat

# n: tokens of all texts, v: vocabulary, w: width

LOGITS_AT_ONCE = 2**22
"""Entries of the logits of one chunk where nothing else is said: 16 MiB in fp32."""


def token_losses(features: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Return the cross-entropy of each token by a linear head, a chunk of tokens at a time.

        l_i = log sum_u exp(<W_u, x_i>) - <W_y(i), x_i>

    The logits of a chunk are computed again in the backward pass, and in the backward pass of that one: those of all
    tokens, which outweigh a small model's activations, never live at once. A single chunk is computed plainly.

    Args:
        features: (..., w), what the head reads.
        weight: (v, w), of the head.
        targets: (...), ids of the tokens that are to be predicted.
        chunk: tokens at once; None: as many as have 2^22 logits.

    Returns:
        Losses (...), in fp32 or the head's higher precision.

    Raises:
        ConfigError: `chunk` is below 1.

    Cost: one more product with the head for each backward pass through it.

    Example:
        >>> token_losses(torch.ones(2, 3, 8), torch.zeros(4, 8), torch.zeros(2, 3, dtype=torch.int64), chunk=2)[0]
        tensor([1.3863, 1.3863, 1.3863])
    """
    chunk = max(1, LOGITS_AT_ONCE // weight.shape[0]) if chunk is None else chunk
    require(chunk >= 1, "chunk", chunk, "at least 1, the tokens whose logits live at once, or null")
    parts = features.flatten(0, -2).split(chunk), targets.flatten().split(chunk)
    if len(parts[0]) == 1:
        return _losses(features, weight, targets)
    losses = [remat(_losses, x, weight, y) for x, y in zip(*parts, strict=True)]
    return torch.cat(losses).unflatten(0, targets.shape)


def losses_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy (...) of each token, of logits (..., v) and targets (...).

    Example:
        >>> losses_of_logits(torch.zeros(1, 4), torch.tensor([2]))
        tensor([1.3863])
    """
    # Under autocast and in bf16 the logits are coarse, but their exponentials need not be.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.logsumexp(dim=-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _losses(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return losses_of_logits(features @ weight.T, targets)
