"""What is kept of an unroll: whatever it is, the gradients are the same to the bit."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from mlotool import Schedule, Stream, Unrolled
from mlotool.hypergradient import AbstractStepStore, Binomial, KeepAll, KeepEvery
from mlotool.problem.optimizers.optimizer_step import replayed_step
from mlotool.problem.trajectory import middle
from tests.hypergradient.test_unrolled import OPTIMIZERS, program
from tests.hypergradient.two_levels import two_levels
from tests.live_storage import LiveStorage
from tests.program.small import assert_identical, parameters, samples

STORES: dict[str, AbstractStepStore] = {
    "every 2": KeepEvery(steps=2),
    "every 3": KeepEvery(steps=3, offload=True),
    "every 20": KeepEvery(steps=20),
    "binomial 1": Binomial(checkpoints=1),
    "binomial 2": Binomial(checkpoints=2),
    "binomial 3": Binomial(checkpoints=3, offload=True),
}


def trained(way: str, name: str, algorithm: Unrolled, num_ticks: int, **settings: Any) -> dict[str, torch.Tensor]:
    stream = Stream(samples(12, 1), 4, seed=1)
    built = program(way, OPTIMIZERS[name], algorithm, stream=stream, **{"num_steps": 7, **settings})
    schedule = Schedule(built)
    for _ in range(num_ticks):
        schedule.tick()
    return parameters(built)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("way", "name", "product"),
    [
        ("loss", "adam", "forward"),
        ("start", "nesterov", "reverse"),
        ("lr", "adamw", "reverse"),
        ("loss", "sgd", "reverse"),
    ],
)
def test_training_is_the_same_to_the_bit(store: str, way: str, name: str, product: Any) -> None:
    """Also across several unrolls, whose state of the optimizer goes on where it is not reset."""
    whole = trained(way, name, Unrolled(product=product), 15)
    assert_identical(trained(way, name, Unrolled(product=product, trajectory=STORES[store]), 15), whole)


@pytest.mark.parametrize("store", ["every 3", "binomial 2"])
@pytest.mark.parametrize(
    "settings",
    [{"gradient_clip_norm": 0.5}, {"accumulate_batches": 2}, {"warmup_steps": 3}, {"num_steps": 1}],
    ids=lambda each: next(iter(each)),
)
def test_with_other_settings(store: str, settings: dict[str, Any]) -> None:
    whole = trained("loss", "adam", Unrolled(), 16, **settings)
    assert_identical(trained("loss", "adam", Unrolled(trajectory=STORES[store]), 16, **settings), whole)


@pytest.mark.parametrize("store", ["every 3", "binomial 2"])
@pytest.mark.parametrize("horizon", [1, 3, 5, 7])
def test_with_a_horizon(store: str, horizon: int) -> None:
    whole = trained("loss", "momentum", Unrolled(horizon=horizon), 15)
    kept = Unrolled(horizon=horizon, trajectory=STORES[store])
    assert_identical(trained("loss", "momentum", kept, 15), whole)


@pytest.mark.parametrize("store", ["every 3", "binomial 2"])
@pytest.mark.parametrize("num_before", [2, 10])
def test_a_resumed_run_is_bit_identical_in_the_middle_of_an_unroll(store: str, num_before: int) -> None:
    def make() -> Any:
        stream = Stream(samples(12, 1), 4, seed=1)
        algorithm = Unrolled(trajectory=STORES[store])
        return program("loss", OPTIMIZERS["adam"], algorithm, stream=stream, num_steps=7)

    whole, first, second = make(), make(), make()
    runs = Schedule(whole), Schedule(first), Schedule(second)
    for _ in range(num_before):
        runs[1].tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    for _ in range(15):
        runs[0].tick()
    for _ in range(15 - num_before):
        runs[2].tick()
    assert_identical(parameters(second), parameters(whole))


def test_a_scheduler_and_parameter_groups_are_those_of_the_steps() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.AdamW([{"params": [weight], "lr": 0.1}, {"params": [bias], "weight_decay": 0.3}], lr=0.02)

    def schedule(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=20)

    found = []
    for store in (KeepAll(), KeepEvery(steps=3), Binomial(checkpoints=2)):
        stream = Stream(samples(12, 1), 4, seed=1)
        algorithm = Unrolled(trajectory=store)
        built = program("loss", optimizer, algorithm, stream=stream, scheduler=schedule, num_steps=7)
        run = Schedule(built)
        for _ in range(14):
            run.tick()
        found.append(parameters(built))
    assert_identical(found[1], found[0])
    assert_identical(found[2], found[0])


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, fused=True),
        partial(torch.optim.Adam, lr=0.1, amsgrad=True, fused=True),
        partial(torch.optim.AdamW, lr=0.1, foreach=True),
    ],
)
def test_a_step_again_is_the_step_to_the_bit(make: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    theta = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(3, 4).t())]
    optimizer = make(theta)
    for _ in range(4):
        before = [each.detach().clone() for each in theta]
        state = [{name: value.clone() for name, value in optimizer.state.get(x, {}).items()} for x in theta]
        slopes = [torch.randn_like(each) for each in theta]
        rates = [dict(optimizer.param_groups[0]) for _ in theta]
        for parameter, slope in zip(theta, slopes, strict=True):
            parameter.grad = slope.clone()
        optimizer.step()
        again, state_again = replayed_step(optimizer, theta, before, slopes, state, rates)
        for place, parameter in enumerate(theta):
            assert torch.equal(again[place], parameter)
            assert state_again[place].keys() == optimizer.state[parameter].keys()
            assert all(torch.equal(state_again[place][key], each) for key, each in optimizer.state[parameter].items())


@cache
def fewest(num_steps: int, num_free: int) -> int:
    """Return how many steps must be taken again at least, by trying everything."""
    if num_steps <= 1 or num_free == 0:
        return num_steps * (num_steps - 1) // 2
    return min(part + fewest(num_steps - part, num_free - 1) + fewest(part, num_free) for part in range(1, num_steps))


def test_binomial_takes_the_fewest_steps_again() -> None:
    def taken(num_steps: int, num_free: int) -> int:
        if num_steps <= 1 or num_free == 0:
            return num_steps * (num_steps - 1) // 2
        part = middle(num_steps, num_free)
        return part + taken(num_steps - part, num_free - 1) + taken(part, num_free)

    assert all(taken(steps, free) == fewest(steps, free) for steps in range(2, 40) for free in range(6))


@pytest.mark.parametrize("num_steps", [1, 2, 7, 30])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_binomial_keeps_no_more_than_its_checkpoints(num_steps: int, count: int) -> None:
    kept = [number for number in range(num_steps) if Binomial(checkpoints=count).keeps(number, num_steps)]
    assert kept[0] == 0
    assert len(kept) == min(count, num_steps)


def test_memory_of_a_long_unroll() -> None:
    """Vectors of the size of the parameters that are held before the upper step, and at most."""

    def held(store: AbstractStepStore) -> tuple[float, float]:
        size = 1000
        weight = torch.nn.Linear(size, 1, bias=False, dtype=torch.float64)

        def loss(batch: None, w: Any, u: Any) -> torch.Tensor:
            return (
                (w(torch.ones(1, size, dtype=torch.float64)) - u(torch.ones(1, 1, dtype=torch.float64))).square().sum()
            )

        upper = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        optimizer = partial(torch.optim.Adam, lr=0.01)
        settings = {"unroll_steps": 17, "of_upper": {"optimizer": partial(torch.optim.SGD, lr=0.0)}}
        algorithm = Unrolled(trajectory=store)
        schedule = Schedule(two_levels((weight, loss), (upper, loss), algorithm, optimizer=optimizer, **settings))
        with LiveStorage() as live:
            for _ in range(16):
                schedule.tick()
            static = live.now
            live.reset_peak()
            schedule.tick()
        return static / (8 * size), live.peak / (8 * size)

    whole, every, binomial = held(KeepAll()), held(KeepEvery(steps=4)), held(Binomial(checkpoints=4))
    # Parameters and two moments a step, of all; a gradient a step, and three at each fourth; three at each checkpoint.
    assert whole[0] > 45
    assert every[0] < 16 + 3 * 4 + 6
    assert binomial[0] < 3 * 4 + 6
    assert binomial[1] < every[1] < whole[1]
