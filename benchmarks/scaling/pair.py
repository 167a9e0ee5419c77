"""Two processes that stay, joined by gloo, and do what they are told at the same time."""

import gc
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch

from mlotool.runner.ranks import Ranks, joined
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

    def __call__(self, function: Task, *arguments: Any) -> list[Any]:
        """Return what `function(ranks, *arguments)` returns on each rank, by rank."""
        for end in self._ends:
            end.send((function, arguments))
        answers = [end.recv() for end in self._ends]
        for is_good, answer in answers:
            if not is_good:
                raise RuntimeError(f"A rank failed:\n{answer}")
        return [answer for _, answer in answers]


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
