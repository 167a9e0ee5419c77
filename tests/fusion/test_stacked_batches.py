"""The joint streams of several runs: each lane's batch is its member's own, bit for bit."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import TensorDataset

from mlotool.data import CropAndFlip, InMemoryDataset, InMemoryTensors, Normalization, TextWindows
from mlotool.fusion import stacked_batches
from mlotool.fusion.stacked_batches import JoinedData, NotFusedError, StackedStream, stacked_streams
from mlotool.problem.stream import SameBatch
from mlotool.program import Stream

M = 3
ALL = [True] * M
NORMALIZATION = Normalization([0.4, 0.5, 0.6], [0.2, 0.3, 0.25])


def images(seed: int, size: int = 11, **settings: Any) -> InMemoryDataset:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (size, 3, 8, 8), generator=generator, dtype=torch.uint8)
    target = torch.randint(10, (size,), generator=generator)
    extra = {"level": torch.rand(size, 2, generator=generator, dtype=torch.float64)}
    return InMemoryDataset(pixels, target, NORMALIZATION, clean_target=target.flip(0), extra=extra, **settings)


def nested(seed: int, size: int = 11) -> InMemoryTensors:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.rand(size, 4, 2, generator=generator) for name in ("input", "target")}
    return InMemoryTensors({"support": values, "phase": torch.rand(size, generator=generator)})


def windows(seed: int, size: int = 11) -> TextWindows:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (40 + seed,), generator=generator, dtype=torch.uint8)
    starts = torch.randint(30, (size,), generator=generator)
    return TextWindows(tokens, starts, torch.arange(size) % 3, length=6)


def pairs(seed: int, size: int = 11) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.rand(size, 5, generator=generator), torch.randint(3, (size,), generator=generator))


class Theirs:
    """Samples one by one, with a random transform of torch's global generator."""

    def __init__(self, seed: int, size: int = 11) -> None:
        self.values = torch.rand(size, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self.values[index] + torch.rand(3), "target": index, "name": "a"}


class Counted(Theirs):
    """The same, which counts what is read."""

    count = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        return super().__getitem__(index)


DATA: dict[str, Callable[[int], Any]] = {
    "images": images,
    "augmented": lambda seed: images(seed, augmentation=CropAndFlip(2)),
    "nested": nested,
    "windows": windows,
    "tensor": lambda seed: torch.rand(11, 2, generator=torch.Generator().manual_seed(seed)),
    "pairs": pairs,
    "theirs": Theirs,
}
IN_ONE_CALL = {"images", "nested", "windows", "tensor", "pairs"}


def streams_on(datasets: Sequence[Any], seeds: Sequence[int] = (1, 2, 3), **settings: Any) -> list[Stream]:
    return [Stream(each, 4, seed=seed, **settings) for each, seed in zip(datasets, seeds, strict=True)]


def lane(batch: Any, number: int) -> Any:
    return tree_map(lambda each: each[number] if isinstance(each, Tensor) else each, batch)


def assert_same(found: Any, expected: Any) -> None:
    """Hold two batches against each other: containers, the order of keys, dtypes, and every bit."""
    leaves, form = tree_flatten(found)
    others, other_form = tree_flatten(expected)
    assert form == other_form
    for leaf, other in zip(leaves, others, strict=True):
        if isinstance(other, Tensor):
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape)
            assert leaf.numpy().tobytes() == other.numpy().tobytes()
        else:
            assert leaf == other


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shared", [True, False], ids=["one_object", "objects"])
@pytest.mark.parametrize("kind", DATA)
def test_each_lane_has_its_members_own_batches(kind: str, shared: bool, drop_last: bool) -> None:
    one = DATA[kind](0)
    datasets = [one if shared else DATA[kind](seed) for seed in range(M)]
    ours = streams_on(datasets, drop_last=drop_last)
    own = streams_on(datasets, drop_last=drop_last)
    joint = StackedStream(ours)
    for tick in range(8):
        if tick % 3 == 1:
            ahead = joint.peek(ALL)
            for number, each in enumerate(own):
                assert_same(lane(ahead.value, number), each.peek())
        batch = joint.next(ALL)
        assert not batch.is_shared
        for number, each in enumerate(own):
            assert_same(lane(batch.value, number), each.next())
            assert_same(lane(joint.last(ALL).value, number), each.last())
        assert [each.state_dict() for each in ours] == [each.state_dict() for each in own]
        if tick % 3 == 0:
            for mine, theirs in zip(ours, own, strict=True):
                assert_same(mine.last(), theirs.last())
                assert_same(mine.recent(2)[0], theirs.recent(2)[0])
                assert_same(mine.peek(), theirs.peek())


