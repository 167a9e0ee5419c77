"""Where a run goes on: which folder, which checkpoint, and whether it may."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlotool.config import differences
from mlotool.config.length import has_finished, max_ticks, read_summary
from mlotool.core.errors import CheckpointError, ConfigError
from mlotool.core.files import remove_temporary
from mlotool.core.suggest import did_you_mean
from mlotool.runner.checkpoint import newest_first, read_checkpoint
from mlotool.runner.folder import RunFolder, is_stamp, plain
from mlotool.runner.run_lock import run_lock

AUTO = "auto"
NUM_SHOWN = 8


@dataclass(frozen=True)
class Found:
    """A folder to go on in.

    Args:
        folder: the run's.
        checkpoint: a checkpoint that was named; None takes the newest that can be read.
        is_finished: whether nothing is left to do.
    """

    folder: RunFolder
    checkpoint: Path | None = None
    is_finished: bool = False


def find_run(config: Any, resume: str | Path, output_dir: Path | None) -> Found | None:
    """Return the run that `resume` means; None where `auto` finds none, and says so.

    Args:
        config: of the run that is to go on.
        resume: `auto`, a run folder, or a checkpoint in one.
        output_dir: the folder that a new run would have.

    Raises:
        ConfigError: there is no such run, or its config is another one.
    """
    new = _through_yaml(config)
    return _find_auto(new, output_dir) if str(resume) == AUTO else _find_named(new, Path(resume))


def _find_named(new: Mapping[str, Any], path: Path) -> Found:
    is_checkpoint = path.is_file() and path.suffix == ".ckpt" and path.parent.name == "checkpoints"
    run_dir = path.parent.parent if is_checkpoint else path
    old = _config_of(run_dir)
    if old is None:
        what = "has no config.yaml" if path.is_dir() else "is in no run folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"resume: found '{path}', which {what}; expected auto, a run folder (outputs/<name>/<date>_<time>) or a "
            f"checkpoint in one.{did_you_mean(str(path), [AUTO])} Give the folder that `mlotool run` printed."
        )
    different = differences(old, new)
    if different:
        raise ConfigError(
            f"resume: found '{path}', a run with another config in {len(different)} key(s): {_listed(different)}; "
            "expected the same config, but for runner.max_ticks, the logger and what is kept and shown. Give the keys "
            "the values that they have there, or leave resume out for a new run."
        )
    tick = read_checkpoint(path)["tick"] if is_checkpoint else 0
    if tick > max_ticks(new):
        raise ConfigError(
            f"runner.max_ticks: found {max_ticks(new)}, while {path} is at tick {tick}; expected at least that. "
            f"Set runner.max_ticks={tick}, or more."
        )
    is_finished = has_finished(read_summary(run_dir), old, max_ticks(new))
    return Found(RunFolder(run_dir), path if is_checkpoint else None, is_finished)


def _find_auto(new: Mapping[str, Any], output_dir: Path | None) -> Found | None:
    others: list[str] = []
    for run_dir in _candidates(new, output_dir):
        old = _config_of(run_dir)
        if old is None:
            if run_dir == output_dir:
                _free_if_never_begun(run_dir)
            continue
        different = differences(old, new)
        if different:
            others.append(f"{run_dir} has another config ({_listed(different)})")
            continue
        is_finished = has_finished(read_summary(run_dir), old, max_ticks(new))
        # A job of a sweep has one folder alone.
        if is_finished and run_dir != output_dir:
            others.append(f"{run_dir} has finished")
            continue
        with run_lock(run_dir) as is_free:
            if is_free or run_dir == output_dir:
                return Found(RunFolder(run_dir), None, is_finished)
        others.append(f"{run_dir} is being written by another process")
    newest = f"; the newest one, {others[0]}" if others else ""
    say(f"resume=auto: no unfinished run with this config{newest}. A new run begins.")
    return None


def _candidates(new: Mapping[str, Any], output_dir: Path | None) -> Iterator[Path]:
    if output_dir is not None:
        yield output_dir
        if not is_stamp(output_dir.name):
            return
    root = Path("outputs") / str(new["name"]) if output_dir is None else output_dir.parent
    folders = [each for each in root.glob("*") if each != output_dir and each.is_dir()]
    yield from sorted(folders, key=_by_time, reverse=True)


def _free_if_never_begun(run_dir: Path) -> None:
    # A run that was killed when it had taken the folder and not yet written a word.
    config = run_dir / "config.yaml"
    if not config.is_file():
        return
    with run_lock(run_dir) as is_free:
        if is_free and config.stat().st_size == 0:
            config.unlink()


def choose_checkpoint(found: Found) -> Path | None:
    """Return the checkpoint to go on from, the newest that can be read; None where the run has none yet."""
    if found.checkpoint is not None:
        return found.checkpoint
    for path in newest_first(found.folder.checkpoints):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            warnings.warn(
                f"{str(error).partition(';')[0]}; expected a whole one. The one before is taken.", stacklevel=2
            )
        else:
            return path
    return None


def prepare(found: Found, config: Any) -> tuple[Path | None, int]:
    """Make a folder ready to go on in, once it is locked; return the checkpoint and its tick."""
    folder = found.folder
    for each in (folder.path, folder.checkpoints):
        remove_temporary(each)
    checkpoint = choose_checkpoint(found)
    tick = 0 if checkpoint is None else read_checkpoint(checkpoint)["tick"]
    limit = max_ticks(_through_yaml(config))
    if tick > limit:
        raise ConfigError(
            f"runner.max_ticks: found {limit}, while {folder.path} is at tick {tick}; expected at least that. "
            f"Set runner.max_ticks={tick}, or more."
        )
    folder.reopen(config, begins_again=checkpoint is None)
    return checkpoint, tick


def say(text: str) -> None:
    """Tell the user, where the warnings go."""
    print(f"mlotool: {text}", file=sys.stderr)


def _config_of(run_dir: Path) -> dict[str, Any] | None:
    path = run_dir / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except yaml.YAMLError:
        return None
    # It is empty where a run was killed before it had begun.
    return config if isinstance(config, dict) else None


def _through_yaml(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(plain(config)))
    return values


def _listed(different: list[str]) -> str:
    rest = len(different) - NUM_SHOWN
    return "; ".join(different[:NUM_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _by_time(run_dir: Path) -> list[Any]:
    # Of the names of one second, `_10` is later than `_9`.
    return [int(part) if part.isdigit() else 0 for part in re.split(r"\D+", run_dir.name)]
