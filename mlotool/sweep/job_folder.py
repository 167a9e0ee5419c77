"""The folder of one job: what it is to run, and what became of it."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "job.json"
LOG = "log.txt"
ENDED = ("finished", "pruned", "failed")


@dataclass(frozen=True)
class JobSpec:
    """What a job's process is told, in job.json.

    Args:
        command: the sweep's command line, for provenance.json.
        words: the job's overrides, for Hydra.
        recipe_file: of a recipe that was given by its path.
        trusted: packages of the user's that recipes may use.
        study: what `Watcher` takes; None where no study watches the job.
    """

    command: str
    words: tuple[str, ...]
    recipe_file: str | None
    trusted: tuple[str, ...]
    study: dict[str, Any] | None = None


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Args:
        status: finished, pruned, failed or interrupted; unfinished where its process died.
        value: of the objective; None where there is none.
        error: the error's text; empty where there is none.
    """

    status: str
    value: float | None
    error: str


def begin_job(folder: Path, spec: JobSpec) -> None:
    """Make a job's folder, and write down what it is to run; what a dead attempt left is removed, but for a run."""
    if has_run(folder):
        # It is the end of the attempt before.
        (folder / "summary.json").unlink(missing_ok=True)
    elif folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(asdict(spec), indent=2) + "\n", encoding="utf-8")


def has_run(folder: Path) -> bool:
    """Say whether a job's folder holds a run to go on with."""
    return any((folder / "checkpoints").glob("*.ckpt"))


def read_job(folder: Path) -> JobSpec:
    """Return what a job is to run."""
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    return JobSpec(**{**content, "words": tuple(content["words"]), "trusted": tuple(content["trusted"])})


def read_outcome(folder: Path) -> JobOutcome:
    """Return how a job ended, from its summary.json."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return JobOutcome("unfinished", None, "")
    value = (summary.get("objective") or {}).get("value")
    return JobOutcome(summary["status"], value, summary.get("error") or "")


def note_failure(folder: Path, words: tuple[str, ...], error: str) -> None:
    """Leave what a table of the sweep reads, for a job that was refused or died; what the run wrote stays."""
    summary, listing = folder / "summary.json", folder / "overrides.txt"
    if not summary.exists():
        content: dict[str, Any] = {"status": "failed", "objective": None, "metrics": {}, "best": None, "error": error}
        summary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if not listing.exists():
        listing.write_text("".join(f"{line}\n" for line in words), encoding="utf-8")
