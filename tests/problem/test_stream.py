"""The stream: its order, its resume, its workers, its devices."""

from collections import namedtuple
from dataclasses import dataclass
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset

from mlotool.core.user_code import UserCodeError
from mlotool.program import Stream

Pair = namedtuple("Pair", ["input", "target"])


class Noisy:
    """Samples with a random transform."""

    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": index + 0.5 * torch.rand(2), "target": index}


class Whole:
    """Fetches whole batches."""

    def __init__(self, size: int = 10) -> None:
        self.data = torch.arange(size, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __getitems__(self, indices: Tensor) -> dict[str, Tensor]:
        return {"input": self.data[indices], "index": torch.as_tensor(indices)}


class Seeded(Whole):
    """Draws its transforms from a seed that the stream gives it."""

    seeded = True

    def __getitems__(self, indices: Tensor, seed: int | None = None) -> dict[str, Tensor]:
        assert seed is not None
        noise = torch.rand(len(indices), generator=torch.Generator().manual_seed(seed))
        return {"input": self.data[indices] + 0.5 * noise}


def indices(batch: Any) -> list[int]:
    values = batch["input"] if isinstance(batch, dict) else batch
    return [int(value) for value in (values[:, 0] if values.dim() == 2 else values)]


def draw(stream: Stream, count: int) -> list[Any]:
    return [stream.next() for _ in range(count)]


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    stream = Stream(Whole(), 5)
    epochs = [[i for batch in draw(stream, 2) for i in indices(batch)] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = [indices(batch) for batch in draw(Stream(Whole(), 5, seed=3), 4)]
    torch.manual_seed(123)
    torch.rand(5)
    assert [indices(batch) for batch in draw(Stream(Whole(), 5, seed=3), 4)] == first
    assert [indices(batch) for batch in draw(Stream(Whole(), 5, seed=4), 4)] != first
    later = Stream(Whole(), 5, seed=3)
    later.load_state_dict({"epoch": 1, "batches_consumed": 0})
    assert [indices(batch) for batch in draw(later, 2)] == first[2:]


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    stream = Stream(Whole(6), 3, shuffle=False)
    assert [indices(batch) for batch in draw(stream, 4)] == [[0, 1, 2], [3, 4, 5]] * 2


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4, 4, 4]), (False, [4, 4, 2, 4])])
def test_drop_last(drop_last: bool, sizes: list[int]) -> None:
    stream = Stream(Whole(), 4, drop_last=drop_last)
    assert [len(batch["input"]) for batch in draw(stream, 4)] == sizes
    assert stream.num_batches == (2 if drop_last else 3)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_larger_than_the_data_set_is_the_whole_of_it(drop_last: bool) -> None:
    stream = Stream(Whole(3), 100, drop_last=drop_last)
    batches = [indices(batch) for batch in draw(stream, 5)]
    assert [sorted(batch) for batch in batches] == [[0, 1, 2]] * 5
    assert stream.state_dict() == {"epoch": 4, "batches_consumed": 1}


def test_peek_is_the_next_batch_and_last_the_one_before() -> None:
    stream = Stream(Noisy(), 3)
    assert_same(stream.last(), stream.peek())  # before the first batch
    assert stream.state_dict() == {"epoch": 0, "batches_consumed": 0}
    previous = None
    for _ in range(8):
        state, ahead = stream.state_dict(), stream.peek()
        assert_same(stream.peek(), ahead)
        assert stream.state_dict() == state
        if previous is not None:
            assert_same(stream.last(), previous)
        previous = stream.next()
        assert_same(previous, ahead)
        assert_same(stream.last(), previous)


@pytest.mark.parametrize(("num_workers", "peeks"), [(0, False), (0, True), (1, True)])
def test_a_resumed_stream_goes_on_as_if_nothing_had_happened(peeks: bool, num_workers: int) -> None:
    """Epochs have 4 batches: the positions are the start, the middle, an epoch's end, the middle of the second."""
    whole = draw(Stream(Noisy(), 3, seed=5, drop_last=False), 11)
    for position in [0, 2, 4, 6] if num_workers == 0 else [4]:
        stream = Stream(Noisy(), 3, seed=5, drop_last=False, num_workers=num_workers)
        draw(stream, position)
        if peeks:
            stream.peek()
        state = stream.state_dict()
        resumed = Stream(Noisy(), 3, seed=5, drop_last=False, num_workers=num_workers)
        resumed.next()  # a position of its own, which the state replaces
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert_same(resumed.last(), whole[max(position - 1, 0)])
        assert_same(resumed.peek(), whole[position])
        assert_same(draw(resumed, 5), whole[position : position + 5])
        assert_same(draw(stream, 1), whole[position : position + 1])


