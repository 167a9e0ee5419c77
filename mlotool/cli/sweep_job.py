"""The process of one job of a sweep, or of several: `python -m mlotool.cli.sweep_job FOLDER ...`.

Several jobs in one process are each composed and checked as they are alone; then all run together.
"""

import copy
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from mlotool import config as configuration
from mlotool.cli.arguments import Request, call_hydra, open_sources, read_request
from mlotool.cli.job import Job, logs_to_wandb, recipe_path
from mlotool.cli.main import EXIT_FAILURE, EXIT_INTERRUPTED, open_streams, plain_warnings
from mlotool.cli.terminal import say, warn
from mlotool.config.composition import finish, is_apart, key_of, with_values
from mlotool.config.provenance import repositories
from mlotool.core.errors import WriteError
from mlotool.core.process import import_large, import_torch, leave
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.sweep import driver
from mlotool.sweep import folder as job_folder
from mlotool.sweep.study import Watcher

# Begins a reference to a job's own settings of Hydra, which are known while Hydra calls us, and not afterwards.
_OF_HYDRA = "${hydra:"
Composed = tuple[Any, configuration.Origin]


def main(folders: Sequence[Path]) -> int:
    """Run the jobs that folders describe; what became of each stands in its summary.json."""
    _end_with_parent()
    is_in_group = len(folders) > 1 or job_folder.read_job(folders[0]).is_in_group
    try:
        with plain_warnings(debug=False):
            error = run_group(folders) if is_in_group else _run_alone(folders[0])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0 if error is None else int(getattr(error, "exit_code", EXIT_FAILURE))


def _end_with_parent() -> None:
    """End at once when the sweep's process has died, and like after Ctrl-C when it asks for that."""

    def watch() -> None:
        while True:
            # Not sys.stdin: a buffer would hold a lock that the exit wants.
            word = os.read(0, 1)
            if word == driver.STOP:
                os.kill(os.getpid(), signal.SIGINT)
            elif word == b"":
                os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, daemon=True).start()


def _fail(folder: Path, spec: job_folder.JobSpec, error: BaseException) -> None:
    """Leave an error to the sweep's table."""
    text = str(error) or type(error).__name__
    say(f"job {folder.name} failed: {text}")
    try:
        job_folder.note_failure(folder, spec.words, text)
    except WriteError as refused:
        say(f"error: {refused}")


def _run_alone(folder: Path) -> BaseException | None:
    spec = job_folder.read_job(folder)
    try:
        request = _request(spec)
        open_sources(request, spec.trusted)
        words = [*spec.words, *_own_words(folder, is_resumed=job_folder.has_run(folder))]
        job = Job(spec.command, words, request.file, spec.trusted, watch=_watch(spec))
        call_hydra(words, job)
        error: BaseException | None = job.errors[0] if job.errors else None
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = raised
    if error is not None:
        _fail(folder, spec, error)
    return error


class Member(NamedTuple):
    """A job of the process: its folder, what it is to run, and the tick of an earlier end, if it has one."""

    folder: Path
    spec: job_folder.JobSpec
    ended_at: int | None


def run_group(folders: Sequence[Path]) -> BaseException | None:
    """Run the jobs that folders describe; what became of each stands in its summary.json.

    Args:
        folders: the jobs', in their order; one with a summary.json has been ended by an earlier process.

    Returns:
        the first error of a job.

    Raises:
        KeyboardInterrupt: after Ctrl-C or SIGTERM.
    """
    errors: list[BaseException] = []
    warned: set[str] = set()
    configs = _Configs()
    requests: list[tuple[Member, Any]] = []

    def fail(member: Member, error: BaseException) -> None:
        if member.ended_at is None:
            errors.append(error)
            _fail(member.folder, member.spec, error)

    for member in _members(folders):
        try:
            requests.append((member, _run_request(member, configs, warned)))
        except Exception as error:
            fail(member, error)
    from mlotool.runner.together import run_together

    waiting = {place for place, (member, _) in enumerate(requests) if member.ended_at is None}

    def when_ended(place: int, result: object) -> None:
        waiting.discard(place)
        if isinstance(result, BaseException):
            fail(requests[place][0], result)

    try:
        record = job_folder.record_of(folders)
        sweep = SweepFolder(folders[0].parent)
        population = sweep if sweep.has(sweep.POPULATION) else None
        configs_of = [request for _, request in requests]
        run_together(configs_of, record=record, when_ended=when_ended, population=population)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # No job's own: of what they share.
        for place in waiting:
            fail(requests[place][0], error)
    return errors[0] if errors else None


