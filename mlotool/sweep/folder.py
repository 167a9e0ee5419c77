"""The folder of a sweep: made, or found again to go on with."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool.core.errors import ConfigError, RunFileError
from mlotool.core.files import write_text, writing
from mlotool.core.run_files import check_tree, read_json

if TYPE_CHECKING:
    from mlotool.config.sweep_plan import SweepPlan
    from mlotool.sweep.points import AbstractPoints

FILE = "sweep.json"
LOCK = ".lock"
PLAN_FILE = "plan.json"
STUDY_FILE = "study.db"
AUTO = "auto"

_RANDOM = ("n_startup_trials", "num_startup_trials", "population_size")
"""Options of samplers that say how many trials they draw at random at first."""

_NUM_RANDOM = {"tpe": 10, "gp": 10, "cmaes": 1, "nsga2": 50, "evolution": 20, "predictor": 10}
"""The same where no option says it."""


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
                f"hydra.sweep.dir: found {plan.folder}, which holds a sweep already; expected a new folder. Name "
                f"another one, or go on with that sweep: resume={plan.folder}."
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
                f"resume: found {key} = {_short(value)}, while {path} has {_short(before.get(key))}; expected the "
                "command that began that sweep. Repeat it with resume=.., or leave resume out."
            )
    return path, True


def write_plan(folder: Path, plan: "SweepPlan", points: "AbstractPoints | None" = None) -> None:
    """Write plan.json: what the report of a sweep says of jobs that have not begun.

    Args:
        folder: of the sweep.
        plan: the sweep; of a search, the values that a key may take say nothing of how many jobs it has.
        points: its jobs, of which there may be fewer than were asked for; None where there are as many.
    """
    is_grid = plan.settings["method"] == "grid"
    keys = {
        dimension.key.lstrip("+"): {
            "num_values": len(dimension.choices) if is_grid else 0,
            "is_log": dimension.log,
        }
        for dimension in plan.dimensions
    }
    num_jobs = plan.num_jobs if points is None else points.total
    content: dict[str, Any] = {"objective": plan.objective, "mode": plan.mode, "num_jobs": num_jobs, "keys": keys}
    if not is_grid:
        settings, options = plan.settings, plan.settings["sampler_options"] or {}
        num_random = next((options[key] for key in _RANDOM if key in options), _NUM_RANDOM.get(settings["sampler"], 0))
        content["search"] = {
            "sampler": settings["sampler"],
            "num_random": num_random,
            "repeats": settings["repeats"],
            "second_objective": settings["second_objective"],
            "second_mode": settings["second_objective_mode"],
        }
        if points is not None:
            content["search"] |= {"num_same": points.num_same, "ending": points.ending}
    write_text(folder / PLAN_FILE, json.dumps(content, indent=2) + "\n")


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
                f"resume: found {folder}, whose sweep is still running; expected one that has ended. Wait for it, or "
                "end that process."
            ) from None
        yield


def _made(plan: "SweepPlan") -> Path:
    jobs = [path for path in sorted(plan.folder.glob("*")) if path.name.isdigit() and path.is_dir()]
    taken = next((path for path in jobs if any(path.iterdir())), None)
    if taken is not None:
        # It would be taken for the job's own run, or be removed.
        raise ConfigError(
            f"hydra.sweep.dir: found {taken}, which holds files already, where a job of this sweep would run; expected "
            "a new folder. Name another one, or remove it."
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
