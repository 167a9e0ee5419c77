"""Losses of LightningModules as they are: their own steps are called, and what they log becomes metrics."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core import BoundModule, ConfigError, LossOutput, stop_gradient
from mlotool.core.lightning_module import collected_logs, loss_of_step
from mlotool.core.private import tree_leaves, tree_map_only
from mlotool.core.settings import target
from mlotool.losses.cross_entropy import weighted_mean


@target("loss")
def training_step(batch: Any, *, model: BoundModule) -> Tensor:
    """The loss that `training_step` of a LightningModule returns.

    This is the default loss of a problem whose module is a LightningModule. As the loss of a problem above, it
    evaluates the same loss on that problem's batch.

    Args:
        batch: a batch as the module expects it; a batch `{input, target}` of a recipe is passed on as a pair, as from a
            DataLoader.
        model: role; a LightningModule.

    Returns:
        The loss. What the step logs by `self.log` are metrics of the problem.
    """
    return loss_of_step(model.method("training_step", batch), "training_step")


@target("loss")
def validation_step(batch: Any, *, model: BoundModule, log: str | None = None) -> Tensor:
    """The loss that `validation_step` of a LightningModule returns or logs, for a problem above.

    The step is called in the mode of the role: write `model: {problem: net, mode: eval}` for eval mode, as in
    Lightning's validation. The step has to compute its loss with gradients, so without `.item()` and `torch.no_grad()`.

    Args:
        batch: as for `training_step`.
        model: role; a LightningModule.
        log: the name under which the step logs the loss (`val_loss`), if it does not return it.

    Returns:
        The loss. What the step logs by `self.log` are metrics of the problem.
    """
    return loss_of_step(model.method("validation_step", batch), "validation_step", log)


@target("loss")
def weighted_training_step(
    batch: Any,
    *,
    model: BoundModule,
    weigher: BoundModule,
    given: Literal["loss", "index"] = "loss",
    vectorize: bool = True,
) -> LossOutput:
    """The loss of `training_step` on each sample by itself, with weights that another problem learns.

        l_i = training_step(sample i, as a batch of one),   C = sum_i w_i l_i / sum_j w_j

    A training_step returns one number for its batch, so weights per sample need its loss on single samples. Use this if
    the step's loss is a mean over independent samples. Layers that normalize over the batch are refused in train mode.

    Args:
        batch: as for `training_step`, with the samples along the first axis of each part.
        model: role; a LightningModule.
        weigher: role; maps the losses (b, 1), or the samples' indices (b,), to one weight per sample.
        given: the input of `weigher`: "loss" (detached from `model`), or "index", which the batches of a recipe have.
        vectorize: true evaluates all samples at once by `torch.vmap`. false evaluates one after the other, for steps
            that read a tensor's value (`.item()`, `if loss > 1`) or update a metric of torchmetrics.

    Returns:
        The loss, with the metric `mean_weight`. What the step logs by `self.log` becomes a metric, as a mean over
        samples.

    Cost: with `vectorize` that of `training_step`, else one small forward pass per sample.
    """
    if (layer := model.batch_statistics()) is not None:
        raise ConfigError(
            f"losses.weighted_training_step: found '{layer}' in train mode, which normalizes over a batch; expected "
            "layers that treat each sample by itself. Use GroupNorm or LayerNorm, or the role {problem: .., mode: "
            "eval}."
        )

    def of_sample(sample: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with collected_logs() as values:
            loss = loss_of_step(model.method("training_step", sample), "training_step")
        return loss, {name: value.detach() for name, value in values.items()}

    loss, logs = (_at_once if vectorize else _one_by_one)(of_sample, batch)
    weight = weigher(stop_gradient(loss)[:, None] if given == "loss" else batch["index"]).reshape(-1)
    metrics = {name: value.mean() for name, value in logs.items()}
    return LossOutput(weighted_mean(loss, weight, True), {**metrics, "mean_weight": weight.detach().mean()})


# Returns the losses of a batch's samples, and by name what they log: tensors of as many numbers.
OfSample = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]


def _at_once(of_sample: OfSample, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    try:
        found: tuple[Tensor, dict[str, Tensor]] = torch.vmap(of_sample, randomness="different")(
            tree_map_only(Tensor, lambda tensor: tensor.unsqueeze(1), batch)
        )
    except (RuntimeError, ValueError) as error:
        if "vmap" not in str(error):
            raise
        raise ConfigError(
            f"losses.weighted_training_step: found a training_step that torch.vmap cannot evaluate ({error}); expected "
            "one with tensor operations only. Set vectorize: false, which evaluates the samples one by one."
        ) from error
    return found


def _one_by_one(of_sample: OfSample, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    size = next(len(part) for part in tree_leaves(batch) if isinstance(part, Tensor))
    losses, logs = zip(*(of_sample(_sample(batch, index)) for index in range(size)), strict=True)
    names = set(logs[0]).intersection(*logs)
    return torch.stack(losses), {name: torch.stack([log[name] for log in logs]) for name in logs[0] if name in names}


def _sample(batch: Any, index: int) -> Any:
    """Return the batch of one sample: each part has the samples along its first axis."""
    if isinstance(batch, Mapping):
        return {name: _sample(part, index) for name, part in batch.items()}
    if isinstance(batch, list | tuple) and not isinstance(next(iter(batch), None), str | bytes):
        parts = [_sample(part, index) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[index : index + 1]
