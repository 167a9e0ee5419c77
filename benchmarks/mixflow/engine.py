"""A process with one version of mlotool, which does what it is told: so two versions can take turns."""

import multiprocessing
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any


class Engine:
    """A process of one thread that has imported mlotool from a folder.

    Args:
        source: a checkout of mlotool; None: the one that this process would import.

    Example:
        with Engine(Path("an/earlier/checkout")) as before:
            before("memory", Setting())  # what `measure.memory(Setting())` returns there
    """

    def __init__(self, source: Path | None = None) -> None:
        self._source = None if source is None else str(source.resolve())

    def __enter__(self) -> "Engine":
        context = multiprocessing.get_context("spawn")
        self._end, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._source), daemon=True)
        self._process.start()
        other.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.close()
        self._process.join(timeout=10)
        if self._process.is_alive():
            self._process.kill()

    def __call__(self, function: str, *arguments: Any) -> Any:
        """Return what a function of `benchmarks.mixflow.measure` returns there."""
        self._end.send((function, arguments))
        is_good, found = self._end.recv()
        if not is_good:
            raise RuntimeError(f"The process with mlotool from {self._source or 'here'} failed:\n{found}")
        return found


def _serve(end: Connection, source: str | None) -> None:
    if source is not None:
        sys.path.insert(0, source)
    import torch

    import mlotool

    if source is not None:
        # Only mlotool comes from there: the benchmarks and the tests' tools are of the newer version.
        sys.path.remove(source)
        assert Path(source) in Path(mlotool.__file__).parents, f"{mlotool.__file__} is not from {source}"
    from benchmarks.mixflow import measure

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(measure, function)(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        end.send(answer)
