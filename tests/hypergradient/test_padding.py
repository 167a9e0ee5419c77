"""Embeddings with a row for padding: forward mode differentiates them as reverse mode does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlotool import Exact, Graph, Implicit, Neumann, Problem, Program, Unrolled

TOKENS = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(0))
TOKENS[:, 0] = 2
TARGETS = torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")


class Net(nn.Module):
    def __init__(self, embed: Callable[[Tensor, Tensor], Tensor], is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.last = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if is_tied:
            self.last.weight = self.rows.weight
        self.embed = embed
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.embed(tokens, self.rows.weight)
        return self.last(torch.tanh(rows).mean(1) if rows.dim() == 3 else rows)


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))

    def forward(self) -> Tensor:
        return self.x.sigmoid()


def gradient(embed: Callable[[Tensor, Tensor], Tensor], is_tied: bool, algorithm: Any, steps: int = 1) -> Tensor:
    def lower(batch: None, *, model: Any, weights: Any) -> Tensor:
        decay = 0.05 * torch.stack([each.square().sum() for each in model.parameters()]).sum()
        return (weights() * F.cross_entropy(model(TOKENS), TARGETS, reduction="none")).mean() + decay

    def upper(batch: None, *, model: Any) -> Tensor:
        return model(TOKENS).cos().mean() + 0.1 * torch.stack([each.sum() for each in model.parameters()]).sum()

    optimizer = partial(torch.optim.SGD, lr=0.1)
    roles = {"model": "model", "weights": "weights"}
    settings: dict[str, Any] = {"optimizer": optimizer, "hypergradient": algorithm, "unroll_steps": steps}
    low = Problem("model", Net(embed, is_tied), lower, roles=roles, **settings)
    high = Problem("weights", Weights(), upper, roles={"model": "model"}, optimizer=optimizer)
    program = Program([low, high], Graph({"weights": ["model"]}, {"model": ["weights"]}))
    return program.gradient("weights", {"model": [None] * steps} if steps > 1 else None)["x"]


WAYS: dict[str, Callable[[str], tuple[Any, int]]] = {
    "exact": lambda product: (Implicit(Exact(), product), 1),  # type: ignore[arg-type]
    "neumann": lambda product: (Implicit(Neumann(5, 0.5), product), 1),  # type: ignore[arg-type]
    "unrolled": lambda product: (Unrolled(product=product), 3),  # type: ignore[arg-type]
}
EMBEDDINGS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "padding": (partial(F.embedding, padding_idx=2), False),
    "padding counted from the end": (partial(F.embedding, padding_idx=-3), False),
    "tied weights": (partial(F.embedding, padding_idx=2), True),
    "by frequency": (partial(F.embedding, padding_idx=2, scale_grad_by_freq=True), False),
    "torch.embedding": (lambda tokens, weight: torch.embedding(weight, tokens, 2), False),
    "no padding, of torch.embedding": (lambda tokens, weight: torch.embedding(weight, tokens), True),
    "bags": (partial(F.embedding_bag, padding_idx=2, mode="sum"), False),
    "tied bags": (partial(F.embedding_bag, padding_idx=2, mode="max"), True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_forward_mode_is_reverse_mode(name: str, way: str) -> None:
    expected, found = (gradient(*EMBEDDINGS[name], *WAYS[way](product)) for product in ("reverse", "forward"))
    assert expected.norm() > 1e-5
    assert (found - expected).norm() < 1e-12 * expected.norm()
