"""Processes that stay, joined by gloo, and do what they are told at the same time."""

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any

import torch

from benchmarks.harness.rounds import Cycle
from mlotool.distributed.collectives import Ranks
from mlotool.runner.run_config import World, joined

LIMIT = 120.0
"""Seconds."""

Task = Callable[..., Any]


class RankError(RuntimeError):
    """A rank failed, or the ranks wait for each other."""


class Team:
    """Ranks of one thread each, apart from this process.

    They start with the first call. Where one fails, or none answers in time, all of them end, and the next call starts
    others.

    Args:
        num_ranks: how many.
        limit: seconds that a call may take.

    Example:
        with Team(2) as team:
            team(function, argument)  # a list: what `function(ranks, argument)` returned on each
    """

    def __init__(self, num_ranks: int, limit: float = LIMIT) -> None:
        self.num_ranks = num_ranks
        self.limit = limit
        self._ends: list[Connection] = []
        self._processes: list[SpawnProcess] = []

    def __enter__(self) -> "Team":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(patience=10.0)

    def rival(
        self, build: Task, *arguments: Any, num_cycles: int, rank_seconds: list[float], num_warmup: int = 0
    ) -> Callable[[], Cycle]:
        """Return what `interleave` takes for a rival that runs on all ranks.

        Args:
            build: at the top of a module; `build(ranks, *arguments)` returns a rank's cycle.
            arguments: of `build`.
            num_cycles: what the rival's cycle consists of; the ranks are told once for all of them.
            rank_seconds: to which each cycle of the rival adds the CPU seconds of the busiest rank.
            num_warmup: cycles of a rank before the rival's first one.
        """

        def start() -> Cycle:
            self(_start, build, arguments)
            self(_go_on, num_warmup)
            return lambda: rank_seconds.append(max(self(_go_on, num_cycles)))

        return start

    def __call__(self, function: Task, *arguments: Any) -> list[Any]:
        """Return what `function(ranks, *arguments)` returns on each rank, by rank.

        Raises:
            RankError: it failed on a rank, or took longer than the limit.
        """
        if not self._processes:
            self._begin()
        for end in self._ends:
            end.send((function, arguments))
        try:
            return self._answers()
        except RankError:
            self._stop(patience=0.0)
            raise

    def _answers(self) -> list[Any]:
        found: dict[Connection, Any] = {}
        deadline = time.monotonic() + self.limit
        while len(found) < self.num_ranks:
            waiting = [end for end in self._ends if end not in found]
            # Whoever answers first: where one has failed, the others may wait for it without end.
            ready: list[Any] = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankError(f"no answer of {len(waiting)} of {self.num_ranks} ranks in {self.limit:.0f} s")
            for end in ready:
                try:
                    is_good, found[end] = end.recv()
                except (EOFError, ConnectionError) as error:
                    raise RankError("a rank has ended without an answer") from error
                if not is_good:
                    raise RankError(f"a rank failed:\n{found[end]}")
        return [found[end] for end in self._ends]

    def _begin(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.num_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.num_ranks, port), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def _stop(self, patience: float) -> None:
        if not patience:
            # First: they would complain of a parent that does not listen.
            for process in self._processes:
                process.kill()
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
                process.join()
        self._ends, self._processes = [], []


_kept: list[Callable[[], object]] = []
"""What a rank goes on with."""


def _start(ranks: Ranks, build: Task, arguments: tuple[Any, ...]) -> None:
    _kept.clear()
    _kept.append(build(ranks, *arguments))
    gc.collect()


def _go_on(ranks: Ranks, num_cycles: int) -> float:
    began = time.process_time()
    for _ in range(num_cycles):
        _kept[0]()
    return time.process_time() - began


def _serve(end: Connection, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    world = World(rank, num_ranks, rank, num_ranks, "127.0.0.1", port)
    with joined(world, torch.device("cpu")) as ranks:
        gc.collect()
        gc.freeze()
        while True:
            try:
                function, arguments = end.recv()
            except EOFError:
                return
            end.send(_answer(function, ranks, arguments))


def _answer(function: Task, ranks: Ranks, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(ranks, *arguments)
    except Exception:
        # The parent raises it; it ends all of them.
        return False, traceback.format_exc()
