"""Modules that compile themselves, by torch.compile or torch.jit: the hypergradients of uncompiled ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import (
    ConjugateGradient,
    EvolutionStrategies,
    Graph,
    Identity,
    Implicit,
    Neumann,
    Penalty,
    Problem,
    Program,
    Schedule,
    Unrolled,
)
from mlotool.core.errors import ConfigError
from tests.programs import Point

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit",
    "ignore:The .* solve at problem",
    "ignore:The .grad attribute of a Tensor",
    # FX follows no compiled function: its problem steps by the plan.
    "ignore:problems.*its steps are not traced",
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


def loss(batch: Any, *, model: Any, scale: Any = None) -> Tensor:
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [-1.0, 0.3]])
    error = (model(x) - x.sum(1)).square().mean()
    return error if scale is None else error * scale().exp().sum()


def program(model: nn.Module, algorithm: Any, trace: str | None = None) -> Program:
    sgd = partial(torch.optim.SGD, lr=0.1)
    lower = Problem("model", model, loss, roles={"model": "model", "scale": "scale"}, optimizer=sgd,
                    hypergradient=algorithm, unroll_steps=2)  # fmt: skip
    upper = Problem("scale", Point(torch.zeros(1)), loss, roles={"model": "model"}, optimizer=sgd)
    return Program([lower, upper], Graph({"scale": ["model"]}, {"model": ["scale"]}), trace=trace, trace_from=1)


def ends(made: Program) -> list[Tensor]:
    schedule = Schedule(made)
    for _ in range(5):
        schedule.tick()
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
        with pytest.raises(ConfigError, match=r"a module of torch.jit, under product: forward; .*Leave out torch.jit"):
            program(COMPILED[name](), algorithm)
        return
    found, expected = ends(program(COMPILED[name](), algorithm)), ends(program(Net(), algorithm))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