@pytest.mark.parametrize("dataset", [Noisy(), Seeded()], ids=["per sample", "seeded"])
def test_workers_change_nothing(dataset: Any) -> None:
    alone = Stream(dataset, 3, seed=2, drop_last=False)
    helped = Stream(dataset, 3, seed=2, drop_last=False, num_workers=2)
    for _ in range(6):
        assert_same(helped.peek(), alone.peek())
        assert_same(helped.next(), alone.next())
        assert_same(helped.last(), alone.last())


def test_a_seeded_data_set_gets_a_seed_for_each_batch_of_each_epoch() -> None:
    first = draw(Stream(Seeded(), 5, seed=1, shuffle=False), 4)
    fractions = {float(value) for batch in first for value in batch["input"] % 1}
    assert len(fractions) == 20
    assert_same(draw(Stream(Seeded(), 5, seed=1, shuffle=False), 4), first)
    assert not torch.equal(Stream(Seeded(), 5, seed=2, shuffle=False).next()["input"], first[0]["input"])


class Broken(Whole):
    """Has no last sample."""

    def __getitems__(self, indices: Tensor) -> dict[str, Tensor]:
        if 9 in indices:
            raise ValueError("the last sample is broken")
        return super().__getitems__(indices)


def test_the_workers_end_with_the_batch_that_none_can_load() -> None:
    before = set(active_children())
    stream = Stream(Broken(), 5, shuffle=False, num_workers=2)
    stream.next()
    started = set(active_children()) - before
    assert len(started) == 2
    with pytest.raises(UserCodeError, match="the last sample is broken") as caught:
        stream.next()
    # While the error is still there, which a script may show or keep.
    assert caught.value is not None
    assert [each for each in started if each.is_alive()] == []


def test_loading_does_not_seed_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(0)
    assert seeds == [0]  # so this is where torch would do it
    draw(Stream(Noisy(), 3), 4)
    assert seeds == [0]


def test_a_subset_is_collated() -> None:
    """It has `__getitems__`, which returns samples."""
    batches = draw(Stream(Subset(Noisy(), [7, 1, 5, 3]), 2, shuffle=False), 2)
    assert [batch["target"].tolist() for batch in batches] == [[7, 1], [5, 3]]
    assert [batch["input"].shape for batch in batches] == [(2, 2), (2, 2)]


@dataclass(frozen=True)
class Named:
    """A batch with a dataclass's fields."""

    input: Tensor
    more: tuple[Tensor, int]


class Nested(Whole):
    """Batches with tensors at every depth."""

    def __getitems__(self, indices: Tensor) -> Any:
        x = self.data[indices]
        return {"a": [x, (x, 1)], "b": Pair(x, {"c": x}), "d": "text", "e": None, "f": Named(x, (x, 2))}


def test_nested_batches_move() -> None:
    batch = Stream(Nested(), 2).to("meta").next()
    assert isinstance(batch["a"], list)
    assert isinstance(batch["a"][1], tuple)
    assert isinstance(batch["b"], Pair)
    assert isinstance(batch["f"], Named)
    moved = [batch["a"][0], batch["a"][1][0], batch["b"].input, batch["b"].target["c"]]
    moved += [batch["f"].input, batch["f"].more[0]]
    assert [tensor.device.type for tensor in moved] == ["meta"] * 6
    assert (batch["a"][1][1], batch["d"], batch["e"], batch["f"].more[1]) == (1, "text", None, 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_that_moves_delivers_the_batches_that_it_would_have_delivered(num_workers: int) -> None:
    expected = draw(Stream(Noisy(), 3), 4)
    stream = Stream(Noisy(), 3, num_workers=num_workers)
    stream.next()
    stream.peek()
    stream.to("cpu")
    assert_same(stream.last(), expected[0])
    assert_same(draw(stream, 3), expected[1:])
    assert stream.to("meta").last()["input"].is_meta