def _members(folders: Sequence[Path]) -> list[Member]:
    """Return the jobs, without those that ended before their first tick: these never were among the others."""
    members = []
    for folder in folders:
        run = RunFolder(folder)
        if not run.has(run.SUMMARY):
            members.append(Member(folder, job_folder.read_job(folder), None))
        elif run.has(run.CONFIG):
            tick = run.summary().get("num_ticks")
            # Where its process died, the run could not say how far it was.
            members.append(Member(folder, job_folder.read_job(folder), tick if type(tick) is int and tick >= 0 else 0))
    return members


def _run_request(member: Member, configs: "_Configs", warned: set[str]) -> Any:
    """Return what is to run, once it has been checked; a warning of several jobs is printed once."""
    is_resumed = member.ended_at is None and job_folder.has_run(member.folder)
    config, origin = configs.compose(member.spec, member.folder, is_resumed=is_resumed)
    import_torch(with_wandb=logs_to_wandb(config))
    import_large("mlotool.runner")
    from mlotool.runner import process_settings, together

    warnings = configuration.check(config, targets=True)
    warn(*(warning for warning in warnings if warning not in warned))
    warned.update(warnings)
    process_settings.count_devices(config.runner)
    watch = None if member.ended_at is not None else _watch(member.spec)
    return together.RunRequest(config, member.folder, origin, watch, ended_at=member.ended_at)


def _watch(spec: job_folder.JobSpec) -> Watcher | None:
    """Return what a study asks at each evaluation of a job; None without a study."""
    return None if spec.study is None else Watcher(**spec.study)


class _Configs:
    """Composes the configs of jobs as Hydra composes that of a job alone; what differs by plain values, only once."""

    def __init__(self) -> None:
        self._first: tuple[Sequence[str], Composed] | None = None

    def compose(self, spec: job_folder.JobSpec, folder: Path, *, is_resumed: bool) -> Composed:
        """Return the config of a job, and where it came from.

        Args:
            spec: what the job is to run.
            folder: the job's.
            is_resumed: whether it goes on with the run in its folder.

        Raises:
            ConfigError: it cannot be composed.
        """
        words = [*spec.words, *_own_words(folder, is_resumed=is_resumed)]
        if any(_OF_HYDRA in word for word in words):
            return _composed(spec, words)
        varied = self._varied(spec)
        if varied is None:
            self._first = spec.words, _composed(spec, [*spec.words, words[-1]])
        config, origin = varied or self._first[1]  # type: ignore[index]
        if is_resumed:
            config = copy.deepcopy(config)
            config.resume = str(folder.absolute())
        return config, replace(origin, overrides=_without_hydra(words))

    def _varied(self, spec: job_folder.JobSpec) -> Composed | None:
        """Return the first config with other values, where the jobs differ in nothing else."""
        if self._first is None:
            return None
        words, (config, origin) = self._first
        if [key_of(word) for word in words] != [key_of(word) for word in spec.words]:
            return None
        different = [place for place, word in enumerate(spec.words) if word != words[place]]
        if not all(is_apart(spec.words, place) for place in different):
            return None
        varied = with_values(config, [spec.words[place] for place in different])
        return None if varied is None else (varied, origin)


def _without_hydra(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.lstrip("+~").startswith(("hydra.", "hydra/")))


def _composed(spec: job_folder.JobSpec, words: Sequence[str]) -> Composed:
    request = _request(spec)
    open_sources(request, spec.trusted)
    results: list[Composed] = []

    def take(config: Any) -> None:
        choices = HydraConfig.get().runtime.choices
        finish(config, choices, words)
        if any(_OF_HYDRA in word for word in words):
            OmegaConf.resolve(config)
        recipe = recipe_path(choices, request.file)
        # Jobs that differ in values alone have one answer of git's.
        results.append((config, configuration.Origin(spec.command, _without_hydra(words), recipe, git=repositories())))

    call_hydra(words, take)
    [result] = results
    return result


def _request(spec: job_folder.JobSpec) -> Request:
    """Return what a job asks for."""
    request = read_request(spec.words)
    return request if spec.recipe_file is None else request._replace(file=Path(spec.recipe_file))


def _own_words(folder: Path, *, is_resumed: bool) -> list[str]:
    """Return a job's overrides beside those of the command line: where it runs, and what it goes on with."""
    quoted = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [*([f"resume='{quoted}'"] if is_resumed else []), f"hydra.run.dir='{quoted}'"]


if __name__ == "__main__":
    open_streams()
    leave(main([Path(folder) for folder in sys.argv[1:]]))
