"""The jobs of `mlotool run`: one, or those of a sweep, in this process or in processes of their own."""

import shlex
from contextlib import nullcontext, suppress
from pathlib import Path

from mlotool.cli.arguments import Request, call_hydra
from mlotool.cli.job import Job, is_first_rank
from mlotool.cli.terminal import nearby, say, warn
from mlotool.config.recipes import is_literal, quoted
from mlotool.config.sweeps.sweep_plan import SweepPlan, check_first_point, read_sweep
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.process import terminable
from mlotool.folders.run_folder import INFEASIBLE
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.sweep import driver, study
from mlotool.sweep import folder as job_folder
from mlotool.sweep.drawing import Drawer
from mlotool.sweep.folder import AUTO, choose_folder
from mlotool.sweep.points import AbstractPoints, GridPoints, GroupRecord, Point, write_plan
from mlotool.sweep.population import PopulationPoints

_OF_SEARCHES = ("num_trials", "recipe_first", "first", "seed")
_OF_OPTUNA = ("second_objective", "sampler", "sampler_options", "pruner", "pruner_options", "storage")


def run_many(request: Request, words: list[str], trusted: list[str], flags: list[str]) -> int:
    """Run the jobs of a sweep, in this process where nothing asks for others; 0 where none failed.

    Args:
        request: its recipe and overrides.
        words: of the command line, for provenance.json.
        trusted: packages of the user's that recipes may use.
        flags: Hydra's.
    """
    # `resume=..` means the sweep, not its jobs.
    resumes = [word for word in request.overrides if word.startswith("resume=")]
    value = resumes[-1].partition("=")[2].strip("'\"") if resumes else "null"
    resume = None if value == "null" else value
    request = request._replace(overrides=tuple(word for word in request.overrides if word not in resumes))
    # Several recipes in one sweep have no common `name`, of which the default folder is made.
    if len(request.recipe_names()) != 1 and not any(word.startswith("hydra.sweep.dir=") for word in request.overrides):
        default = "hydra.sweep.dir=outputs/recipes/multirun/${now:%Y-%m-%d_%H-%M-%S}"
        request = request._replace(overrides=(*request.overrides, default))
    plan = read_sweep(request.hydra_words())
    idle = [
        key
        for key in (*_OF_SEARCHES, *_OF_OPTUNA)
        if any(word.startswith(f"sweep.{key}=") for word in request.overrides)
    ]
    if plan.settings["method"] == "grid" and idle:
        warn(f"sweep.{idle[0]}: has no effect in a grid. Add sweep=optuna, or leave it out.")
    if plan.settings["method"] == "pbt" and (unused := [key for key in idle if key in _OF_OPTUNA]):
        warn(f"sweep.{unused[0]}: has no effect with sweep=pbt. Write sweep=optuna, or leave it out.")
    _warn_of_idle(plan)
    if plan.needs_processes:
        return run_sweep(plan, request, words, trusted, resume)
    # What a recipe sweeps is swept as if it were typed.
    request = request._replace(overrides=(*request.overrides, *plan.listed))
    if not is_first_rank():
        return run_here(request, words, trusted, flags)
    folder, is_resumed = sweep_folder(plan, resume)
    if not is_literal(str(folder.path)):
        raise ConfigError(f"found the folder '{folder.path}'; expected one without '$' and backslashes. Rename it.")
    ours = (f"hydra.sweep.dir={quoted(str(folder.path))}", *(["resume=auto"] if is_resumed else []))
    write_plan(folder.path, plan)
    return run_here(request._replace(overrides=(*request.overrides, *ours)), words, trusted, flags, folder)


def _warn_of_idle(plan: SweepPlan) -> None:
    """Warn of settings of a search that do nothing."""
    settings, split = plan.settings, str(plan.objective).partition("/")[0]
    is_at_end = plan.config is not None and (plan.config.get("evaluate") or {}).get("splits", {}).get(split) == "end"
    if settings["method"] == "optuna" and settings["pruner"] != "none" and is_at_end:
        warn(
            f"sweep.pruner: found {settings['pruner']}, which cannot end a trial early, as {plan.objective} is "
            f"evaluated at the end only. Set evaluate.splits.{split} to a number of ticks, or sweep.pruner=none."
        )
    if settings["method"] == "pbt" and settings["fuse"] != 1:
        warn("sweep.fuse: has no effect with sweep=pbt, whose members always share a process. Leave it out.")


def run_here(
    request: Request, words: list[str], trusted: list[str], flags: list[str], folder: SweepFolder | None = None
) -> int:
    """Let Hydra run one job or those of a plain grid in this process, and show what became of a sweep.

    Raises:
        MlotoolError: the error of the first job that had one.
    """
    job = Job(shlex.join(["mlotool", "run", *words]), request.hydra_words(), request.file, tuple(trusted))
    try:
        with folder.locked() if folder is not None else nullcontext():
            call_hydra(request.hydra_words(), job, flags)
    finally:
        if job.sweep_dir is not None and is_first_rank():
            _show(job.sweep_dir)
    if job.errors and job.sweep_dir is not None:
        exit_code(job.sweep_dir)
    if job.errors:
        # A job that was refused its folder leaves nothing of it there.
        raise job.errors[0]
    if "--multirun" in flags and job.sweep_dir is None:
        # A launcher ran the jobs in processes of its own.
        say("`mlotool report <folder of the sweep>` makes the table of its jobs.")
    return 0


