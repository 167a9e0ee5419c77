"""What the operators are made of: tensors by a short specification, modules as functions, constants.

Legend: `r` normal numbers, `p` positive ones, `u` between 0.1 and 0.9, `s` positive definite; then the shape.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Operator = Callable[..., Any]
Operators = dict[str, tuple[str, Operator]]
"""By name: the specification of the tensors, and the function."""


def inputs_of(spec: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return the tensors of a specification such as `"r2,3 p3"`, the same ones each time."""
    generator, found = torch.Generator().manual_seed(0), []
    for each in spec.split():
        kind, shape = each[0], [int(size) for size in each[1:].split(",") if size]
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if kind == "p":
            value = value.abs() + 0.5
        elif kind == "u":
            value = 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=torch.float64)
        elif kind == "s":
            value = value @ value.mT + torch.eye(shape[-1], dtype=torch.float64)
        found.append(value.to(dtype))
    return found


def seeded(function: Operator) -> Operator:
    def seeded(*tensors: Tensor) -> Any:
        torch.manual_seed(1)
        return function(*tensors)

    return seeded


def from_module(make: Callable[[], nn.Module], *, mode: str = "train", select: Operator = lambda y: y) -> Operator:
    """Return a module's output as a function of the input and a number that scales all its parameters."""
    torch.manual_seed(2)
    with warnings.catch_warnings():
        # Some are deprecated.
        warnings.simplefilter("ignore")
        module = make().double().train(mode == "train")

    def call(x: Tensor, scale: Tensor) -> Any:
        own = {name: each.detach().to(x.dtype) * scale for name, each in module.named_parameters()}
        named = module.named_buffers()
        buffers = {name: value.to(x.dtype) if value.is_floating_point() else value.clone() for name, value in named}
        torch.manual_seed(1)
        return select(torch.func.functional_call(module, {**own, **buffers}, (x,)))

    return call


def normalized(make: Callable[[nn.Module], nn.Module]) -> Operator:
    return from_module(lambda: make(nn.Linear(3, 2)))


def attention(**options: Any) -> Operator:
    def attention(x: Tensor, packed: Tensor, out: Tensor) -> Tensor:
        nothing = None, None, None, False, 0.0
        return F.multi_head_attention_forward(x, x, x, 4, 2, packed, *nothing, out, None, **options)[0]

    return attention


class SelfAttention(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(4, 2, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x, need_weights=False)[0]


class Decoder(nn.TransformerDecoderLayer):
    def __init__(self) -> None:
        super().__init__(4, 2, 6, 0.1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x)


def assigned(x: Tensor, y: Tensor) -> Tensor:
    found = x * 1.0
    found[1] = y.sin()
    found[0, 1:] *= 2.0
    return found


LABELS = torch.tensor([0, 2, 1])
CHOICE = torch.tensor([[0, 2], [1, 1]])
SIGNS = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
ZERO = torch.ones(3, 4).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(0.0))
ZEROS = torch.ones(3, 4).index_put((torch.tensor([1, 1]), torch.tensor([2, 3])), torch.tensor(0.0))
MASK = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])


def zeroed(x: Tensor, ones: Tensor) -> Tensor:
    """Return normal numbers x of shape (3, 4), moved to zero where `ones` is zero, in the losses of `products.py`."""
    start = inputs_of("r3,4", x.dtype)[0]
    return x - torch.add(start, start * start, alpha=0.1) * (1 - ones.to(x.dtype))


def symmetric(x: Tensor) -> Tensor:
    return (x + x.mT) / 2


def ones(x: Tensor) -> Tensor:
    return torch.ones(x.shape, dtype=x.dtype)


def sampled(mode: str, x: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(x, grid * 0.5, mode=mode, align_corners=False)
