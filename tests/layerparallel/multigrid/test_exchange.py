"""Layers on several ranks: threads that stand for them, and two real processes that talk by gloo."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.layerparallel import mgrit
from mlotool.layerparallel.multigrid.exchange import AbstractExchange
from tests.layerparallel.multigrid.two_ranks import NUM_LAYERS, compute


class Shared:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=20)
        self.places: list[Any] = [None] * size
        self.queues: list[Queue[Tensor]] = [Queue() for _ in range(size)]


class Threads(AbstractExchange):
    """The exchange of threads."""

    def __init__(self, group: tuple[Shared, int], is_mirrored: bool = False) -> None:
        self.shared, rank = group
        self.num_parts = self.shared.size
        self.part = self.num_parts - 1 - rank if is_mirrored else rank

    def pass_on(self, values: Tensor) -> None:
        if self.part < self.num_parts - 1:
            self.shared.queues[self.part + 1].put(values[-1].clone())
        if self.part > 0:
            values[0] = self.shared.queues[self.part].get(timeout=20)

    def gather(self, own: Tensor) -> Tensor:
        return torch.cat(self._all(own))

    def origin(self, value: Tensor) -> Tensor:
        return self._all(value)[0].clone()

    def norm(self, own: Tensor) -> Tensor:
        return torch.stack(self._all(own)).norm()

    def _all(self, own: Tensor) -> list[Tensor]:
        self.shared.places[self.part] = own.clone()
        self.shared.barrier.wait()
        found = list(self.shared.places)
        self.shared.barrier.wait()
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


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_equal_the_whole(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute(None, 0, 1)
    monkeypatch.setattr(sys.modules["mlotool.layerparallel.multigrid.mgrit"], "Ranks", Threads)
    shared = Shared(num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        runs = [pool.submit(compute, (shared, rank), rank, num_ranks) for rank in range(num_ranks)]
        parts = [run.result(timeout=60) for run in runs]
    assert_parts_equal(parts, whole)


def test_layers_that_cannot_be_divided_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mlotool.layerparallel.multigrid.mgrit"], "Ranks", Threads)
    with pytest.raises(ConfigError, match="num_layers: found 32 with coarsening=4 for 3 ranks"):
        mgrit(lambda u, n, h: u, torch.zeros(1, 1), 32, 0.1, group=(Shared(3), 1))


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.layerparallel.multigrid.two_ranks", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    processes = [subprocess.Popen([*command, str(rank), "2"], env=environment) for rank in range(2)]
    try:
        whole = compute(None, 0, 1)
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    parts = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(2)]
    assert_parts_equal(parts, whole)
