"""Differentiable architecture search: the loss of both problems, and what was found."""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from mlotool.core import BoundModule, LossOutput
from mlotool.losses.cross_entropy import accuracy

# b: batch, k: classes, e: edges of a cell

Batch = Mapping[str, Tensor]


def architecture_cross_entropy(batch: Batch, *, model: BoundModule, architecture: BoundModule) -> LossOutput:
    """Mean cross-entropy of a network whose architecture is another problem's.

        C = 1/b sum_i -log softmax(model(x_i, alpha))[y_i],   alpha = architecture()

    Both problems have it: the network on the train split, given alpha; the architecture on another one, given the
    network's solution.

    Args:
        batch: `input` (b, ...) and `target` (b,).
        model: role; maps images and the architecture to logits (b, k).
        architecture: role; called without arguments.

    Returns:
        The loss, with the metric `accuracy`.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), equations 3 and 4.
    """
    logits, target = model(batch["input"], *architecture()), batch["target"]
    return LossOutput(F.cross_entropy(logits, target), lambda: {"accuracy": accuracy(logits, target)})


def architecture_analysis(batches: Iterable[Batch], *, architecture: BoundModule) -> dict[str, Tensor | str]:
    """Return what a search has found; the batches are not looked at.

    Args:
        batches: ignored.
        architecture: role; gives logits (e, 8) of normal and reduction cells, and has `genotype`.

    Returns:
        `genotype`: text, for `problems.classifier.module.genotype` of darts_evaluate. `normal` and `reduction`
        (e, 8): probabilities of the operations on each edge. 0-D, by kind of cell: `normal_entropy` (of an edge,
        mean over edges; log 8 = 2.08 where nothing is decided) and `normal_skips` (skip connections in the genotype:
        a search that collapses ends with many).
    """
    del batches
    genotype = str(architecture.method("genotype"))
    found: dict[str, Tensor | str] = {"genotype": genotype}
    cells = dict(zip(("normal", "reduction"), genotype.split("reduction:"), strict=True))
    for (kind, text), logits in zip(cells.items(), architecture(), strict=True):
        log_probability = F.log_softmax(logits.detach(), dim=1)
        found[kind] = log_probability.exp()
        found[f"{kind}_entropy"] = -(log_probability.exp() * log_probability).sum(dim=1).mean()
        found[f"{kind}_skips"] = torch.tensor(text.count("skip_connect"))
    return found
