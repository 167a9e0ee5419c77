"""Dropout: what was drawn in a step is drawn again in a pullback, and the device's generator does not notice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import EvolutionStrategies, FirstOrder, Identity, Implicit, Neumann, Penalty, Unrolled
from mlotool.core.replay import RandomState
from mlotool.program import Program
from tests.gpu.placed import follow, placed, relative_error
from tests.hypergradient import every_algorithm
from tests.program.reweighting import reweighting
from tests.program.small import Mlp

pytestmark = pytest.mark.gpu

ALGORITHMS: dict[str, Callable[[], Any]] = {
    "identity": lambda: Implicit(Identity(0.1)),
    "neumann": lambda: Implicit(Neumann(3, 0.1)),
    "finite_difference": lambda: Implicit(Identity(0.1), "finite_difference"),
    "unrolled": Unrolled,
    "penalty": lambda: Penalty(multiplier=20.0, num_steps=2, step_size=0.1),
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.01),
}


def noisy(make: Callable[[], Any], device: torch.device) -> Program:
    return placed(reweighting(make, Mlp(nn.Dropout(0.5))), device)


def decayed(make: Callable[[], Any], device: torch.device) -> Program:
    """Return one whose upper problem has a gradient without any pullback as well."""
    return placed(every_algorithm.program(make, Mlp(nn.Dropout(0.5))), device)


def draws(device: torch.device) -> Tensor:
    return torch.rand(4, device=device)


def seeded_gradient(program: Program) -> dict[str, Tensor]:
    program.random.manual_seed(1)
    return program.gradient("weigher")


@pytest.mark.parametrize("solver", [lambda: Identity(0.1), lambda: Neumann(3, 0.1)], ids=["identity", "neumann"])
def test_finite_differences_see_the_same_masks(solver: Callable[[], Any], device: torch.device) -> None:
    """With other masks they would differ by more than their own size."""
    found = [
        seeded_gradient(follow(noisy(lambda product=product: Implicit(solver(), product), device), 3))
        for product in ("finite_difference", "reverse")
    ]
    assert relative_error(*found) < 1e-5


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_gradient_is_the_same_bit_by_bit(name: str, device: torch.device) -> None:
    programs = [follow(noisy(ALGORITHMS[name], device), 3) for _ in range(2)]
    first, second = map(seeded_gradient, programs)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_masks_differ_from_draw_to_draw(device: torch.device) -> None:
    program = noisy(ALGORITHMS["identity"], device)
    first, second = (program.loss("model").loss for _ in range(2))
    assert not torch.equal(first, second)


def drawn_after(make: Callable[[], Any], device: torch.device) -> Tensor:
    """Return what comes of the generator after two gradients, the first of which looks at the losses more closely."""
    program = follow(decayed(make, device), 3)
    for _ in range(2):
        seeded_gradient(program)
    with program.random:
        return draws(device)


def test_steps_that_are_taken_again_leave_the_generator_as_it_was(device: torch.device) -> None:
    assert torch.equal(drawn_after(Unrolled, device), drawn_after(FirstOrder, device))


@pytest.mark.parametrize("name", ["neumann", "finite_difference", "penalty"])
def test_a_pullback_draws_for_one_evaluation_however_many_it_takes(name: str, device: torch.device) -> None:
    assert torch.equal(drawn_after(ALGORITHMS[name], device), drawn_after(ALGORITHMS["identity"], device))


def test_a_state_is_replayed(device: torch.device) -> None:
    torch.manual_seed(0)
    devices = (device,) if device.type == "cuda" else ()
    state = RandomState(devices)
    drawn, follows = draws(device), draws(device)
    torch.manual_seed(0)
    draws(device)
    for each in (state, RandomState.from_state_dict(state.state_dict())):
        with each.replayed():
            assert torch.equal(draws(device), drawn)
    assert torch.equal(draws(device), follows)


def test_the_devices_of_a_problem_are_those_whose_generators_are_kept(device: torch.device) -> None:
    problem = noisy(FirstOrder, device).problems["model"]
    assert problem.devices == ((device,) if device.type == "cuda" else ())


def test_the_devices_generator_belongs_to_the_program(device: torch.device) -> None:
    """In the turn of another one, and beside what is drawn outside."""
    alone = seeded_gradient(noisy(ALGORITHMS["identity"], device))
    made, other = (noisy(ALGORITHMS["identity"], device) for _ in range(2))
    made.random.manual_seed(1)
    torch.manual_seed(0)
    first = draws(device)
    other.gradient("weigher")
    torch.manual_seed(0)
    found = made.gradient("weigher")
    assert torch.equal(draws(device), first)
    assert all(torch.equal(found[key], alone[key]) for key in alone)
    state = made.random.state_dict()
    expected = made.gradient("weigher")
    made.random.load_state_dict(state)
    found = made.gradient("weigher")
    assert all(torch.equal(found[key], expected[key]) for key in expected)
