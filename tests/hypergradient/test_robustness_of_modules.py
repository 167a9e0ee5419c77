"""What real models and batches bring along, with every algorithm: each is compared with a plain twin."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mlotool.hypergradient
from mlotool.core import stop_gradient
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import KFAC, EvolutionStrategies, FirstOrder, Implicit, Unrolled
from mlotool.program import AbstractHypergradient, Program, Schedule
from tests.hypergradient.every_algorithm import (
    DIFFERENTIATED,
    EVERY,
    SOLVERS,
    Batch,
    Rows,
    clean_and_decayed,
    program,
    weighted,
)
from tests.hypergradient.test_kfac import needs_curvlinops
from tests.program.reweighting import flat, relative_error
from tests.program.small import Mlp, assert_identical, parameters

# The small losses are not convex, and a Nystrom solve says so.
pytestmark = pytest.mark.filterwarnings("ignore:The Nystrom solve")

TICKS = 4
"""Two rounds of two lower steps and an upper one."""


def test_the_tables_hold_every_export() -> None:
    named = {name for name in mlotool.hypergradient.__all__ if not name.startswith("Abstract")}
    tried = {type(make()).__name__ for make in (*EVERY.values(), *SOLVERS.values())}
    # These say what is kept of steps; tests/hypergradient/test_step_store.py has them.
    assert named - tried == {"SolveResult", "Status", "KeepAll", "KeepEvery", "Binomial"}


def trained(
    make: Callable[[], AbstractHypergradient], *modules: nn.Module, ticks: int = TICKS, **options: Any
) -> Program:
    built = program(make, *modules, **options)
    schedule = Schedule(built)
    for _ in range(ticks):
        schedule.tick()
    return built


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether they agree up to the order of sums, which finite differences and multipliers enlarge."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-7) for name in found
    )


class LowRank(nn.Module):
    """A frozen weight plus trained low-rank factors; `base` is a frozen parameter, or a buffer in the twin."""

    def __init__(self, num_inputs: int, seed: int, *, is_twin: bool) -> None:
        super().__init__()
        inner = Mlp(num_inputs=num_inputs, seed=seed)
        base, self.head = inner.body[0].weight.detach(), inner.body[2]
        if is_twin:
            self.register_buffer("base", base)
        else:
            self.base = nn.Parameter(base, requires_grad=False)
        self.down = nn.Parameter(0.3 * base[:2].clone() + 0.1)
        self.up = nn.Parameter(torch.linspace(-1, 1, 10, dtype=base.dtype).reshape(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ (self.base + self.up @ self.down).T)).squeeze(1)


@pytest.mark.parametrize("name", EVERY)
def test_frozen_weights_with_low_rank_factors(name: str) -> None:
    found, twin = (
        trained(EVERY[name], LowRank(3, 0, is_twin=flag), LowRank(1, 1, is_twin=flag)) for flag in (False, True)
    )
    for problem in found.problems.values():
        assert "base" not in problem.theta
        assert torch.equal(problem.module.base, LowRank(*_SHAPE[problem.name], is_twin=True).base)
    ours = {key: tensor for key, tensor in parameters(found).items() if not key.endswith("base")}
    assert close(ours, parameters(twin))


_SHAPE = {"model": (3, 0), "weigher": (1, 1)}


@needs_curvlinops
@pytest.mark.parametrize("kind", ["kfac", "ekfac"])
def test_kronecker_factors_with_a_frozen_layer(kind: Any) -> None:
    def column(batch: Batch) -> Batch:
        return {**batch, "target": batch["target"][:, None]}

    model = Mlp().body
    model[0].requires_grad_(False)
    first = model[0].weight.clone()
    solver = KFAC(1.0, kind, "mean_squared_error")
    built = trained(lambda: Implicit(solver), model, Mlp(num_inputs=1, seed=1).body, pack=column, lower=_by_column)
    assert torch.equal(model[0].weight, first)
    assert float(flat(built.gradient("weigher")).norm()) > 0


def _by_column(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
    losses = (model(batch["input"]) - batch["target"]) ** 2
    return (torch.sigmoid(weigher(stop_gradient(losses))) * losses).mean()


class Spare(Mlp):
    """Has a parameter that its forward does not use."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3),
}


