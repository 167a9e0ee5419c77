"""Where a run goes on: which folder, which checkpoint, and whether it may."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from mlotool.config import Origin, build_module, differences, load_run_config, note_resume
from mlotool.config.objective import is_wrong_way_round
from mlotool.config.run_config import finished_run, folder_of, has_finished, max_ticks, read_run_config, read_summary
from mlotool.core.errors import CheckpointError, ConfigError
from mlotool.core.files import remove_temporary
from mlotool.core.messages import did_you_mean, escape
from mlotool.core.run_files import check_tree
from mlotool.program import Program
from mlotool.runner.checkpoint import fitting, load_program, newest_first, read_checkpoint
from mlotool.runner.folder import RunFolder, is_stamp, plain, run_lock
from mlotool.runner.logging import HEADER_BYTES
from mlotool.spaces import SharedSpace, Space

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
    run_dir = folder_of(path)
    old = _config_of(run_dir)
    if old is None:
        what = "has no config.yaml" if path.is_dir() else "is in no run folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"resume: found '{path}', which {what}; expected auto, a run folder (outputs/<name>/<date>_<time>) or a "
            f"checkpoint in one.{did_you_mean(str(path), [AUTO])} Give the folder that `mlotool run` printed."
        )
    fault = _fault(old, new)
    if fault is not None:
        raise ConfigError(
            f"resume: found '{path}', a run that {fault}; expected one of the same config, but for runner.max_ticks, "
            "the logger and what is kept and shown. Give the keys the values that they have there, or leave resume out "
            "for a new run."
        )
    if run_dir != path:
        _check_ticks(read_checkpoint(path)["tick"], new, path)
    is_finished = has_finished(read_summary(run_dir), old, max_ticks(new))
    return EarlierRun(RunFolder(run_dir), path if run_dir != path else None, is_finished)


def _find_auto(new: Mapping[str, Any], output_dir: Path | None) -> EarlierRun | None:
    others: list[str] = []
    for run_dir in _candidates(new, output_dir):
        try:
            old = _config_of(run_dir)
        except ConfigError as error:
            others.append(f"{run_dir} is left out ({error})")
            continue
        if old is None:
            if run_dir == output_dir:
                _free_if_never_begun(run_dir)
            continue
        fault = _fault(old, new)
        if fault is not None:
            others.append(f"{run_dir} {fault}")
            continue
        is_finished = has_finished(read_summary(run_dir), old, max_ticks(new))
        # A job of a sweep has one folder alone.
        if is_finished and run_dir != output_dir:
            others.append(f"{run_dir} has finished")
            continue
        with run_lock(run_dir) as is_free:
            if is_free or run_dir == output_dir:
                return EarlierRun(RunFolder(run_dir), None, is_finished)
        others.append(f"{run_dir} is being written by another process")
    newest = f"; the newest one, {others[0]}" if others else ""
    say(f"resume=auto: no unfinished run with this config{newest}. A new run begins.")
    return None


def _fault(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why a run with the config `old` does not go on with `new`; None where it does."""
    if is_wrong_way_round(old):
        return (
            f"has objective_mode={old['objective_mode']} with objective={old['objective']}, as older versions allowed, "
            "so that its best.ckpt is that of the worst evaluation"
        )
    different = differences(old, new)
    if not different:
        return None
    rest = len(different) - NUM_SHOWN
    more = f"; and {rest} more" if rest > 0 else ""
    return f"has another config in {len(different)} key(s): {'; '.join(different[:NUM_SHOWN])}{more}"


