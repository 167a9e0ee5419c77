"""Collected losses, the values of small upper problems, and which problem is named when a number is not finite."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mlotool
from mlotool.core.errors import NonFiniteLossError, NonFiniteParametersError
from mlotool.models import PositiveVector
from mlotool.program import Graph, Problem, Program, StepResult
from mlotool.runner.values import MAX_VALUES, Window, check_parameters, explain, learned_values


def step(loss: float, **metrics: float) -> StepResult:
    return StepResult(torch.tensor(loss), {key: torch.tensor(value) for key, value in metrics.items()})


def test_a_flush_gives_means_over_the_window_and_begins_the_next() -> None:
    window = Window()
    window.append({"lower": step(1.0, accuracy=0.5)})
    window.append({"lower": step(2.0, accuracy=1.0), "upper": StepResult(torch.tensor([5.0]).double(), {})})
    assert window.flush() == {"lower/loss": 1.5, "lower/accuracy": 0.75, "upper/loss": 5.0}
    assert window.flush() == {}


class Noisy(nn.Module):
    """Gives something else in training mode, with random numbers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self) -> Tensor:
        self.calls += 1
        return self.scale * torch.rand(()).clamp(0.5, 0.5) * (3.0 if self.training else 1.0)


class Table(nn.Module):
    def __init__(self, **values: float) -> None:
        super().__init__()
        self.values = nn.ParameterDict({name: nn.Parameter(torch.tensor(value)) for name, value in values.items()})

    def forward(self, index: Tensor) -> Tensor:
        return self.values["a"] * index


class Wide(Table):
    def forward(self) -> Tensor:  # type: ignore[override]
        return self.values["a"].expand(MAX_VALUES + 1)


class Broken(Table):
    def forward(self) -> Tensor:  # type: ignore[override]
        raise RuntimeError("not like that")


def unused(batch: Any, **roles: Any) -> Tensor:
    raise AssertionError("no loss is evaluated")


def read(module: nn.Module) -> dict[str, float]:
    roles = {"w": "w", "u": "u"}
    lower = Problem("w", PositiveVector(), unused, roles=roles, hypergradient=mlotool.FirstOrder())
    upper = Problem("u", module, unused, roles={"w": "w"})
    program = Program([lower, upper], Graph({"u": ["w"]}, {"w": ["u"]}))
    assert learned_values(program) == learned_values(program)
    return learned_values(program)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (PositiveVector(1, initial=0.5), {"learned_value": 0.5}),
        (PositiveVector(2, initial=0.5), {"learned_value_0": 0.5, "learned_value_1": 0.5}),
        (Noisy(), {"learned_value": 1.0}),
        (Table(a=1.5, b=2.0), {"learned_values.a": 1.5, "learned_values.b": 2.0}),
        (Wide(a=1.5), {"learned_values.a": 1.5}),
        (Broken(a=1.5), {"learned_values.a": 1.5}),
        (PositiveVector(MAX_VALUES + 1), {}),
    ],
)
def test_the_value_in_use_is_read_and_else_the_parameters(module: nn.Module, expected: dict[str, float]) -> None:
    before = torch.get_rng_state()
    assert read(module) == pytest.approx({f"u/{key}": value for key, value in expected.items()})
    assert torch.equal(torch.get_rng_state(), before)
    assert module.training and all(not buffer.any() for buffer in module.buffers())


def program() -> Program:
    def make(name: str, lr: float, **roles: str) -> Problem:
        module = PositiveVector(2)
        optimizer = torch.optim.SGD(module.parameters(), lr=lr)
        return Problem(name, module, lambda batch, **_: torch.zeros(()), roles=roles, optimizer=optimizer)

    problems = [make("w", 1e6, w="w", lam="lam"), make("lam", 1e-3, w="w"), make("apart", 7.0, apart="apart")]
    problems[0].hypergradient = mlotool.FirstOrder()
    return Program(problems, Graph({"lam": ["w"]}, {"w": ["lam"]}))


BOTH = "problems.w.optimizer.lr (1e+06 now) and problems.lam.optimizer.lr (0.001 now)"


@pytest.mark.parametrize(
    ("ticks", "said", "unsaid"),
    [
        (
            [{"w": 2.0, "lam": math.nan}],
            "'lam' became nan at tick 1; Lower problems.w.optimizer.lr (1e+06 now), or set that problem's",
            "problems.lam.optimizer.lr",
        ),
        ([{"w": 2.0, "lam": 1.0}, {"w": math.nan}], f"the one that is too large of {BOTH}", "apart"),
        ([{"w": math.nan}], "look for NaN in the data of 'w'", "optimizer.lr"),
    ],
)
def test_those_that_had_stepped_are_to_blame(ticks: list[dict[str, float]], said: str, unsaid: str) -> None:
    window = Window(explain=partial(explain, program().problems))
    for losses in ticks:
        window.append({name: step(value) for name, value in losses.items()})
    with pytest.raises(NonFiniteLossError) as caught:
        window.check()
    assert all(part in str(caught.value) for part in said.split("; ")) and unsaid not in str(caught.value)


def test_all_problems_with_bad_parameters_are_named() -> None:
    made = program()
    tensors = {name: next(problem.module.parameters()) for name, problem in made.problems.items()}
    with torch.no_grad():
        tensors["w"].fill_(math.nan)
        with pytest.raises(NonFiniteParametersError, match="The parameters of problem 'w' were found") as caught:
            check_parameters(made, 5)
        assert BOTH in str(caught.value)
        tensors["lam"].fill_(math.inf)
    with pytest.raises(NonFiniteParametersError, match=r"the problems 'w', 'lam' were found .* after tick 5"):
        check_parameters(made, 5)
