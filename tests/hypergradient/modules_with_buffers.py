"""Networks whose buffers move, each in another way."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm


class Momentum(nn.Module):
    """A network that subtracts a running mean of its inputs, which it keeps in a buffer that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("still", torch.ones(100))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        return torch.tanh(self.layer(x - self.mean))


class Sparse(nn.Module):
    """A network on a graph whose adjacency matrix is a buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("adjacency", (0.5 * torch.eye(3, dtype=torch.float64)).to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        # Sparse products have no tangents.
        return torch.tanh(self.layer(x) @ self.adjacency.to_dense())


class Late(nn.Module):
    """A network that scales its inputs with a buffer which changes at every k-th evaluation."""

    def __init__(self, change: Callable[[Tensor], Tensor], period: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("number", torch.zeros((), dtype=torch.long))
        self.change, self.period = change, period

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        if int(self.number) % self.period == 0:
            self.scale = self.change(self.scale)
        return torch.tanh(self.layer(x * self.scale))


class Born(nn.Module):
    """A network whose running mean is none at first.

    Args:
        is_dropped: it is one at first, and none at last.
    """

    def __init__(self, is_dropped: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.full((3,), 0.5) if is_dropped else None)
        self.is_dropped = is_dropped

    def forward(self, x: Tensor) -> Tensor:
        now = x.detach().mean(0)
        before = now if self.mean is None else self.mean
        self.mean = None if self.is_dropped else 0.5 * before + 0.5 * now
        return torch.tanh(self.layer(x - before))


def in_inference_mode(scale: Tensor) -> Tensor:
    with torch.inference_mode():
        return scale * 0.5


class Rows(nn.Module):
    """A network whose buffer is one row of another one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("table", torch.randn(4, 1 << 13, dtype=torch.float64))
        self.register_buffer("row", self.table[0])
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x * self.row[:3]))
        self.number += 1
        self.row = self.table[int(self.number) % 4]
        return y


MOVING: dict[str, Callable[[], nn.Module]] = {
    "spectral norm": lambda: nn.Sequential(spectral_norm(nn.Linear(3, 5)), nn.BatchNorm1d(5), nn.Linear(5, 3)),
    "running mean": Momentum,
    "sparse": lambda: Sparse(torch.sparse_coo),
    "rows of a table": Rows,
    "at the third": lambda: Late(lambda x: torch.full((3,), 0.1).to(x), 3),
    "in the second unroll": lambda: Late(lambda x: torch.full((3,), 0.1).to(x), 6),
    "every time, in place": lambda: Late(lambda x: x.mul_(0.8), 1),
    "in place, later": lambda: Late(lambda x: x.mul_(0.1), 7),
    "with a graph": lambda: Late(lambda x: (x * torch.ones(3, requires_grad=True).to(x)) * 0.5, 2),
    "in inference mode": lambda: Late(in_inference_mode, 2),
}
