"""Several jobs of a sweep in one process: each is composed and checked as it is alone, then all run together."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool import config as configuration
from mlotool.cli.hydra_app import call_hydra, open_sources
from mlotool.cli.job import recipe_path
from mlotool.cli.job_words import own_words, request_of
from mlotool.config.booleans import check_overrides
from mlotool.core.errors import WriteError
from mlotool.core.escape import escape
from mlotool.core.run_files import read_json
from mlotool.sweep.job_folder import SUMMARY, JobSpec, has_run, note_failure, read_job, record_of

if TYPE_CHECKING:
    from mlotool.runner import RunResult
    from mlotool.runner.objective import Watch
    from mlotool.runner.together import RunRequest


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
    group = _Group()
    requests = [(member, request) for member in _members(folders) if (request := group.prepared(member)) is not None]
    from mlotool.runner.together import run_together

    waiting = {place for place, (member, _) in enumerate(requests) if member.ended_at is None}

    def when_ended(place: int, result: "RunResult | BaseException") -> None:
        waiting.discard(place)
        if isinstance(result, BaseException):
            group.fail(requests[place][0], result)

    try:
        run_together([request for _, request in requests], record=record_of(folders), when_ended=when_ended)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # No job's own: of what they share.
        for place in waiting:
            group.fail(requests[place][0], error)
    return group.errors[0] if group.errors else None


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


class _Group:
    """The jobs of this process, as far as they have been prepared.

    Attributes:
        errors: those of jobs that failed.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._warnings: set[str] = set()

    def prepared(self, member: Member) -> "RunRequest | None":
        """Return what is to run, once it has been checked; None where it is refused."""
        from mlotool.runner.together import RunRequest

        try:
            config, origin = _composed(member)
            for warning in configuration.check(config, targets=True):
                if warning not in self._warnings:
                    self._warnings.add(warning)
                    print(f"mlotool: warning: {escape(warning)}", file=sys.stderr)
            watch = _watch(member) if member.ended_at is None else None
        except Exception as error:
            self.fail(member, error)
            return None
        return RunRequest(config, member.folder, origin, watch, ended_at=member.ended_at)

    def fail(self, member: Member, error: BaseException) -> None:
        """Leave an error to the sweep's table."""
        if member.ended_at is not None:
            return
        self.errors.append(error)
        text = str(error) or type(error).__name__
        print(f"mlotool: job {member.folder.name} failed: {escape(text)}", file=sys.stderr)
        try:
            note_failure(member.folder, member.spec.words, text)
        except WriteError as refused:
            print(f"mlotool: error: {escape(str(refused))}", file=sys.stderr)


def _composed(member: Member) -> tuple[Any, configuration.Origin]:
    """Return the config of a job, and where it came from."""
    request = request_of(member.spec)
    open_sources(request, member.spec.trusted)
    found: list[tuple[Any, configuration.Origin]] = []

    def take(config: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from omegaconf import OmegaConf

        hydra = HydraConfig.get()
        # Not as they are read: one with a reference in it would be resolved, or fail here.
        words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        check_overrides(words)
        recipe = recipe_path(hydra.runtime.choices, request.file)
        found.append((config, configuration.Origin(member.spec.command, tuple(words), recipe)))

    is_resumed = member.ended_at is None and has_run(member.folder)
    call_hydra([*member.spec.words, *own_words(member.folder, is_resumed=is_resumed)], take)
    [result] = found
    return result


def _watch(member: Member) -> "Watch | None":
    if member.spec.study is None:
        return None
    from mlotool.sweep.watcher import Watcher

    return Watcher(**member.spec.study)
