"""Modules that compile themselves, by torch.compile or torch.jit: the hypergradients of uncompiled ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import ConjugateGradient, EvolutionStrategies, Identity, Implicit, Neumann, Penalty, Unrolled
from mlotool.core.errors import ConfigError
from tests.hypergradient.two_levels import ticked, two_levels
from tests.programs import Point

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit", "ignore:The .* solve at problem", "ignore:The .grad attribute of a Tensor"
)
COMPILE = partial(torch.compile, backend="aot_eager")


class Net(nn.Module):
    def __init__(self, make: Callable[[nn.Module], Any] = lambda layer: layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = make(nn.Sequential(nn.Linear(2, 3), nn.Tanh())), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)).squeeze(-1)


class Helped(Net):
    """Calls a compiled function that is no module."""

    tanh = staticmethod(COMPILE(lambda x: torch.tanh(x) * 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tanh(self.first[0](x))).squeeze(-1)


COMPILED = {
    "a layer": lambda: Net(COMPILE),
    "the whole": lambda: COMPILE(Net()),
    "a function": Helped,
    "TorchScript": lambda: Net(torch.jit.script),
}


def error(batch: Any, *, w: Any) -> Tensor:
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [-1.0, 0.3]])
    return (w(x) - x.sum(1)).square().mean()


def ends(model: nn.Module, algorithm: Any) -> list[Tensor]:
    sgd, lower = partial(torch.optim.SGD, lr=0.1), lambda batch, *, w, u: error(batch, w=w) * u().exp().sum()
    settings = {"of_upper": {"optimizer": sgd}, "optimizer": sgd, "unroll_steps": 2}
    made = ticked(two_levels((model, lower), (Point(torch.zeros(1)), error), algorithm, **settings), 4)
    return [each.detach() for problem in made.problems.values() for each in problem.theta.values()]


CG = Implicit(ConjugateGradient(2, damping=1.0))
ALGORITHMS = [
    Implicit(Neumann(3, 0.1), "forward"),
    Implicit(Identity(), "finite_difference"),
    Unrolled(),
    Penalty(0.1),
    EvolutionStrategies(2),
]


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [*[(name, CG) for name in COMPILED], *[("the whole", each) for each in ALGORITHMS], ("TorchScript", ALGORITHMS[0])],
    ids=repr,
)
def test_hypergradients_are_those_of_the_module_itself(name: str, algorithm: Any) -> None:
    torch.compiler.reset()
    if "TorchScript" in name and getattr(algorithm, "product", None) == "forward":
        with pytest.raises(ConfigError, match=r"a module of torch.jit, which does not support .*Leave out torch.jit"):
            ends(COMPILED[name](), algorithm)
        return
    found, expected = ends(COMPILED[name](), algorithm), ends(Net(), algorithm)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
