"""Which run is gone on with, from which of its checkpoints, and what its folder has to be told of that."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlotool.config import Origin, differences, note_resume
from mlotool.config.composition import plain
from mlotool.config.run_config import has_finished, max_ticks
from mlotool.core.errors import CheckpointError, ConfigError
from mlotool.core.messages import did_you_mean, escape
from mlotool.folders.files import remove_temporary
from mlotool.folders.run_folder import RunFolder, is_stamp
from mlotool.folders.safe_files import check_tree
from mlotool.program import Program
from mlotool.runner.checkpoint import load_program, newest_first, read_checkpoint
from mlotool.runner.records import write_config

# A killed run's data loaders need some seconds to notice, and hold what it held.
PATIENCE_S = 8.0
AUTO = "auto"
NUM_SHOWN = 8


@dataclass(frozen=True)
class EarlierRun:
    """A folder to go on in.

    Args:
        folder: the run's.
        checkpoint: a checkpoint that was named; None takes the newest that can be read.
        is_finished: whether nothing is left to do.
    """

    folder: RunFolder
    checkpoint: Path | None = None
    is_finished: bool = False


def find_run(config: Any, resume: str | Path, output_dir: Path | None) -> EarlierRun | None:
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


def _find_named(new: Mapping[str, Any], path: Path) -> EarlierRun:
    run = RunFolder.of(path)
    old = _config_of(run)
    if old is None:
        what = "has no config.yaml" if path.is_dir() else "is in no run folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"resume: found '{path}', which {what}; expected auto, a run folder (outputs/<name>/<date>_<time>) or a "
            f"checkpoint in one.{did_you_mean(str(path), [AUTO])} Give the folder that `mlotool run` printed."
        )
    fault = _fault(old, new)
    if fault is not None:
        raise ConfigError(
            f"resume: found '{path}', a run that {fault}; expected a run with the same config, except "
            "runner.max_ticks, the logger, checkpoints and displays. Set the keys to the values of that run, or leave "
            "resume out."
        )
    checkpoint = path if run.path != path else None
    if checkpoint is not None:
        _check_ticks(read_checkpoint(checkpoint)["tick"], new, checkpoint)
    return EarlierRun(run, checkpoint, has_finished(run.summary(), old, max_ticks(new)))


def _find_auto(new: Mapping[str, Any], output_dir: Path | None) -> EarlierRun | None:
    newest = ""
    for run in map(RunFolder, _candidates(new, output_dir)):
        is_here = run.path == output_dir
        try:
            old = _config_of(run)
        except ConfigError as error:
            newest = newest or f"; the newest one, {run.path} is left out ({error})"
            continue
        if old is None:
            if is_here:
                run.free_if_never_begun()
            continue
        fault = _fault(old, new)
        if fault is None:
            is_finished = has_finished(run.summary(), old, max_ticks(new))
            with run.lock() as is_free:
                # A job of a sweep has one folder alone.
                if is_here or (is_free and not is_finished):
                    return EarlierRun(run, None, is_finished)
            fault = "has finished" if is_finished else "is being written by another process"
        newest = newest or f"; the newest one, {run.path} {fault}"
    say(f"resume=auto: no unfinished run with this config{newest}. A new run begins.")
    return None


def _fault(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why a run with the config `old` does not go on with `new`; None where it does."""
    different = differences(old, new)
    more = f"; and {len(different) - NUM_SHOWN} more" if len(different) > NUM_SHOWN else ""
    shown = f"{'; '.join(different[:NUM_SHOWN])}{more}"
    return f"has another config in {len(different)} key(s): {shown}" if different else None


def _config_of(run: RunFolder) -> dict[str, Any] | None:
    """Return the config of a run folder; None where it has none, or an empty one: it was killed before it had begun."""
    document = run.config() if run.path.is_dir() else None
    if document is None or not document.data:
        return None
    check_tree(run.path)
    return document.data


def _check_ticks(tick: int, config: Mapping[str, Any], path: Path) -> None:
    """Refuse a run that is to end before the tick at which it stands."""
    if tick > max_ticks(config):
        raise ConfigError(
            f"runner.max_ticks: found {max_ticks(config)}, while {path} is at tick {tick}; expected at least that."
        )


def _candidates(new: Mapping[str, Any], output_dir: Path | None) -> Iterator[Path]:
    if output_dir is not None:
        yield output_dir
        if not is_stamp(output_dir.name):
            return
    root = Path("outputs") / str(new["name"]) if output_dir is None else output_dir.parent
    # Not a link, which may lead to a run of another place.
    folders = [path for path in root.glob("*") if path != output_dir and path.is_dir() and not path.is_symlink()]
    # Of the names of one second, `_10` is later than `_9`.
    yield from sorted(folders, key=lambda path: [*map(int, re.findall(r"\d+", path.name))], reverse=True)


def choose_checkpoint(earlier: EarlierRun) -> Path | None:
    """Return the checkpoint to go on from, the newest that can be read; None where the run has none yet.

    Raises:
        CheckpointError: it has some, and none can be read.
    """
    if earlier.checkpoint is not None:
        return earlier.checkpoint
    faults = []
    for path in newest_first(earlier.folder.checkpoints):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            faults.append(str(error).partition(";")[0])
        else:
            if faults:
                warnings.warn(f"{faults[0]}; expected a complete one. {path.name} is used instead.", stacklevel=2)
            return path
    if faults:
        # To begin again would be to lose what metrics.csv holds.
        raise CheckpointError(
            f"resume: found no checkpoint in {earlier.folder.path} that can be read: {faults[0]}; expected one."
        )
    return None


def go_on(earlier: EarlierRun, config: Any, origin: Origin, program: Program | None = None) -> Path | None:
    """Make a folder ready to go on in, once it is locked, and tell of it; return the checkpoint, if there is one.

    Args:
        earlier: the run.
        config: of the run that goes on.
        origin: where the config came from.
        program: is put into the checkpoint's state before anything of the folder is changed; None where that takes
            all ranks, and comes later.
    """
    folder = earlier.folder
    for place in (folder.path, folder.checkpoints, folder.artifacts):
        remove_temporary(place)
    checkpoint, tick = choose_checkpoint(earlier), 0
    if checkpoint is not None:
        tick = (read_checkpoint(checkpoint) if program is None else load_program(program, checkpoint))["tick"]
    # A run writes a checkpoint before its first tick, and its numbers later.
    elif config.runner.checkpoint and folder.has_values:
        raise CheckpointError(
            f"resume: found no checkpoint in {folder.checkpoints}, while metrics.csv has values; expected the "
            "checkpoints that the run wrote. Put one back; or leave resume out for a new run, in a folder of its own."
        )
    _check_ticks(tick, _through_yaml(config), folder.path)
    folder.forget_end(with_metrics=checkpoint is None)
    write_config(folder, config)
    for change in note_resume(folder, config, origin, tick):
        warnings.warn(
            f"resume: found {change}; expected the same. Results may differ in their last bits.",
            stacklevel=3,
        )
    if checkpoint is None:
        say(f"{folder.path} has no checkpoint yet: it begins again.")
    else:
        say(f"going on in {folder.path} after tick {tick} ({checkpoint.name})")
    return checkpoint


def say(text: str) -> None:
    """Tell the user, where the warnings go."""
    print(f"mlotool: {escape(text)}", file=sys.stderr)


def _through_yaml(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(plain(config)))
    return values
