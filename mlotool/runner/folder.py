"""The run folder: where each file of a run lies, how it is claimed, and what is written and read once."""

import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.config import Built, Origin, differences, finish_provenance, load_run_config, note_resume, write_provenance
from mlotool.config.composition import plain
from mlotool.config.run_config import folder_of, has_finished, max_ticks, read_run_config, read_summary
from mlotool.core.errors import CheckpointError, ConfigError, MlotoolError, RunFileError
from mlotool.core.files import remove_temporary, write_text, writing
from mlotool.core.messages import did_you_mean, escape
from mlotool.core.run_files import check_tree
from mlotool.distributed.collectives import Ranks
from mlotool.program import Program
from mlotool.runner.checkpoint import FOLDER, load_program, newest_first, read_checkpoint
from mlotool.spaces.shared.shared_space import AbstractArchitecture, SharedSpace
from mlotool.spaces.summary import nodes_of_spaces

NODES_FILE, FILE = "nodes.json", "paths.json"
MAX_NODES, MAX_DECISIONS, MAX_CANDIDATES = 2_000, 500, 50


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
    write_text(run_dir / NODES_FILE, json.dumps({"problems": problems}) + "\n")


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
        modules = {other: problem.module for other, problem in program.problems.items()}
        choosers = {other: each for other, each in modules.items() if isinstance(each, AbstractArchitecture)}
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


PATIENCE_S = 8.0
"""A killed run's data loaders need some seconds to notice, and hold what it held."""

STAMP = "%Y-%m-%d_%H-%M-%S"

HEADER = ("tick", "key", "value")
"""The first line of metrics.csv."""


@contextmanager
def run_lock(folder: Path, patience_s: float = 0.0) -> Iterator[bool]:
    """Hold a folder, and yield whether it could be had; the system gives it back however the process ends.

    Args:
        folder: the run folder.
        patience_s: how long to wait for it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield True
        return
    descriptor = os.open(folder, os.O_RDONLY)
    give_up_at = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    yield False
                    return
                time.sleep(0.1)
                continue
            except OSError:  # a file system without locks
                pass
            yield True
            return
    finally:
        os.close(descriptor)


class RunFolder:
    """The files of a run.

    Args:
        path: the folder.
        sweep: name of the sweep's folder, where the run is a job of one.

    Attributes:
        config: the config, with everything resolved; whoever makes it has the folder.
        metrics: `tick,key,value`.
        summary: how the run ended; a run that goes on has none.
        artifacts: the folder of arrays for the report.
        checkpoints: the folder of `best.ckpt` and `last.ckpt`.
    """

    def __init__(self, path: Path, sweep: str | None = None) -> None:
        self.path, self.sweep = path, sweep
        self.config, self.metrics, self.summary = path / "config.yaml", path / "metrics.csv", path / "summary.json"
        self.artifacts, self.checkpoints = path / "artifacts", path / FOLDER

    @property
    def has_inputs(self) -> bool:
        """Whether all is written that is known before the first tick: provenance.json is the last of it."""
        return (self.path / "provenance.json").exists()

    @property
    def has_values(self) -> bool:
        """Whether metrics.csv has more than its header."""
        return self.metrics.is_file() and self.metrics.stat().st_size > len(",".join(HEADER)) + 1

    @classmethod
    def create(cls, config: Any, output_dir: Path | None, sweep: str | None = None) -> "RunFolder":
        """Make the folder, which no other run has: `output_dir`, or a new `outputs/<name>/<date>_<time>`.

        Where two runs of the same second have the same `<date>_<time>`, the later one gets `<date>_<time>_1`.

        Raises:
            ConfigError: `output_dir` holds a run, and its name is none that was made from the time.
        """
        stamped = Path("outputs") / config.name / datetime.now().strftime(STAMP)
        path = stamped if output_dir is None else Path(output_dir)
        # Hydra has made the folder of a run of the command line before we are asked; a job's lies in the sweep's. A
        # name that the user has chosen is not changed.
        is_stamped = any(is_stamp(folder.name) for folder in (path, path.parent))
        others = (path.with_name(f"{path.name}_{count}") for count in range(1, 1_000_000) if is_stamped)
        with writing(path):
            folder = next((cls(place, sweep) for place in chain((path,), others) if _claim(place)), None)
        if folder is None:
            raise ConfigError(
                f"{path} holds a run already; expected a new or empty folder. Name another one, or remove it."
            )
        try:
            check_tree(folder.path)
            folder.make_folders()
        except MlotoolError as error:
            # So that the same command can take the folder once it is put right.
            folder.config.unlink(missing_ok=True)
            if isinstance(error, RunFileError):
                raise ConfigError(
                    f"{folder.path}: found files of other programs ({error}). Name a new folder."
                ) from error
            raise
        return folder

    def make_folders(self) -> None:
        """Make the folders in it that are missing."""
        for folder in (self.artifacts, self.checkpoints):
            with writing(folder):
                folder.mkdir(exist_ok=True)

    def checkpoint(self, which: str) -> Path:
        """Return where the checkpoint `which` ("best" or "last") lies."""
        return self.checkpoints / f"{which}.ckpt"

    def find_checkpoint(self, which: str) -> Path:
        """Return the checkpoint `which`; a run without one is a ConfigError."""
        if not self.path.is_dir():
            raise ConfigError(f"There is no folder '{self.path}'; expected that of a run, as `mlotool run` printed it.")
        path = self.checkpoint(which)
        if not path.is_file():
            # Refuses a folder that is not a run's.
            load_run_config(self.path, is_own=True)
            present = ", ".join(one.stem for one in newest_first(self.checkpoints)) or "none"
            raise ConfigError(
                f"{self.path} has no checkpoint '{which}', but {present}; expected {path}. Name another one."
            )
        return path

    def kept(self) -> Path | None:
        """Return the checkpoint that a finished run is judged by: the best one, else the last one."""
        return next((path for path in map(self.checkpoint, ("best", "last")) if path.is_file()), None)

    def what_is_kept(self) -> str:
        """Return in a sentence what a run that failed can go on from."""
        last = self.checkpoint("last")
        if not last.is_file():
            return "No checkpoint is kept, for runner.checkpoint=false."
        tick = read_checkpoint(last)["tick"]
        state = f"after tick {tick}" if tick else "the initial one"
        return f"{last} holds the last good state that was saved, {state}."

    def write_inputs(self, config: Any, origin: Origin, built: Built) -> None:
        """Write everything that is known before the first tick."""
        write_nodes(self.path, built)
        self._write_config(config)
        # Of a run that looked for one to go on with, and found none.
        overrides = [f"{word}\n" for word in origin.overrides if not word.startswith("resume=")]
        write_text(self.path / "overrides.txt", "".join(overrides))
        write_text(self.path / "graph.mmd", built.program.graph.mermaid())
        if origin.recipe_path is not None:
            with writing(self.path / "recipe.yaml"):
                shutil.copyfile(origin.recipe_path, self.path / "recipe.yaml")
        write_provenance(self.path, config, origin)

    def reopen(self, config: Any, *, begins_again: bool) -> None:
        """Make ready for a run that goes on here, maybe with more ticks; the end that it had is forgotten.

        Args:
            config: of the run.
            begins_again: whether it has no checkpoint to go on from.
        """
        self.summary.unlink(missing_ok=True)
        if begins_again:
            self.metrics.unlink(missing_ok=True)
        self._write_config(config)
        self.make_folders()

    def _write_config(self, config: Any) -> None:
        values = plain(config)
        values |= {"resume": None} if "resume" in values else {}
        write_text(self.config, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json; NaN and infinity become null, which JSON has and they are not."""
        plain_summary = json.loads(json.dumps(summary), parse_constant=lambda name: None)
        write_text(self.summary, json.dumps(plain_summary, indent=2) + "\n")

    def note_failure(self, text: str) -> None:
        """Write the cause of a failure into summary.json, where the run has written a consequence, or nothing."""
        summary = read_summary(self.path)
        if not summary:
            finish_provenance(self.path)
            summary = {"objective": None, "metrics": {}, "best": None, "num_ticks": 0, "training_s": 0.0}
        self.write_summary({**summary, "status": "failed", "error": text})


