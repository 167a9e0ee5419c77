"""`mlotool run -m`: the folder of a sweep, and its jobs in processes of their own (workers, Optuna, a cluster)."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from mlotool.cli.arguments import Request
from mlotool.cli.report import show_sweep
from mlotool.cli.terminal import nearby, say
from mlotool.config.sweep_plan import SweepPlan, check_first_point
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.process import terminable
from mlotool.sweep.driver import make_launcher, run_jobs, worker_environments
from mlotool.sweep.folder import AUTO, INFEASIBLE, JobOutcome, JobSpec, choose_folder, discard, locked, note_alone
from mlotool.sweep.points import AbstractPoints, GridPoints, GroupRecord, Point, write_plan


def sweep_folder(plan: SweepPlan, resume: str | None) -> tuple[Path, bool]:
    """Return the folder of a sweep and whether it is gone on with, as `choose_folder` does, and say so."""
    folder, is_resumed = choose_folder(plan, resume)
    if is_resumed:
        say(f"going on with the sweep in {nearby(folder)}")
    elif resume == AUTO:
        say("resume=auto: there is no sweep by these words that can be gone on with. A new one begins.")
    return folder, is_resumed


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
    folder, is_resumed = sweep_folder(plan, resume)
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
        when_begins = record.add if shared.is_in_group else None
        run_jobs(points, launcher, environments, folder, shared, announce, when_begins)
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
