"""Frozen parts of several runs are evaluated once, and every run has what it has alone."""

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
from mlotool.data import InMemoryDataset, Normalization
from mlotool.fusion.shared_batches import share_reads
from mlotool.fusion.shared_prefix import SharedPrefix, frozen_parts, have_same_bits, share_prefixes
from mlotool.losses import cross_entropy
from mlotool.problem.stream import Stream


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


@pytest.fixture(autouse=True)
def _calls() -> None:
    CALLS.clear()


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


def trained(shares: bool, num_ticks: int = 7) -> tuple[list[Tensor], int]:
    data = images()
    problems = [problem(f"p{number}", head, data) for number, head in enumerate(heads())]
    schedules = [Schedule(Program([each], Graph())) for each in problems]
    if shares:
        share_reads([each.stream for each in problems])  # type: ignore[misc]
        [prefix] = share_prefixes(problems)
    for _ in range(num_ticks):
        for schedule in schedules:
            schedule.tick()
    if shares:
        assert prefix.num_shared == 2 * num_ticks
        prefix.close()
    assert all("forward" not in vars(each.module.encoder) for each in problems)
    return [tensor for each in problems for tensor in each.module.state_dict().values()], len(CALLS)


def test_runs_with_one_encoder_train_as_alone_with_a_fraction_of_its_evaluations() -> None:
    alone, num_alone = trained(False)
    CALLS.clear()
    together, num_together = trained(True)
    assert all(map(have_same_bits, together, alone))
    # Besides one a tick, the first result that each of the others takes over, the second and the fourth.
    assert (num_alone, num_together) == (21, 7 + 2 * 3)


def pair(first: nn.Module | None = None, second: nn.Module | None = None) -> tuple[Probe, Probe, SharedPrefix]:
    probes = Probe(nn.Linear(144, 2), first), Probe(nn.Linear(144, 2), second)
    return *probes, SharedPrefix([each.encoder for each in probes])


def evaluated(call: Callable[[], Any]) -> int:
    before = len(CALLS)
    call()
    return len(CALLS) - before


def settle(one: Probe, other: Probe) -> None:
    """Go past the comparisons of the first results."""
    for seed in range(4):
        given = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        one(given), other(given)
    CALLS.clear()


def test_an_equal_input_is_known_by_its_content() -> None:
    one, other, _ = pair()
    settle(one, other)
    given = torch.rand(6, 3, 8, 8)
    assert evaluated(lambda: one(given)) == 1
    assert evaluated(lambda: other(given.clone())) == 0
    assert evaluated(lambda: other(given.contiguous(memory_format=torch.channels_last))) == 1
    assert evaluated(lambda: one(given[:5])) == 1
    changed = given.clone()
    changed[3, 1, 4, 4] += 1e-6
    assert evaluated(lambda: one(changed)) == 1
    assert evaluated(lambda: one(given)) == 1
    # The same tensor with another content, also in few places.
    given[3, 1, 4, 5] += 1.0
    assert evaluated(lambda: one(given)) == 1
    given.add_(1.0)
    assert evaluated(lambda: one(given)) == 1
    given[2] = torch.nan
    assert evaluated(lambda: one(given)) == 1
    assert evaluated(lambda: other(given.clone())) == 0


def test_what_is_no_constant_is_left_to_the_part_itself() -> None:
    one, other, prefix = pair()
    settle(one, other)
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
    other.train()
    mean = other.encoder.layers[1].running_mean.clone()
    other(given)
    assert not torch.equal(other.encoder.layers[1].running_mean, mean)
    assert prefix.num_shared > 0


def test_a_part_in_its_pure_form_is_shared_too() -> None:
    one, other, _ = pair()
    settle(one, other)
    given = torch.rand(6, 3, 8, 8)
    bound = [
        BoundModule(each, {name: tensor for name, tensor in each.named_parameters() if tensor.requires_grad})
        for each in (one, other)
    ]
    expected = Probe(other.head)(given)
    CALLS.clear()
    bound[0](given)
    assert torch.equal(bound[1](given), expected)
    assert len(CALLS) == 1


