"""Metrics of a problem's module over a whole split."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from mlotool.config.check_evaluation import class_faults
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.core.user_code import Call, noted
from mlotool.problem.batches import BatchFetcher
from mlotool.runner.function_metric import FunctionMetric, MetricFunction
from mlotool.runner.recalibration import Recalibration

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


def _nats_per_token(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (b, t, v) and tokens (b, t)."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


# Losses averaged over samples.
MEAN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "nats_per_token": _nats_per_token,
    "bits_per_token": lambda logits, target: _nats_per_token(logits, target) / math.log(2),
}
METRIC_NAMES = (*CLASSIFICATION_METRICS, *MEAN_LOSSES, *REGRESSION_METRICS)
NUM_REHEARSED = 16
"""Samples of a split on which the metrics are tried before the first tick."""


class Evaluator:
    """Evaluates one module in eval mode, without gradients.

    Args:
        module: maps a batch's `input` to logits (or to predictions, for the regression metrics).
        data: has `split(name)`, `splits` and, for the classification metrics, `num_classes`.
        metrics: names out of METRIC_NAMES.
        batch_size: samples a forward pass.
        device: where the module is.
        reading: as `Problem.reading`: gives the module as it is now, where it may be in shards.
        functions: metrics of the user's, each by the key of the config where it stands.
        recalibration: takes running statistics anew for each evaluation; None leaves them.

    Raises:
        ConfigError: a metric is unknown.
    """

    def __init__(
        self,
        module: nn.Module,
        data: Any,
        metrics: Sequence[str],
        batch_size: int,
        device: torch.device | str = "cpu",
        reading: Callable[[bool], BoundModule] | None = None,
        functions: Mapping[str, MetricFunction] | None = None,
        recalibration: Recalibration | None = None,
    ) -> None:
        self._module = module
        self._recalibration = recalibration
        self._reading = reading or (lambda training: BoundModule(module, training=training))
        self._data = data
        self._batch_size = batch_size
        self._device = torch.device(device)
        num_classes = getattr(data, "num_classes", None)
        self._metrics = {name: build_metric(name, num_classes).to(self._device) for name in metrics}
        self._losses = {name: MEAN_LOSSES[name] for name in metrics if name in MEAN_LOSSES}
        self._num_classes = num_classes
        self._has_nan: Tensor | None = None
        self._functions = [FunctionMetric(key, function) for key, function in (functions or {}).items()]

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
        self._reset()
        with self._recalibrated(model):
            for size, batch in _sized_batches(find_split(self._data, split), self._batch_size, self._device):
                self._update(model, batch, size)
        values = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        if self._has_nan is not None and bool(self._has_nan):
            # The largest of logits that are NaN would be the first class.
            values |= {name: math.nan for name in values if name in CLASSIFICATION_METRICS}
        for metric in self._functions:
            values.update(metric.compute(taken=values))
        return {f"{split}/{name}": value for name, value in values.items()}

    @torch.no_grad()
    def rehearse(self, split: str) -> list[str]:
        """Update all metrics with the first samples of `split`, and return what `evaluate` will return the values of.

        Raises:
            ConfigError: the split is empty.
        """
        dataset = find_split(self._data, split)
        size = min(len(dataset), self._batch_size, NUM_REHEARSED)
        if size < 1:
            raise ConfigError(
                f"evaluate.splits.{split}: the data has no samples there; expected at least 1. Correct the data set's "
                f"sizes, or remove evaluate.splits.{split}."
            )
        self._reset()
        batch = _batch(dataset, range(size), self._device)
        self._update(self.model(), batch, size, is_rehearsal=True)
        if any(name in CLASSIFICATION_METRICS for name in self._metrics):
            self._check_targets(split, batch["target"])
        names = list(self._metrics)
        for metric in self._functions:
            names += metric.compute(taken=names)
        self._reset()
        return [f"{split}/{name}" for name in names]

    def _recalibrated(self, model: BoundModule) -> AbstractContextManager[None]:
        if self._recalibration is None:
            return nullcontext()
        return self._recalibration.applied(self._module, lambda batch: model(batch["input"]))

    def _reset(self) -> None:
        self._has_nan = None
        for metric in self._metrics.values():
            metric.reset()
        for function in self._functions:
            function.reset()

    def _update(self, model: BoundModule, batch: Any, size: int, *, is_rehearsal: bool = False) -> None:
        if self._metrics:
            with noted(lambda: self._call("evaluate.problem", self._module, batch)):
                output, target = model(batch["input"]), batch["target"]
            for name, metric in self._metrics.items():
                with noted(lambda: self._call("evaluate.metrics", name, {"output": output, "target": target})):  # noqa: B023
                    if name in CLASSIFICATION_METRICS:
                        _check_classes(output, target)
                        has_nan = output.isnan().any()
                        self._has_nan = has_nan if self._has_nan is None else self._has_nan | has_nan
                    if name in self._losses:
                        metric.update(self._losses[name](output, target), len(target))
                    else:
                        metric.update(output, target)
        for function in self._functions:
            if is_rehearsal:
                function.rehearse(model, batch, size)
            else:
                function.update(model, batch, size)

    def _check_targets(self, split: str, target: Tensor) -> None:
        lowest, highest = int(target.min()), int(target.max())
        if lowest < 0 or highest >= int(self._num_classes or 0):
            raise ConfigError(
                f"data.num_classes: found {self._num_classes}, while the split '{split}' has targets from {lowest} to "
                f"{highest}; expected targets from 0 to num_classes - 1. Correct one of them."
            )

    def _call(self, key: str, what: Any, given: Any) -> Call:
        if isinstance(what, str):
            expected, advice = (
                "outputs and targets that fit it",
                "Use another metric, or correct the module or the data.",
            )
            return Call(key, f"the metric {what}", given, expected, advice)
        expected = f"a batch with input and target, as {', '.join(self._metrics)} need(s) them"
        return Call(
            key,
            what,
            {"batch": given},
            expected,
            "Correct the data, or give a function of yours in evaluate.metrics, which reads a batch as it likes.",
        )


def _check_classes(output: Tensor, target: Tensor) -> None:
    """Refuse targets that torchmetrics would take for others in silence."""
    is_one_column_each = output.is_floating_point() and output.ndim == target.ndim and output.ndim > 1
    if target.is_floating_point() or is_one_column_each:
        raise TypeError("targets are no numbers of classes; expected a whole number a sample, as .argmax(1) of one-hot")


def build_metric(name: str, num_classes: int | None) -> "Metric":
    """Build a torchmetrics metric by name.

    Raises:
        ConfigError: the name is unknown, or the metric needs classes and the data has none.
    """
    # Imported here: it takes a second, and a run that evaluates nothing does not need it.
    import torchmetrics
    import torchmetrics.classification

    if name in MEAN_LOSSES:
        # Else a batch whose loss is NaN would be left out of the mean.
        return torchmetrics.MeanMetric(sync_on_compute=False, nan_strategy=float("nan"))
    if name in REGRESSION_METRICS:
        return getattr(torchmetrics, REGRESSION_METRICS[name])(sync_on_compute=False)
    if name not in CLASSIFICATION_METRICS:
        raise ConfigError(
            f"evaluate.metrics: found '{name}'; expected one of {', '.join(METRIC_NAMES)}."
            f"{did_you_mean(name, METRIC_NAMES)} Correct evaluate.metrics."
        )
    fault = next(class_faults([name], num_classes), None)
    if fault is not None:
        raise ConfigError(fault)
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


class Batches:
    """All samples of a data set in their order, in batches on a device; the last may be smaller.

    Args:
        dataset: map-style.
        batch_size: samples a batch.
        device: where the batches go.
        most: samples in all, the first ones; None takes all.
    """

    def __init__(
        self, dataset: Any, batch_size: int, device: torch.device | str = "cpu", most: int | None = None
    ) -> None:
        self._dataset, self._batch_size, self._device = dataset, batch_size, device
        self._size = len(dataset) if most is None else min(most, len(dataset))

    def __len__(self) -> int:
        return math.ceil(self._size / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield them, from the first one each time."""
        return (batch for _, batch in _sized_batches(self._dataset, self._batch_size, self._device, self._size))


def _sized_batches(
    dataset: Any, batch_size: int, device: torch.device | str, size: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    size = len(dataset) if size is None else size
    for number, begin in enumerate(range(0, size, batch_size)):
        indices = range(begin, min(begin + batch_size, size))
        yield len(indices), _batch(dataset, indices, torch.device(device), number)


def _batch(dataset: Any, indices: Sequence[int], device: torch.device, number: int = 0) -> Any:
    # What samples draw is the same in each evaluation, so that two of them differ by the module alone.
    batch = BatchFetcher(dataset, seed=0)[0, number, torch.tensor(indices)]
    return tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, batch)
