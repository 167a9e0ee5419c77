"""What a run writes once into its folder: what it was made from, and what became of spaces; and how a run goes on."""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.config import Built, Origin, differences, note_resume, write_provenance
from mlotool.config.composition import plain
from mlotool.config.run_config import has_finished, max_ticks
from mlotool.core.errors import CheckpointError, ConfigError
from mlotool.core.messages import did_you_mean, escape
from mlotool.distributed.collectives import Ranks
from mlotool.folders.files import remove_temporary
from mlotool.folders.run_folder import RunFolder, is_stamp
from mlotool.folders.safe_files import check_tree
from mlotool.program import Program
from mlotool.runner.checkpoint import load_program, newest_first, read_checkpoint
from mlotool.spaces.shared.shared_space import AbstractArchitecture, SharedSpace
from mlotool.spaces.summary import nodes_of_spaces

MAX_NODES, MAX_DECISIONS, MAX_CANDIDATES = 2_000, 500, 50


def num_parameters(program: Program) -> dict[str, int]:
    """Return how many numbers the parameters of each problem's module are, those that are frozen too; of one task."""
    return {
        name: sum(parameter.numel() for parameter in problem.module.parameters() if not is_lazy(parameter))
        // (problem.settings.tasks or 1)
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
                f"{', '.join(never)[:500]}; expected each in some. Raise runner.max_ticks, or {advice}.",
                stacklevel=2,
            )


# A killed run's data loaders need some seconds to notice, and hold what it held.
PATIENCE_S = 8.0


def write_inputs(folder: RunFolder, config: Any, origin: Origin, built: Built) -> None:
    """Write everything that is known before the first tick."""
    write_nodes(folder, built)
    _write_config(folder, config)
    # Of a run that looked for one to go on with, and found none.
    folder.write_overrides([word for word in origin.overrides if not word.startswith("resume=")])
    folder.write_text(folder.GRAPH, built.program.graph.mermaid())
    if origin.recipe_path is not None:
        folder.copy_recipe(origin.recipe_path)
    write_provenance(folder, config, origin)


def _write_config(folder: RunFolder, config: Any) -> None:
    values = plain(config)
    folder.write_config(values | ({"resume": None} if "resume" in values else {}))


AUTO = "auto"
NUM_SHOWN = 8


@dataclass(frozen=True)
class EarlierRun:
    """A folder to go on in.

    Args:
        folder: the run's.
        checkpoint: a checkpoint that was named; None takes the newest that can be read.
        is_finished: whether nothing is left to do.
    """

    folder: RunFolder
    checkpoint: Path | None = None
    is_finished: bool = False


def find_run(config: Any, resume: str | Path, output_dir: Path | None) -> EarlierRun | None:
    """Return the run that `resume` means; None where `auto` finds none, and says so.

    Args:
        config: of the run that is to go on.
        resume: `auto`, a run folder, or a checkpoint in one.
        output_dir: the folder that a new run would have.

    Raises:
        ConfigError: there is no such run, or its config is another one.
    """
    new = _through_yaml(config)
    return _find_auto(new, output_dir) if str(resume) == AUTO else _find_named(new, Path(resume))


def _find_named(new: Mapping[str, Any], path: Path) -> EarlierRun:
    run = RunFolder.of(path)
    old = _config_of(run)
    if old is None:
        what = "has no config.yaml" if path.is_dir() else "is in no run folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"resume: found '{path}', which {what}; expected auto, a run folder (outputs/<name>/<date>_<time>) or a "
            f"checkpoint in one.{did_you_mean(str(path), [AUTO])} Give the folder that `mlotool run` printed."
        )
    fault = _fault(old, new)
    if fault is not None:
        raise ConfigError(
            f"resume: found '{path}', a run that {fault}; expected one of the same config, but for runner.max_ticks, "
            "the logger and what is kept and shown. Give the keys the values that they have there, or leave resume out."
        )
    checkpoint = path if run.path != path else None
    if checkpoint is not None:
        _check_ticks(read_checkpoint(checkpoint)["tick"], new, checkpoint)
    return EarlierRun(run, checkpoint, has_finished(run.summary(), old, max_ticks(new)))


def _find_auto(new: Mapping[str, Any], output_dir: Path | None) -> EarlierRun | None:
    newest = ""
    for run in map(RunFolder, _candidates(new, output_dir)):
        is_here = run.path == output_dir
        try:
            old = _config_of(run)
        except ConfigError as error:
            newest = newest or f"; the newest one, {run.path} is left out ({error})"
            continue
        if old is None:
            if is_here:
                run.free_if_never_begun()
            continue
        fault = _fault(old, new)
        if fault is None:
            is_finished = has_finished(run.summary(), old, max_ticks(new))
            with run.lock() as is_free:
                # A job of a sweep has one folder alone.
                if is_here or (is_free and not is_finished):
                    return EarlierRun(run, None, is_finished)
            fault = "has finished" if is_finished else "is being written by another process"
        newest = newest or f"; the newest one, {run.path} {fault}"
    say(f"resume=auto: no unfinished run with this config{newest}. A new run begins.")
    return None


