"""What a loss returns when it has more to tell than one number."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """A scalar loss with metrics beside it.

    Args:
        loss: 0-D tensor, the value that is minimised.
        metrics: 0-D tensors to log, by name; they are detached, nothing flows back through them.

    Example:
        >>> import torch
        >>> LossOutput(torch.tensor(0.5), {"accuracy": torch.tensor(1.0)}).loss
        tensor(0.5000)
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, value: "Tensor | LossOutput") -> "LossOutput":
        """Wrap a bare loss tensor; a LossOutput passes through."""
        return value if isinstance(value, LossOutput) else cls(value)