def test_data_in_memory_is_read_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, make in DATA.items():
        calls: list[Any] = []
        fetch = JoinedData.__getitem__
        monkeypatch.setattr(JoinedData, "__getitem__", lambda self, places: calls.append(places) or fetch(self, places))  # noqa: B023
        StackedStream(streams_on([make(seed) for seed in range(M)])).next(ALL)
        assert len(calls) == (kind in IN_ONE_CALL), kind
        monkeypatch.undo()


def test_data_sets_that_are_too_large_or_differ_are_read_lane_by_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    different = [
        images(0),
        images(1, size=9),
        InMemoryDataset(torch.rand(11, 3, 8, 8), torch.arange(11), NORMALIZATION),
    ]
    for datasets in (different[:2], [*map(images, range(2))]):
        ours, own = streams_on(datasets, (1, 2)), streams_on(datasets, (1, 2))
        joint = StackedStream(ours)
        for _ in range(7):
            batch = joint.next([True, True])
            for number, each in enumerate(own):
                assert_same(lane(batch.value, number), each.next())
        monkeypatch.setattr(stacked_batches, "MAX_BYTES", 1)
    assert JoinedData.of(different) is None


@pytest.mark.parametrize("kind", DATA)
def test_runs_with_the_same_samples_share_one_batch(kind: str) -> None:
    data = DATA[kind](0)
    ours, own = streams_on([data] * M, (1, 1, 1), repeat=2), Stream(data, 4, seed=1, repeat=2)
    joint = StackedStream(ours)
    for _ in range(11):
        batch = joint.next(ALL)
        assert batch.is_shared
        assert_same(batch.value, own.next())
        assert [each.state_dict() for each in ours] == [own.state_dict()] * M
        assert_same(joint.last(ALL).value, own.last())
        assert_same(joint.peek(ALL).value, own.peek())
    assert_same(ours[2].last(), own.last())
    assert_same(ours[2].next(), own.next())


def test_lanes_of_one_seed_are_loaded_once_where_others_differ() -> None:
    data = Counted(5)
    ours = streams_on([data] * M, (1, 2, 1))
    own = streams_on([Counted(5)] * M, (1, 2, 1))
    joint = StackedStream(ours)
    for tick in range(1, 4):
        batch = joint.next(ALL)
        assert data.count == 2 * 4 * tick
        for number, each in enumerate(own):
            assert_same(lane(batch.value, number), each.next())


@pytest.mark.parametrize("kind", DATA)
def test_a_lane_without_its_member_has_another_ones_samples(kind: str) -> None:
    datasets = [DATA[kind](seed) for seed in range(M)]
    ours, own = streams_on(datasets), streams_on(datasets)
    joint = StackedStream(ours)
    joint.next(ALL)
    left = ours[0].state_dict()
    own[1].next(), own[2].next()
    for _ in range(6):
        batch = joint.next([False, True, True])
        expected = own[1].next()
        assert_same(lane(batch.value, 0), expected)
        assert_same(lane(batch.value, 1), expected)
        assert_same(lane(batch.value, 2), own[2].next())
    assert ours[0].state_dict() == left
    # A resumed group has no stream for it.
    resumed = [None, *(Stream(data, 4, seed=seed) for data, seed in zip(datasets[1:], (2, 3), strict=True))]
    for stream, other in zip(resumed[1:], own[1:], strict=True):
        stream.load_state_dict(other.state_dict())
    batch = StackedStream(resumed).next([False, True, True])
    for number in (1, 2):
        assert_same(lane(batch.value, number), own[number].next())


def test_sharing_does_not_change_with_the_lanes_that_are_left() -> None:
    data = images(0)
    assert StackedStream([None, *streams_on([data] * 2, (1, 1))]).shares
    stays = StackedStream([None, *streams_on([data] * 2, (1, 1))], shares=False)
    batch = stays.next([False, True, True])
    assert not batch.is_shared
    assert_same(lane(batch.value, 2), Stream(data, 4, seed=1).next())
    with pytest.raises(NotFusedError, match="different samples"):
        StackedStream(streams_on([data] * 3), shares=True)


def test_members_at_different_places_and_with_epochs_of_other_lengths() -> None:
    datasets = [images(0, 8), images(1, 12), images(2, 23)]
    ours, own = streams_on(datasets), streams_on(datasets)
    for number, (mine, theirs) in enumerate(zip(ours, own, strict=True)):
        for _ in range(number):
            mine.next()
        theirs.load_state_dict(mine.state_dict())
    joint = StackedStream(ours)
    for _ in range(9):
        batch = joint.next(ALL)
        for number, each in enumerate(own):
            assert_same(lane(batch.value, number), each.next())


