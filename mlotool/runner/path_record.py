"""paths.json: how often a run has trained each candidate of its shared spaces, and what it has found, for its page."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mlotool.core.files import write_text
from mlotool.distributed.collectives import Ranks
from mlotool.program import Program
from mlotool.spaces.shared.architecture import AbstractArchitecture
from mlotool.spaces.shared.shared_space import SharedSpace

FILE = "paths.json"


def trained_paths(program: Program, ranks: Ranks) -> dict[str, Tensor]:
    """Return, by problem with a shared space, how often all ranks together have trained each candidate.

    Args:
        program: at the end of training.
        ranks: all of them, each of which counts its own paths.
    """
    modules = [(name, each.module) for name, each in program.problems.items()]
    return {name: ranks.total(each.counts) for name, each in modules if isinstance(each, SharedSpace)}


def write_paths(run_dir: Path, program: Program, counts: Mapping[str, Tensor]) -> None:
    """Write paths.json, where a problem's module is a shared space.

    Args:
        run_dir: the run folder.
        program: as it was evaluated in the end, which has found what is written.
        counts: of the whole training, by problem.
    """
    modules = [(name, each.module) for name, each in program.problems.items()]
    spaces = {name: _counts(each, counts[name]) for name, each in modules if isinstance(each, SharedSpace)}
    found = {name: _found(each) for name, each in modules if isinstance(each, AbstractArchitecture)}
    if spaces:
        write_text(run_dir / FILE, json.dumps({"spaces": spaces, "architectures": found}) + "\n")


def _counts(space: SharedSpace, total: Tensor) -> list[dict[str, Any]]:
    return [
        {"name": name, "candidates": [str(each) for each in counts], "counts": list(counts.values())}
        for name, counts in space.named_counts(total).items()
    ]


def _found(architecture: AbstractArchitecture) -> list[dict[str, Any]]:
    found = architecture.found()
    return [
        {
            "name": each.name,
            "candidates": [str(one) for one in each.candidates],
            "probabilities": architecture.logits[each.name].detach().softmax(0).tolist(),
            "found": str(found[each.name]) if each.name in found else None,
        }
        for each in architecture.table
    ]
