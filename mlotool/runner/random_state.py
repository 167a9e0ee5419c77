"""The state of all random number generators, as plain containers that load with `weights_only=True`."""

import random
from typing import Any

import numpy
import torch

from mlotool.program import Program
from mlotool.runner.ranks import Ranks


def random_state() -> dict[str, Any]:
    """Return the states of torch's, CUDA's, numpy's and Python's global generators."""
    kind, keys, position, has_gauss, cached_gaussian = numpy.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [
            kind,
            torch.from_numpy(numpy.asarray(keys, dtype="int64")),
            int(position),
            int(has_gauss),
            float(cached_gaussian),
        ],
        "python": [version, torch.tensor(internal), gauss_next],
    }


def random_states(program: Program, ranks: Ranks) -> list[dict[str, Any]]:
    """Return the states of all ranks, by rank; for a checkpoint, which rank 0 writes.

    Recorded steps hold random states as well; all else in a program's state is the same on all ranks.
    """
    recorded = {name: problem.trajectory.state_dict()["steps"] for name, problem in program.problems.items()}
    steps = {name: [step["random"] for step in each] for name, each in recorded.items()}
    return ranks.gather({**random_state(), "steps": steps})


def restore_random_states(states: list[dict[str, Any]], ranks: Ranks) -> None:
    """Take this rank's state back; a rank that had none goes on as it was seeded."""
    if ranks.rank < len(states):
        restore_random_state(states[ranks.rank])


def with_own_steps(program_state: dict[str, Any], states: list[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Return a program's state, in which rank 0's recorded random states have given way to this rank's.

    Args:
        program_state: as rank 0 has saved it.
        states: what `random_states` returned.
        ranks: those of the resumed run.
    """
    if ranks.rank == 0 or ranks.rank >= len(states):
        return program_state
    found = dict(program_state)
    for name, randoms in states[ranks.rank]["steps"].items():
        trajectory = found[name]["trajectory"]
        steps = [{**step, "random": own} for step, own in zip(trajectory["steps"], randoms, strict=True)]
        found[name] = {**found[name], "trajectory": {**trajectory, "steps": steps}}
    return found


def restore_random_state(state: dict[str, Any]) -> None:
    """Take the states back; CUDA's only where the number of devices is the same."""
    kind, keys, position, has_gauss, cached_gaussian = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached_gaussian))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([value.cpu() for value in state["cuda"]])
    torch.set_rng_state(state["torch"].cpu())
