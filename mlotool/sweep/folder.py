"""The folders of a sweep and of its jobs: made, or found again; what jobs are to run, and what became of them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.folders.files import writing
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from mlotool.config.sweeps.sweep_plan import SweepPlan

AUTO = "auto"

# Characters of an error that are shown.
MAX_ERROR = 5_000


def choose_folder(plan: "SweepPlan", resume: str | None) -> tuple[SweepFolder, bool]:
    """Return the folder of a sweep, and whether it is gone on with.

    Args:
        plan: the sweep.
        resume: `auto` takes `hydra.sweep.dir` if that is the folder of a sweep, or else the newest folder of the same
            sweep beside it, if there is one; a folder is taken as it is; None makes a new one.

    Raises:
        ConfigError: the folder is none of a sweep, or of another one; a new one holds a sweep or a job's run already.
    """
    planned = SweepFolder(plan.folder)
    if resume is None or (resume == AUTO and not planned.has(planned.IDENTITY)):
        others = planned.beside() if resume == AUTO else []
        if same := [folder for folder in others if folder.identity() == plan.identity()]:
            return same[-1], True
        if planned.has(planned.IDENTITY):
            raise ConfigError(
                f"hydra.sweep.dir: found {plan.folder}, which holds a sweep already. Name another one, or resume it."
            )
        planned.create(plan.name, plan.identity())
        return planned, False
    folder = planned if resume == AUTO else SweepFolder(Path(resume).absolute())
    if not folder.has(folder.IDENTITY):
        raise ConfigError(
            f"resume: found '{folder.path}', which has no {folder.IDENTITY}; expected the folder of a sweep, "
            "outputs/<name>/multirun/<date>_<time>. Correct it. A grid without that file is of an earlier version of "
            "mlotool, with which it can be resumed."
        )
    before = folder.identity()
    for key, value in plan.identity().items():
        if before.get(key) != value:
            raise ConfigError(
                f"resume: found {key} = {_short(value)}, while {folder.path} has {_short(before.get(key))}. "
                "Repeat the command that began that sweep with resume=.."
            )
    return folder, True


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:299]}…"


@dataclass(frozen=True)
class JobSpec:
    """What a job's process is told, in job.json.

    Args:
        command: the sweep's command line, for provenance.json.
        words: the job's overrides, for Hydra.
        recipe_file: of a recipe that was given by its path.
        trusted: packages of the user's that recipes may use.
        study: what `Watcher` takes; None where no study watches the job.
        is_in_group: whether its process may have other jobs; it then leaves its page to `mlotool report`.
    """

    command: str
    words: tuple[str, ...]
    recipe_file: str | None
    trusted: tuple[str, ...]
    study: dict[str, Any] | None = None
    is_in_group: bool = False


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Args:
        status: finished, pruned, failed, infeasible or interrupted; unfinished where its process died, and nobody has
            seen it yet.
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
        (folder / RunFolder.SUMMARY).unlink(missing_ok=True)
    elif folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_job(folder, spec)


def write_job(folder: Path, spec: JobSpec) -> None:
    """Write down what a job is, also one that has ended: what stands there may be a stranger's."""
    RunFolder(folder).write_json(RunFolder.JOB, asdict(spec))


def log_of(folders: Sequence[Path]) -> Path:
    """Return the file that takes what a process with these jobs prints."""
    first = folders[0]
    return first / RunFolder.LOG if len(folders) == 1 else SweepFolder(first.parent).together(first.name, ".log")


def record_of(folders: Sequence[Path]) -> Path:
    """Return the file that says which of several jobs of a process ran as one program."""
    return SweepFolder(folders[0].parent).together(folders[0].name, ".json")


def has_run(folder: Path) -> bool:
    """Say whether a job's folder holds a run to go on with."""
    return any(RunFolder(folder).checkpoints.glob("*.ckpt"))


def read_job(folder: Path) -> JobSpec:
    """Return what a job is to run."""
    content = RunFolder(folder).json(RunFolder.JOB) or {}
    return JobSpec(**{**content, "words": tuple(content["words"]), "trusted": tuple(content["trusted"])})


def read_outcome(folder: Path) -> JobOutcome:
    """Return how a job ended, from its summary.json."""
    summary = _summary(folder)
    status, objective = summary.get("status"), summary.get("objective")
    value = objective.get("value") if isinstance(objective, dict) else None
    error = str(summary.get("error") or "")[:MAX_ERROR]
    return JobOutcome(status if isinstance(status, str) else "unfinished", _number(value), error)


def read_numbers(folder: Path) -> dict[str, float | None]:
    """Return the numbers of a job's summary.json: metrics by their keys, sizes by `<problem>/num_parameters`."""
    summary = _summary(folder)
    metrics, sizes = (summary.get(key) for key in ("metrics", "num_parameters"))
    numbers = {f"{problem}/num_parameters": size for problem, size in sizes.items()} if isinstance(sizes, dict) else {}
    numbers |= metrics if isinstance(metrics, dict) else {}
    return {key: _number(value) for key, value in numbers.items()}


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return RunFolder(folder).summary()
    except RunFileError:
        return {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def note_failure(folder: Path, words: tuple[str, ...], error: str, status: str = "failed") -> None:
    """Leave what a table of the sweep reads, for a job that was refused or died; what the run wrote stays.

    A folder that somebody has removed meanwhile is made anew: the other jobs' table does not depend on it.
    """
    run = RunFolder(folder)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    # The summary is last: with it the job has ended, whenever this process is killed.
    if not run.has(run.OVERRIDES):
        run.write_overrides(words)
    if not run.has(run.SUMMARY):
        run.write_failure(error, status)
