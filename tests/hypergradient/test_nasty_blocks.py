"""Blocks as they are written in research code: every way finds the same hypergradient, or refuses with one error."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from mlotool import Identity, Implicit, Unrolled, remat, stop_gradient
from mlotool.core.errors import ConfigError
from tests.hypergradient.two_levels import two_levels
from tests.programs import Point

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

BATCH, TIME, WIDTH = 6, 5, 8
TOKENS = torch.randint(7, (BATCH, TIME), generator=torch.Generator().manual_seed(4))


class Mlp(nn.Module):
    """Two layers with something between them.

    Args:
        between: `(block, values of the first layer) -> what the second one reads`.
        prepare: sets a new block up.
    """

    def __init__(
        self, between: Callable[[Any, Tensor], Tensor] | None = None, prepare: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.between = between
        if prepare is not None:
            prepare(self)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return x + self.last(y if self.between is None else self.between(self, y))


class Attention(nn.Module):
    """With masks and changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.full((TIME, TIME), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT / WIDTH**0.5
        scores += self.mask
        y = x.sin()
        y += scores.softmax(-1) @ self.value(x)
        y[..., 0].mul_(0.5)
        y[:, 1:] += y[:, :-1].clone()
        return y


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, weights[rows, places][:, None] * torch.tanh(expert(flat[rows])))
        return x + out.reshape(x.shape)


class Nested(nn.Module):
    """Takes and returns containers with things in them that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Mlp()

    def forward(self, x: Any) -> Any:
        x = x[0]["x"] if isinstance(x, tuple) else x
        return {"x": self.inside(x), "none": None, "count": 3}, None, [x.argmax(-1), "text"]


class Lookup(nn.Module):
    """Reads a table of rows, by a function of tokens and table."""

    def __init__(self, embed: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.rows, self.last, self.embed = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH), embed

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embed(TOKENS, self.rows.weight)
        return x + torch.tanh(self.last(rows if rows.dim() == 3 else rows[:, None])) * x


# With a row for padding, forward mode has formulas of our own.
EMBEDDINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "with padding": partial(F.embedding, padding_idx=2),
    "of bags": partial(F.embedding_bag, padding_idx=2, mode="sum"),
}


@dataclass
class Output:
    x: Tensor


class Opaque(Mlp):
    def forward(self, x: Any) -> Any:
        return Output(super().forward(x.x if isinstance(x, Output) else x))


class Rounded(torch.autograd.Function):
    """Straight through; with tangents where it has `jvp`."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        return

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent


class RoundedWithTangents(Rounded):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


class OldSine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * ctx.saved_tensors[0].cos()


class Tanh(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tanh() + 0.1 * weight


def with_teacher(block: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = block.first(y).softmax(-1)
    return y * teacher


def with_cached_weights(block: Any, y: Tensor) -> Tensor:
    with parametrize.cached():
        return block.first(block.first(y))


def with_moving_mean(block: Any, y: Tensor) -> Tensor:
    block.mean = 0.9 * block.mean + 0.1 * y.detach().mean((0, 1))
    return y - block.mean


def with_counter(block: Any, y: Tensor) -> Tensor:
    block.count = getattr(block, "count", 0) + 1
    return y * (1 + 0.1 * block.count)


def with_own_generator(block: Any, y: Tensor) -> Tensor:
    if not hasattr(block, "generator"):
        block.generator = torch.Generator().manual_seed(1)
    return y * torch.rand(y.shape, generator=block.generator, dtype=y.dtype)


def with_loss_in_attribute(block: Any, y: Tensor) -> Tensor:
    block.auxiliary = y.square().mean()
    return y


def relu_first(block: Any) -> None:
    plain = block.forward
    block.forward = lambda x: plain(F.relu(x, inplace=True))


def checkpointed(block: Any, y: Tensor) -> Tensor:
    return checkpoint(block.first, y, use_reentrant=False)


def buffer(*shape: int) -> Callable[[Any], None]:
    return lambda block: block.register_buffer("mean", torch.zeros(*shape))


def with_pre_hooks(block: Any) -> None:
    block.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))
    block.last.register_forward_pre_hook(lambda module, inputs: (inputs[0].sin(),))
    block.first.register_forward_hook(lambda module, inputs, output: 1.5 * output)


def with_backward_hook(block: Any) -> None:
    block.first.register_full_backward_hook(lambda module, slopes, _: (0.5 * slopes[0],))


def with_frozen_copy(block: Any) -> None:
    block.frozen = copy.deepcopy(block.first).requires_grad_(False)


Make = Callable[[], nn.Module]

