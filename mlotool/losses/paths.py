"""Losses of shared spaces: of a mixture, of a drawn path, and its mean over the paths that a policy draws."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput, stop_gradient
from mlotool.core.arguments import require
from mlotool.core.settings import NonNegative, Rounds, target
from mlotool.losses.cross_entropy import Batch, accuracy

# b: batch, k: classes, s: paths


@target("loss")
def path_cross_entropy(
    batch: Batch, *, model: BoundModule, paths: BoundModule, entropy: NonNegative = 0.0
) -> LossOutput:
    """Mean cross-entropy of a shared space, with a path or mixture of paths that another problem gives.

        C = 1/b sum_i -log softmax(model(x_i, path))[y_i] - entropy * (entropy of a decision),   path = paths()

    Both problems use this loss: the space on its own split, for the current paths; the problem of the paths on another
    split, for the space's solution.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; a `mlotool.spaces.SharedSpace` that returns logits (b, k).
        paths: role; `mlotool.spaces.PathWeights`, `BinaryPaths` or `PathPolicy`.
        entropy: for the problem of the paths, the weight of the entropy (in nats, mean over decisions), which keeps the
            decisions from settling early.

    Returns:
        The loss, with the metric `accuracy`.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), equations 3 and 4.
    """
    drawn = paths()
    path = drawn[0] if isinstance(drawn, tuple) else drawn
    logits, target = model(batch["input"], path=path), batch["target"]
    loss = _with_entropy(F.cross_entropy(logits, target), paths, entropy)
    return LossOutput(loss, lambda: {"accuracy": accuracy(logits, target)})


@target("loss")
def expected_path_cross_entropy(
    batch: Batch, *, model: BoundModule, paths: BoundModule, num_paths: Rounds = 4, entropy: NonNegative = 0.0
) -> LossOutput:
    """Mean cross-entropy over the paths that a policy draws, with a gradient for the policy.

        C(phi) = E_{path ~ p_phi} C(path) - entropy * (entropy of a decision)

    The expectation is estimated by `score_function` on num_paths paths and one batch.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; a `mlotool.spaces.SharedSpace` that returns logits (b, k).
        paths: role; a `mlotool.spaces.PathPolicy`.
        num_paths: s, the number of paths that are drawn, at least 2.
        entropy: weight of the entropy (in nats, mean over decisions), which keeps the policy from settling early.

    Returns:
        The loss, with the metric `accuracy`, mean over the paths.

    Raises:
        ConfigError: fewer than 2 paths.

    Source: Pham et al. 2018, ENAS (arXiv 1802.03268), section 2.2.
    """
    expected = "at least 2, as each path's loss is compared with that of the others"
    require(num_paths >= 2, "num_paths", num_paths, expected)
    losses, log_probabilities, right = [], [], []
    for _ in range(num_paths):
        path, log_probability = paths()
        logits = model(batch["input"], path=path)
        losses.append(F.cross_entropy(logits, batch["target"]))
        log_probabilities.append(log_probability)
        right.append(accuracy(logits, batch["target"]))
    loss = _with_entropy(score_function(torch.stack(losses), torch.stack(log_probabilities)), paths, entropy)
    return LossOutput(loss, lambda: {"accuracy": torch.stack(right).mean()})


def _with_entropy(loss: Tensor, paths: BoundModule, weight: float) -> Tensor:
    return loss - weight * paths.method("entropy") if weight else loss


def score_function(losses: Tensor, log_probabilities: Tensor) -> Tensor:
    """Return the mean of sampled losses, whose derivatives of any order estimate those of the expected loss.

        C = 1/s sum_j (c_j m_j + b_j (1 - m_j)),   m_j = exp(log p_j - stop(log p_j)),   b_j = mean of the other c

    The value is the mean; the gradient is `1/s sum_j (c_j - b_j) dlog p_j + dc_j`, which is REINFORCE with an unbiased
    baseline. So a hypergradient through a solution that was trained with this loss is one of the expected loss.

    Args:
        losses: c (s,), of independent draws.
        log_probabilities: log p (s,), of these draws.

    Returns:
        0-D.

    Source: Foerster et al. 2018, DiCE (arXiv 1802.05098), section 3; Kool et al. 2019, Buy 4 REINFORCE Samples, Get a
    Baseline for Free!

    Example:
        >>> log_probability = torch.zeros(2, requires_grad=True)
        >>> loss = score_function(torch.tensor([1.0, 3.0]), log_probability)
        >>> loss.item(), torch.autograd.grad(loss, log_probability)[0].tolist()
        (2.0, [-1.0, 1.0])
    """
    count = len(losses)
    fixed = stop_gradient(losses)
    baseline = (fixed.sum() - fixed) / (count - 1)
    magic = (log_probabilities - stop_gradient(log_probabilities)).exp()
    return (losses * magic + baseline * (1 - magic)).mean()


@target("analysis")
def path_analysis(batches: Iterable[Batch], *, paths: BoundModule) -> dict[str, Tensor | str]:
    """Return the path that a search has found; the batches are not used.

    Args:
        batches: ignored.
        paths: role; a `mlotool.spaces.PathWeights`, `BinaryPaths` or `PathPolicy`.

    Returns:
        `decisions`: a text with one line per decision, in the form of the key `decisions` of a recipe; `entropy`: the
        entropy in nats, mean over decisions, 0-D.
    """
    del batches
    decisions = paths.method("found")
    text = "".join(f"{name}: {value}\n" for name, value in decisions.items())
    return {"decisions": text, "entropy": paths.method("entropy").detach()}