@pytest.mark.parametrize(
    ("name", "optimizer"), [*[(name, "sgd") for name in EVERY], ("cg", "adamw"), ("unrolled", "adamw")]
)
def test_unused_parameters_are_left_alone_by_weight_decay(name: str, optimizer: str) -> None:
    found, twin = (trained(EVERY[name], model, optimizer=OPTIMIZERS[optimizer]) for model in (Spare(), Mlp()))
    spare = found.problems["model"].module.spare
    assert torch.equal(spare, torch.ones_like(spare))
    ours = parameters(found)
    ours.pop("model.spare")
    # Nystrom draws its columns from all parameters, so the twin's are others.
    assert "nystrom" in name or close(ours, parameters(twin))


class Tied(nn.Module):
    """One weight in two layers: registered twice, or in the twin once and used twice."""

    def __init__(self, num_inputs: int, seed: int, *, is_twin: bool) -> None:
        super().__init__()
        self.inner, outer = Mlp(num_inputs=num_inputs, seed=seed), Mlp(num_inputs=num_inputs, seed=seed + 5)
        self.bias, self.head, self.is_twin = outer.body[0].bias, outer.body[2], is_twin
        if not is_twin:
            self.again = nn.Linear(num_inputs, 5, bias=False).double()
            self.again.weight = self.inner.body[0].weight

    def forward(self, x: Tensor) -> Tensor:
        again = x @ self.inner.body[0].weight.T if self.is_twin else self.again(x)
        return self.inner(x) * self.head(torch.tanh(again + self.bias)).squeeze(1)


@pytest.mark.parametrize("name", EVERY)
def test_tied_weights(name: str) -> None:
    found, twin = (trained(EVERY[name], Tied(3, 0, is_twin=flag), Tied(1, 1, is_twin=flag)) for flag in (False, True))
    for problem in found.problems.values():
        assert problem.module.again.weight is problem.module.inner.body[0].weight
    assert close(parameters(found), parameters(twin))


class Named(NamedTuple):
    x: Tensor
    rest: tuple[Any, ...]


@dataclass(frozen=True)
class Derived:
    """Its second field is not an argument."""

    x: Tensor
    target: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self.x.sum(1))


PACKINGS: dict[str, tuple[Callable[[Batch], Any], Callable[[Any], Batch]]] = {
    "dict": (lambda b: {"a": {"b": dict(b)}, "n": 3}, lambda p: p["a"]["b"]),
    "tuple": (lambda b: (1, (b["input"], [b["target"], None])), lambda p: {"input": p[1][0], "target": p[1][1][0]}),
    "namedtuple": (lambda b: Named(b["input"], (b["target"],)), lambda p: {"input": p.x, "target": p.rest[0]}),
    "dataclass": (lambda b: Derived(b["input"]), lambda p: {"input": p.x, "target": p.target}),
}


@pytest.mark.parametrize("name", ["neumann", "identity_difference", "unrolled_forward", "penalty", "saba", "evolution"])
def test_nested_batches(name: str) -> None:
    expected = parameters(trained(EVERY[name]))
    for pack, unpack in PACKINGS.values():
        built = trained(
            EVERY[name],
            pack=pack,
            lower=lambda batch, unpack=unpack, **roles: weighted(unpack(batch), **roles),
            upper=lambda batch, unpack=unpack, **roles: clean_and_decayed(unpack(batch), **roles),
        )
        assert_identical(parameters(built), expected)


def _statistics(model: Mlp) -> nn.BatchNorm1d:
    return model.body[1]  # type: ignore[return-value]