def _config_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the config of a run folder; None where it has none, or an empty one: it was killed before it had begun."""
    document = read_run_config(run_dir) if run_dir.is_dir() else None
    if document is None or not document.data:
        return None
    check_tree(run_dir)
    return document.data


def _check_ticks(tick: int, config: Mapping[str, Any], path: Path) -> None:
    """Refuse a run that is to end before the tick at which it stands."""
    if tick > max_ticks(config):
        raise ConfigError(
            f"runner.max_ticks: found {max_ticks(config)}, while {path} is at tick {tick}; expected at least that. "
            f"Set runner.max_ticks={tick}, or more."
        )


def _candidates(new: Mapping[str, Any], output_dir: Path | None) -> Iterator[Path]:
    if output_dir is not None:
        yield output_dir
        if not is_stamp(output_dir.name):
            return
    root = Path("outputs") / str(new["name"]) if output_dir is None else output_dir.parent
    # Not a link, which may lead to a run of another place.
    folders = [each for each in root.glob("*") if each != output_dir and each.is_dir() and not each.is_symlink()]
    yield from sorted(folders, key=_by_time, reverse=True)


def _free_if_never_begun(run_dir: Path) -> None:
    # A run that was killed when it had taken the folder and not yet written a word.
    config = RunFolder(run_dir).config
    if config.is_file():
        with run_lock(run_dir) as is_free:
            if is_free and config.stat().st_size == 0:
                config.unlink()


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
                warnings.warn(f"{faults[0]}; expected a whole one. {path.name} is taken in its place.", stacklevel=2)
            return path
    if faults:
        # To begin again would be to lose what metrics.csv holds.
        raise CheckpointError(
            f"resume: found no checkpoint in {earlier.folder.checkpoints} that can be read: {faults[0]}; expected one "
            "at least. Put a copy of one there; or leave resume out for a new run, in a folder of its own."
        )
    return None


def go_on(earlier: EarlierRun, config: Any, origin: Origin, program: Program | None = None) -> Path | None:
    """Make a folder ready to go on in, once it is locked, and tell of it; return the checkpoint, if there is one.

    Args:
        found: the run.
        config: of the run that goes on.
        origin: where the config came from.
        program: is put into the checkpoint's state before anything of the folder is changed; None where that takes
            all ranks, and comes later.
    """
    folder = earlier.folder
    for each in (folder.path, folder.checkpoints, folder.artifacts):
        remove_temporary(each)
    checkpoint, tick = choose_checkpoint(earlier), 0
    if checkpoint is not None:
        tick = (read_checkpoint(checkpoint) if program is None else load_program(program, checkpoint))["tick"]
    # A run writes a checkpoint before its first tick, and its numbers later.
    elif config.runner.checkpoint and folder.metrics.is_file() and folder.metrics.stat().st_size > HEADER_BYTES:
        raise CheckpointError(
            f"resume: found no checkpoint in {folder.checkpoints}, while metrics.csv has values; expected the "
            "checkpoints that the run wrote. Put one back; or leave resume out for a new run, in a folder of its own."
        )
    _check_ticks(tick, _through_yaml(config), folder.path)
    folder.reopen(config, begins_again=checkpoint is None)
    for change in note_resume(folder.path, config, origin, tick):
        warnings.warn(
            f"resume: found {change}; expected the same, or the numbers may not be the same to the last bit. Go on "
            "where the run began, if that matters.",
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


def _by_time(run_dir: Path) -> list[Any]:
    # Of the names of one second, `_10` is later than `_9`.
    return [int(part) if part.isdigit() else 0 for part in re.split(r"\D+", run_dir.name)]


MAX_SHOWN = 500
State = Mapping[str, Any]


@dataclass(frozen=True)
class _Source:
    """What a run has left.

    Args:
        folder: of the run, as it was named.
        states: the state of each problem's module.
        shared: those modules that are shared spaces, in these states.
    """

    folder: Path
    states: Mapping[str, State]
    shared: Mapping[str, SharedSpace]


def inherit(program: Program, folder: Path) -> None:
    """Put the modules of a program into the states that the problems of the same names have in another run.

    Where the other module is a shared space and this one a model of that space, it gets that model's part. Problems
    that the other run does not have begin as they are. Optimizers begin anew.

    Args:
        program: as it was built.
        folder: of the other run, which has finished, or a checkpoint in it; of a folder the last one is taken.

    Raises:
        ConfigError: there is no such run, its config.yaml says what only the user may say, no problem has a name of its
            problems, or a module does not fit the state.
        CheckpointError: the checkpoint cannot be read.
    """
    run_dir = folder_of(folder)
    finished_run("inherit", run_dir)
    path = folder if run_dir != folder else RunFolder(run_dir).find_checkpoint("last")
    source = _read(run_dir, path.resolve(), path.stat().st_mtime_ns)
    names = [name for name in program.problems if name in source.states]
    if not names:
        raise ConfigError(
            f"inherit: found '{folder}', whose problems are {', '.join(source.states)}; expected at least one of "
            f"{', '.join(program.problems)}. Give the folder of a run of the same recipe, or leave inherit out."
        )
    for name in names:
        module = program.problems[name].module
        try:
            module.load_state_dict(_state_for(name, module, source))
        except RuntimeError as error:
            raise ConfigError(
                f"inherit: found '{folder}', where the state of the problem '{name}' does not fit its module here "
                f"({' '.join(str(error).split())[:MAX_SHOWN]}); expected the same names and shapes. Give "
                f"problems.{name}.module the settings that it has there, or leave inherit out."
            ) from error


# Once for all trials of a process.
@lru_cache(maxsize=1)
def _read(folder: Path, path: Path, written_at: int) -> _Source:
    config = load_run_config(folder, built=("problems",))
    saved, shared = read_checkpoint(path)["program"], {}
    with fitting(path):
        states = {name: dict(saved[name]["module"]) for name in config.problems}
        for name, problem in config.problems.items():
            if isinstance(problem.module, Mapping) and problem.module.get("shared"):
                module = build_module(config, name)
                module.load_state_dict(states[name])
                if isinstance(module, SharedSpace):
                    shared[name] = module
    return _Source(folder, states, shared)


def _state_for(name: str, module: nn.Module, source: _Source) -> State:
    space = source.shared.get(name)
    if space is not None and isinstance(module, Space) and not isinstance(module, SharedSpace):
        return _of_path(name, module, space, source.folder)
    return source.states[name]


def _of_path(name: str, module: Space, space: SharedSpace, folder: Path) -> State:
    known = {decision.name: decision.candidates for decision in space.table}
    path = {decision.name: decision.value for decision in module.decisions.values()}
    strange = [decision for decision, value in path.items() if value not in known.get(decision, ())]
    if strange:
        first = strange[0]
        raise ConfigError(
            f"inherit: found the decision {first}={path[first]} of the problem '{name}', which the shared space in "
            f"'{folder}' does not have; expected decisions and candidates of that space. Give problems.{name}.module "
            "the mutators that it has there, or leave inherit out."
        )
    return space.state_of(path)
