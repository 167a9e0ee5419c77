"""`mlotool run -m` with jobs in processes of their own: several workers, Optuna, a cluster, a sweep gone on with."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.arguments import Request
from mlotool.cli.show_sweep import show_sweep
from mlotool.cli.terminal import nearby, say
from mlotool.config.reading import parse_document
from mlotool.config.recipes import is_literal
from mlotool.config.sweep_plan import SweepPlan, check_first_point
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.process import terminable
from mlotool.core.run_files import MAX_CONFIG_BYTES, check_tree, read_text
from mlotool.sweep.driver import Sweep, run_jobs, worker_environments
from mlotool.sweep.folder import AUTO, choose_folder, discard, locked, write_plan
from mlotool.sweep.folder import FILE as PROCESSES_FILE
from mlotool.sweep.job_folder import INFEASIBLE, JobOutcome, JobSpec, note_alone
from mlotool.sweep.launchers import make_launcher
from mlotool.sweep.points import AbstractPoints, GridPoints, GroupRecord, Point


def run_sweep(
    plan: SweepPlan, request: Request, words: Sequence[str], trusted: Sequence[str], resume: str | None
) -> int:
    """Run a sweep's jobs, and show what became of them; 0 where none failed.

    Args:
        plan: the sweep.
        request: its recipe and overrides.
        words: of the command line, for provenance.json.
        trusted: packages of the user's that recipes may use.
        resume: `auto`, the folder of the sweep to go on with, or None.
    """
    check_first_point(plan)
    workers = worker_environments(plan)
    folder, is_resumed = choose_folder(plan, resume)
    if resume == AUTO and not is_resumed:
        say("resume=auto: there is no sweep by these words that can be gone on with. A new one begins.")
    file = None if request.file is None else str(request.file)
    command, is_grouped = shlex.join(["mlotool", "run", *words]), plan.group_size > 1
    shared = JobSpec(command, plan.fixed, file, tuple(trusted), is_in_group=is_grouped)
    try:
        with locked(folder):
            _run_locked(plan, shared, folder, workers, is_resumed=is_resumed)
    except KeyboardInterrupt:
        _show(folder)
        say(f"go on with it: the same command with resume={nearby(folder)}")
        raise
    _show(folder)
    return exit_code(folder)


def _run_locked(
    plan: SweepPlan, shared: JobSpec, folder: Path, workers: list[dict[str, str]], *, is_resumed: bool
) -> None:
    """Run the jobs of a sweep whose folder this process holds."""
    try:
        record = GroupRecord(folder, is_resumed=is_resumed)
        points = _points(plan, folder, record)
        launcher = make_launcher(plan.settings["launcher"], folder, plan.settings["launcher_options"])
        write_plan(folder, plan, points)
    except ConfigError:
        if not is_resumed:
            discard(folder)
        raise
    size, at_a_time = min(plan.group_size, plan.num_jobs), f"{len(workers)} at a time"
    if size > 1:
        at_a_time = f"up to {size} in a process{f', {at_a_time}' if len(workers) > 1 else ''}"
    done = f"{points.num_ended} of {points.total} jobs done" if is_resumed else f"{points.total} jobs, {at_a_time}"
    say(f"sweep {nearby(folder)}: {done}")
    say(f"its state at any time: mlotool report {nearby(folder)}")
    if plan.settings["fuse"] != 1 and plan.devices_per_job != 1:
        reason = f"runner.devices={plan.devices_per_job}, so that each has processes of its own"
        say(f"sweep.fuse: the jobs run one by one: {reason}")
        note_alone(folder, range(plan.num_jobs), reason)
    environments = [{"WANDB_RUN_GROUP": f"{plan.name}/{folder.name}", **worker} for worker in workers]

    def announce(point: Point, outcome: JobOutcome) -> None:
        # A study may end before all that was asked for, or draw points that jobs have.
        write_plan(folder, plan, points)
        value = "" if outcome.value is None else f" {plan.objective} {outcome.value:.4g}"
        error = f": {outcome.error}" if outcome.error else ""
        say(f"job {point.number} {outcome.status}{value} ({points.num_ended} of {points.total}){error}")

    with terminable():
        sweep = Sweep(folder, shared, announce, record.add if shared.is_in_group else None)
        run_jobs(points, launcher, environments, sweep)
    write_plan(folder, plan, points)


def _points(plan: SweepPlan, folder: Path, record: GroupRecord) -> AbstractPoints:
    if plan.settings["method"] == "grid":
        return GridPoints(plan, folder, record)
    from mlotool.config.drawing import Drawer
    from mlotool.sweep.study import StudyPoints

    drawer = Drawer(plan)
    return StudyPoints(plan, folder, record, drawer.draw if drawer.is_needed else None)


def _show(folder: Path) -> None:
    if any(path.name.isdigit() for path in folder.iterdir()):
        show_sweep(folder)


def exit_code(folder: Path) -> int:
    """Return 0 where all jobs of a sweep finished; a RunError names those that did not, or why there is nothing."""
    from mlotool.report import sweep_rows
    from mlotool.report.search import nothing_fits

    rows = sweep_rows(folder)
    failed = [row for row in rows if row.status not in ("finished", "pruned", INFEASIBLE)]
    if failed:
        names = ", ".join(row.job for row in failed)
        # One that was interrupted, and then refused to go on, has no error of its own.
        first = failed[0].error or failed[0].status
        raise RunError(f"{len(failed)} of {len(rows)} jobs of the sweep failed: {names}; the first one: {first}")
    fault = nothing_fits(rows)
    if fault:
        raise RunError(fault)
    return 0


FILE = "multirun.yaml"


def resumed_sweep(request: Request) -> list[str]:
    """Return the words that make Hydra use the folder of the sweep to go on with; none for a new sweep.

    Args:
        request: its `resume` is auto, for the newest sweep by the same words, or the folder of a sweep.

    Raises:
        ConfigError: the folder is none of a sweep.
    """
    values = [word.partition("=")[2].strip("'\"") for word in request.overrides if word.startswith("resume=")]
    if not values or values[-1] == "null" or any(word.startswith("hydra.sweep.dir=") for word in request.overrides):
        return []
    if values[-1] != AUTO:
        folder = Path(values[-1])
        _check_resumed(folder, request)
        # The jobs look in their own folders.
        return [_sweep_dir(folder), "resume=auto"]
    wanted = _said(request.hydra_words())
    sweeps = Path("outputs").glob(f"*/multirun/*/{FILE}")
    # A link may lead to a sweep of another place.
    literal = (file for file in sweeps if is_literal(str(file)) and not file.parent.is_symlink())
    same = [file.parent for file in literal if _said(_words_of(file)) == wanted]
    if not same:
        say("resume=auto: no sweep by these words. A new one begins.")
        return []
    newest = max(same, key=lambda folder: folder.name)
    check_tree(newest)
    say(f"going on with the sweep in {newest}")
    return [_sweep_dir(newest)]


def _check_resumed(folder: Path, request: Request) -> None:
    if not is_literal(str(folder)):
        raise ConfigError(
            f"resume: found '{folder}'; expected a folder without '$' and backslashes in its path, which Hydra would "
            "resolve. Rename it."
        )
    if (folder / PROCESSES_FILE).is_file():
        raise ConfigError(
            f"resume: found '{folder}', a sweep that ran in processes of its own; expected the settings that it had as "
            "well, such as sweep.workers=2 or sweep=optuna. Add them."
        )
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"resume: found '{folder}' with -m, which has no {FILE}; expected auto, or the folder of a sweep "
            "(outputs/<name>/multirun/<date>_<time>). Leave -m out to go on with one run."
        )
    check_tree(folder)
    before, now = (
        [word.lstrip("+") for word in words if word.lstrip("+").startswith("recipe=")]
        for words in (_words_of(folder / FILE), request.hydra_words())
    )
    if before and before != now:
        raise ConfigError(
            f"resume: found '{folder}', a sweep of {', '.join(before)}, with {', '.join(now)}; expected the same "
            "recipe. Name it, or leave resume out for a new sweep."
        )


def _said(words: list[str]) -> list[str]:
    """Return the words that say which sweep it is, in a fixed order."""
    from mlotool.config.run_config import may_differ

    pairs = [(word.lstrip("+~").partition("=")[0], word) for word in words]
    return sorted(word for key, word in pairs if not may_differ(key) and not key.startswith("hydra."))


def _words_of(file: Path) -> list[str]:
    try:
        text = read_text(file.parent, file.name, MAX_CONFIG_BYTES)
        config = parse_document(file, text or "").data
        return [str(word) for word in config["hydra"]["overrides"]["task"]]
    # Of a sweep that was killed while it wrote, of another version of Hydra, or of a stranger.
    except (ConfigError, KeyError, TypeError):
        return []


def _sweep_dir(folder: Path) -> str:
    return "hydra.sweep.dir='" + str(folder).replace("'", "\\'") + "'"