def test_a_part_that_is_changed_is_alone_from_then_on() -> None:
    one, other, _ = pair()
    settle(one, other)
    given = torch.rand(6, 3, 8, 8)
    first = one.encoder(given)
    with torch.no_grad():
        other.encoder.layers[0].weight.mul_(2.0)
    assert not torch.equal(other.encoder(given), first)
    assert "forward" not in vars(other.encoder)
    # None is left to share with.
    assert "forward" not in vars(one.encoder)


def test_a_part_that_is_no_function_is_found_out_by_comparison() -> None:
    class Counting(Encoder):
        def forward(self, images: Tensor) -> Tensor:
            self.count = getattr(self, "count", 0) + 1
            return super().forward(images) * self.count

    one, other, _ = pair(Counting(), Counting())
    given = torch.rand(6, 3, 8, 8)
    one(given), one(given)
    alone = Probe(other.head, Counting())
    for _ in range(3):
        assert torch.equal(other(given), alone(given))
    assert "forward" not in vars(other.encoder)


def test_runs_with_other_samples_stop_looking_for_equal_ones() -> None:
    one, _, prefix = pair()
    for _ in range(80):
        one(torch.rand(2, 3, 8, 8))
    assert "forward" not in vars(one.encoder)
    assert not prefix._kept


def test_the_memory_of_what_is_kept_is_bounded_and_a_run_may_leave() -> None:
    probes = [Probe(nn.Linear(144, 2)) for _ in range(3)]
    prefix = SharedPrefix([each.encoder for each in probes], max_bytes=3 * 2 * (192 + 144) * 4)
    inputs = [torch.rand(2, 3, 8, 8) for _ in range(5)]
    with torch.no_grad():
        for each in inputs:
            probes[0](each)
    assert len(prefix._kept) == 3
    prefix.leave(probes[1].encoder)
    assert "forward" not in vars(probes[1].encoder)
    assert "forward" in vars(probes[2].encoder)
    prefix.leave(probes[0].encoder)
    assert "forward" not in vars(probes[2].encoder)
    assert not prefix._kept


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
    assert len(share_prefixes([first, problem("c", nn.Linear(144, 5), data), *others[:2]])) == 1
    assert list(frozen_parts(others[4].module)) == ["encoder.layers.1"]
    assert not have_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert have_same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))


def test_hypergradients_through_a_frozen_part_are_those_of_a_run_alone() -> None:
    def weighted(batch: Any, *, model: Any, weigher: Any) -> Tensor:
        losses = nn.functional.cross_entropy(model(batch["input"]), batch["target"], reduction="none")
        return (losses * weigher(losses.detach()[:, None]).sigmoid()[:, 0]).mean()

    def program(head: nn.Module, data: Any) -> Program:
        lower = Problem(
            "lower", Probe(head), weighted, roles={"model": "lower", "weigher": "upper"},
            stream=Stream(data, 6, seed=1), optimizer=partial(torch.optim.SGD, lr=0.1), unroll_steps=2,
            hypergradient=Implicit(Identity()),
        )  # fmt: skip
        torch.manual_seed(7)
        upper = Problem(
            "upper", nn.Linear(1, 1), cross_entropy, roles={"model": "lower"}, stream=Stream(data, 6, seed=2),
            optimizer=partial(torch.optim.SGD, lr=0.1),
        )  # fmt: skip
        return Program([lower, upper], Graph({"upper": ["lower"]}, {"lower": ["upper"]}))

    found = []
    for shares in (False, True):
        data = images()
        programs = [program(head, data) for head in heads()[:2]]
        schedules = [Schedule(each) for each in programs]
        problems = [problem for each in programs for problem in each.problems.values()]
        if shares:
            share_reads([each.stream for each in problems])  # type: ignore[misc]
            [prefix] = share_prefixes(problems)
        for _ in range(6):
            for schedule in schedules:
                schedule.tick()
        found.append([tensor for each in problems for tensor in each.module.state_dict().values()])
    assert prefix.num_shared > 6
    assert all(map(have_same_bits, *found))
