"""What a run tells of its models: nodes.json, and paths.json of shared spaces."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.config import Built
from mlotool.core.files import write_text
from mlotool.distributed.collectives import Ranks
from mlotool.program import Program
from mlotool.spaces.shared.shared_space import AbstractArchitecture, SharedSpace
from mlotool.spaces.summary import NodeSummary, nodes_of_spaces

NODES_FILE, FILE = "nodes.json", "paths.json"
MAX_NODES, MAX_DECISIONS, MAX_CANDIDATES = 2_000, 500, 50

MAX_NAMED = 8
"""Candidates that a message names."""


def num_parameters(program: Program) -> dict[str, int]:
    """Return how many numbers the parameters of each problem's module are, those that are frozen too; of one task."""
    return {
        name: sum(parameter.numel() for parameter in problem.module.parameters() if not is_lazy(parameter))
        // (problem.settings.tasks or 1)
        for name, problem in program.problems.items()
    }


def write_nodes(run_dir: Path, built: Built) -> None:
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
    problems = {}
    for name in names:
        # A page of more would not be read.
        shown = [_node(node) for node in nodes[name]] if len(nodes[name]) <= MAX_NODES else []
        decisions = [
            {
                "name": decision.name,
                "value": decision.value,
                "candidates": decision.candidates[:MAX_CANDIDATES],
                "num_candidates": len(decision.candidates),
            }
            for decision in built.decisions.get(name, ())[:MAX_DECISIONS]
        ]
        sizes = {"num_parameters": counts[name], "num_nodes": len(nodes[name])}
        problems[name] = {**sizes, "nodes": shown, "decisions": decisions}
    write_text(run_dir / NODES_FILE, json.dumps({"problems": problems}) + "\n")


def _node(node: NodeSummary) -> dict[str, Any]:
    return {key: value for key, value in asdict(node).items() if key != "stands_for" or value}


def trained_paths(program: Program, ranks: Ranks) -> dict[str, Tensor]:
    """Return, by problem with a shared space, how often all ranks together have trained each candidate.

    Args:
        program: at the end of training.
        ranks: all of them, each of which counts its own paths.
    """
    return {name: ranks.total(space.counts) for name, space in _shared_spaces(program).items()}


def _shared_spaces(program: Program) -> dict[str, SharedSpace]:
    modules = {name: problem.module for name, problem in program.problems.items()}
    return {name: module for name, module in modules.items() if isinstance(module, SharedSpace)}


def write_paths(run_dir: Path, program: Program, counts: Mapping[str, Tensor]) -> None:
    """Write paths.json, where a problem's module is a shared space.

    Args:
        run_dir: the run folder.
        program: as it was evaluated in the end, which has found what is written.
        counts: of the whole training, by problem.
    """
    spaces, architectures = {}, {}
    for name, space in _shared_spaces(program).items():
        spaces[name] = [
            {"name": decision, "candidates": list(map(str, values)), "counts": list(values.values())}
            for decision, values in space.named_counts(counts[name]).items()
        ]
    for name, problem in program.problems.items():
        module = problem.module
        if isinstance(module, AbstractArchitecture):
            chosen = module.found()
            architectures[name] = [
                {
                    "name": decision.name,
                    "candidates": list(map(str, decision.candidates)),
                    "probabilities": module.logits[decision.name].detach().softmax(0).tolist(),
                    "found": str(chosen[decision.name]) if decision.name in chosen else None,
                }
                for decision in module.table
            ]
    if spaces:
        write_text(run_dir / FILE, json.dumps({"spaces": spaces, "architectures": architectures}) + "\n")


def warn_of_untrained(program: Program, ranks: Ranks) -> None:
    """Warn of candidates of shared spaces that no training step has computed; all ranks call it."""
    for name, space in _shared_spaces(program).items():
        counts = ranks.total(space.counts)
        # The problems that learn which paths are run: their decisions have the space's names.
        names = [decision.name for decision in space.table]
        learned = [other for other, problem in program.problems.items() if _names(problem.module) == names]
        never = [
            f"{decision}: {value}"
            for decision, values in space.named_counts(counts).items()
            for value, count in values.items()
            if count == 0 and decision in space.differing
        ]
        # Else nothing was trained, or one path alone.
        if never and bool(counts.any()) and (space.draws or learned):
            advice = "draw each equally often: paths: {_target_: mlotool.spaces.FairPaths}"
            if learned:
                advice = f"keep decisions open: a lower problems.{learned[0]}.optimizer.lr, or loss.entropy=0.01 there"
            more = f" and {len(never) - MAX_NAMED} more" if len(never) > MAX_NAMED else ""
            warnings.warn(
                f"problems.{name}.module: found candidates that no training step has computed, so that their weights "
                f"are those of the start: {', '.join(never[:MAX_NAMED])}{more}; expected each of them in some. Train "
                f"for longer (runner.max_ticks), or {advice}.",
                stacklevel=2,
            )


def _names(module: Any) -> list[str] | None:
    return [decision.name for decision in module.table] if isinstance(module, AbstractArchitecture) else None