def is_stamp(name: str) -> bool:
    """Say whether a folder's name is one that was made from the time, with a number behind it or not."""
    return re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)*", name) is not None


def _claim(path: Path) -> bool:
    """Take a folder for one run, by making its config.yaml, which only one process can; False where it is taken."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    if folder.metrics.exists():
        return False
    try:
        folder.config.open("x").close()
    except FileExistsError:
        return False
    return True


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
    run_dir = folder_of(path)
    old = _config_of(run_dir)
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
    if run_dir != path:
        _check_ticks(read_checkpoint(path)["tick"], new, path)
    is_finished = has_finished(read_summary(run_dir), old, max_ticks(new))
    return EarlierRun(RunFolder(run_dir), path if run_dir != path else None, is_finished)


def _find_auto(new: Mapping[str, Any], output_dir: Path | None) -> EarlierRun | None:
    newest = ""
    for run_dir in _candidates(new, output_dir):
        is_here = run_dir == output_dir
        try:
            old = _config_of(run_dir)
        except ConfigError as error:
            newest = newest or f"; the newest one, {run_dir} is left out ({error})"
            continue
        if old is None:
            if is_here:
                _free_if_never_begun(run_dir)
            continue
        fault = _fault(old, new)
        if fault is None:
            is_finished = has_finished(read_summary(run_dir), old, max_ticks(new))
            with run_lock(run_dir) as is_free:
                # A job of a sweep has one folder alone.
                if is_here or (is_free and not is_finished):
                    return EarlierRun(RunFolder(run_dir), None, is_finished)
            fault = "has finished" if is_finished else "is being written by another process"
        newest = newest or f"; the newest one, {run_dir} {fault}"
    say(f"resume=auto: no unfinished run with this config{newest}. A new run begins.")
    return None


def _fault(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Return why a run with the config `old` does not go on with `new`; None where it does."""
    different = differences(old, new)
    more = f"; and {len(different) - NUM_SHOWN} more" if len(different) > NUM_SHOWN else ""
    shown = f"{'; '.join(different[:NUM_SHOWN])}{more}"
    return f"has another config in {len(different)} key(s): {shown}" if different else None


def _config_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the config of a run folder; None where it has none, or an empty one: it was killed before it had begun."""
    document = read_run_config(run_dir) if run_dir.is_dir() else None
    if document is None or not document.data:
        return None
    check_tree(run_dir)
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


def _free_if_never_begun(run_dir: Path) -> None:
    # A run that was killed when it had taken the folder and not yet written a word.
    config = RunFolder(run_dir).config
    if config.is_file():
        with run_lock(run_dir) as is_free:
            if is_free and config.stat().st_size == 0:
                config.unlink()


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
    folder.reopen(config, begins_again=checkpoint is None)
    for change in note_resume(folder.path, config, origin, tick):
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
