"""Equal batches and equal frozen parts of several runs are read and run once; every run has what it has alone."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Identity, Implicit, Problem, Program, Schedule
from mlotool.core.bound_module import BoundModule
from mlotool.core.tangents import dual_level
from mlotool.core.tracing import tracing
from mlotool.data import CropAndFlip, InMemoryDataset, Normalization
from mlotool.fusion.shared_batches import KeptData, SharedPrefix, frozen_parts, share_prefixes, share_reads
from mlotool.losses import cross_entropy
from mlotool.problem.streams.stream import Stream
from tests.fusion.test_stacked_batches import assert_same


class Counted:
    """Counts what is read; a sample draws from the generator that the stream seeds."""

    def __init__(self, size: int = 10) -> None:
        self.size, self.count = size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        return {"input": torch.rand(3, 50, 50) + index, "target": index, "name": "a", "nested": [torch.zeros(2)]}


@pytest.mark.parametrize(("repeat", "num_workers"), [(1, 1), (2, 0)])
def test_each_batch_is_read_once_and_is_each_streams_own(repeat: int, num_workers: int) -> None:
    data = Counted()
    streams = [Stream(data, 4, seed=1, repeat=repeat, num_workers=num_workers) for _ in range(3)]
    alone = Stream(Counted(), 4, seed=1, repeat=repeat)
    assert len(share_reads([*streams, Stream(data, 4, seed=2)])) == 1
    for _ in range(7):
        expected = alone.next()
        batches = [each.next() for each in streams]
        for batch in batches:
            assert_same(batch, expected)
        assert len({id(each["input"]) for each in batches}) == 3
        assert [each.state_dict() for each in streams] == [alone.state_dict()] * 3
        assert_same(streams[1].last(), alone.last())
        assert_same(streams[2].recent(2), alone.recent(2))
    if not num_workers:
        assert data.count < 2 * alone.dataset.count
    others = [Stream(data, 4, seed=1), Stream(data, 4, seed=2), Stream(Counted(), 4, seed=1), Stream(data, 5, seed=1)]
    assert share_reads([*others, others[0], Stream(data, 4, seed=1).to(dtype=torch.float64)]) == []


def test_what_one_run_writes_into_its_batch_stays_its_own() -> None:
    data = Counted()
    streams = [Stream(data, 4, seed=1) for _ in range(3)]
    share_reads(streams)
    expected = Stream(Counted(), 4, seed=1)
    for _ in range(3):
        clean = expected.next()
        for number in (1, 0, 2):
            batch = streams[number].next()
            assert_same(batch, clean)
            # Large and small tensors, by an operator, by an address that was taken, and containers.
            batch["input"].clamp_(max=0.0)
            batch["nested"][0].add_(1.0)
            batch["target"].numpy()[:] = -1
            batch["new"] = batch.pop("name")
            assert int(streams[number].last()["target"][0]) == -1


class Data:
    """Two splits, one of which augments; counts calls."""

    splits = ("train", "val")
    num_classes = 10

    def __init__(self) -> None:
        self.calls: list[int] = []
        images = torch.randint(256, (20, 3, 40, 40), dtype=torch.uint8)
        normalization, target = Normalization([0.5] * 3, [0.2] * 3), torch.arange(20)
        self.val = InMemoryDataset(images, target, normalization)
        self.train = InMemoryDataset(images, target, normalization, augmentation=CropAndFlip())
        read = self.val.__getitems__
        self.val.__getitems__ = lambda indices: self.calls.append(len(indices)) or read(indices)  # type: ignore[method-assign]

    def split(self, name: str) -> Any:
        return getattr(self, name)


def kept(room: int, num_readers: int = 2) -> tuple[Data, KeptData]:
    data = Data()
    wrapped = KeptData(data, room)
    wrapped.num_readers = num_readers
    return data, wrapped


def test_a_batch_is_read_once_and_each_evaluation_has_its_own() -> None:
    data, wrapped = kept(2**24)
    assert (wrapped.num_classes, wrapped.splits, len(wrapped.split("val"))) == (10, ("train", "val"), 20)
    for _ in range(3):
        for indices in ([0, 1, 2], [3, 4], [2, 1, 0]):
            batch = wrapped.split("val").__getitems__(indices)
            expected = data.val._inputs(torch.tensor(indices), None)["input"]
            assert torch.equal(batch["input"], expected)
            batch["input"].zero_()
            batch["target"].zero_()
    assert data.calls == [3, 2, 3]
    # What finds no room, augments or has one reader is read again.
    data, wrapped = kept(3 * 3 * 40 * 40 * 4 + 100)
    for _ in range(3):
        wrapped.split("val").__getitems__([0, 1, 2])
        wrapped.split("val").__getitems__([3])
    assert data.calls == [3, 1, 1, 1]
    assert wrapped.split("train") is data.train
    alone, wrapped = kept(2**24, num_readers=1)
    for _ in range(2):
        wrapped.split("val").__getitems__([0])
    assert alone.calls == [1, 1]


class Encoder(nn.Module):
    """Counts its evaluations; BatchNorm moves where it is in train mode."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = scale
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten())
        self.requires_grad_(False).eval()
        self.layers[1].running_mean.fill_(0.3)

    def forward(self, images: Tensor) -> Tensor:
        CALLS.append(len(images))
        return self.scale * self.layers(images)


