"""Losses of language models, plain and with weights that another problem learns, and what such weights have found."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from mlotool.core import BoundModule, LossOutput
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, NonNegative, target
from mlotool.losses.cross_entropy import Batch, collected, weighted_mean

# b: batch, t: tokens of a window, v: vocabulary, d: domains, n: sequences of the whole split


@target("loss")
def next_token(batch: Batch, *, model: BoundModule, chunk: Count | None = None) -> LossOutput:
    """Mean cross-entropy of each token given the tokens before it, in nats.

        C = -1/(b t) sum_is log softmax(model(x_i)_s)[y_is]

    Args:
        batch: `input` (b, t) and `target` (b, t), where `target[:, s]` follows `input[:, s]`.
        model: role; gives logits (b, t, v).
        chunk: number of tokens whose logits are in memory at once, by the model's method `losses` (as of a `Decoder`);
            None: all.

    Returns:
        The loss, with the metric `bits_per_token`; where tokens are bytes, that is bits per byte.
    """
    loss = token_losses(model, batch, chunk).mean()
    return LossOutput(loss, lambda: {"bits_per_token": loss.detach() / math.log(2)})


@target("loss")
def next_token_of_both(
    batch: Batch, *, model: BoundModule, weigher: BoundModule, scale: NonNegative = 0.03, chunk: Count | None = None
) -> LossOutput:
    """Cross-entropy of the next token of a model, and of the weigher's own language model, in nats.

        C = C(model) + s C(weigher's decoder),      C as of `next_token`

    For a problem that learns weights of texts with a `SequenceWeigher`. The first term depends on the weights through
    the model that was trained with them. That alone would have to teach the weigher's decoder the language from one
    number per text. The second term trains the decoder directly, on the same texts.

    Args:
        batch: `input` (b, t) and `target` (b, t), of the target domain.
        model: role; gives logits (b, t, v).
        weigher: role; has the method `losses` (a `SequenceWeigher` has it).
        scale: s. It should be small: the derivatives through the model are small, and an optimizer such as Adam follows
            the larger term.
        chunk: as for `next_token`.

    Returns:
        The loss, with the metrics `bits_per_token` of the model and `weigher_bits_per_token`.
    """
    loss = token_losses(model, batch, chunk).mean()
    own = weigher.method("losses", batch["input"], batch["target"], chunk=chunk).mean()
    return LossOutput(
        loss + scale * own,
        lambda: {"bits_per_token": loss.detach() / math.log(2), "weigher_bits_per_token": own.detach() / math.log(2)},
    )


@target("loss")
def weighted_next_token(
    batch: Batch, *, model: BoundModule, weigher: BoundModule, normalize: bool = True, chunk: Count | None = None
) -> LossOutput:
    """Cross-entropy of the next token with weights that `weigher` computes from the text, per sequence or per token.

        l_is = -log softmax(model(x_i)_s)[y_is],   w = weigher(x)
        C = sum_is w_is l_is / sum_is w_is      (normalize)
        C = 1/(b t) sum_is w_is l_is            (otherwise)

    Args:
        batch: `input` (b, t) and `target` (b, t).
        model: role; gives logits (b, t, v).
        weigher: role; maps tokens (b, t) to weights, (b,) or (b, t); with one weight per sequence, w_is is w_i.
        normalize: whether the weights are divided by their sum, so that only their ratios matter and the step size does
            not change.
        chunk: as for `next_token`.

    Returns:
        The loss, with the metrics `mean_weight` and `bits_per_token`, which is not weighted.

    Source: Kemaev et al. 2025, MixFlow-MG (arXiv 2505.00793), section 5.2, loss weighting.
    """
    losses, weight = token_losses(model, batch, chunk), weigher(batch["input"])
    return _weighted(losses, weight if weight.dim() > 1 else weight[:, None], normalize)


@target("loss")
def mixture_next_token(
    batch: Batch, *, model: BoundModule, mixture: BoundModule, normalize: bool = True, chunk: Count | None = None
) -> LossOutput:
    """Cross-entropy of the next token with one weight for each domain: training on a learned mixture of texts.

        l_i = -1/t sum_s log softmax(model(x_i)_s)[y_is],   w_i = mixture()[domain_i]
        C = sum_i w_i l_i / sum_i w_i      (normalize)
        C = d/b sum_i w_i l_i              (otherwise)

    If batches contain all domains equally often, both estimate the loss under the mixture, in which domain k has the
    share `mixture()_k`. The second estimate has no bias, but more variance.

    Args:
        batch: `input` (b, t), `target` (b, t) and `domain` (b,), the numbers of the domains.
        model: role; gives logits (b, t, v).
        mixture: role; called without arguments gives the shares (d,), which add up to 1.
        normalize: whether the weights are divided by their sum in the batch.
        chunk: as for `next_token`.

    Returns:
        The loss, with the metrics `mean_weight` and `bits_per_token`, which is not weighted.

    Raises:
        ConfigError: there are fewer shares than domains.

    Source: Grangier et al. 2024, Adaptive Training Distributions (arXiv 2311.11973), whose upper loss is that on a
        target domain; Xie et al. 2023, DoReMi (arXiv 2305.10429), section 2, have a minimax problem instead.
    """
    shares = mixture()
    try:
        weight = shares[batch["domain"]] * len(shares)
    except IndexError as error:
        size = int(batch["domain"].max()) + 1
        raise ConfigError(
            f"module.size={len(shares)} of the mixture, but a batch has domain number {size - 1}; expected a share for "
            f"each domain of the data. Set problems.<name>.module.size={size}, or more where there are more."
        ) from error
    return _weighted(token_losses(model, batch, chunk), weight[:, None], normalize)


def token_losses(model: BoundModule, batch: Batch, chunk: int | None = None) -> Tensor:
    """Return the cross-entropy (b, t) of each token of `batch["target"]`; arguments as for `next_token`.

    Where a sample is a task of several windows, (tasks, s, t), the model sees all of them as one batch.
    """
    tokens = batch["input"].flatten(0, -2)
    if chunk is not None:
        losses = model.method("losses", tokens, batch["target"].flatten(0, -2), chunk=chunk)
        assert isinstance(losses, Tensor)
        return losses.view(batch["target"].shape)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, -2), batch["target"].flatten(), reduction="none").view(
        batch["target"].shape
    )


def _weighted(losses: Tensor, weight: Tensor, normalize: bool) -> LossOutput:
    weight = weight.expand_as(losses)
    return LossOutput(
        weighted_mean(losses, weight, normalize),
        lambda: {"mean_weight": weight.detach().mean(), "bits_per_token": losses.detach().mean() / math.log(2)},
    )


@target("analysis")
def mixture_analysis(batches: Iterable[Batch], *, mixture: BoundModule) -> dict[str, Tensor]:
    """Return a learned mixture of domains beside the mixture of a split.

    Args:
        batches: one pass over a split, with `domain` (b,).
        mixture: role; called without arguments gives the shares (d,).

    Returns:
        1-D (d,): `share`, the learned shares, and `share_of_split`, those of the split. 0-D: `share_<k>` of each domain
        k, and `perplexity`, the exponential of the mixture's entropy: the effective number of domains.
    """
    share = mixture().detach()
    counts = torch.stack([torch.bincount(batch["domain"], minlength=len(share)) for batch in batches]).sum(0)
    shares = {"share": share, "share_of_split": counts / counts.sum()}
    shares |= {f"share_{number}": domain_share for number, domain_share in enumerate(share)}
    return shares | {"perplexity": torch.special.entr(share).sum().exp()}


@target("analysis")
def text_weight_analysis(batches: Iterable[Batch], *, weigher: BoundModule) -> dict[str, Tensor]:
    """Return the weight that a weigher gives each text of a split, and its mean over each domain.

    Args:
        batches: one pass over a split, with `input` (b, t) and `domain` (b,).
        weigher: role; maps tokens (b, t) to weights (b,), or to (b, t), whose mean over each text is taken.

    Returns:
        1-D (n,), in the order of the batches: `weight` and `domain`. 0-D: `mean_weight`, and `mean_weight_<k>` for each
        domain k that occurs in the split.
    """

    def rows(batch: Batch) -> dict[str, Tensor]:
        weight = weigher(batch["input"])
        return {"weight": weight if weight.dim() == 1 else weight.mean(dim=1), "domain": batch["domain"]}

    columns = collected(batches, rows)
    means = {
        f"mean_weight_{number}": columns["weight"][columns["domain"] == number].mean()
        for number in columns["domain"].unique().tolist()
    }
    return columns | {"mean_weight": columns["weight"].mean()} | means
