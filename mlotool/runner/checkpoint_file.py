"""The file of a checkpoint, which may be a stranger's: what is checked before anything is made of it.

torch reads it with `weights_only=True`, which executes nothing; but it looks neither at the checksums that it has
written, nor at whether a tensor has the memory that it claims.
"""

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import CheckpointError, MlotoolError, RunError
from mlotool.core.plain_state import Plain, check_plain, is_dense
from mlotool.core.run_files import check_members, located, open_file, open_zip
from mlotool.core.user_code import explained
from mlotool.program import Schedule
from mlotool.runner.checkpoint_pickle import check_pickle

# Our part of a Lightning checkpoint.
STATE_KEY = "mlotool"
FOLDER = "checkpoints"
MAX_FILE_BYTES = 1 << 42
MAX_LIST_BYTES = 20_000_000
"""Of the zip file's list of members, a hundred for each tensor."""

MAX_PICKLE_BYTES, PICKLE_BYTES_A_MEMBER = 16_000_000, 1_000
"""Of what is no tensor: in all, and more for each tensor."""

MAX_NUMBER = 10**15
"""Of ticks, bytes and seconds."""

_KINDS: dict[str, type | tuple[type, ...]] = {
    "program": Mapping,
    "schedule": Mapping,
    "window": Mapping,
    "metrics": Mapping,
    "tick": int,
    "metrics_position": int,
    "training_s": (int, float),
    "random_states": list,
    "is_pending": bool,
}


def load_checked(path: Path) -> dict[str, Any]:
    """Return a checkpoint, whose tensors are on the CPU.

    Raises:
        CheckpointError: it is none of mlotool.
        Exception: it cannot be read; it may be any error.
        FileNotFoundError: there is none.
    """
    # checkpoints/ in a run folder; a link may lead from one file of it to another.
    root = path.parent.parent if path.parent.name == FOLDER else path.parent
    with open_file(root, path.relative_to(root), MAX_FILE_BYTES) as file, open_zip(file, MAX_LIST_BYTES) as archive:
        num_bytes = os.fstat(file.fileno()).st_size
        check_members(archive, num_bytes)
        if not any(each.endswith("/data.pkl") for each in archive.namelist()):
            raise zipfile.BadZipFile("it is a zip file of something else than torch.save")
        pickles = [each for each in archive.infolist() if each.filename.endswith(".pkl")]
        num_pickled = sum(each.file_size for each in pickles)
        num_members = len(archive.infolist())
        limit = MAX_PICKLE_BYTES + PICKLE_BYTES_A_MEMBER * num_members
        if num_pickled > limit:
            raise zipfile.BadZipFile(f"it has {num_pickled} bytes beside its tensors, and at most {limit} are read")
        for each in pickles:
            check_pickle(archive.read(each), num_members)
    checkpoint = torch.load(located(root, path.relative_to(root)), map_location="cpu", weights_only=True)
    _check_memory(checkpoint, num_bytes)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(STATE_KEY), dict):
        raise CheckpointError(
            f"{path} is not a checkpoint of mlotool: it has no '{STATE_KEY}' entry; expected one that a run wrote. "
            "Name the run folder whose checkpoints/ holds it."
        )
    state = checkpoint[STATE_KEY]
    for key, kind in _KINDS.items():
        value = state.get(key)
        is_wrong = isinstance(value, int | float) and not 0 <= value < MAX_NUMBER
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool) or is_wrong:
            found = str(value)[:60] if isinstance(value, str | int | float) else f"a {type(value).__name__}"
            raise CheckpointError(
                f"{path} has a wrong '{key}' in it ({found!r}); expected a checkpoint as a run of this version writes "
                "it. Remove it, and name the run folder for the one before."
            )
    _check_metrics(path, state["metrics"])
    return checkpoint


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn any error of what is inside, which puts a checkpoint's state into a program, into a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    # What a state lacks shows as an error of whatever takes it.
    except Exception as error:
        raise CheckpointError(
            f"{path} does not fit the problems of its config.yaml ({_said(error)}); expected the "
            "checkpoint that this run wrote, by the same code. Put it back, or the code as it was."
        ) from error


@contextmanager
def going_on(path: Path | None, schedule: Schedule) -> Iterator[None]:
    """Put an error in the first ticks after a resume, which nobody's code has made, down to the state that was read.

    Its form was looked at, but not all that algorithms have made of it.

    Args:
        path: of the checkpoint; None where a run begins.
        schedule: steps the program.
    """
    last = schedule.num_ticks + schedule.cycle_length()
    try:
        yield
    except MlotoolError:
        raise
    except Exception as error:
        if path is None or schedule.num_ticks > last or explained(error) is not None:
            raise
        raise CheckpointError(
            f"{path} cannot be gone on from ({_said(error)}); expected the state that this run wrote, by the same "
            "code. Put it back, or go on from another checkpoint of the folder."
        ) from error


def unreadable(path: Path, reason: str) -> str:
    """Return what is said of a checkpoint that cannot be read."""
    return (
        f"{path} cannot be read ({reason.rstrip('.')}); expected a whole checkpoint. "
        "Remove it and go on with resume=<the run folder>, which takes the one before."
    )


def check_writable(checkpoint: Mapping[str, Any]) -> None:
    """Refuse a checkpoint that could not be read again.

    Raises:
        RunError: somebody's code keeps what no checkpoint holds.
    """
    plain, state = Plain(), checkpoint[STATE_KEY]
    check_plain(state["program"], plain=plain)
    fault = plain.fault({**checkpoint, STATE_KEY: {**state, "program": None}})
    if fault is not None:
        raise RunError(f"checkpoint: found {fault.found}, at '{fault.path}'; expected plain values. {fault.advice}")


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
    return text if isinstance(error, MlotoolError) else f"{type(error).__name__}: {text}"


def _check_metrics(path: Path, metrics: Mapping[Any, Any]) -> None:
    if not all(isinstance(key, str) and type(value) in (int, float) for key, value in metrics.items()):
        raise CheckpointError(
            f"{path} has wrong 'metrics' in it; expected a number for each key, as a run writes them. Remove it, and "
            "name the run folder for the one before."
        )


def _check_memory(checkpoint: Any, num_bytes: int) -> None:
    """Refuse what no writer puts into a checkpoint, and tensors that claim memory which the file does not have."""
    fault = Plain().fault(checkpoint)
    if fault is not None:
        raise ValueError(f"it holds {fault.found}, at '{fault.path}'")
    storages: dict[int, int] = {}
    for tensor in tree_leaves(checkpoint):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
            if tensor.device.type != "cpu" or not is_dense(tensor):
                raise ValueError(f"it has a tensor on {tensor.device} with the strides {tensor.stride()}")
    claimed = sum(storages.values())
    if claimed > num_bytes:
        raise ValueError(f"its tensors claim {claimed} bytes, and the file has {num_bytes}")
