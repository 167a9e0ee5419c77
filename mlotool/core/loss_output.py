"""What a loss returns when it has more to tell than one number."""

from collections.abc import Callable, Mapping

from torch import Tensor

from mlotool.core.described import kind_of
from mlotool.core.user_code import WrongResultError

Metrics = Mapping[str, Tensor]

_ONE_NUMBER = (
    "a 0-D tensor, or LossOutput(loss, metrics) with one",
    "Return the mean over the batch, such as `losses.mean()`, and metrics beside it in a LossOutput.",
)


class LossOutput:
    """A scalar loss with metrics beside it.

    A hypergradient evaluates a loss many times and looks at its metrics in none of them; given as a callable, they
    are computed only where they are read.

    Args:
        loss: 0-D tensor, the value that is minimised.
        metrics: 0-D tensors to log, by name, or a callable that returns them; nothing flows back through them.

    Example:
        >>> import torch
        >>> LossOutput(torch.tensor(0.5), lambda: {"accuracy": torch.tensor(1.0)}).metrics
        {'accuracy': tensor(1.)}
    """

    __slots__ = ("_metrics", "loss")

    def __init__(self, loss: Tensor, metrics: Metrics | Callable[[], Metrics] | None = None) -> None:
        self.loss = loss
        self._metrics = {} if metrics is None else metrics

    @property
    def metrics(self) -> Metrics:
        """The metrics by name."""
        if callable(self._metrics):
            self._metrics = self._metrics()
        return self._metrics

    @classmethod
    def of(cls, value: "Tensor | LossOutput") -> "LossOutput":
        """Wrap a bare loss tensor; a LossOutput passes through.

        Raises:
            WrongResultError: it is neither, or the loss is not one number.
        """
        output = value if isinstance(value, LossOutput) else cls(value)
        loss = output.loss
        if not isinstance(loss, Tensor) or (loss.dim() and loss.numel() != 1):
            raise WrongResultError(kind_of(loss), *_ONE_NUMBER)
        return output
