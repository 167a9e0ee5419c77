"""Checkpoints: which are kept, what they hold, how they are written and read."""

import math
import os
import random
import shutil
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.core.arguments import require
from mlotool.core.errors import CheckpointError, MlotoolError, RunError
from mlotool.core.plain_state import ADVICE, check_plain, find_fault
from mlotool.core.private import tree_map_only
from mlotool.distributed.collectives import Ranks
from mlotool.folders.files import replacing, writing
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.safe_files import located, open_file
from mlotool.program import Program

# Our part of a Lightning checkpoint.
STATE_KEY = "mlotool"

MAX_FILE_BYTES = 1 << 42
_NUMBERS = ("window", "metrics", "tick", "metrics_position", "training_s", "is_pending")
# What our part has.
KEYS = ("program", "schedule", "random_states", *_NUMBERS)

# A small checkpoint takes as long as two ticks of a small problem, a large one seconds: the pauses grow with it.
LARGEST_SHARE_OF_TIME = 0.01


def write_checkpoint(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint in one piece: whoever is killed meanwhile leaves the one that was there. For one rank."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(_with_own_memory(checkpoint), file)
        except RuntimeError as error:
            # torch says that a position was not expected, and not that the disk has refused what it wrote.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _with_own_memory(checkpoint: Mapping[str, Any]) -> Any:
    """Return the same with copies of tensors that are parts of larger ones, which a file would hold whole."""
    copies: dict[Any, Tensor] = {}

    def with_own_memory(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.itemsize:
            return tensor
        # What stands twice in a checkpoint stands once in its file.
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        return copies.setdefault(key, tensor.detach().clone())

    return tree_map_only(Tensor, with_own_memory, checkpoint)


def check_writable(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that could not be read again.

    Raises:
        RunError: somebody's code keeps what no checkpoint holds.
    """
    state = checkpoint[STATE_KEY]
    check_plain(state["program"])
    fault = find_fault({**checkpoint, STATE_KEY: {**state, "program": None}})
    if fault is not None:
        raise RunError(f"checkpoint: found {fault.found}, at '{fault.path}'; expected plain values. {fault.advice}")


def read_whole_checkpoint(path: Path) -> dict[str, Any]:
    """Return a checkpoint with Lightning's part.

    Nothing in the file is executed (`weights_only=True`); the tensors are on the CPU.

    Raises:
        CheckpointError: the file is torn or changed, as its checksums say, or no run of this version has written it.
    """
    # checkpoints/ in a run folder; a link may lead from one file of it to another.
    root = path.parent.parent if path.parent.name == RunFolder.CHECKPOINTS else path.parent
    name = path.relative_to(root)
    try:
        with open_file(root, name, MAX_FILE_BYTES) as file, zipfile.ZipFile(file) as archive:
            if sum(member.file_size for member in archive.infolist()) > os.fstat(file.fileno()).st_size:
                raise zipfile.BadZipFile("its members claim more than the file holds")
            # torch does not look at the checksums that it has written.
            torn = archive.testzip()
            if torn:
                raise zipfile.BadZipFile(f"its part {torn} has another checksum than when it was written")
        checkpoint = torch.load(located(root, name), map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    # Of bytes at random it may be any error.
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({_said(error)}); expected a complete file. Remove it, and resume the run folder."
        ) from error
    state: Any = checkpoint.get(STATE_KEY) if isinstance(checkpoint, dict) else None
    missing = [key for key in KEYS if not isinstance(state, dict) or key not in state]
    if missing:
        raise CheckpointError(
            f"{path} is not a checkpoint of mlotool: it has no '{STATE_KEY}.{missing[0]}'; expected one that this "
            "version has written. Name another one, or use the version that provenance.json beside it names."
        )
    if type(state["tick"]) is not int or state["tick"] < 0:
        raise CheckpointError(f"{path} has no valid number of ticks; expected a checkpoint that a run has written.")
    return checkpoint


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return our part of a checkpoint: program, schedule, random state, tick, metrics; see `read_whole_checkpoint`."""
    state: dict[str, Any] = read_whole_checkpoint(path)[STATE_KEY]
    return state


def load_program(program: Program, path: Path) -> dict[str, Any]:
    """Put the program into the state of a checkpoint, on the devices where its modules are; return our part of it.

    Raises:
        CheckpointError: it cannot be read, or is of another program.
    """
    state = read_checkpoint(path)
    with fitting(path):
        program.load_state_dict(state["program"])
    return state


@contextmanager
def fitting(path: Path, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Turn any error of what is inside, which puts a checkpoint's state into a program, into a CheckpointError.

    Args:
        path: of the checkpoint.
        overrides: `key=value`, with which the program was built.
    """
    try:
        yield
    except CheckpointError:
        raise
    # What a state lacks shows as an error of whatever takes it.
    except Exception as error:
        words = [word for word in overrides if word.startswith(("problems.", "data.", "decisions.", "hypergradient."))]
        what = " ".join([" with the override", *words]) if words else ""
        advice = "Leave it out, or run the recipe again with it." if words else "Put the code or it back."
        raise CheckpointError(
            f"{path} does not fit the problems of its config.yaml{what} ({_said(error)}). {advice}"
        ) from error


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
    return text if isinstance(error, MlotoolError) else f"{type(error).__name__}: {text}"


class AtomicCheckpointIO(TorchCheckpointIO):
    """How Lightning writes a checkpoint, for callbacks of the user's too.

    Args:
        is_writer: whether this rank writes; the others take part in what is gathered for it.
        folder: the run's own, which is not made again once it is gone; those of callbacks are made.
    """

    def __init__(self, is_writer: bool, folder: Path) -> None:
        self._is_writer, self._folder = is_writer, folder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write it in one piece."""
        if self._is_writer:
            with writing(Path(path)):
                Path(path).parent.mkdir(parents=Path(path).parent != self._folder, exist_ok=True)
            write_checkpoint(checkpoint, Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it."""
        if self._is_writer:
            super().remove_checkpoint(path)


class BestCheckpoint(Checkpoint):
    """Writes `best.ckpt` at the end of each round whose objective is better than all before; NaN never is.

    Not a ModelCheckpoint: one whose folder has been moved forgets what was best.

    Args:
        path: the file.
        monitor: the objective's key.
        mode: "min" or "max".
    """

    def __init__(self, path: Path, monitor: str, mode: str) -> None:
        self._path = path
        self._monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._value: float | None = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after a round, if it was the best."""
        if _is_cut(pl_module):
            return
        # A callback may have ended the run before the first evaluation.
        value = float(trainer.callback_metrics.get(self._monitor, math.nan))
        if not math.isnan(value) and (self._value is None or self._sign * value > self._sign * self._value):
            self._value = value
            trainer.save_checkpoint(self._path)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value."""
        return {"value": self._value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self._value = state_dict["value"]


class LastCheckpoint(Checkpoint):
    """Writes `last.ckpt`: before the first tick, at the first round's end, at any tick when it is time, and at the end.

    The end is the last tick, an early stop or a signal. A round may be long, so `Session` asks within it as well.

    Args:
        path: of `last.ckpt`.
        seconds_between: least time between two writes; more where they take more than a hundredth of the time.
        num_kept: of the last ones; from 2 on each is also `tick_<tick>.ckpt`.
        is_resumed: whether the state at the start lies there already.
        ranks: of which all write at the same moment, by rank 0's clock.
    """

    def __init__(self, path: Path, seconds_between: float, num_kept: int, *, is_resumed: bool, ranks: Ranks) -> None:
        self._ranks = ranks
        self._path = path
        self._seconds_between = self._pause = seconds_between
        self._num_kept = num_kept
        self._is_resumed = is_resumed
        self._is_first_round = not is_resumed
        # Tick of the last write at a round's end.
        self._round_written = -1
        self.due_at = float("inf")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write before the first tick: a run that fails in its first round has a good state too."""
        self.due_at = time.monotonic() + self._pause
        # A lazy module has no state yet that could be written: whoever resumes begins again.
        if not self._is_resumed and not any(map(is_lazy, pl_module.parameters())):
            self.write(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after a round, if it is time or the run has been told to stop."""
        is_asked = self._is_first_round or cast(Any, pl_module).interrupt.requested
        if not _is_cut(pl_module) and (self.is_due() or is_asked):
            self._write_round(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write after the last tick or an early stop; an error does not come here."""
        if not _is_cut(pl_module) and self._round_written != trainer.global_step:
            self._write_round(trainer)

    def is_due(self) -> bool:
        """Say whether it is time; every rank has to ask."""
        return self._ranks.first(time.monotonic() >= self.due_at)

    def write(self, trainer: Trainer) -> None:
        """Write now; every rank has to call it, for all of them have a part in it."""
        began = time.monotonic()
        trainer.save_checkpoint(self._path)
        if self._ranks.is_first and self._num_kept > 1:
            _keep_by_tick(self._path, trainer.global_step, self._num_kept)
        now = time.monotonic()
        self._pause = max(self._seconds_between, (now - began) / LARGEST_SHARE_OF_TIME)
        self.due_at = now + self._pause

    def take(self, path: Path) -> None:
        """Copy a checkpoint of the last tick to `last.ckpt`, before which a run may have been killed."""
        if path != self._path:
            with replacing(self._path) as temporary:
                shutil.copyfile(path, temporary)

    def _write_round(self, trainer: Trainer) -> None:
        self.write(trainer)
        self._round_written, self._is_first_round = trainer.global_step, False


def _is_cut(module: LightningModule) -> bool:
    """Say whether the round has ended before its last evaluation, so that it has no objective."""
    return bool(cast(Any, module).is_cut)


def _keep_by_tick(path: Path, tick: int, num_kept: int) -> None:
    """Give a checkpoint the name `tick_<tick>.ckpt` as well, and remove such names but the `num_kept` newest."""
    with replacing(path.with_name(f"tick_{tick}.ckpt")) as temporary:
        temporary.unlink()
        try:
            os.link(path, temporary)
        # Not every file system has links.
        except OSError:
            shutil.copyfile(path, temporary)
    for old in sorted(path.parent.glob("tick_*.ckpt"), key=_written_at)[:-num_kept]:
        old.unlink()


def newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints in the order of a fall-back: what was written last comes first."""
    return sorted(
        directory.glob("*.ckpt"), key=lambda path: (_written_at(path), path.name == RunFolder.LAST), reverse=True
    )


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns


def restore_callbacks(callbacks: list[Callback], checkpoint: Mapping[str, Any]) -> bool:
    """Take the callbacks' states back; return whether early stopping had ended the run."""
    states = checkpoint.get("callbacks", {})
    for callback in callbacks:
        if callback.state_key in states:
            callback.load_state_dict(states[callback.state_key])
    return any(
        isinstance(callback, EarlyStopping) and callback.stopping_reason is not EarlyStoppingReason.NOT_STOPPED
        for callback in callbacks
    )


def random_state() -> dict[str, Any]:
    """Return the states of torch's, CUDA's, numpy's and Python's global generators."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        **global_state(),
    }


def global_state() -> dict[str, Any]:
    """Return the states of numpy's and Python's global generators."""
    kind, keys, position, has_gauss, cached_gaussian = numpy.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys, dtype="int64")), position, has_gauss, cached_gaussian],
        "python": [version, torch.tensor(internal), gauss_next],
    }


def random_states(program: Program, ranks: Ranks, snapshots: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return the states of all ranks, by rank; for a checkpoint, which rank 0 writes.

    Beside those of the global generators there is the program's own. Recorded steps hold random states as well, the
    buffers of modules follow a rank's own samples until they are averaged, and so may what layer-parallel steps keep;
    all else in a program's state is the same on all ranks.

    Args:
        program: as it is on this rank.
        ranks: those of the run.
        snapshots: the schedule's look-ahead, by problem.
    """
    recorded = {name: problem.trajectory.state_dict()["steps"] for name, problem in program.problems.items()}
    state = {**random_state(), "program": program.random.state_dict()}
    state["steps"] = {
        name: [{key: step[key] for key in ("random", "buffers")} for step in _recorded(steps)]
        for name, steps in recorded.items()
    }
    if not ranks.is_first:
        modules = {name: problem.module.state_dict() for name, problem in program.problems.items()}
        state["buffers"] = _buffers(program, modules)
        state["snapshots"] = _buffers(program, {name: kept["module"] for name, kept in (snapshots or {}).items()})
        state["parallel"] = {
            name: problem.parallel.state_dict()
            for name, problem in program.problems.items()
            if problem.parallel is not None and problem.parallel.differs_by_rank
        }
    return ranks.gather(state)


def restore_random_states(states: list[dict[str, Any]], program: Program, ranks: Ranks) -> None:
    """Take this rank's state back; a rank that had none goes on as it was seeded.

    Args:
        states: what `random_states` returned.
        program: as it is on this rank; it gets its own random numbers back.
        ranks: those of the resumed run.
    """
    if ranks.rank < len(states):
        restore_random_state(states[ranks.rank])
        program.random.load_state_dict(states[ranks.rank]["program"])


def put_own(state: dict[str, Any], ranks: Ranks) -> None:
    """Put what this rank had for itself into our part of a checkpoint, in the place of what rank 0 has saved.

    These are the random states and buffers of recorded steps, the buffers now and in the schedule's look-ahead, and the
    states of some layer-parallel steps.
    """
    if ranks.is_first or ranks.rank >= len(state["random_states"]):
        return
    program, snapshots, of_rank = state["program"], state["schedule"]["snapshots"], state["random_states"][ranks.rank]
    for name, randoms in of_rank["steps"].items():
        for step, own in zip(_recorded(program[name]["trajectory"]["steps"]), randoms, strict=True):
            step.update(own)
        program[name]["module"].update(of_rank["buffers"][name])
    for name, parallel in of_rank["parallel"].items():
        program[name]["parallel"] = parallel
    for name, buffers in of_rank["snapshots"].items():
        snapshots[name]["module"].update(buffers)


def _recorded(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield recorded steps, and those that led to what they have read."""
    for step in steps:
        yield step
        for reading in step["readings"].values():
            yield from _recorded(reading["steps"])


def _buffers(program: Program, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the buffers in the state of each module."""
    names = {
        name: [key for key, _ in program.problems[name].module.named_buffers(remove_duplicate=False)]
        for name in modules
    }
    return {name: {key: modules[name][key] for key in keys if key in modules[name]} for name, keys in names.items()}


def restore_random_state(state: dict[str, Any]) -> None:
    """Take the states back; CUDA's only where the number of devices is the same."""
    restore_global_state(state)
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([value.cpu() for value in state["cuda"]])
    torch.set_rng_state(state["torch"].cpu())


def restore_global_state(state: dict[str, Any]) -> None:
    """Take the states of numpy's and Python's global generators back."""
    kind, keys, position, *others = state["numpy"]
    # numpy would take any, and read past the end.
    require(0 <= position <= len(keys), "random_states.numpy", position, "a position in its state", ADVICE)
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, *others))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss_next))
