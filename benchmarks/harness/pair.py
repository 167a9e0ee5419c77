"""Two processes that stay, joined by gloo, and do what they are told at the same time."""

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch

from benchmarks.harness.rounds import Cycle
from mlotool.distributed.collectives import Ranks
from mlotool.runner.process_group import joined
from mlotool.runner.world import World

NUM_RANKS = 2

Task = Callable[..., Any]


class Pair:
    """Two ranks of one thread each, apart from this process.

    Example:
        with Pair() as pair:
            pair(function, argument)  # a list: what `function(ranks, argument)` returned on each
    """

    def __enter__(self) -> "Pair":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        context = multiprocessing.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, port), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()

    def rival(self, build: Task, *arguments: Any, num_cycles: int, rank_seconds: list[float]) -> Callable[[], Cycle]:
        """Return what `interleave` takes for a rival that runs on both ranks.

        Args:
            build: at the top of a module; `build(ranks, *arguments)` returns a rank's cycle.
            arguments: of `build`.
            num_cycles: what the rival's cycle consists of; the ranks are told once for all of them.
            rank_seconds: to which each cycle of the rival adds the CPU seconds of the busier rank.
        """

        def start() -> Cycle:
            self(_start, build, arguments)
            return lambda: rank_seconds.append(max(self(_go_on, num_cycles)))

        return start

    def __call__(self, function: Task, *arguments: Any) -> list[Any]:
        """Return what `function(ranks, *arguments)` returns on each rank, by rank."""
        for end in self._ends:
            end.send((function, arguments))
        found: dict[Connection, Any] = {}
        while len(found) < NUM_RANKS:
            # Whoever answers first: where one has failed, the other may wait for it without end.
            for end in wait([end for end in self._ends if end not in found]):
                is_good, found[end] = end.recv()
                if not is_good:
                    raise RuntimeError(f"A rank failed:\n{found[end]}")
        return [found[end] for end in self._ends]


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


def _serve(end: Connection, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    world = World(rank, NUM_RANKS, rank, NUM_RANKS, "127.0.0.1", port)
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
        # The parent raises it; it ends both.
        return False, traceback.format_exc()
