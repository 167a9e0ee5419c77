"""Random numbers belong to the program: what draws outside changes nothing inside, and the other way round."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.core.random_stream import RandomStream
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import EvolutionStrategies, Implicit, Nystrom, Unrolled
from mlotool.program import AbstractHypergradient, Program, Schedule
from mlotool.runner.checkpoint import random_states, restore_random_states
from tests.hypergradient.every_algorithm import Batch, program, sample_losses
from tests.program.small import Mlp, assert_identical, parameters

ALGORITHMS: dict[str, Callable[[], AbstractHypergradient]] = {
    "nystrom by differences": lambda: Implicit(Nystrom(rank=4, rho=10.0), "finite_difference"),
    "evolution": lambda: EvolutionStrategies(num_pairs=2, sigma=0.01),
    "unrolled": Unrolled,
}
NUM_TICKS = 6

pytestmark = pytest.mark.filterwarnings("ignore:The Nystrom solve")


def dropped_out(make: Callable[[], AbstractHypergradient], seed: int) -> Program:
    """Return a program with dropout below and above, seeded as a script would do it."""
    torch.manual_seed(seed)
    return program(make, Mlp(nn.Dropout(0.5)), Mlp(nn.Dropout(0.5), num_inputs=1))


def ticked(*programs: Program, between: Callable[[], Any] = lambda: None) -> list[dict[str, Tensor]]:
    schedules = [Schedule(each) for each in programs]
    for _ in range(NUM_TICKS):
        for schedule in schedules:
            schedule.tick()
            between()
    return [parameters(each) for each in programs]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_programs_in_turn_equal_each_alone(name: str) -> None:
    make = ALGORITHMS[name]
    alone = [ticked(dropped_out(make, seed))[0] for seed in (1, 2)]
    for found, expected in zip(ticked(dropped_out(make, 1), dropped_out(make, 2)), alone, strict=True):
        assert_identical(found, expected)
    # The masks do something.
    assert not all(torch.equal(*pair) for pair in zip(alone[0].values(), alone[1].values(), strict=True))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_drawn_outside_changes_nothing_inside_and_the_other_way_round(name: str) -> None:
    [expected] = ticked(dropped_out(ALGORITHMS[name], 1))
    made, drawn = dropped_out(ALGORITHMS[name], 1), []
    torch.manual_seed(5)
    [found] = ticked(made, between=lambda: drawn.append(torch.rand(2)))
    assert_identical(found, expected)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(torch.stack(drawn), torch.stack([torch.rand(2, generator=generator) for _ in drawn]))


def noted(seen: list[Tensor]) -> Callable[..., Tensor]:
    """Return a loss that notes what it draws."""

    def loss(batch: Batch, *, model: Any, weigher: Any) -> Tensor:
        seen.append(torch.rand(3))
        return sample_losses(batch, model).mean() + 0.1 * sum((tensor**2).sum() for tensor in weigher.parameters())

    return loss


def test_a_program_draws_what_the_global_generator_would_have_drawn() -> None:
    seen: list[Tensor] = []
    torch.manual_seed(3)
    made = program(lambda: Implicit(Nystrom(rank=2, rho=10.0)), lower=noted(seen), unroll_steps=100)
    torch.manual_seed(4)
    # At the first tick losses are rehearsed, with numbers that are drawn again.
    made.rehearse()
    seen.clear()
    made.loss("model")
    schedule = Schedule(made)
    schedule.tick()
    made.internals.direct_loss("model")
    schedule.tick()
    generator = torch.Generator().manual_seed(3)
    assert len(seen) == 4
    assert torch.equal(torch.stack(seen), torch.stack([torch.rand(3, generator=generator) for _ in seen]))


def test_a_backward_pass_outside_draws_inside() -> None:
    """Through a solution that is handed out, whose pullback is called by autograd."""
    seen: list[Tensor] = []
    made = program(lambda: Implicit(Nystrom(rank=2, rho=10.0)), lower=noted(seen))
    before = torch.get_rng_state()
    solution = made.solution("model")
    loss = sum((tensor**2).sum() for tensor in solution.values())
    torch.autograd.grad(loss, list(made.problems["weigher"].theta.values()), allow_unused=True)
    assert seen
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_is_entered_within_itself_and_left_by_an_error() -> None:
    torch.manual_seed(0)
    stream = RandomStream()
    expected = [torch.rand(1) for _ in range(3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with stream:
        found = [torch.rand(1)]
        with stream:
            found.append(torch.rand(1))
        assert stream.state_dict()["cpu"].equal(torch.get_rng_state())
    with pytest.raises(ZeroDivisionError), stream:
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    with stream:
        found.append(torch.rand(1))
    assert found == expected
    stream.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), before)
    with stream:
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))
    with pytest.raises(ConfigError, match=r"random.cpu: found a tensor of shape \(10,\)"):
        stream.load_state_dict({"cpu": torch.zeros(10), "cuda": []})


def saved_and_drawn(made: Program) -> tuple[Any, list[dict[str, Tensor]]]:
    """Return what a checkpoint has of random numbers after some ticks, through a file, and what comes next."""
    ticked(made)
    buffer = io.BytesIO()
    torch.save(random_states(made, Ranks()), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True), [made.gradient("weigher") for _ in range(2)]


def test_random_numbers_come_back_with_a_checkpoint() -> None:
    made = dropped_out(ALGORITHMS["unrolled"], 1)
    states, expected = saved_and_drawn(made)
    outside = torch.get_rng_state()
    torch.rand(3)
    restore_random_states(states, made, Ranks())
    assert torch.equal(torch.get_rng_state(), outside)
    for each in expected:
        assert_identical(made.gradient("weigher"), each)
    assert not torch.equal(expected[0]["body.0.weight"], expected[1]["body.0.weight"])