SAME: dict[str, Make] = {
    "attention with masks, in place": Attention,
    "experts": Experts,
    "nested containers": Nested,
    **{f"an embedding, {name}": partial(Lookup, embed) for name, embed in EMBEDDINGS.items()},
    "blocks in blocks": lambda: Mlp(lambda block, y: remat(block.last, F.dropout(remat(block.first, y), 0.2))),
    "hooks that change what passes": lambda: Mlp(prepare=with_pre_hooks),
    "a teacher under no_grad": lambda: Mlp(with_teacher),
    "data": lambda: Mlp(lambda block, y: y * y.data.sigmoid() * block.first.weight.data.sum()),
    "item": lambda: Mlp(lambda block, y: y * y.mean().item()),
    "stop_gradient": lambda: Mlp(lambda block, y: y * stop_gradient(y)),
    "straight through, a function": lambda: Mlp(lambda block, y: y * RoundedWithTangents.apply(3 * y)),
    "complex numbers": lambda: Mlp(lambda block, y: torch.fft.irfft(torch.fft.rfft(y) ** 2 * (1 + 1j), n=WIDTH)),
    "dropout": lambda: Mlp(lambda block, y: F.dropout(y, 0.3)),
    "dropout of a transposed tensor": lambda: Mlp(lambda block, y: F.dropout(y.transpose(0, 1), 0.3).transpose(0, 1)),
    "a moving mean in a buffer": lambda: Mlp(with_moving_mean, buffer(WIDTH)),
    "the old weight of a hook": lambda: Mlp(prepare=lambda block: old_spectral_norm(block.first)),
    "spectral norm": lambda: Mlp(prepare=lambda block: spectral_norm(block.first)),
    "a parametrization, cached": lambda: Mlp(
        with_cached_weights, lambda block: parametrize.register_parametrization(block.first, "weight", Tanh())
    ),
    "a frozen copy": lambda: Mlp(lambda block, y: block.frozen(y), with_frozen_copy),
}
"""All ways find the same."""

NEWER = torch.__version__ >= "2.14"
AGAIN, MODES, TANGENTS, PLACE = "returned something else", "differs from that of double", "under product", "in.place"

REFUSED: dict[str, tuple[Make, str | None, str | None]] = {
    "a counter": (lambda: Mlp(with_counter), AGAIN, MODES),
    "a generator of its own": (lambda: Mlp(with_own_generator), AGAIN, MODES),
    "random numbers of numpy": (lambda: Mlp(lambda block, y: y * float(numpy.random.rand())), AGAIN, MODES),
    "an auxiliary loss in an attribute": (lambda: Mlp(with_loss_in_attribute), "attribute 'auxiliary'", None),
    "a dataclass": (Opaque, "returns an Output, which holds tensors", None),
    "an input changed in place": (lambda: Mlp(prepare=relu_first), PLACE, None),
    # Forward mode of torch 2.9 takes it, and is right; that of 2.14 does not.
    "weights renormalised in place": (
        lambda: Lookup(partial(F.embedding, max_norm=1.0)),
        PLACE,
        PLACE if NEWER else None,
    ),
    "hooks of gradients": (lambda: Mlp(prepare=with_backward_hook), None, TANGENTS),
    "an old function": (lambda: Mlp(lambda block, y: OldSine.apply(y)), None, TANGENTS),
    "a function without tangents": (lambda: Mlp(lambda block, y: y * Rounded.apply(3 * y)), None, TANGENTS),
    "a checkpoint of torch": (lambda: Mlp(checkpointed), None, TANGENTS),
}
"""By name: the block, what remat says of it, and what forward mode says; None where they find the same."""

INPUTS = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
REMAT = ["blocks.*"]


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if isinstance(x, tuple):
            x = x[0]["x"]
        return getattr(x, "x", x)


def gradient(make: Callable[[], nn.Module], algorithm: Any, again: Any) -> Tensor:
    """Return the gradient of weights of samples, of two recorded steps or of an implicit solution."""

    def lower(batch: None, *, w: Any, u: Any) -> Tensor:
        return (u().sigmoid()[:, None, None] * w(INPUTS).square()).mean()

    def upper(batch: None, *, w: Any) -> Tensor:
        return w(INPUTS).cos().mean()

    torch.manual_seed(0)
    net, steps = Net(make).double(), 2 if isinstance(algorithm, Unrolled) else 1
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5), "remat": again, "unroll_steps": steps}
    weights = Point(torch.linspace(-1, 1, BATCH, dtype=torch.float64))
    made = two_levels((net, lower), (weights, upper), algorithm, **settings)
    made.random.manual_seed(5)
    random.seed(1)
    numpy.random.seed(1)
    return made.gradient("u", {"w": [None] * steps} if steps > 1 else None)["x"]


WAYS = {
    "unrolled": (Unrolled(remat=False), (Unrolled(), Unrolled(product="forward"))),
    "implicit": (Implicit(Identity()), (Implicit(Identity()), Implicit(Identity(), "forward"))),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [*[(name, "unrolled") for name in SAME], *[(name, "implicit") for name in ("dropout", "data", "spectral norm")]],
)
def test_the_same(name: str, way: str) -> None:
    base, algorithms = WAYS[way]
    expected = gradient(SAME[name], base, None)
    assert expected.norm() > 1e-5
    for algorithm in algorithms:
        for again in (None, REMAT) if algorithm.product == "forward" else (REMAT,):
            found = gradient(SAME[name], algorithm, again)
            assert (found - expected).norm() < 1e-10 * expected.norm(), (algorithm.product, again)


IN_BOTH = ("a counter", "a dataclass", "hooks of gradients")
"""Blocks of which normal tests see in implicit solutions too that they are refused."""


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *[(name, "unrolled") for name in REFUSED],
        *[pytest.param(name, "implicit", marks=[] if name in IN_BOTH else pytest.mark.slow) for name in REFUSED],
    ],
)
def test_refused(name: str, way: str) -> None:
    make, of_remat, of_forward = REFUSED[name]
    base, (reverse, forward) = WAYS[way]
    for algorithm, again, said in ((reverse, REMAT, of_remat), (forward, None, of_forward)):
        if said is None:
            expected = gradient(make, base, None)
            assert (gradient(make, algorithm, again) - expected).norm() < 1e-10 * expected.norm()
        else:
            with pytest.raises(ConfigError, match=said):
                gradient(make, algorithm, again)
    with pytest.raises(ConfigError, match="|".join(filter(None, (of_remat, of_forward)))):
        gradient(make, forward, REMAT)
