"""What a run writes once into its folder: what it was made from, and what became of its spaces of models."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.config import Built, Origin, write_provenance
from mlotool.config.composition import plain
from mlotool.config.security.trusted import named_packages
from mlotool.distributed.collectives import Ranks
from mlotool.folders.run_folder import RunFolder
from mlotool.program import Program
from mlotool.spaces.shared.shared_space import AbstractArchitecture, SharedSpace
from mlotool.spaces.summary import nodes_of_spaces

MAX_NODES, MAX_DECISIONS, MAX_CANDIDATES = 2_000, 500, 50


def num_parameters(program: Program) -> dict[str, int]:
    """Return how many numbers the parameters of each problem's module are, those that are frozen too; of one task."""
    return {
        name: sum(parameter.numel() for parameter in problem.module.parameters() if not is_lazy(parameter))
        // (problem.num_tasks or 1)
        for name, problem in program.problems.items()
    }


def write_nodes(folder: RunFolder, built: Built) -> None:
    """Write nodes.json, where a problem's module is a space of models or has asked for decisions.

    Args:
        folder: of the run.
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
        shown = [] if len(nodes[name]) > MAX_NODES else [asdict(node) for node in nodes[name]]
        shown = [{key: value for key, value in node.items() if key != "stands_for" or value} for node in shown]
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
    folder.write_json(folder.NODES, {"problems": problems}, indent=None)


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


def write_paths(folder: RunFolder, program: Program, counts: Mapping[str, Tensor]) -> None:
    """Write paths.json, where a problem's module is a shared space.

    Args:
        folder: of the run.
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
        folder.write_json(folder.PATHS, {"spaces": spaces, "architectures": architectures}, indent=None)


def warn_of_untrained(program: Program, ranks: Ranks) -> None:
    """Warn of candidates of shared spaces that no training step has computed; all ranks call it."""
    for name, space in _shared_spaces(program).items():
        counts = ranks.total(space.counts)
        # The problems that learn which paths are run: their decisions have the space's names.
        names = [decision.name for decision in space.table]
        modules = {other: problem.module for other, problem in program.problems.items()}
        choosers = {other: module for other, module in modules.items() if isinstance(module, AbstractArchitecture)}
        learned = [other for other, chooser in choosers.items() if [row.name for row in chooser.table] == names]
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
            warnings.warn(
                f"problems.{name}.module: found candidates that no training step has computed: "
                f"{', '.join(never)[:500]}; expected steps with each candidate. Raise runner.max_ticks, or {advice}.",
                stacklevel=2,
            )


def write_inputs(folder: RunFolder, config: Any, origin: Origin, built: Built) -> None:
    """Write everything that is known before the first tick."""
    packages = named_packages(plain(config))
    origin = origin.trusting(packages)
    write_nodes(folder, built)
    write_config(folder, config)
    # Of a run that looked for one to go on with, and found none.
    words = [word for word in origin.overrides if not word.startswith("resume=")]
    folder.write_overrides([*words, *(f"--trust={package}" for package in packages)])
    folder.write_text(folder.GRAPH, built.program.graph.mermaid())
    if origin.recipe_path is not None:
        folder.copy_recipe(origin.recipe_path)
    write_provenance(folder, config, origin)


def write_config(folder: RunFolder, config: Any) -> None:
    """Write config.yaml, without what the run was gone on with."""
    values = plain(config)
    folder.write_config(values | ({"resume": None} if "resume" in values else {}))
