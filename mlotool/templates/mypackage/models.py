"""Models: torch modules. The recipe sets their arguments."""

import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """A network with one hidden layer, from points (b, 2) to logits (b, 2).

    Args:
        hidden: width of the hidden layer.
    """

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.layers(x)
        return logits


class MistakeRates(nn.Module):
    """The learned rate of wrong labels in each of the two classes, between 0 and 0.5.

    Args:
        initial: the initial value of both rates.
    """

    def __init__(self, initial: float = 0.1) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.full((2,), 2 * initial).logit())

    def forward(self) -> Tensor:
        """Return the rates (2,). They stay below one half, since beyond it the two classes could change places."""
        return 0.5 * self.raw.sigmoid()
