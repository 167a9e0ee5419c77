"""The state of all random number generators, as plain containers that load with `weights_only=True`."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch

from mlotool.core.arguments import require
from mlotool.core.plain_state import ADVICE
from mlotool.distributed.collectives import Ranks
from mlotool.program import Program


def random_state() -> dict[str, Any]:
    """Return the states of torch's, CUDA's, numpy's and Python's global generators."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        **global_state(),
    }


def global_state() -> dict[str, Any]:
    """Return the states of numpy's and Python's global generators."""
    kind, keys, position, has_gauss, cached_gaussian = numpy.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys, dtype="int64")), position, has_gauss, cached_gaussian],
        "python": [version, torch.tensor(internal), gauss_next],
    }


def random_states(program: Program, ranks: Ranks, snapshots: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the states of all ranks, by rank; for a checkpoint, which rank 0 writes.

    Beside those of the global generators there is the program's own. Recorded steps hold random states as well, the
    buffers of modules follow a rank's own samples until they are averaged, and so may what layer-parallel steps keep;
    all else in a program's state is the same on all ranks.

    Args:
        program: as it is on this rank.
        ranks: those of the run.
        snapshots: the schedule's look-ahead, by problem.
    """
    recorded = {name: problem.trajectory.state_dict()["steps"] for name, problem in program.problems.items()}
    state = {**random_state(), "program": program.random.state_dict()}
    state["steps"] = {name: list(_randoms(steps)) for name, steps in recorded.items()}
    if not ranks.is_first:
        modules = {name: problem.module.state_dict() for name, problem in program.problems.items()}
        state["buffers"] = _buffers(program, modules)
        state["snapshots"] = _buffers(program, {name: kept["module"] for name, kept in (snapshots or {}).items()})
        state["parallel"] = {
            name: problem.parallel.state_dict()
            for name, problem in program.problems.items()
            if problem.parallel is not None and problem.parallel.differs_by_rank
        }
    return ranks.gather(state)


def restore_random_states(states: list[dict[str, Any]], program: Program, ranks: Ranks) -> None:
    """Take this rank's state back; a rank that had none goes on as it was seeded.

    Args:
        states: what `random_states` returned.
        program: as it is on this rank; it gets its own random numbers back.
        ranks: those of the resumed run.
    """
    if ranks.rank < len(states):
        restore_random_state(states[ranks.rank])
        program.random.load_state_dict(states[ranks.rank]["program"])


def with_own_steps(program_state: dict[str, Any], states: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Return a program's state, in which what rank 0 has for itself has given way to what this rank had.

    These are the random states and buffers of recorded steps, the buffers now, and the states of some layer-parallel
    steps.

    Args:
        program_state: as rank 0 has saved it.
        states: what `random_states` returned.
        ranks: those of the resumed run.
    """
    if ranks.is_first or ranks.rank >= len(states):
        return program_state
    of_rank, changed = states[ranks.rank], dict(program_state)
    for name, randoms in of_rank["steps"].items():
        trajectory = changed[name]["trajectory"]
        steps = _with_randoms(trajectory["steps"], iter(randoms))
        module = {**changed[name]["module"], **of_rank["buffers"][name]}
        changed[name] = {**changed[name], "module": module, "trajectory": {**trajectory, "steps": steps}}
    for name, state in of_rank["parallel"].items():
        changed[name] = {**changed[name], "parallel": state}
    return changed


def with_own_snapshots(schedule_state: dict[str, Any], states: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Return a schedule's state with this rank's buffers in the snapshots; arguments as for `with_own_steps`."""
    if ranks.is_first or ranks.rank >= len(states):
        return schedule_state
    buffers = states[ranks.rank]["snapshots"]
    snapshots = {
        name: {**kept, "module": {**kept["module"], **buffers[name]}}
        for name, kept in schedule_state["snapshots"].items()
    }
    return {**schedule_state, "snapshots": snapshots}


def _randoms(steps: list[dict[str, Any]]) -> Iterator[Any]:
    """Yield the random states and buffers of recorded steps, and of those that led to what they have read."""
    for step in steps:
        yield {key: step[key] for key in ("random", "buffers")}
        for reading in step["readings"].values():
            yield from _randoms(reading["steps"])


def _with_randoms(steps: list[dict[str, Any]], randoms: Iterator[Any]) -> list[dict[str, Any]]:
    """Return recorded steps with what `_randoms` has yielded elsewhere, in the same order."""
    changed = []
    for step in steps:
        randoms_of_step = next(randoms)
        readings = {
            name: {**reading, "steps": _with_randoms(reading["steps"], randoms)}
            for name, reading in step["readings"].items()
        }
        changed.append({**step, **randoms_of_step, "readings": readings})
    return changed


def _buffers(program: Program, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the buffers in the state of each module."""
    names = {
        name: [key for key, _ in program.problems[name].module.named_buffers(remove_duplicate=False)]
        for name in modules
    }
    return {name: {key: modules[name][key] for key in keys if key in modules[name]} for name, keys in names.items()}


def restore_random_state(state: dict[str, Any]) -> None:
    """Take the states back; CUDA's only where the number of devices is the same."""
    restore_global_state(state)
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([value.cpu() for value in state["cuda"]])
    torch.set_rng_state(state["torch"].cpu())


def restore_global_state(state: dict[str, Any]) -> None:
    """Take the states of numpy's and Python's global generators back."""
    kind, keys, position, *others = state["numpy"]
    # numpy would take any, and read past the end.
    require(0 <= position <= len(keys), "random_states.numpy", position, "a position in its state", ADVICE)
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, *others))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))
