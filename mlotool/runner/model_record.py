"""nodes.json: what the model spaces of a run became, for its page; and how many parameters its problems have."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parameter import is_lazy

from mlotool.core.files import write_text
from mlotool.program import Program
from mlotool.spaces.summary import NodeSummary, nodes_of_spaces

if TYPE_CHECKING:
    from mlotool.config import Built
    from mlotool.spaces.decisions import Decision

FILE = "nodes.json"
MAX_NODES = MAX_DECISIONS = 2_000
MAX_CANDIDATES = 50
MAX_CHARACTERS = 1_000_000
"""Of the file. What is larger is written without nodes and candidates."""


def num_parameters(program: Program) -> dict[str, int]:
    """Return how many numbers the parameters of each problem's module are, those that are frozen too; of one task."""
    return {
        name: sum(each.numel() for each in problem.module.parameters() if not is_lazy(each))
        // (problem.settings.tasks or 1)
        for name, problem in program.problems.items()
    }


def write_nodes(run_dir: Path, built: "Built") -> None:
    """Write nodes.json, where a problem's module is a space of models or has asked for decisions.

    Args:
        run_dir: the run folder.
        built: what the run's config describes.
    """
    counts = num_parameters(built.program)
    nodes = {name: nodes_of_spaces(problem.module) for name, problem in built.program.problems.items()}
    names = [name for name in counts if nodes[name] or built.decisions.get(name)]
    if not names:
        return
    for most_nodes, most_candidates in ((MAX_NODES, MAX_CANDIDATES), (0, 0)):
        problems = {
            name: {
                "num_parameters": counts[name],
                "num_nodes": len(nodes[name]),
                "nodes": _nodes(nodes[name], most_nodes),
                "decisions": _decisions(built.decisions.get(name, ()), most_candidates),
            }
            for name in names
        }
        text = json.dumps({"problems": problems}) + "\n"
        if len(text) <= MAX_CHARACTERS:
            break
    write_text(run_dir / FILE, text)


def _nodes(nodes: Sequence[NodeSummary], most: int) -> list[dict[str, Any]]:
    return [
        {
            "id": each.id,
            "kind": each.kind,
            "inputs": each.inputs,
            "shape": each.shape,
            "mutator": each.mutator,
            **({"stands_for": each.stands_for} if each.stands_for else {}),
        }
        for each in (nodes if len(nodes) <= most else ())
    ]


def _decisions(decisions: "Sequence[Decision]", most_candidates: int) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "value": each.value,
            "candidates": each.candidates[:most_candidates],
            "num_candidates": len(each.candidates),
        }
        for each in decisions[:MAX_DECISIONS]
    ]
