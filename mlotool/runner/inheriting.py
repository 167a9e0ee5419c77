"""What a run begins with: the parameters that another run has left."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mlotool.config import build_module, load_run_config
from mlotool.config.run_config import finished_run, folder_of
from mlotool.core.arguments import shown
from mlotool.core.errors import ConfigError
from mlotool.core.form import check_mapping, is_like
from mlotool.program import Program
from mlotool.runner.checkpoint import read_checkpoint
from mlotool.runner.checkpoint_file import fitting
from mlotool.runner.folder import RunFolder
from mlotool.runner.module_size import check_module_sizes
from mlotool.spaces import SharedSpace, Space

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
    check_module_sizes(config, path)
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
