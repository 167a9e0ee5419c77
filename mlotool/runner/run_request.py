"""What a run is to be."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlotool.config import Origin
from mlotool.runner.objective import Watch


@dataclass(frozen=True)
class RunRequest:
    """One run, alone or among several of a process.

    Args:
        config: a composed config, which has been checked.
        output_dir: the run folder; None makes one.
        origin: where the config came from, for provenance.json; None takes what `compose` knows of it.
        watch: called with tick and objective at each evaluation of the objective; true ends the run as pruned.
        resume: the run to go on with, as for `mlotool.run`.
        when_created: called with the path of the run folder, once it is made.
        ended_at: among several, the tick at which the run ended in an earlier process, whose place it keeps; None where
            it is to run.
    """

    config: Any
    output_dir: Path | None = None
    origin: Origin | None = None
    watch: Watch | None = None
    resume: str | Path | None = None
    when_created: Callable[[str], object] | None = None
    ended_at: int | None = None
