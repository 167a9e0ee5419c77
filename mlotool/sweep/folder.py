"""The folders of a sweep and of its jobs: made, or found again; what jobs are to run, and what became of them."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.files import write_text, writing
from mlotool.core.run_files import check_tree, read_json

if TYPE_CHECKING:
    from mlotool.config.sweep_plan import SweepPlan

FILE = "sweep.json"
LOCK, PLAN_FILE = ".lock", "plan.json"
STUDY_FILE = "study.db"
AUTO = "auto"


def choose_folder(plan: "SweepPlan", resume: str | None) -> tuple[Path, bool]:
    """Return the folder of a sweep, and whether it is gone on with.

    Args:
        plan: the sweep.
        resume: `auto` takes `hydra.sweep.dir` if that is the folder of a sweep, or else the newest folder of the same
            sweep beside it, if there is one; a folder is taken as it is; None makes a new one.

    Raises:
        ConfigError: the folder is none of a sweep, or of another one; a new one holds a sweep or a job's run already.
    """
    is_there = (plan.folder / FILE).is_file()
    if resume is None or (resume == AUTO and not is_there):
        others = _sweeps(plan.folder.parent) if resume == AUTO else []
        if same := [path for path in others if _read(path)["identity"] == plan.identity()]:
            return same[-1], True
        if is_there:
            raise ConfigError(
                f"hydra.sweep.dir: found {plan.folder}, which holds a sweep already. Name another one, or resume it."
            )
        return _made(plan), False
    path = plan.folder if resume == AUTO else Path(resume).absolute()
    if not (path / FILE).is_file():
        raise ConfigError(
            f"resume: found '{path}', which has no {FILE}; expected the folder of a sweep, outputs/<name>/multirun/"
            "<date>_<time>. Correct it; a grid without that file goes on with the earlier version alone that began it."
        )
    before = _read(path)["identity"] or {}
    for key, value in plan.identity().items():
        if before.get(key) != value:
            raise ConfigError(
                f"resume: found {key} = {_short(value)}, while {path} has {_short(before.get(key))}. "
                "Repeat the command that began that sweep with resume=.."
            )
    return path, True


def study_name(folder: Path) -> str:
    """Return what the study of a sweep is called in its database: as its folder was when the sweep began."""
    name = _read(folder).get("study")
    return name if isinstance(name, str) else folder.name


def discard(folder: Path) -> None:
    """Remove what was written for a sweep that cannot start."""
    for name in (FILE, LOCK, STUDY_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)
    # The user may have chosen a folder that holds other files.
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder, so that no second process runs its jobs; a process that dies lets go of it.

    Raises:
        ConfigError: another process holds it.
    """
    # Not on Windows.
    import fcntl

    # What the jobs write stays in the folder, which may be a stranger's that is gone on with.
    check_tree(folder)
    with writing(folder / LOCK):
        lock = (folder / LOCK).open("w")
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"resume: found {folder}, whose sweep is still running. Wait for it, or end that process."
            ) from None
        yield


def _made(plan: "SweepPlan") -> Path:
    jobs = [path for path in sorted(plan.folder.glob("*")) if path.name.isdigit() and path.is_dir()]
    taken = next((path for path in jobs if any(path.iterdir())), None)
    if taken is not None:
        # It would be taken for the job's own run, or be removed.
        raise ConfigError(
            f"hydra.sweep.dir: found {taken}, which holds files already, a job's. Name another one, or remove it."
        )
    content = {"name": plan.name, "identity": plan.identity(), "study": plan.folder.name}
    with writing(plan.folder):
        plan.folder.mkdir(parents=True, exist_ok=True)
        write_text(plan.folder / FILE, json.dumps(content, indent=2) + "\n")
    return plan.folder


def _sweeps(parent: Path) -> list[Path]:
    """Return the sweeps in a folder, the newest last; no link, which may lead to a sweep of another place."""
    folders = (file.parent for file in parent.glob(f"*/{FILE}") if not file.parent.is_symlink())
    return sorted(folders, key=lambda path: path.name)


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        content = read_json(folder, FILE) or {}
    except RunFileError:
        return {"identity": None}
    return content if isinstance(content.get("identity"), dict) else {"identity": None}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 300 else f"{text[:299]}…"


JOB_FILE = "job.json"
SUMMARY = "summary.json"
LOG = "log.txt"
GROUPS = "fusion"
"""The folder, in that of the sweep, of what processes with several jobs leave beside the jobs' own folders."""

MAX_ERROR = 5_000
"""Characters of an error that are shown."""

INFEASIBLE = "infeasible"
"""How a job ends whose decisions make no model: it is not trained."""

ENDED = ("finished", "pruned", "failed", INFEASIBLE)
INTERRUPTED = "interrupted"
"""How a job has ended that goes on when its sweep does."""


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
        (folder / SUMMARY).unlink(missing_ok=True)
    elif folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_job(folder, spec)


def write_job(folder: Path, spec: JobSpec) -> None:
    """Write down what a job is, also one that has ended: what stands there may be a stranger's."""
    write_text(folder / JOB_FILE, json.dumps(asdict(spec), indent=2) + "\n")


def log_of(folders: Sequence[Path]) -> Path:
    """Return the file that takes what a process with these jobs prints."""
    first = folders[0]
    return first / LOG if len(folders) == 1 else first.parent / GROUPS / f"{first.name}.log"


def record_of(folders: Sequence[Path]) -> Path:
    """Return the file that says which of several jobs of a process ran as one program."""
    return folders[0].parent / GROUPS / f"{folders[0].name}.json"


def note_alone(sweep: Path, jobs: Iterable[int], reason: str) -> None:
    """Leave to the sweep's page why jobs do not share processes."""
    numbers = list(jobs)
    stack = {"jobs": numbers, "is_fused": False, "fused_s": None, "alone_s": None, "reason": reason}
    path = sweep / GROUPS / "0.json"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps({"jobs": numbers, "stacks": [stack]}) + "\n")


def has_run(folder: Path) -> bool:
    """Say whether a job's folder holds a run to go on with."""
    return any((folder / "checkpoints").glob("*.ckpt"))


def read_job(folder: Path) -> JobSpec:
    """Return what a job is to run."""
    content = read_json(folder, JOB_FILE) or {}
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
    found = {f"{problem}/num_parameters": size for problem, size in sizes.items()} if isinstance(sizes, dict) else {}
    found |= metrics if isinstance(metrics, dict) else {}
    return {key: _number(value) for key, value in found.items()}


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_json(folder, SUMMARY) or {})
    except RunFileError:
        return {}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def note_failure(folder: Path, words: tuple[str, ...], error: str, status: str = "failed") -> None:
    """Leave what a table of the sweep reads, for a job that was refused or died; what the run wrote stays.

    A folder that somebody has removed meanwhile is made anew: the other jobs' table does not depend on it.
    """
    summary, listing = folder / SUMMARY, folder / "overrides.txt"
    with writing(summary):
        folder.mkdir(exist_ok=True)
    # The summary is last: with it the job has ended, whenever this process is killed.
    if not listing.exists():
        write_text(listing, "".join(f"{line}\n" for line in words))
    if not summary.exists():
        content: dict[str, Any] = {"status": status, "objective": None, "metrics": {}, "best": None, "error": error}
        write_text(summary, json.dumps(content, indent=2) + "\n")