def test_last_batches_of_other_sizes_do_not_fit_and_no_stream_goes_on() -> None:
    for make in (images, Theirs):
        streams = [Stream(make(seed, size), 4, seed=seed, drop_last=False) for seed, size in enumerate((6, 9))]
        joint = StackedStream(streams)
        joint.next([True, True])
        before = [each.state_dict() for each in streams]
        with pytest.raises(NotFusedError, match="different s"):
            joint.next([True, True])
        assert [each.state_dict() for each in streams] == before


def test_values_that_are_no_tensors_have_to_agree() -> None:
    class Named(Theirs):
        def __getitems__(self, indices: Tensor) -> dict[str, Any]:
            return {"input": self.values[indices], "domain": self.domain}

    one, other = Named(0), Named(1)
    one.domain = other.domain = 3
    joint = StackedStream(streams_on([one, other], (1, 2)))
    assert joint.next([True, True]).value["domain"] == 3
    other.domain = 4
    with pytest.raises(NotFusedError, match=r"'domain'.*different values"):
        joint.next([True, True])


def test_nan_images_and_values_stay_in_their_lane() -> None:
    spoilt = [nested(seed) for seed in range(M)]
    spoilt[1].values["phase"][:] = torch.nan
    batch = StackedStream(streams_on(spoilt)).next(ALL)
    assert batch.value["phase"].isnan().any(1).tolist() == [False, True, False]


def test_another_dtype_is_honoured() -> None:
    datasets = [images(seed) for seed in range(M)]
    ours = [each.to(dtype=torch.float64) for each in streams_on(datasets)]
    own = [each.to(dtype=torch.float64) for each in streams_on(datasets)]
    batch = StackedStream(ours).next(ALL).value
    assert batch["input"].dtype == torch.float64
    for number, each in enumerate(own):
        assert_same(lane(batch, number), each.next())
    with pytest.raises(NotFusedError, match="dtypes"):
        StackedStream([*ours[:2], *streams_on(datasets)[2:]])


def test_ranks_and_workers_load_by_themselves() -> None:
    for settings in ({"num_workers": 1}, {}):
        datasets = [images(seed) for seed in range(2)]
        ours, own = streams_on(datasets, (1, 2), **settings), streams_on(datasets, (1, 2))
        if not settings:
            for each in (*ours, *own):
                each.divide(1, 3)
        joint = StackedStream(ours)
        for _ in range(4):
            batch = joint.next([True, True])
            for number, each in enumerate(own):
                expected = each.next()
                found = batch.value if settings else batch.value.batch
                assert_same(lane(found, number), expected if settings else expected.batch)
        assert ours[0].state_dict() == own[0].state_dict()


def test_a_problem_that_repeats_anothers_batch_reads_nothing_again() -> None:
    data = Counted(5)
    lower = streams_on([data] * M)
    joint = stacked_streams({"lower": lower, "upper": [SameBatch(each) for each in lower], "none": [None] * M})
    assert [*joint] == ["lower", "upper"]
    assert_same(joint["upper"].next(ALL).value, joint["lower"].peek(ALL).value)
    for _ in range(3):
        batch = joint["lower"].next(ALL)
        assert joint["upper"].next(ALL) is batch
        assert joint["upper"].peek(ALL) is batch
    assert data.count == M * 4 * 3
    alone = StackedStream([SameBatch(each) for each in lower])
    assert_same(alone.next(ALL).value, joint["lower"].last(ALL).value)
    assert lower[0].state_dict() == {"epoch": 1, "batches_consumed": 1}


def test_a_resume_in_the_middle_goes_on_with_the_same_batches() -> None:
    datasets = [images(seed) for seed in range(M)]
    ours = streams_on(datasets, repeat=2)
    joint = StackedStream(ours)
    for _ in range(7):
        joint.next(ALL)
    resumed = streams_on(datasets, repeat=2)
    for stream, other in zip(resumed, ours, strict=True):
        stream.load_state_dict(other.state_dict())
    again = StackedStream(resumed)
    assert_same(again.last(ALL).value, joint.last(ALL).value)
    for _ in range(5):
        assert_same(again.next(ALL).value, joint.next(ALL).value)


class Drawn:
    """Samples that are drawn from all global generators."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": torch.rand(2) + random.random() + numpy.random.randn(), "index": index}


@pytest.mark.parametrize("is_one_data_set", [False, True])
def test_lanes_draw_as_their_members_do_alone(is_one_data_set: bool) -> None:
    datasets = [Drawn()] * M if is_one_data_set else [Drawn() for _ in range(M)]
    joint, own = StackedStream(streams_on(datasets)), streams_on(datasets)
    for tick in range(6):
        batch = joint.next(ALL)
        for number, each in enumerate(own):
            assert_same(lane(batch.value, number), each.next())
        numpy.random.seed(tick)  # of a loss's, between two ticks
        random.seed(tick)
