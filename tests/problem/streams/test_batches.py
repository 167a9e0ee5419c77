"""Batches: random numbers of samples, which code of the user's draws from the global generators; shares of ranks."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from mlotool.config.user_data import NamedSamples, limited
from mlotool.problem.streams.batches import Share, bounds, draws_nothing
from mlotool.problem.streams.stream import SameBatch
from mlotool.program import Stream
from tests.problem.streams.test_stream import Noisy, Seeded


def rotated(index: int) -> Any:
    """As libraries of augmentations draw: a coin of one generator, and values of another."""
    return random.choice([0.0, 1.0]) + np.random.uniform(2, 3)


def of_a_new_generator(index: int) -> Any:
    return np.random.default_rng(torch.initial_seed()).random()


def of_two_algorithms(index: int) -> Any:
    """Coins of torch and numpy, which take 32 bits of a seed in the same way."""
    coins = torch.randint(0, 2, (24,)), torch.from_numpy(np.random.randint(0, 2, 24))
    assert not torch.equal(*coins)
    return torch.cat(coins).double()


DRAWS: dict[str, Callable[[int], Any]] = {
    "an odd number of normals": lambda index: np.random.randn(3)[0],
    "a Gaussian of Python's": lambda index: random.gauss(0, 1),
    "a coin and values": rotated,
    "a generator of its own": of_a_new_generator,
    "coins of two": of_two_algorithms,
}


class Drawn(Dataset[Any]):
    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"noise": self.draw(index), "index": index}


class DrawnWhole(Drawn):
    def __getitems__(self, indices: Tensor) -> Any:
        return {"noise": torch.from_numpy(np.random.rand(len(indices))), "index": indices}


def epochs(dataset: Any, seed: int = 0, *, position: int = 0, count: int = 6, **settings: Any) -> list[Any]:
    """Return batches of 4, 4 and 2 samples an epoch."""
    stream = Stream(dataset, batch_size=4, seed=seed, drop_last=False, **settings)
    stream.load_state_dict({"epoch": position // 3, "batches_consumed": position % 3})
    return [stream.next() for _ in range(count)]


def by_sample(batches: list[Any]) -> dict[int, Any]:
    return {int(i): x for batch in batches for i, x in zip(batch["index"], batch["noise"].tolist(), strict=True)}


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=[*DRAWS])
def test_what_a_sample_draws_is_fixed_by_seed_epoch_and_index(draw: Callable[[int], Any]) -> None:
    dataset = Drawn(draw)
    found = epochs(dataset)
    np.random.seed(3)
    random.seed(3)
    assert_same(epochs(dataset), found)
    assert_same(epochs(dataset, position=4, count=2), found[4:])
    first, second = by_sample(found[:3]), by_sample(found[3:])
    assert by_sample(epochs(dataset, shuffle=False, count=3)) == first  # whatever was read before it
    assert first != second
    assert by_sample(epochs(dataset, seed=1, count=3)) != first
    assert len({str(value) for value in first.values()}) == 10


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_whole_batch_draws_by_its_number(num_workers: int) -> None:
    found = epochs(DrawnWhole(rotated), shuffle=False, num_workers=num_workers)
    assert_same(epochs(DrawnWhole(rotated), shuffle=False, position=4, count=2), found[4:])
    assert len({tuple(batch["noise"].tolist()) for batch in found}) == 6


@pytest.mark.parametrize("dataset", [Drawn(rotated), DrawnWhole(rotated)], ids=["samples", "whole batches"])
def test_ranks_draw_for_their_own_samples(dataset: Any) -> None:
    whole = Stream(dataset, batch_size=4, shuffle=False).next()["noise"].tolist()
    shares = [Stream(dataset, batch_size=4, shuffle=False).divide(rank, 2).next()["noise"].tolist() for rank in (0, 1)]
    assert shares[0] == whole[:2]
    assert len({*shares[0], *shares[1]}) == 4
    if not isinstance(dataset, DrawnWhole):
        assert shares[0] + shares[1] == whole


@pytest.mark.parametrize("dataset", [Drawn(rotated), DrawnWhole(rotated)], ids=["samples", "whole batches"])
def test_the_numbers_outside_are_as_if_nothing_had_been_drawn(dataset: Any) -> None:
    def outside(between: Callable[[], Any]) -> list[Any]:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        # The second normal number of a pair is kept for the next call.
        values: list[Any] = [np.random.randn(), random.gauss(0, 1)]
        between()
        return [*values, np.random.randn(), random.gauss(0, 1), np.random.rand(), random.random(), torch.rand(())]

    stream = Stream(dataset, batch_size=4)
    assert outside(lambda: [stream.next(), stream.peek()]) == outside(lambda: None)


def test_a_sample_that_fails_leaves_the_numbers_outside_alone() -> None:
    before = random.getstate()
    with pytest.raises(ZeroDivisionError):
        Stream(Drawn(lambda index: random.random() / 0), batch_size=4).next()
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("dataset", "is_known"),
    [
        (TensorDataset(torch.arange(4)), True),
        ([1, 2], True),
        (NamedSamples([(1, 2)]), True),
        (NamedSamples(Drawn(rotated)), False),
        (limited(DrawnWhole(rotated), 3), False),
        (Subset(Drawn(rotated), [1]), False),
        (ConcatDataset([Drawn(rotated)]), False),
    ],
)
def test_only_data_sets_that_cannot_draw_go_without_seeds(dataset: Any, is_known: bool) -> None:
    assert draws_nothing(dataset) == is_known


class Counting(Drawn):
    def __init__(self) -> None:
        super().__init__(lambda index: self.generator.random())
        self.generator = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("dataset", "is_repeatable", "num_workers"),
    [
        (Drawn(rotated), True, 1),
        (DrawnWhole(rotated), True, 0),
        (Drawn(lambda index: float("nan")), True, 0),
        (Drawn(lambda index: random.SystemRandom().random()), False, 0),
        (Counting(), False, 1),
    ],
)
def test_a_generator_that_nobody_seeds_is_found(dataset: Any, is_repeatable: bool, num_workers: int) -> None:
    stream = Stream(dataset, batch_size=4, num_workers=num_workers)
    assert stream.is_repeatable() == is_repeatable
    assert stream.state_dict() == {"epoch": 0, "batches_consumed": 0}


class Paired(Seeded):
    """Has texts beside tensors, in a pair."""

    def __getitems__(self, indices: Tensor, seed: int | None = None) -> dict[str, Any]:
        found = super().__getitems__(indices, seed)
        return {**found, "pair": (found["input"], [f"{index}" for index in indices.tolist()])}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("dataset", "num_workers"), [(Paired(), 0), (Noisy(), 0), (Noisy(), 1)])
def test_the_shares_of_a_batch_are_the_batch(dataset: Any, num_ranks: int, num_workers: int) -> None:
    settings: dict[str, Any] = {"seed": 5, "drop_last": False, "num_workers": num_workers}
    whole = Stream(dataset, 4, **settings)
    parts = [Stream(dataset, 4, **settings).divide(rank, num_ranks) for rank in range(num_ranks)]
    for _ in range(4):
        batch = whole.next()
        shares = [Share.opened(part.next()) for part in parts]
        used = [share for share, weight in shares if weight > 0]
        assert torch.equal(torch.cat([share["input"] for share in used]), batch["input"])
        sizes = [len(share["input"]) if weight else 0 for share, weight in shares]
        weights = [size * num_ranks / len(batch["input"]) for size in sizes]
        assert [weight for _, weight in shares] == pytest.approx(weights)


def test_equal_shares_are_plain_batches() -> None:
    stream = Stream(torch.arange(8), 4, shuffle=False).divide(1, 2)
    assert torch.equal(stream.next(), torch.tensor([2, 3]))
    assert torch.equal(SameBatch(stream).divide(1, 2).next(), torch.tensor([2, 3]))
    assert torch.equal(stream.recent(1)[0], torch.tensor([2, 3]))


def test_a_share_moves_and_keeps_its_weight() -> None:
    stream = Stream(torch.arange(6.0), 3, shuffle=False).divide(1, 2).to("cpu", torch.float64)
    samples, weight = Share.opened(stream.next())
    assert samples.dtype is torch.float64
    assert weight == pytest.approx(4 / 3)


def test_weights_make_the_mean_over_ranks_that_of_the_samples() -> None:
    values = torch.tensor([1.0, 5.0, 2.0, 7.0, 4.0])
    for num_ranks in (1, 2, 3, 5, 8):
        parts = [bounds(5, rank, num_ranks) for rank in range(num_ranks)]
        losses = [weight * values[begin:end].mean() for begin, end, weight in parts]
        assert torch.stack(losses).mean().item() == pytest.approx(values.mean().item())


def test_a_batch_of_unknown_shape_is_refused() -> None:
    class Odd(Seeded):
        def __getitems__(self, indices: Tensor, seed: int | None = None) -> Any:
            return object()

    with pytest.raises(TypeError, match="cannot be divided among ranks"):
        Stream(Odd(), 4).divide(0, 2).next()
