"""Blocks as they are written in research code: every way finds the same hypergradient, or refuses with one error."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from mlotool import Identity, Implicit, Unrolled
from mlotool.core.errors import ConfigError
from tests.hypergradient.nasty_blocks import BATCH, REFUSED, SAME, TIME, WIDTH
from tests.hypergradient.two_levels import two_levels
from tests.programs import Point

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")

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


def gradient(make: Callable[[], nn.Module], algorithm: Any, remat: Any) -> Tensor:
    """Return the gradient of weights of samples, of two recorded steps or of an implicit solution."""

    def lower(batch: None, *, w: Any, u: Any) -> Tensor:
        return (u().sigmoid()[:, None, None] * w(INPUTS).square()).mean()

    def upper(batch: None, *, w: Any) -> Tensor:
        return w(INPUTS).cos().mean()

    torch.manual_seed(0)
    net, steps = Net(make).double(), 2 if isinstance(algorithm, Unrolled) else 1
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5), "remat": remat, "unroll_steps": steps}
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
        for remat in (None, REMAT) if algorithm.product == "forward" else (REMAT,):
            found = gradient(SAME[name], algorithm, remat)
            assert (found - expected).norm() < 1e-10 * expected.norm(), (algorithm.product, remat)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, way: str) -> None:
    make, of_remat, of_forward = REFUSED[name]
    base, (reverse, forward) = WAYS[way]
    for algorithm, remat, said in ((reverse, REMAT, of_remat), (forward, None, of_forward)):
        if said is None:
            expected = gradient(make, base, None)
            assert (gradient(make, algorithm, remat) - expected).norm() < 1e-10 * expected.norm()
        else:
            with pytest.raises(ConfigError, match=said):
                gradient(make, algorithm, remat)
    with pytest.raises(ConfigError, match="|".join(filter(None, (of_remat, of_forward)))):
        gradient(make, forward, REMAT)
