"""The stream: its order, its resume, its workers, also those that end, its devices."""

import os
import signal
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mlotool.core.errors import ConfigError, RunError
from mlotool.core.user_code import UserCodeError
from mlotool.problem.streams.stream import Stream

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


def test_a_batch_of_another_size_than_asked_for_is_refused() -> None:
    class Short(list[int]):
        def __getitems__(self, indices: Tensor) -> list[int]:
            return self[:1]

    with pytest.raises(ConfigError, match="found 1 samples for 2 indices in the __getitems__ of"):
        Stream(Short(range(4)), 2).next()


@pytest.mark.parametrize(("size", "drop_last", "sizes"), [(4, True, [4, 4]), (4, False, [4, 4, 2]), (99, True, [10])])
def test_drop_last(size: int, drop_last: bool, sizes: list[int]) -> None:
    stream = Stream(Whole(), size, drop_last=drop_last)
    assert [len(batch["input"]) for batch in draw(stream, 2 * stream.num_batches)] == 2 * sizes


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


SIZE = 12


class Data:
    """Ends the process that reads a sample, in a worker and as often as it is told."""

    def __init__(self, end: Callable[[], Any], folder: Path, at: int = 5, times: int = 1) -> None:
        self.end, self.folder, self.at, self.times, self.home = end, folder, at, times, os.getpid()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if os.getpid() != self.home and index == self.at:
            ended = len(list(self.folder.iterdir()))
            if ended < self.times:
                (self.folder / str(ended)).touch()
                self.end()
        return {"input": index + torch.rand(2)}


@pytest.fixture(autouse=True)
def _is_soon_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch looks every five seconds whether the workers are there."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


ENDS: dict[str, Callable[[], Any]] = {
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit code 0": lambda: os._exit(0),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_worker_that_ends_is_replaced_once(tmp_path: Path, name: str) -> None:
    expected = draw(Stream(Data(ENDS[name], tmp_path), 3, shuffle=False), 4)
    stream = Stream(Data(ENDS[name], tmp_path), 3, shuffle=False, num_workers=1)
    with pytest.warns(UserWarning, match="has ended .* Another process loads the same samples"):
        assert_same(draw(stream, 4), expected)


def test_one_that_ends_again_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    stream = Stream(Data(ENDS["kill -9"], tmp_path, at=0, times=2), 3, shuffle=False, num_workers=1)
    with (
        pytest.raises(RunError, match=r"A process that loads data has ended .*resume=auto"),
        pytest.warns(UserWarning, match="has ended"),
    ):
        stream.next()
