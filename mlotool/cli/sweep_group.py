"""Several jobs of a sweep in one process: each is composed and checked as it is alone, then all run together."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool import config as configuration
from mlotool.cli.arguments import Request, read_request
from mlotool.cli.hydra_app import call_hydra, open_sources
from mlotool.cli.job import logs_to_wandb, recipe_path
from mlotool.cli.terminal import say, warn
from mlotool.config.composition import finish, is_apart, key_of, with_values
from mlotool.config.provenance import repositories_asked_once
from mlotool.core.errors import WriteError
from mlotool.core.process import import_large, import_torch
from mlotool.core.run_files import read_json
from mlotool.sweep.job_folder import SUMMARY, JobSpec, has_run, note_failure, read_job, record_of

if TYPE_CHECKING:
    from mlotool.runner import RunResult
    from mlotool.runner.plan import Watch
    from mlotool.runner.together import RunRequest


# Begins a reference to a job's own settings of Hydra, which are known while Hydra calls us, and not afterwards.
_OF_HYDRA = "${hydra:"


@dataclass(frozen=True)
class Member:
    """A job among those of the process.

    Args:
        folder: the job's.
        spec: what it is to run.
        ended_at: the tick at which an earlier process has ended it; None where it is to run.
    """

    folder: Path
    spec: JobSpec
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
    requests: list[tuple[Member, RunRequest]] = []

    def fail(member: Member, error: BaseException) -> None:
        """Leave an error to the sweep's table."""
        if member.ended_at is not None:
            return
        errors.append(error)
        text = str(error) or type(error).__name__
        say(f"job {member.folder.name} failed: {text}")
        try:
            note_failure(member.folder, member.spec.words, text)
        except WriteError as refused:
            say(f"error: {refused}")

    for member in _members(folders):
        try:
            requests.append((member, _request(member, configs, warned)))
        except Exception as error:
            fail(member, error)
    from mlotool.runner.together import run_together

    waiting = {place for place, (member, _) in enumerate(requests) if member.ended_at is None}

    def when_ended(place: int, result: "RunResult | BaseException") -> None:
        waiting.discard(place)
        if isinstance(result, BaseException):
            fail(requests[place][0], result)

    try:
        with repositories_asked_once():
            run_together([request for _, request in requests], record=record_of(folders), when_ended=when_ended)
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
        summary = read_json(folder, SUMMARY)
        if summary is None:
            members.append(Member(folder, read_job(folder), None))
        elif (folder / "config.yaml").is_file():
            tick = summary.get("num_ticks")
            # Where its process died, the run could not say how far it was.
            members.append(Member(folder, read_job(folder), tick if type(tick) is int and tick >= 0 else 0))
    return members


def _request(member: Member, configs: "_Configs", warned: set[str]) -> "RunRequest":
    """Return what is to run, once it has been checked; a warning of several jobs is printed once."""
    is_resumed = member.ended_at is None and has_run(member.folder)
    config, origin = configs.compose(member.spec, member.folder, is_resumed=is_resumed)
    import_torch(with_wandb=logs_to_wandb(config))
    import_large("mlotool.runner")
    from mlotool.runner.process_settings import count_devices
    from mlotool.runner.together import RunRequest

    found = configuration.check(config, targets=True)
    warn(*(warning for warning in found if warning not in warned))
    warned.update(found)
    count_devices(config.runner)
    watch = None if member.ended_at is not None else watch_of(member.spec)
    return RunRequest(config, member.folder, origin, watch, ended_at=member.ended_at)


def watch_of(spec: JobSpec) -> "Watch | None":
    """Return what a study asks at each evaluation of a job; None without a study."""
    if spec.study is None:
        return None
    from mlotool.sweep.watcher import Watcher

    return Watcher(**spec.study)


Composed = tuple[Any, configuration.Origin]


class _Configs:
    """Composes the configs of jobs as Hydra composes that of a job alone; what differs by plain values, only once."""

    def __init__(self) -> None:
        self._first: tuple[Sequence[str], Composed] | None = None

    def compose(self, spec: JobSpec, folder: Path, *, is_resumed: bool) -> Composed:
        """Return the config of a job, and where it came from.

        Args:
            spec: what the job is to run.
            folder: the job's.
            is_resumed: whether it goes on with the run in its folder.

        Raises:
            ConfigError: it cannot be composed.
        """
        words = [*spec.words, *own_words(folder, is_resumed=is_resumed)]
        if any(_OF_HYDRA in word for word in words):
            return _composed(spec, words)
        composed = self._varied(spec)
        if composed is None:
            composed = _composed(spec, [*spec.words, words[-1]])
            self._first = spec.words, composed
        config, origin = composed
        if is_resumed:
            config = copy.deepcopy(config)
            config.resume = str(folder.absolute())
        return config, replace(origin, overrides=_lines(words))

    def _varied(self, spec: JobSpec) -> Composed | None:
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


def _lines(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if not word.lstrip("+~").startswith(("hydra.", "hydra/")))


def _composed(spec: JobSpec, words: Sequence[str]) -> Composed:
    request = request_of(spec)
    open_sources(request, spec.trusted)
    results: list[Composed] = []

    def take(config: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        hydra = HydraConfig.get()
        finish(config, hydra.runtime.choices, words)
        if any(_OF_HYDRA in word for word in words):
            OmegaConf.resolve(config)
        recipe = recipe_path(hydra.runtime.choices, request.file)
        results.append((config, configuration.Origin(spec.command, _lines(words), recipe)))

    call_hydra(words, take)
    [result] = results
    return result


def request_of(spec: JobSpec) -> Request:
    """Return what a job asks for."""
    request = read_request(spec.words)
    return request if spec.recipe_file is None else Request(request.recipe, Path(spec.recipe_file), request.overrides)


def own_words(folder: Path, *, is_resumed: bool) -> list[str]:
    """Return a job's overrides beside those of the command line: where it runs, and what it goes on with."""
    quoted = str(folder.absolute()).replace("\\", "\\\\").replace("'", "\\'")
    return [*([f"resume='{quoted}'"] if is_resumed else []), f"hydra.run.dir='{quoted}'"]
