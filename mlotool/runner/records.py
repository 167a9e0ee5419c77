"""paths.json: how often a run has trained each candidate of its shared spaces, and what it has found, for its page."""

import json
import warnings
from collections.abc import Mapping, Sequence
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
    from mlotool.spaces.decisions import Decision


NODES_FILE = "nodes.json"
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
    write_text(run_dir / NODES_FILE, text)


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
        modules = {name: each.module for name, each in problems.items()}
        self._architectures = {name: each for name, each in modules.items() if isinstance(each, AbstractArchitecture)}
        self._spaces = {name: each for name, each in modules.items() if isinstance(each, SharedSpace)}
        self._problems, self._max_ticks, self._reduce = problems, max_ticks, reduce
        self._told: set[str] = set()

    def look(self, tick: int) -> None:
        """Warn where all decisions of an architecture are made though much of the run is left.

        Args:
            tick: the last one done.

        Cost: a transfer from the device an architecture, until half of the run is over.
        """
        if tick >= EARLY * self._max_ticks:
            return
        for name, each in self._architectures.items():
            if name in self._told or not each.is_made(SURE):
                continue
            self._told.add(name)
            warnings.warn(
                f"problems.{name}: found a probability of at least {SURE:g} for one candidate of each decision at tick "
                f"{tick} of {self._max_ticks}; expected decisions that are open for half of the run, as what is not "
                f"drawn is not compared any more. {self._opening(name)}",
                stacklevel=2,
            )

    def end(self) -> None:
        """Warn of candidates that no training step has computed; all ranks call it."""
        for name, each in self._spaces.items():
            [counts] = self._reduce([each.counts.double()])
            deciding = self._deciding_on(each)
            if not bool(counts.any()) or not (each.draws or deciding):
                # Nothing was trained, or one path alone.
                continue
            never = [
                f"{decision}: {value}"
                for decision, found in each.named_counts(counts).items()
                for value, count in found.items()
                if count == 0 and decision in each.differing
            ]
            if never:
                more = f" and {len(never) - MAX_NAMED} more" if len(never) > MAX_NAMED else ""
                warnings.warn(
                    f"problems.{name}.module: found candidates that no training step has computed: "
                    f"{', '.join(never[:MAX_NAMED])}{more}; expected each of them in some, as their weights are those "
                    f"of the start. Train for longer (runner.max_ticks). {self._drawing(deciding)}",
                    stacklevel=2,
                )

    def _deciding_on(self, space: SharedSpace) -> list[str]:
        """Return the problems that learn which paths of a space are run: their decisions have its names."""
        names = [each.name for each in space.table]
        return [name for name, each in self._architectures.items() if [one.name for one in each.table] == names]

    def _drawing(self, deciding: Sequence[str]) -> str:
        """Return what makes more candidates be drawn, where problems decide or, if there is none, `paths`."""
        if not deciding:
            return "Or draw each equally often: paths: {_target_: mlotool.spaces.FairPaths}."
        return " ".join(map(self._opening, deciding))

    def _opening(self, name: str) -> str:
        """Return what keeps the decisions of an architecture open."""
        optimizer = self._problems[name].optimizer
        rate = None if optimizer is None else optimizer.param_groups[0].get("lr")
        value = "" if rate is None else f" ({float(rate):g} now)"
        return (
            f"Lower problems.{name}.optimizer.lr{value}, or set problems.{name}.loss.entropy=0.01, which keeps its "
            "decisions open."
        )
