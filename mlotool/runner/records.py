"""paths.json: how often a run has trained each candidate of its shared spaces, and what it has found, for its page."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.core.files import write_text
from mlotool.distributed.collectives import Ranks
from mlotool.problem.rank_mean import Reduce, identity_reduce
from mlotool.program import Problem, Program
from mlotool.spaces.shared.architecture import AbstractArchitecture
from mlotool.spaces.shared.shared_space import SharedSpace
from mlotool.spaces.summary import NodeSummary, nodes_of_spaces

if TYPE_CHECKING:
    from mlotool.config import Built


NODES_FILE = "nodes.json"
MAX_NODES, MAX_DECISIONS, MAX_CANDIDATES = 2_000, 500, 50


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
    problems = {
        name: {
            "num_parameters": counts[name],
            "num_nodes": len(nodes[name]),
            # A page of more would not be read.
            "nodes": [_node(node) for node in nodes[name]] if len(nodes[name]) <= MAX_NODES else [],
            "decisions": [
                {
                    "name": decision.name,
                    "value": decision.value,
                    "candidates": decision.candidates[:MAX_CANDIDATES],
                    "num_candidates": len(decision.candidates),
                }
                for decision in built.decisions.get(name, ())[:MAX_DECISIONS]
            ],
        }
        for name in names
    }
    write_text(run_dir / NODES_FILE, json.dumps({"problems": problems}) + "\n")


def _node(node: NodeSummary) -> dict[str, Any]:
    record = asdict(node)
    if not node.stands_for:
        del record["stands_for"]
    return record


FILE = "paths.json"


def trained_paths(program: Program, ranks: Ranks) -> dict[str, Tensor]:
    """Return, by problem with a shared space, how often all ranks together have trained each candidate.

    Args:
        program: at the end of training.
        ranks: all of them, each of which counts its own paths.
    """
    modules = {name: problem.module for name, problem in program.problems.items()}
    return {name: ranks.total(module.counts) for name, module in modules.items() if isinstance(module, SharedSpace)}


def write_paths(run_dir: Path, program: Program, counts: Mapping[str, Tensor]) -> None:
    """Write paths.json, where a problem's module is a shared space.

    Args:
        run_dir: the run folder.
        program: as it was evaluated in the end, which has found what is written.
        counts: of the whole training, by problem.
    """
    spaces, architectures = {}, {}
    for name, problem in program.problems.items():
        module = problem.module
        if isinstance(module, SharedSpace):
            spaces[name] = [
                {"name": decision, "candidates": list(map(str, values)), "counts": list(values.values())}
                for decision, values in module.named_counts(counts[name]).items()
            ]
        if isinstance(module, AbstractArchitecture):
            found = module.found()
            architectures[name] = [
                {
                    "name": decision.name,
                    "candidates": list(map(str, decision.candidates)),
                    "probabilities": module.logits[decision.name].detach().softmax(0).tolist(),
                    "found": str(found[decision.name]) if decision.name in found else None,
                }
                for decision in module.table
            ]
    if spaces:
        write_text(run_dir / FILE, json.dumps({"spaces": spaces, "architectures": architectures}) + "\n")


SURE = 0.99
"""The probability of a candidate from which on its decision is made."""

EARLY = 0.5
"""The part of a run in which not all decisions should be made."""

MAX_NAMED = 8
"""Candidates that a message names."""


class PathWatch:
    """Looks at shared spaces and architectures of a run, and warns of each once.

    Args:
        problems: of the program, by name.
        max_ticks: of the run.
        reduce: a mean over ranks, each of which may draw paths of its own.
    """

    def __init__(self, problems: Mapping[str, Problem], max_ticks: int, reduce: Reduce = identity_reduce) -> None:
        self._problems, self._max_ticks, self._reduce = problems, max_ticks, reduce
        modules = {name: problem.module for name, problem in problems.items()}
        self._open = {name: module for name, module in modules.items() if isinstance(module, AbstractArchitecture)}
        self._deciding = {name: [one.name for one in module.table] for name, module in self._open.items()}
        self._spaces = {name: module for name, module in modules.items() if isinstance(module, SharedSpace)}

    def look(self, tick: int) -> None:
        """Warn where all decisions of an architecture are made though much of the run is left.

        Args:
            tick: the last one done.

        Cost: a transfer from the device an architecture, until half of the run is over.
        """
        if tick >= EARLY * self._max_ticks:
            return
        for name in [name for name, architecture in self._open.items() if architecture.is_made(SURE)]:
            del self._open[name]
            warnings.warn(
                f"problems.{name}: found a probability of at least {SURE:g} for one candidate of each decision at tick "
                f"{tick} of {self._max_ticks}; expected decisions that are open for half of the run, as what is not "
                f"drawn is not compared any more. {self._opening(name)}",
                stacklevel=2,
            )

    def end(self) -> None:
        """Warn of candidates that no training step has computed; all ranks call it."""
        for name, space in self._spaces.items():
            [counts] = self._reduce([space.counts.double()])
            # The problems that learn which paths are run: their decisions have the space's names.
            table = [decision.name for decision in space.table]
            deciding = [other for other, decisions in self._deciding.items() if decisions == table]
            if not bool(counts.any()) or not (space.draws or deciding):
                # Nothing was trained, or one path alone.
                continue
            never = [
                f"{decision}: {value}"
                for decision, values in space.named_counts(counts).items()
                for value, count in values.items()
                if count == 0 and decision in space.differing
            ]
            advice = "Or draw each equally often: paths: {_target_: mlotool.spaces.FairPaths}."
            if never:
                more = f" and {len(never) - MAX_NAMED} more" if len(never) > MAX_NAMED else ""
                warnings.warn(
                    f"problems.{name}.module: found candidates that no training step has computed: "
                    f"{', '.join(never[:MAX_NAMED])}{more}; expected each of them in some, as their weights are those "
                    "of the start. Train for longer (runner.max_ticks). "
                    f"{' '.join(map(self._opening, deciding)) or advice}",
                    stacklevel=2,
                )

    def _opening(self, name: str) -> str:
        """Return what keeps the decisions of an architecture open."""
        optimizer = self._problems[name].optimizer
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        value = "" if rate is None else f" ({float(rate):g} now)"
        return (
            f"Lower problems.{name}.optimizer.lr{value}, or set problems.{name}.loss.entropy=0.01, which keeps its "
            "decisions open."
        )
