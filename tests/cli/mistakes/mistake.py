"""A mistake, and what has to be said of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Mistake:
    """What a user typed, with the files that lie there.

    Args:
        words: after `mlotool`.
        says: all of these are in what is printed.
        code: the exit code: 2 wrong usage or configuration, 1 a run failed, 0 where a warning says it.
        files: texts by name, beside mypackage/ and mine.yaml.
        prepare: makes what is no text.
        leaves: what may lie there afterwards, beside `outputs` without a run.
    """

    words: tuple[str, ...]
    says: tuple[str, ...]
    code: int = 2
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    leaves: tuple[str, ...] = ()
