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
from torch import Tensor, nn

from mlotool.config import build_module, differences, load_run_config
from mlotool.config.objective import is_wrong_way_round
from mlotool.config.run_config import finished_run, folder_of, has_finished, max_ticks, read_run_config, read_summary
from mlotool.core.arguments import shown
from mlotool.core.errors import CheckpointError, ConfigError
from mlotool.core.files import remove_temporary
from mlotool.core.messages import did_you_mean, escape
from mlotool.core.plain_state import check_mapping, is_like
from mlotool.core.run_files import check_tree
from mlotool.program import Program
from mlotool.runner.checkpoint import fitting, load_program, newest_first, read_checkpoint
from mlotool.runner.folder import RunFolder, is_stamp, plain, run_lock
from mlotool.runner.logging import HEADER_BYTES
from mlotool.spaces import SharedSpace, Space

AUTO = "auto"
NUM_SHOWN = 8
MAX_FAULTS = 5


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
    if old is not None:
        check_tree(run_dir)
    if old is None:
        what = "has no config.yaml" if path.is_dir() else "is in no run folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"resume: found '{path}', which {what}; expected auto, a run folder (outputs/<name>/<date>_<time>) or a "
            f"checkpoint in one.{did_you_mean(str(path), [AUTO])} Give the folder that `mlotool run` printed."
        )
    if is_wrong_way_round(old):
        raise ConfigError(
            f"resume: found '{path}', whose {_wrong_way(old)}; expected a run judged the right way round. Leave resume "
            "out for a new run."
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
        try:
            old = _config_of(run_dir)
            if old is not None:
                check_tree(run_dir)
        except ConfigError as error:
            others.append(f"{run_dir} is left out ({error})")
            continue
        if old is None:
            if run_dir == output_dir:
                _free_if_never_begun(run_dir)
            continue
        if is_wrong_way_round(old):
            others.append(f"{run_dir}, cannot be gone on with: its {_wrong_way(old)}")
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
    # Not a link, which may lead to a run of another place.
    folders = [each for each in root.glob("*") if each != output_dir and each.is_dir() and not each.is_symlink()]
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
    """Return the checkpoint to go on from, the newest that can be read; None where the run has none yet.

    Raises:
        CheckpointError: it has some, and none can be read.
    """
    if found.checkpoint is not None:
        return found.checkpoint
    faults = []
    for path in newest_first(found.folder.checkpoints):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            faults.append(str(error).partition(";")[0])
        else:
            for fault in _first(faults):
                warnings.warn(f"{fault}; expected a whole one. The one before is taken.", stacklevel=2)
            return path
    if faults:
        # To begin again would be to lose what metrics.csv holds.
        raise CheckpointError(
            f"resume: found no checkpoint in {found.folder.checkpoints} that can be read: {'; '.join(_first(faults))}; "
            "expected one at least. Put a copy of one there; or leave resume out for a new run, in a folder of its own."
        )
    return None


def _first(faults: list[str]) -> list[str]:
    more = len(faults) - MAX_FAULTS
    return faults if more <= 0 else [*faults[:MAX_FAULTS], f"{more} more cannot be read"]


def prepare(found: Found, config: Any, program: Program | None = None) -> tuple[Path | None, int]:
    """Make a folder ready to go on in, once it is locked; return the checkpoint and its tick.

    Args:
        found: the run.
        config: of the run that goes on.
        program: is put into the checkpoint's state before anything of the folder is changed; None where that takes
            all ranks, and comes later.
    """
    folder = found.folder
    for each in (folder.path, folder.checkpoints, folder.artifacts):
        remove_temporary(each)
    checkpoint, tick = choose_checkpoint(found), 0
    if checkpoint is None and config.runner.checkpoint:
        _check_never_begun(folder)
    elif checkpoint is not None:
        tick = (read_checkpoint(checkpoint) if program is None else load_program(program, checkpoint))["tick"]
    limit = max_ticks(_through_yaml(config))
    if tick > limit:
        raise ConfigError(
            f"runner.max_ticks: found {limit}, while {folder.path} is at tick {tick}; expected at least that. "
            f"Set runner.max_ticks={tick}, or more."
        )
    folder.reopen(config, begins_again=checkpoint is None)
    return checkpoint, tick


def _check_never_begun(folder: RunFolder) -> None:
    """Refuse a folder whose checkpoints are gone: a run writes one before its first tick, and its numbers later."""
    if folder.metrics.is_file() and folder.metrics.stat().st_size > HEADER_BYTES:
        raise CheckpointError(
            f"resume: found no checkpoint in {folder.checkpoints}, while metrics.csv has values; expected the "
            "checkpoints that the run wrote. Put one back; or leave resume out for a new run, in a folder of its own."
        )


def say(text: str) -> None:
    """Tell the user, where the warnings go."""
    print(f"mlotool: {escape(text)}", file=sys.stderr)


def _config_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the config of a run folder; None where it has none, or an empty one: it was killed before it had begun."""
    document = read_run_config(run_dir) if run_dir.is_dir() else None
    return document.data or None if document is not None else None


def _wrong_way(old: Mapping[str, Any]) -> str:
    return (
        f"config.yaml has objective_mode={old['objective_mode']} with objective={old['objective']}, as older versions "
        "allowed, so that its best.ckpt is that of the worst evaluation"
    )


def _through_yaml(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(plain(config)))
    return values


def _listed(different: list[str]) -> str:
    rest = len(different) - NUM_SHOWN
    return "; ".join(different[:NUM_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def _by_time(run_dir: Path) -> list[Any]:
    # Of the names of one second, `_10` is later than `_9`.
    return [int(part) if part.isdigit() else 0 for part in re.split(r"\D+", run_dir.name)]


MAX_SHOWN = 3
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
    source = _source(folder)
    names = [name for name in program.problems if name in source.states]
    if not names:
        raise ConfigError(
            f"inherit: found '{folder}', whose problems are {', '.join(source.states)}; expected at least one of "
            f"{', '.join(program.problems)}. Give the folder of a run of the same recipe, or leave inherit out."
        )
    states = {name: _state_for(name, program.problems[name].module, source) for name in names}
    for name, state in states.items():
        program.problems[name].module.load_state_dict(state)


def _source(folder: Path) -> _Source:
    run_dir = folder_of(folder)
    finished_run("inherit", run_dir)
    path = folder if run_dir != folder else RunFolder(run_dir).find_checkpoint("last")
    status = path.stat()
    return _read(run_dir, path.resolve(), (status.st_mtime_ns, status.st_size))


# Once for all trials of a process.
@lru_cache(maxsize=1)
def _read(folder: Path, path: Path, stamp: tuple[int, int]) -> _Source:
    config = load_run_config(folder, built=("problems",))
    program = read_checkpoint(path)["program"]
    shared = {}
    with fitting(path):
        check_mapping("program", program, tuple(config.problems))
        for name in config.problems:
            check_mapping(f"program.{name}", program[name], ("module",))
            check_mapping(f"program.{name}.module", program[name]["module"])
        states = {name: program[name]["module"] for name in config.problems}
        for name, problem in config.problems.items():
            if isinstance(problem.module, Mapping) and problem.module.get("shared"):
                module = build_module(config, name)
                module.load_state_dict(states[name])
                if isinstance(module, SharedSpace):
                    shared[name] = module
    return _Source(folder, states, shared)


def _state_for(name: str, module: nn.Module, source: _Source) -> State:
    space = source.shared.get(name)
    is_model = space is not None and isinstance(module, Space) and not isinstance(module, SharedSpace)
    state = _of_path(name, module, space, source.folder) if is_model else source.states[name]  # type: ignore[arg-type]
    fault = _difference(module.state_dict(), state)
    if fault:
        what = "its part of the shared space" if is_model else "the state"
        advice = "" if is_model or not isinstance(module, Space) else " That run has no shared space of this problem."
        raise ConfigError(
            f"inherit: found '{source.folder}', where {what} of the problem '{name}' does not fit its module here: "
            f"{fault}; expected the same names and shapes.{advice} Give problems.{name}.module the settings that it "
            "has there, or leave inherit out."
        )
    return state


def _of_path(name: str, module: Space, space: SharedSpace, folder: Path) -> State:
    known = {each.name: each.candidates for each in space.table}
    path = {each.name: each.value for each in module.decisions.values()}
    strange = [each for each, value in path.items() if value not in known.get(each, ())]
    if strange:
        first = strange[0]
        raise ConfigError(
            f"inherit: found the decision {first}={path[first]} of the problem '{name}', which the shared space in "
            f"'{folder}' does not have; expected decisions and candidates of that space. Give problems.{name}.module "
            "the mutators that it has there, or leave inherit out."
        )
    return space.state_of(path)


def _difference(own: State, found: State) -> str:
    """Return in words how two states differ in names and shapes; empty where they do not."""
    faults = [
        *(f"{key} is missing there" for key in own if key not in found),
        *(f"{key} is not here" for key in found if key not in own),
        *(
            f"{key} is {shown(each)} here and {shown(found[key])} there"
            for key, each in own.items()
            if key in found and isinstance(each, Tensor) and not is_like(found[key], each)
        ),
    ]
    more = [f"and {len(faults) - MAX_SHOWN} more"] if len(faults) > MAX_SHOWN else []
    return "; ".join([*faults[:MAX_SHOWN], *more])
