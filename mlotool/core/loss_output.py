"""The return value of a loss that also reports metrics."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mlotool.core.messages import kind_of
from mlotool.core.user_code import WrongResultError

Metrics = Mapping[str, Tensor]

# What is logged of a problem beside the metrics of its loss, which have other names.
RESERVED = ("loss", "step", "lr", "gradient_norm", "hypergradient_norm")


class LossOutput:
    """A loss with metrics to log.

    A hypergradient evaluates a loss many times without reading the metrics. If they are given as a function, they are
    computed only when they are read.

    Args:
        loss: 0-D tensor, the value that is minimized.
        metrics: 0-D tensors to log, by name, or a function that returns them; no gradient flows through them.

    Example:
        >>> import torch
        >>> LossOutput(torch.tensor(0.5), lambda: {"accuracy": torch.tensor(1.0)}).metrics
        {'accuracy': tensor(1.)}
    """

    def __init__(self, loss: Tensor, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        self.loss = loss
        self._metrics = {} if metrics is None else metrics

    @property
    def metrics(self) -> Metrics:
        """The metrics by name.

        Raises:
            WrongResultError: the metrics are not a dict of tensors with one real number each.
        """
        if callable(self._metrics):
            self._metrics = self._metrics()
        if not isinstance(self._metrics, Mapping):
            raise WrongResultError(f"{kind_of(self._metrics)} as metrics", "a dict of 0-D tensors", "Name them.")
        for name, value in self._metrics.items():
            is_number = isinstance(value, Tensor) and value.numel() == 1 and not (value.is_complex() or value.is_sparse)
            if not is_number or value.is_meta:
                returned = f"{kind_of(value)} as the metric '{name}'"
                raise WrongResultError(returned, "dense real 0-D tensors as metrics", "Take the mean over the batch.")
        return self._metrics

    @classmethod
    def mean(cls, outputs: "Sequence[LossOutput]") -> "LossOutput":
        """Return the mean of several losses and of their metrics, without a gradient.

        Raises:
            WrongResultError: the losses have metrics of different names.
        """
        names = list(outputs[0].metrics)
        for output in outputs:
            if set(output.metrics) != set(names):
                returned = f"metrics with the names {[*output.metrics]} for one batch of a step and {names} for another"
                raise WrongResultError(returned, "the same names for every batch", "Return each name every time.")
        return cls(
            torch.stack([output.loss.detach() for output in outputs]).mean(),
            {name: torch.stack([output.metrics[name].detach() for output in outputs]).mean() for name in names},
        )

    @classmethod
    def of(cls, value: "Tensor | LossOutput") -> "LossOutput":
        """Return a loss tensor as a LossOutput; a LossOutput is returned as it is.

        Raises:
            WrongResultError: `value` is neither a tensor nor a LossOutput, or the loss is not one real number.
        """
        output = value if isinstance(value, LossOutput) else cls(value)
        loss = output.loss
        if not isinstance(loss, Tensor) or (loss.dim() and loss.numel() != 1):
            advice = "Return the mean over the batch, such as `losses.mean()`, and metrics beside it in a LossOutput."
            raise WrongResultError(kind_of(loss), "a 0-D tensor, or LossOutput(loss, metrics) with one", advice)
        if loss.is_complex():
            raise WrongResultError("a complex number", "a real one", "Return its .abs() or .real.")
        return output