CALLS: list[int] = []


class Probe(nn.Module):
    """A head on a frozen encoder."""

    def __init__(self, head: nn.Module, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = Encoder() if encoder is None else encoder
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        # The head writes into what the encoder has returned.
        return self.head(self.encoder(images).mul_(2.0))


def heads() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Linear(144, 5),
        nn.Sequential(nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 5)),
        nn.Linear(144, 5, bias=False),
    ]


def problem(name: str, head: nn.Module, data: Any, **settings: Any) -> Problem:
    return Problem(
        name, Probe(head), cross_entropy, roles={"model": name}, stream=Stream(data, 6, seed=1),
        optimizer=partial(torch.optim.SGD, lr=0.1), **settings,
    )  # fmt: skip


def images() -> InMemoryDataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (18, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return InMemoryDataset(pixels, torch.arange(18) % 5, Normalization([0.5] * 3, [0.2] * 3))


def weighted(batch: Any, *, model: Any, weigher: Any) -> Tensor:
    losses = nn.functional.cross_entropy(model(batch["input"]), batch["target"], reduction="none")
    return (losses * weigher(losses.detach()[:, None]).sigmoid()[:, 0]).mean()


def plain(name: str, head: nn.Module, data: Any) -> Program:
    return Program([problem(name, head, data)], Graph())


def bilevel(name: str, head: nn.Module, data: Any) -> Program:
    roles, stream = {"model": "lower", "weigher": "upper"}, Stream(data, 6, seed=1)
    sgd = partial(torch.optim.SGD, lr=0.1)
    settings: dict[str, Any] = {"unroll_steps": 2, "hypergradient": Implicit(Identity())}
    lower = Problem("lower", Probe(head), weighted, roles=roles, stream=stream, optimizer=sgd, **settings)
    torch.manual_seed(7)
    stream = Stream(data, 6, seed=2)
    upper = Problem("upper", nn.Linear(1, 1), cross_entropy, roles={"model": "lower"}, stream=stream, optimizer=sgd)
    return Program([lower, upper], Graph({"upper": ["lower"]}, {"lower": ["upper"]}))


def trained(make: Any, shares: bool) -> tuple[list[Tensor], int]:
    """Return what three runs come to in seven ticks, and how often an encoder was evaluated."""
    data = images()
    programs = [make(f"p{number}", head, data) for number, head in enumerate(heads())]
    schedules = [Schedule(program) for program in programs]
    problems = [each for program in programs for each in program.problems.values()]
    if shares:
        share_reads([each.stream for each in problems])
        [prefix] = share_prefixes(problems)
    CALLS.clear()
    for _ in range(7):
        for schedule in schedules:
            schedule.tick()
    if shares:
        prefix.close()
    assert all("forward" not in vars(part) for each in problems for part in each.module.modules())
    return [tensor for each in problems for tensor in each.module.state_dict().values()], len(CALLS)


@pytest.mark.parametrize("make", [plain, bilevel])
def test_runs_with_one_encoder_train_as_alone_with_a_fraction_of_its_evaluations(make: Any) -> None:
    (alone, num_alone), (together, num_together) = trained(make, False), trained(make, True)
    assert all(map(torch.equal, together, alone))
    # Besides one a tick, the first result that each of the others takes over, the second and the fourth.
    assert (num_alone, num_together) == (21, 7 + 2 * 3) if make is plain else num_together < num_alone


def pair(first: nn.Module | None = None, second: nn.Module | None = None) -> tuple[Probe, Probe, SharedPrefix]:
    """Return two runs past the comparisons of the first results."""
    probes = Probe(nn.Linear(144, 2), first), Probe(nn.Linear(144, 2), second)
    prefix = SharedPrefix([each.encoder for each in probes])
    for seed in range(4) if first is None else ():
        given = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        for each in probes:
            each(given)
    return *probes, prefix


def evaluated(call: Callable[[], Any]) -> int:
    before = len(CALLS)
    call()
    return len(CALLS) - before


def test_an_equal_input_is_known_by_its_content() -> None:
    one, other, _ = pair()
    given = torch.rand(6, 3, 8, 8)
    assert evaluated(lambda: one(given)) == 1
    assert evaluated(lambda: other(given.clone())) == 0
    assert evaluated(lambda: other(given.contiguous(memory_format=torch.channels_last))) == 1
    assert evaluated(lambda: one(given[:5])) == 1
    changed = given.clone()
    changed[3, 1, 4, 4] += 1e-6
    assert evaluated(lambda: one(changed)) == 1
    # The same tensor with another content, also in few places.
    given[3, 1, 4, 5] += 1.0
    assert evaluated(lambda: one(given)) == 1
    given[2] = torch.nan
    assert evaluated(lambda: one(given)) == 1
    assert evaluated(lambda: other(given.clone())) == 0
    for _ in range(80):
        one(torch.rand(2, 3, 8, 8))
    # Runs with other samples stop looking.
    assert "forward" not in vars(one.encoder)


def test_what_is_no_constant_is_left_to_the_part_itself() -> None:
    one, other, prefix = pair()
    given = torch.rand(6, 3, 8, 8)
    one(given)
    leaf = given.clone().requires_grad_()
    assert evaluated(lambda: other(leaf)) == 1
    assert other(leaf).requires_grad
    assert evaluated(lambda: torch.func.vmap(other.encoder)(given[:, None])) == 1
    with tracing():
        assert evaluated(lambda: other(given)) == 1
    with torch.inference_mode():
        assert evaluated(lambda: other.encoder(given)) == 1
    with dual_level():
        dual = torch.autograd.forward_ad.make_dual(given, torch.ones_like(given))
        assert evaluated(lambda: other(dual)) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluated(lambda: other(given)) == 1
    assert evaluated(lambda: other(given)) == 0
    twin = copy.deepcopy(other)
    assert evaluated(lambda: twin(given)) == 1
    assert torch.equal(twin(given), other(given))
    # In its pure form it is shared, too.
    bound = BoundModule(other, {name: each for name, each in other.named_parameters() if each.requires_grad})
    assert evaluated(lambda: bound(given)) == 0
    other.train()
    mean = other.encoder.layers[1].running_mean.clone()
    other(given)
    assert not torch.equal(other.encoder.layers[1].running_mean, mean)
    assert prefix.num_shared > 0


class Counting(Encoder):
    def forward(self, images: Tensor) -> Tensor:
        self.count = getattr(self, "count", 0) + 1
        return super().forward(images) * self.count


def test_a_part_that_is_changed_or_no_function_is_alone_from_then_on() -> None:
    one, other, _ = pair()
    given = torch.rand(6, 3, 8, 8)
    first = one.encoder(given)
    with torch.no_grad():
        other.encoder.layers[0].weight.mul_(2.0)
    assert not torch.equal(other.encoder(given), first)
    # None is left to share with.
    assert "forward" not in {*vars(other.encoder), *vars(one.encoder)}
    one, other, _ = pair(Counting(), Counting())
    one(given), one(given)
    alone = Probe(other.head, Counting())
    for _ in range(3):
        assert torch.equal(other(given), alone(given))
    assert "forward" not in vars(other.encoder)


def test_parts_that_are_trained_hooked_or_different_are_not_shared() -> None:
    data = images()
    first = problem("a", nn.Linear(144, 5), data)
    others = [problem("b", nn.Linear(144, 5), data) for _ in range(5)]
    others[0].module.encoder.scale = 2.0
    others[1].module.encoder.layers[1].running_var.mul_(1.5)
    others[2].module.encoder.layers[0].register_forward_hook(lambda *_: None)
    others[3].module.encoder.layers[0] = nn.Conv2d(3, 4, 3, stride=1, padding_mode="circular").requires_grad_(False)
    others[4].module.encoder.layers[0].weight.requires_grad_(True)
    for each in others:
        assert share_prefixes([first, each]) == []
    assert list(frozen_parts(others[4].module)) == ["encoder.layers.1"]
