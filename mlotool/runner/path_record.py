"""paths.json: how often a run has trained each candidate of its shared spaces, and what it has found, for its page."""

import json
from pathlib import Path
from typing import Any

from mlotool.core.files import write_text
from mlotool.program import Program
from mlotool.spaces.shared.architecture import AbstractArchitecture
from mlotool.spaces.shared.shared_space import SharedSpace

FILE = "paths.json"


def write_paths(run_dir: Path, program: Program) -> None:
    """Write paths.json, where a problem's module is a shared space.

    Args:
        run_dir: the run folder.
        program: as it was evaluated in the end; the counts are those of this process.
    """
    modules = [(name, each.module) for name, each in program.problems.items()]
    spaces = {name: _counts(each) for name, each in modules if isinstance(each, SharedSpace)}
    found = {name: _found(each) for name, each in modules if isinstance(each, AbstractArchitecture)}
    if spaces:
        write_text(run_dir / FILE, json.dumps({"spaces": spaces, "architectures": found}) + "\n")


def _counts(space: SharedSpace) -> list[dict[str, Any]]:
    return [
        {"name": name, "candidates": [str(each) for each in counts], "counts": list(counts.values())}
        for name, counts in space.path_counts.items()
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
