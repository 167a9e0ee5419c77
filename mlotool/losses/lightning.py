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

    It is the loss of a problem whose module is a LightningModule, where no other one is given. As the loss of a problem
    above it takes the same loss on that problem's batch.

    Args:
        batch: as the module expects it; `{input, target}` of a recipe comes as the pair that a DataLoader gives.
        model: role; a LightningModule.

    Returns:
        The loss. What the step logs by `self.log` are metrics of the problem.
    """
    return loss_of_step(model.method("training_step", batch), "training_step")


@target("loss")
def validation_step(batch: Any, *, model: BoundModule, log: str | None = None) -> Tensor:
    """The loss that `validation_step` of a LightningModule returns or logs: for a problem above.

    The step is called in the mode that the role says, so write `model: {problem: net, mode: eval}` for that of
    Lightning's validation. A step that takes its loss without gradients (`.item()`, `torch.no_grad()`) cannot serve.

    Args:
        batch: as for `training_step`.
        model: role; a LightningModule.
        log: the name under which the step logs the loss (`val_loss`), where it does not return it.

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
    """The loss of `training_step` on each sample alone, with weights that another problem learns.

        l_i = training_step(sample i, as a batch of one),   C = sum_i w_i l_i / sum_j w_j

    A training_step returns one number for its batch, so that weights have no other place. It is the loss of a step
    whose loss is a mean over independent samples; layers that normalise over the batch are refused in train mode.

    Args:
        batch: as for `training_step`; the samples are along the first axis of each part.
        model: role; a LightningModule.
        weigher: role; maps the losses (b, 1), or the samples' indices (b,), to as many weights.
        given: what `weigher` gets: "loss", through which no gradient flows to `model`, or "index", which the batches of
            a recipe have.
        vectorize: evaluate all samples at once by `torch.vmap`. Without it one after the other: for steps that ask for
            a tensor's number (`.item()`, `if loss > 1`) or change a metric of torchmetrics.

    Returns:
        The loss, with the metric `mean_weight`. What the step logs by `self.log` are metrics, as means over samples.

    Cost: that of `training_step` with `vectorize`, else a small forward pass a sample.
    """
    if (layer := model.batch_statistics()) is not None:
        raise ConfigError(
            f"losses.weighted_training_step: found '{layer}' in train mode, which normalises over a batch; expected "
            "layers that see a sample alone. Use GroupNorm or LayerNorm, or the role {problem: .., mode: eval}."
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
            "one of tensors alone. Set vectorize: false, which takes the samples one by one."
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
