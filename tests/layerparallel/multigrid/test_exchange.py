"""Layers on several ranks: threads that stand for them; test_in_place.py has processes."""

import copy
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.layerparallel import BlockLayers, MultigridResidual, mgrit, mgrit_adjoint
from mlotool.layerparallel.exchange import Exchange
from tests.layerparallel.multigrid.reference import Network
from tests.layerparallel.multigrid.test_mgrit import batched_step, start
from tests.layerparallel.multigrid.test_residual import Wave, dense


class Shared:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=20)
        self.places: list[Any] = [None] * size
        self.queues: list[Queue[Tensor]] = [Queue() for _ in range(size)]


class Threads(Exchange):
    """The exchange of threads."""

    def __init__(self, group: tuple[Shared, int], is_mirrored: bool = False) -> None:
        self.shared, self.rank = group
        self.num_parts = self.shared.size
        self.part = self.num_parts - 1 - self.rank if is_mirrored else self.rank
        self.is_mirrored = is_mirrored

    def pass_on(self, last: Tensor) -> Tensor | None:
        if self.part < self.num_parts - 1:
            self.shared.queues[self.part + 1].put(last.clone())
        return self.shared.queues[self.part].get(timeout=20) if self.part > 0 else None

    def gather(self, own: Tensor) -> Tensor:
        return torch.cat(self._all(own))

    def origin(self, value: Tensor) -> Tensor:
        return self._all(value)[-1 if self.is_mirrored else 0].clone()

    def norm(self, own: Tensor) -> Tensor:
        return torch.stack(self._all(own)).norm()

    def join(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = self._all(rows)
        return torch.cat(parts), torch.cat([torch.full((len(part),), n == self.rank) for n, part in enumerate(parts)])

    def _all(self, own: Tensor) -> list[Tensor]:
        self.shared.places[self.rank] = own.detach().clone()
        self.shared.barrier.wait()
        values = list(self.shared.places)
        self.shared.barrier.wait()
        return values


NUM_LAYERS = 32
CASES: dict[str, dict[str, Any]] = {
    "F": {"relaxation": "F", "cycles": 2},
    "FCF": {"relaxation": "FCF", "cycles": 2},
    "two grids": {"relaxation": "FCF", "cycles": 1, "levels": 2},
    "F-cycle, nested": {"cycle": "F", "cycles": 1, "nested": True, "coarsening": [2, 2, 2]},
    "tolerance": {"relaxation": "F", "cycles": 9, "relative_tolerance": 1e-2},
}


def compute(group: Any, part: int, num_parts: int) -> dict[str, tuple[Tensor, list[float], Tensor, list[float]]]:
    """Return states, adjoints and residuals of all cases, of this rank's points; also from a warm start."""
    network = Network.random(NUM_LAYERS)
    step, h = batched_step(network), network.h
    # What only one of the ranks has is garbage elsewhere.
    u0 = torch.from_numpy(start()) + (part > 0)
    cotangent = torch.from_numpy(start(2)) + (part < num_parts - 1)
    found = {}
    for name, case in CASES.items():
        states, residuals = mgrit(step, u0, NUM_LAYERS, h, group=group, **case)
        adjoints, adjoint_residuals = mgrit_adjoint(step, states, cotangent, NUM_LAYERS, h, group=group, **case)
        found[name] = states, residuals, adjoints, adjoint_residuals
        warm, more = mgrit(step, u0, NUM_LAYERS, h, group=group, initial=states, **case)
        again, again_residuals = mgrit_adjoint(
            step, warm, cotangent, NUM_LAYERS, h, group=group, initial=adjoints, **case
        )
        found[f"{name}, warm"] = warm, more, again, again_residuals
    return found


def assert_parts_equal(parts: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    size = NUM_LAYERS // len(parts)
    for name, expected in whole.items():
        for rank, part in enumerate(parts):
            own = slice(rank * size, (rank + 1) * size + 1)
            states, residuals, adjoints, adjoint_residuals = part[name]
            torch.testing.assert_close(states, expected[0][own], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(adjoints, expected[2][own], rtol=1e-12, atol=1e-12)
            assert residuals == pytest.approx(expected[1], rel=1e-9, abs=1e-12)
            assert adjoint_residuals == pytest.approx(expected[3], rel=1e-9, abs=1e-12)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_equal_the_whole(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute(None, 0, 1)
    monkeypatch.setattr(sys.modules["mlotool.layerparallel.multigrid.solver"], "Exchange", Threads)
    shared = Shared(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        runs = [pool.submit(compute, (shared, rank), rank, num_ranks) for rank in range(num_ranks)]
        parts = [run.result(timeout=60) for run in runs]
    assert_parts_equal(parts, whole)


def losses_and_gradients(part: MultigridResidual, rank: int, num_ranks: int) -> list[Tensor]:
    """Return the gradients of a few steps, summed over this rank's samples; the ranks' shares are unequal."""
    samples = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scale = torch.linspace(0.5, 1.5, 7, dtype=torch.float64)[:, None]
    own = torch.arange(7).tensor_split(num_ranks)[rank]
    found = []
    for _ in range(2):
        part.begin(own)
        u0 = samples[own].requires_grad_()
        loss = (part(u0).square() * scale[own]).sum()
        theta = list(part.parameters())
        slopes = torch.autograd.grad(loss, [u0, *theta])
        found += [loss.detach(), *slopes[1:]]
    return found


def on_ranks(monkeypatch: pytest.MonkeyPatch, run: Callable[[int], Any], size: int = 2) -> list[Any]:
    """Return what threads that stand for ranks find."""
    home, own, shared = sys.modules["mlotool.layerparallel.multigrid.residual"], threading.local(), Shared(size)
    monkeypatch.setattr(home, "exchanges", lambda: (Threads(own.group), Threads(own.group, is_mirrored=True)))

    def on_rank(rank: int) -> Any:
        own.group = shared, rank
        return run(rank)

    with ThreadPoolExecutor(size) as pool:
        return [each.result(timeout=60) for each in [pool.submit(on_rank, rank) for rank in range(size)]]


@pytest.mark.parametrize("make", [lambda: Wave(16, h=0.1), lambda: BlockLayers([dense() for _ in range(16)], 0.1)])
@pytest.mark.parametrize("warm_start", [False, True])
def test_a_module_over_ranks_has_the_gradients_of_one_rank(
    make: Callable[[], nn.Module], warm_start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers, settings = make().double(), {"relaxation": "F", "cycles": 1, "warm_start": warm_start}
    whole = losses_and_gradients(MultigridResidual(layers, **settings), 0, 1)

    def run(rank: int) -> list[Tensor]:
        return losses_and_gradients(MultigridResidual(copy.deepcopy(layers), over_ranks=True, **settings), rank, 2)

    parts = on_ranks(monkeypatch, run)
    for expected, *found in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(found), expected, rtol=1e-10, atol=1e-12)
    if isinstance(layers, Wave):
        # Each has the gradient of its own layers.
        assert not parts[0][1][8:].any()
        assert not parts[1][1][:8].any()


GUARDS: dict[str, dict[str, Any]] = {
    "guard": {"cycles": 0, "guard_every": 1, "guard_threshold": 1e-3},
    "gives up": {"cycles": 0, "guard_every": 1, "guard_threshold": 1e-30, "guard_max_cycles": 1},
    "auto": {"cycles": "auto", "coarsening": 4, "workers": 64, "guard_every": 1, "guard_threshold": 1e-3},
}


@pytest.mark.filterwarnings("ignore:(The multigrid gradient|cycles. auto).*:UserWarning")
@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_over_ranks_decides_as_on_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layers, settings = Wave(32, h=0.1), GUARDS[name]
    alone = MultigridResidual(layers, **settings)
    whole = losses_and_gradients(alone, 0, 1)

    def run(rank: int) -> tuple[MultigridResidual, list[Tensor]]:
        part = MultigridResidual(copy.deepcopy(layers), over_ranks=True, **settings)
        return part, losses_and_gradients(part, rank, 2)

    parts = on_ranks(monkeypatch, run)
    for part, _ in parts:
        assert part.statistics() == pytest.approx(alone.statistics(), rel=1e-6, abs=1e-9)
        assert part.guard.state_dict() == parts[0][0].guard.state_dict()
    for expected, *found in zip(whole, *[each for _, each in parts], strict=True):
        torch.testing.assert_close(sum(found), expected, rtol=1e-9, atol=1e-12)
