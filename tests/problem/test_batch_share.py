"""Shares of a batch: together they are the batch."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.problem.batches import Share, bounds
from mlotool.problem.stream import SameBatch
from mlotool.program import Stream


class Seeded:
    """Draws noise for a whole batch."""

    seeded = True

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        raise AssertionError

    def __getitems__(self, indices: Tensor, seed: int) -> dict[str, Any]:
        noise = torch.rand(len(indices), generator=torch.Generator().manual_seed(seed))
        return {"index": indices, "noise": noise, "pair": (noise, [f"{index}" for index in indices.tolist()])}


class Single:
    """Gives one sample at a time, with noise of torch's generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.rand(())}


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(("dataset", "num_workers"), [(Seeded(), 0), (Single(), 0), (Single(), 1)])
def test_the_shares_of_a_batch_are_the_batch(dataset: Any, num_ranks: int, num_workers: int) -> None:
    settings: dict[str, Any] = {"seed": 5, "drop_last": False, "num_workers": num_workers}
    whole = Stream(dataset, 4, **settings)
    parts = [Stream(dataset, 4, **settings).divide(rank, num_ranks) for rank in range(num_ranks)]
    for _ in range(4):
        batch = whole.next()
        shares = [Share.opened(part.next()) for part in parts]
        used = [share for share, weight in shares if weight > 0]
        for key in ("index", "noise"):
            assert torch.equal(torch.cat([share[key] for share in used]), batch[key])
        sizes = [len(share["index"]) if weight else 0 for share, weight in shares]
        weights = [size * num_ranks / len(batch["index"]) for size in sizes]
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
        def __getitems__(self, indices: Sequence[int] | Tensor, seed: int) -> Any:
            return object()

    with pytest.raises(TypeError, match="cannot be divided among ranks"):
        Stream(Odd(), 4).divide(0, 2).next()
