"""What a check of the kit is: one file in checks/, with a `CHECK` and a `run(job)` that fills in its rows."""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

KINDS = ("correctness", "speed", "memory", "training", "multi")


@dataclass(frozen=True)
class Check:
    """What the list of checks says of one.

    Args:
        title: a line of the page.
        kind: one of KINDS.
        order: smaller comes first: by worth, not by kind.
        seconds: it may take, on a GPU or a CPU.
        run: does the work; it returns when it is done, and raises `LaterError` where more is to do in another call.
    """

    title: str
    kind: str
    order: int
    seconds: float
    run: Callable[["Job"], None]


class SkippedError(Exception):
    """The check cannot be made here; the text says what it needs."""


class LaterError(Exception):
    """The time is over; the next call goes on."""


@dataclass
class Job:
    """One check as it runs: where, for how long, and what has been found so far.

    Args:
        device: `cuda`, or `cpu` for a dry run.
        folder: for what is more than figures, such as run folders.
        file: takes the figures.
        deadline: by `time.monotonic`.
        content: of `file`: status, surroundings, and `rows` by name; those of an earlier call are there already.
        images: CIFAR-10 as folders of images, if given.
        betty: a clone of Betty, if given.
    """

    device: torch.device
    folder: Path
    file: Path
    deadline: float
    content: dict[str, Any] = field(default_factory=dict)
    images: Path | None = None
    betty: Path | None = None

    @property
    def is_small(self) -> bool:
        """Whether it is a dry run: of tiny sizes, with figures that mean nothing."""
        return self.device.type == "cpu"

    @property
    def seconds_left(self) -> float:
        """Until it is ended."""
        return self.deadline - time.monotonic()

    @property
    def rows(self) -> dict[str, Any]:
        """What has been found, by name."""
        rows: dict[str, Any] = self.content.setdefault("rows", {})
        return rows

    def row(self, name: str, measure: Callable[[], dict[str, Any]], seconds: float) -> None:
        """Measure a row and write the file, unless an earlier call has it.

        A row that fails says so, and the next one is tried.

        Args:
            name: of the row.
            measure: returns its figures.
            seconds: that it takes; with less time left it waits for the next call.
        """
        if "error" not in self.rows.get(name, {"error": ""}):
            return
        if self.seconds_left < seconds:
            raise LaterError(f"row '{name}' and what follows it")
        try:
            found = measure()
        except (SkippedError, LaterError, TimeoutError):
            raise
        except Exception as error:
            if self.seconds_left <= 0:
                # The end of the time, as whatever it has interrupted tells it.
                raise LaterError(f"row '{name}' and what follows it") from error
            found = {"error": f"{type(error).__name__}: {error}"[:2_000]}
        finally:
            _release(self.device)
        self.rows[name] = found
        self.save()

    def save(self) -> None:
        """Write the file, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self.content, indent=2, default=float) + "\n")
        part.replace(self.file)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