def _fault(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why a run with the config `old` does not go on with `new`; None where it does."""
    different = differences(old, new)
    more = f"; and {len(different) - NUM_SHOWN} more" if len(different) > NUM_SHOWN else ""
    shown = f"{'; '.join(different[:NUM_SHOWN])}{more}"
    return f"has another config in {len(different)} key(s): {shown}" if different else None


def _config_of(run: RunFolder) -> dict[str, Any] | None:
    """Return the config of a run folder; None where it has none, or an empty one: it was killed before it had begun."""
    document = run.config() if run.path.is_dir() else None
    if document is None or not document.data:
        return None
    check_tree(run.path)
    return document.data


def _check_ticks(tick: int, config: Mapping[str, Any], path: Path) -> None:
    """Refuse a run that is to end before the tick at which it stands."""
    if tick > max_ticks(config):
        raise ConfigError(
            f"runner.max_ticks: found {max_ticks(config)}, while {path} is at tick {tick}; expected at least that."
        )


def _candidates(new: Mapping[str, Any], output_dir: Path | None) -> Iterator[Path]:
    if output_dir is not None:
        yield output_dir
        if not is_stamp(output_dir.name):
            return
    root = Path("outputs") / str(new["name"]) if output_dir is None else output_dir.parent
    # Not a link, which may lead to a run of another place.
    folders = [path for path in root.glob("*") if path != output_dir and path.is_dir() and not path.is_symlink()]
    # Of the names of one second, `_10` is later than `_9`.
    yield from sorted(folders, key=lambda path: [*map(int, re.findall(r"\d+", path.name))], reverse=True)


def choose_checkpoint(earlier: EarlierRun) -> Path | None:
    """Return the checkpoint to go on from, the newest that can be read; None where the run has none yet.

    Raises:
        CheckpointError: it has some, and none can be read.
    """
    if earlier.checkpoint is not None:
        return earlier.checkpoint
    faults = []
    for path in newest_first(earlier.folder.checkpoints):
        try:
            read_checkpoint(path)
        except CheckpointError as error:
            faults.append(str(error).partition(";")[0])
        else:
            if faults:
                warnings.warn(f"{faults[0]}; expected a whole one. {path.name} is taken in its place.", stacklevel=2)
            return path
    if faults:
        # To begin again would be to lose what metrics.csv holds.
        raise CheckpointError(
            f"resume: found no checkpoint in {earlier.folder.path} that can be read: {faults[0]}; expected one."
        )
    return None


def go_on(earlier: EarlierRun, config: Any, origin: Origin, program: Program | None = None) -> Path | None:
    """Make a folder ready to go on in, once it is locked, and tell of it; return the checkpoint, if there is one.

    Args:
        earlier: the run.
        config: of the run that goes on.
        origin: where the config came from.
        program: is put into the checkpoint's state before anything of the folder is changed; None where that takes
            all ranks, and comes later.
    """
    folder = earlier.folder
    for place in (folder.path, folder.checkpoints, folder.artifacts):
        remove_temporary(place)
    checkpoint, tick = choose_checkpoint(earlier), 0
    if checkpoint is not None:
        tick = (read_checkpoint(checkpoint) if program is None else load_program(program, checkpoint))["tick"]
    # A run writes a checkpoint before its first tick, and its numbers later.
    elif config.runner.checkpoint and folder.has_values:
        raise CheckpointError(
            f"resume: found no checkpoint in {folder.checkpoints}, while metrics.csv has values; expected the "
            "checkpoints that the run wrote. Put one back; or leave resume out for a new run, in a folder of its own."
        )
    _check_ticks(tick, _through_yaml(config), folder.path)
    folder.forget_end(with_metrics=checkpoint is None)
    _write_config(folder, config)
    for change in note_resume(folder, config, origin, tick):
        warnings.warn(
            f"resume: found {change}; expected the same, or numbers may differ in their last bits.",
            stacklevel=3,
        )
    if checkpoint is None:
        say(f"{folder.path} has no checkpoint yet: it begins again.")
    else:
        say(f"going on in {folder.path} after tick {tick} ({checkpoint.name})")
    return checkpoint


def say(text: str) -> None:
    """Tell the user, where the warnings go."""
    print(f"mlotool: {escape(text)}", file=sys.stderr)


def _through_yaml(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(plain(config)))
    return values
