"""What real models and batches bring along, with every algorithm: each is compared with a plain twin."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.hypergradient import Exact, Identity, Implicit, Penalty
from mlotool.program import AbstractHypergradient, Program, Schedule
from tests.hypergradient.every_algorithm import DIFFERENTIATED, EVERY, Batch, Rows, clean_and_decayed, program, weighted
from tests.hypergradient.two_levels import ticked
from tests.program.reweighting import FD, REVERSE, by_torch, flat, relative_error, reweighting, weighted_by_plain_detach
from tests.program.small import Mlp, assert_identical, parameters
from tests.programs import Case

# The small losses are not convex, and a Nystrom solve says so.
pytestmark = pytest.mark.filterwarnings("ignore:The Nystrom solve")


def trained(make: Callable[[], AbstractHypergradient], *modules: nn.Module, ticks: int, **options: Any) -> Program:
    return ticked(program(make, *modules, **options), ticks)


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return whether they agree up to the order of sums, which finite differences and multipliers enlarge."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name], expected[name], rtol=1e-6, atol=1e-7) for name in found
    )


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
    found, twin = (trained(EVERY[name], model, ticks=2, optimizer=OPTIMIZERS[optimizer]) for model in (Spare(), Mlp()))
    spare = found.problems["model"].module.spare
    assert torch.equal(spare, torch.ones_like(spare))
    ours = parameters(found)
    ours.pop("model.spare")
    # Nystrom draws its columns from all parameters, so the twin's are others.
    assert "nystrom" in name or close(ours, parameters(twin))


@pytest.mark.parametrize("name", ["neumann", "identity_difference", "unrolled_forward", "penalty", "saba", "evolution"])
def test_nested_batches(name: str) -> None:
    def unpacked(batch: Any) -> Batch:
        return {"input": batch["a"][1], "target": batch["a"][2][0]}

    built = trained(
        EVERY[name],
        ticks=2,
        pack=lambda batch: {"a": (1, batch["input"], [batch["target"], None]), "n": 3},
        lower=lambda batch, **roles: weighted(unpacked(batch), **roles),
        upper=lambda batch, **roles: clean_and_decayed(unpacked(batch), **roles),
    )
    assert_identical(parameters(built), parameters(trained(EVERY[name], ticks=2)))


@pytest.mark.parametrize("name", EVERY)
def test_batch_statistics_move_once_an_optimizer_step(name: str) -> None:
    model = Mlp(nn.BatchNorm1d(5, momentum=0.5))
    built = program(EVERY[name], model)
    norm, schedule = model.body[1], Schedule(built)
    for tick in range(1, 4):
        first = model.body[0].weight.detach().clone(), model.body[0].bias.detach().clone()
        mean = norm.running_mean.clone()
        schedule.tick()
        assert int(norm.num_batches_tracked) == tick
        own = (built.problems["model"].stream.last()["input"] @ first[0].T + first[1]).mean(0)
        assert torch.allclose(norm.running_mean, 0.5 * mean + 0.5 * own, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "ticks"),
    [*[(name, 3) for name in EVERY], *[(name, 0) for name in ("cg", "unrolled", "unrolled_forward", "evolution")]],
)
def test_a_gradient_changes_no_bit(name: str, ticks: int) -> None:
    """Simulated steps and recorded ones, of which some are still missing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, eps=1.0), nn.Linear(2, 1), nn.Flatten(0)).double()
    built = trained(EVERY[name], model, ticks=ticks)
    given = {"model": Rows(3).__getitems__([0, 1, 2, 3])}
    before = _bits(built)
    for batches in (None, None if name == "saba" else given):
        built.gradient("weigher", batches)
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


def test_stop_gradient_makes_finite_differences_agree_with_double_backward() -> None:
    reverse, difference = reweighting(REVERSE), reweighting(FD)
    expected = reverse.gradient("weigher")
    assert relative_error(expected, by_torch(reverse)) < 1e-12
    assert relative_error(difference.gradient("weigher"), expected) < 1e-4
    plain = reweighting(FD, lower=weighted_by_plain_detach)
    with pytest.warns(UserWarning, match="found products by finite differences"):
        assert relative_error(plain.gradient("weigher"), expected) > 0.05
    assert relative_error(reweighting(REVERSE, lower=weighted_by_plain_detach).gradient("weigher"), expected) < 1e-12


@pytest.mark.parametrize("make", [FD, lambda: Penalty(multiplier=10.0, step_size=0.01)], ids=["difference", "penalty"])
def test_hidden_values_are_warned_of_once(make: Callable[[], AbstractHypergradient]) -> None:
    reweighting(make).gradient("weigher")
    plain = reweighting(make, lower=weighted_by_plain_detach)
    with pytest.warns(UserWarning, match=r"problems\.model\.hypergradient: found .* write mlotool\.stop_gradient"):
        plain.gradient("weigher")
    for _ in range(10):
        plain.gradient("weigher")


def test_a_radius_that_is_too_long_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the radius may be too large"):
        reweighting(lambda: Implicit(Identity(), "finite_difference", radius=30.0)).gradient("weigher")


def _with_dropout(make: Callable[[], AbstractHypergradient]) -> Program:
    return reweighting(make, Mlp(nn.Dropout(0.1)))


def _draws(program: Program, count: int) -> Tensor:
    program.random.manual_seed(0)
    return torch.stack([flat(program.gradient("weigher")) for _ in range(count)])


def test_finite_differences_pair_their_random_numbers() -> None:
    """Unpaired, the masks' difference is divided by the radius 1e-5: the noise would be thousands of times larger."""
    difference, reverse = (_draws(_with_dropout(make), 60) for make in (FD, REVERSE))
    noise = [float(each.std(0).norm()) for each in (difference, reverse)]
    assert noise[1] > 0  # the masks do something
    assert noise[0] <= 2 * noise[1]
    # They see the very same masks, so they agree draw by draw.
    assert float((difference - reverse).norm() / reverse.norm()) < 1e-4


def test_all_products_of_one_solve_see_one_mask() -> None:
    """Exact builds H column by column: with a mask for each column, it would not be H at all."""
    program = _with_dropout(lambda: Implicit(Exact(damping=10.0), "finite_difference"))
    reverse = _with_dropout(lambda: Implicit(Exact(damping=10.0)))
    assert torch.allclose(_draws(program, 3), _draws(reverse, 3), rtol=1e-3, atol=1e-6)


def test_all_evaluations_of_one_differentiated_pullback_see_the_same_random_numbers() -> None:
    """Nested: the lower pullback is differentiated, for which its loss is evaluated again and again."""
    drawn: list[Tensor] = []

    def low(low: Tensor, mid: Tensor) -> Tensor:
        drawn.append(1 + torch.rand(3, dtype=torch.float64))
        return (drawn[-1] * (low - mid) ** 2 + 0.1 * low**4).sum()

    def mid(mid: Tensor, low: Tensor, top: Tensor) -> Tensor:
        return ((mid - top) ** 2 + (low - 1) ** 2 + low * mid**2).sum()

    def top(mid: Tensor) -> Tensor:
        return (mid**3).sum()

    graph = {"top": ["mid"], "mid": ["low"]}, {"low": ["mid"], "mid": ["top"]}
    case = Case({"low": low, "mid": mid, "top": top}, *graph, lambda top: {"low": top, "mid": top}, "top")
    case.program(lambda: Implicit(Exact())).gradient("top")
    assert len(drawn) > 2
    assert all(torch.equal(draw, drawn[0]) for draw in drawn)