@pytest.mark.parametrize("name", EVERY)
def test_batch_statistics_move_once_an_optimizer_step(name: str) -> None:
    model = Mlp(nn.BatchNorm1d(5, momentum=0.5))
    built = program(EVERY[name], model)
    norm, schedule = _statistics(model), Schedule(built)
    for tick in range(1, TICKS + 2):
        first = model.body[0].weight.detach().clone(), model.body[0].bias.detach().clone()
        mean = norm.running_mean.clone()
        schedule.tick()
        assert int(norm.num_batches_tracked) == tick
        own = (built.problems["model"].stream.last()["input"] @ first[0].T + first[1]).mean(0)
        assert torch.allclose(norm.running_mean, 0.5 * mean + 0.5 * own, rtol=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("ticks", [0, TICKS - 1])
def test_a_gradient_changes_no_bit(name: str, ticks: int) -> None:
    """Simulated steps and recorded ones, of which some are still missing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, eps=1.0), nn.Linear(2, 1), nn.Flatten(0)).double()
    built = trained(EVERY[name], model, ticks=ticks)
    given = {"model": Rows(3).__getitems__([0, 1, 2, 3])}
    before = _bits(built)
    for number in range(6):
        built.gradient("weigher", given if number % 2 and name != "saba" else None)
    assert_identical(_bits(built), before)
    assert all(tensor.grad is None for each in built.problems.values() for tensor in each.module.parameters())


def _bits(built: Program) -> dict[str, Tensor]:
    """Return copies of parameters, buffers, optimizer states, positions and the states of generators."""
    found = {"generator": torch.get_rng_state(), "own": built.random.state_dict()["cpu"]}
    for name, problem in built.problems.items():
        found |= {f"{name}.{key}": tensor.clone() for key, tensor in problem.module.state_dict().items()}
        for index, state in enumerate(problem.optimizer_state()):
            found |= {f"{name}.{index}.{key}": tensor for key, tensor in state.items()}
        position = problem.stream.state_dict()
        found[f"{name}.stream"] = torch.tensor([*position.values(), problem.num_steps, len(problem.trajectory)])
    return found


def _clean(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
    return ((model(batch["input"]) - batch["target"]) ** 2).mean()


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_the_direct_gradient_is_added(name: str) -> None:
    """The difference between an upper loss with a term of its own and one without is the gradient of that term."""
    found, implicit = (program(EVERY[name], upper=each).gradient("weigher") for each in (clean_and_decayed, _clean))
    weights = dict(program(EVERY[name]).problems["weigher"].module.named_parameters())
    sums = {key: implicit[key] + 0.2 * tensor.detach() for key, tensor in weights.items()}
    assert relative_error(found, sums) < 1e-9


def test_first_order_leaves_the_direct_gradient_alone() -> None:
    built = program(FirstOrder)
    for key, found in built.gradient("weigher").items():
        assert torch.allclose(found, 0.2 * built.problems["weigher"].theta[key].detach(), rtol=1e-12)
    with pytest.raises(ConfigError, match=r"problems.weigher.loss: the loss does not depend on any parameter"):
        program(FirstOrder, upper=_clean).gradient("weigher")


def test_evolution_adds_the_direct_gradient_too() -> None:
    """With a direction for each parameter and a small sigma it is the unrolled gradient of a loss without constants."""

    def lower(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        losses = (model(batch["input"]) - batch["target"]) ** 2
        return (torch.sigmoid(weigher(losses[:, None])) * losses).mean()

    size = sum(tensor.numel() for tensor in Mlp(num_inputs=1).parameters())
    algorithm = EvolutionStrategies(size, 1e-5, "orthogonal")
    made = (program(lambda each=each: each, lower=lower) for each in (algorithm, Unrolled()))
    found, expected = (built.gradient("weigher") for built in made)
    assert relative_error(found, expected) < 1e-5