def sweep_folder(plan: SweepPlan, resume: str | None) -> tuple[SweepFolder, bool]:
    """Return the folder of a sweep and whether it is gone on with, as `choose_folder` does, and say so."""
    folder, is_resumed = choose_folder(plan, resume)
    if is_resumed:
        say(f"going on with the sweep in {nearby(folder.path)}")
    elif resume == AUTO:
        say("resume=auto: found no sweep of this command that this version can continue. A new one begins.")
    return folder, is_resumed


def run_sweep(plan: SweepPlan, request: Request, words: list[str], trusted: list[str], resume: str | None) -> int:
    """Run a sweep's jobs, and show what became of them; 0 where none failed.

    Args:
        plan: the sweep.
        request: its recipe and overrides.
        words: of the command line, for provenance.json.
        trusted: packages of the user's that recipes may use.
        resume: `auto`, the folder of the sweep to go on with, or None.
    """
    check_first_point(plan)
    workers = driver.worker_environments(plan)
    folder, is_resumed = sweep_folder(plan, resume)
    file = None if request.file is None else str(request.file)
    command, is_grouped = shlex.join(["mlotool", "run", *words]), plan.group_size > 1
    shared = job_folder.JobSpec(command, plan.fixed, file, tuple(trusted), is_in_group=is_grouped)
    try:
        with folder.locked():
            _run_locked(plan, shared, folder, workers, is_resumed=is_resumed)
    except KeyboardInterrupt:
        _show(folder.path)
        say(f"go on with it: the same command with resume={nearby(folder.path)}")
        raise
    _show(folder.path)
    return exit_code(folder.path)


def _run_locked(
    plan: SweepPlan, shared: job_folder.JobSpec, folder: SweepFolder, workers: list[dict[str, str]], *, is_resumed: bool
) -> None:
    """Run the jobs of a sweep whose folder this process holds."""
    try:
        record = GroupRecord(folder.path, is_resumed=is_resumed)
        points = _points(plan, folder.path, record)
        launcher = driver.make_launcher(plan.settings["launcher"], folder.path, plan.settings["launcher_options"])
        write_plan(folder.path, plan, points)
    except ConfigError:
        if not is_resumed:
            folder.discard()
        raise
    size, at_a_time = min(plan.group_size, plan.num_jobs), f"{len(workers)} at a time"
    if size > 1:
        at_a_time = f"up to {size} in a process{f', {at_a_time}' if len(workers) > 1 else ''}"
    done = f"{points.num_ended} of {points.total} jobs done" if is_resumed else f"{points.total} jobs, {at_a_time}"
    say(f"sweep {nearby(folder.path)}: {done}")
    say(f"its state at any time: mlotool report {nearby(folder.path)}")
    if plan.settings["fuse"] != 1 and plan.devices_per_job != 1:
        reason = f"runner.devices={plan.devices_per_job}, so that each has processes of its own"
        say(f"sweep.fuse: the jobs run one by one: {reason}")
        folder.note_alone([*range(plan.num_jobs)], reason)
    environments = [{"WANDB_RUN_GROUP": f"{plan.name}/{folder.path.name}", **worker} for worker in workers]

    def announce(point: Point, outcome: job_folder.JobOutcome) -> None:
        # A study may end before all that was asked for, or draw points that jobs have.
        write_plan(folder.path, plan, points)
        value = "" if outcome.value is None else f" {plan.objective} {outcome.value:.4g}"
        error = f": {outcome.error}" if outcome.error else ""
        say(f"job {point.number} {outcome.status}{value} ({points.num_ended} of {points.total}){error}")

    with terminable():
        when_begins = record.add if shared.is_in_group else None
        driver.run_jobs(points, launcher, environments, folder.path, shared, announce, when_begins)
    write_plan(folder.path, plan, points)


def _points(plan: SweepPlan, folder: Path, record: GroupRecord) -> AbstractPoints:
    if plan.settings["method"] == "grid":
        return GridPoints(plan, folder, record)
    if plan.settings["method"] == "pbt":
        return PopulationPoints(plan, folder, is_resumed=record.is_resumed)
    drawer = Drawer(plan)
    return study.StudyPoints(plan, folder, record, drawer.draw if drawer.is_needed else None)


def _show(folder: Path) -> None:
    from mlotool.cli.verbs.report import show_sweep

    with suppress(ConfigError):  # no job had begun
        show_sweep(folder)


def exit_code(folder: Path) -> int:
    """Return 0 where all jobs of a sweep finished; a RunError names those that did not, or why there is nothing."""
    from mlotool.report import search, sweep_rows

    rows = sweep_rows(folder)
    failed = [row for row in rows if row.status not in ("finished", "pruned", INFEASIBLE)]
    if failed:
        names = ", ".join(row.job for row in failed)
        # One that was interrupted, and then refused to go on, has no error of its own.
        first = failed[0].error or failed[0].status
        raise RunError(f"{len(failed)} of {len(rows)} jobs of the sweep failed: {names}; the first one: {first}")
    fault = search.nothing_fits(rows)
    if fault:
        raise RunError(fault)
    return 0
