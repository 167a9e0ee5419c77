"""Metrics of a problem's module over a whole split."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean

if TYPE_CHECKING:
    from torchmetrics import Metric

# By name: the torchmetrics class and its settings. `macro` is the mean over classes.
CLASSIFICATION_METRICS = {
    "accuracy": ("MulticlassAccuracy", {"average": "micro"}),
    "balanced_accuracy": ("MulticlassAccuracy", {"average": "macro"}),
    "precision": ("MulticlassPrecision", {"average": "macro"}),
    "recall": ("MulticlassRecall", {"average": "macro"}),
    "f1": ("MulticlassF1Score", {"average": "macro"}),
    "auroc": ("MulticlassAUROC", {"average": "macro"}),
    "average_precision": ("MulticlassAveragePrecision", {"average": "macro"}),
    "calibration_error": ("MulticlassCalibrationError", {}),
    "cohen_kappa": ("MulticlassCohenKappa", {}),
    "matthews_corrcoef": ("MulticlassMatthewsCorrCoef", {}),
}
REGRESSION_METRICS = {
    "mean_squared_error": "MeanSquaredError",
    "mean_absolute_error": "MeanAbsoluteError",
    "r2": "R2Score",
}
# Losses averaged over samples.
MEAN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": functional.cross_entropy}
METRIC_NAMES = (*CLASSIFICATION_METRICS, *MEAN_LOSSES, *REGRESSION_METRICS)


class Evaluator:
    """Evaluates one module in eval mode, without gradients.

    Args:
        module: maps a batch's `input` to logits (or to predictions, for the regression metrics).
        data: has `split(name)`, `splits` and, for the classification metrics, `num_classes`.
        metrics: names out of METRIC_NAMES.
        batch_size: samples a forward pass.
        device: where the module is.
        reading: as `Problem.reading`: gives the module as it is now, where it may be in shards.

    Raises:
        ConfigError: a metric is unknown.
    """

    def __init__(
        self,
        module: nn.Module,
        data: Any,
        metrics: Iterable[str],
        batch_size: int,
        device: torch.device | str = "cpu",
        reading: Callable[[bool], BoundModule] | None = None,
    ) -> None:
        self._reading = reading or (lambda training: BoundModule(module, training=training))
        self._data = data
        self._batch_size = batch_size
        self._device = torch.device(device)
        num_classes = getattr(data, "num_classes", None)
        self._metrics = {name: build_metric(name, num_classes).to(self._device) for name in metrics}
        self._losses = {name: MEAN_LOSSES[name] for name in metrics if name in MEAN_LOSSES}

    def model(self) -> BoundModule:
        """Return what is evaluated; all ranks call it, which may have to gather it."""
        return self._reading(False)

    @torch.no_grad()
    def evaluate(self, split: str, model: BoundModule | None = None) -> dict[str, float]:
        """Return `<split>/<metric>` over the whole of `split`.

        Args:
            split: of the data.
            model: what `model` returned; None asks for it.
        """
        model = self.model() if model is None else model
        for metric in self._metrics.values():
            metric.reset()
        for batch in whole_batches(find_split(self._data, split), self._batch_size, self._device):
            output, target = model(batch["input"]), batch["target"]
            for name, metric in self._metrics.items():
                if name in self._losses:
                    metric.update(self._losses[name](output, target), len(target))
                else:
                    metric.update(output, target)
        return {f"{split}/{name}": float(metric.compute()) for name, metric in self._metrics.items()}


def build_metric(name: str, num_classes: int | None) -> "Metric":
    """Build a torchmetrics metric by name.

    Raises:
        ConfigError: the name is unknown, or the metric needs classes and the data has none.
    """
    # Imported here: it takes a second, and a run that evaluates nothing does not need it.
    import torchmetrics
    import torchmetrics.classification

    if name in MEAN_LOSSES:
        return torchmetrics.MeanMetric(sync_on_compute=False)
    if name in REGRESSION_METRICS:
        return getattr(torchmetrics, REGRESSION_METRICS[name])(sync_on_compute=False)
    if name not in CLASSIFICATION_METRICS:
        raise ConfigError(
            f"evaluate.metrics: found '{name}'; expected one of {', '.join(METRIC_NAMES)}."
            f"{did_you_mean(name, METRIC_NAMES)} Correct evaluate.metrics."
        )
    if not num_classes:
        raise ConfigError(
            f"evaluate.metrics: found '{name}', which needs classes; the data has num_classes={num_classes}. "
            f"Use one of {', '.join(REGRESSION_METRICS)}, or data with classes."
        )
    kind, settings = CLASSIFICATION_METRICS[name]
    # The checks of the arguments' values cost as much as the metric itself; with several ranks one evaluates alone.
    common = {"num_classes": num_classes, "validate_args": False, "sync_on_compute": False}
    return getattr(torchmetrics.classification, kind)(**common, **settings)


def find_split(data: Any, split: str) -> Any:
    """Return the data set of `split`; a name that the data does not have is a ConfigError."""
    if split not in data.splits:
        raise ConfigError(
            f"Split '{split}' is not in the data; expected one of {', '.join(data.splits)}."
            f"{did_you_mean(split, data.splits)} Correct the split's name."
        )
    return data.split(split)


def whole_batches(dataset: Any, batch_size: int, device: torch.device | str = "cpu") -> Iterator[dict[str, Any]]:
    """Yield all samples of `dataset` in their order, in batches on `device`; the last may be smaller."""
    for begin in range(0, len(dataset), batch_size):
        indices = list(range(begin, min(begin + batch_size, len(dataset))))
        if hasattr(dataset, "__getitems__"):
            batch = dataset.__getitems__(indices)
        else:
            batch = default_collate([dataset[index] for index in indices])
        yield _on_device(batch, torch.device(device))


def _on_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
