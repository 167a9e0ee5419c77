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

from mlotool.core.errors import CheckpointError, MlotoolError
from mlotool.core.run_files import located, open_file
from mlotool.core.zip_files import check_members, open_zip
from mlotool.runner.checkpoint_pickle import check_pickle

# Our part of a Lightning checkpoint.
STATE_KEY = "mlotool"
FOLDER = "checkpoints"
MAX_FILE_BYTES = 1 << 42
MAX_LIST_BYTES = 20_000_000
"""Of the zip file's list of members, a hundred for each tensor."""

MAX_PICKLE_BYTES = 16_000_000
"""Of what is no tensor; a hundred for each tensor too."""

MAX_REPEATED = 16
"""How often the same memory may stand in a checkpoint: shared parameters, Lightning's copy of the modules' state."""

MAX_NUMBER = 10**15
"""Of ticks, bytes and seconds."""

MAX_VALUES, MAX_DEPTH = 500_000, 50
"""In a checkpoint, what stands there several times counted as often: a few lists in each other may be endless."""

_SPARE_BYTES = 64_000_000
_KINDS: dict[str, type | tuple[type, ...]] = {
    "program": Mapping,
    "schedule": Mapping,
    "window": Mapping,
    "metrics": Mapping,
    "tick": int,
    "metrics_position": int,
    "training_s": (int, float),
    "random_states": list,
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
        if num_pickled > MAX_PICKLE_BYTES:
            raise zipfile.BadZipFile(f"it has {num_pickled} bytes beside its tensors, and at most {MAX_PICKLE_BYTES}")
        for each in pickles:
            check_pickle(archive.read(each), len(archive.infolist()))
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
        if not isinstance(value, kind) or isinstance(value, bool) or is_wrong:
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
        text = " ".join(str(error).split())[:300].rstrip(".") or "no reason given"
        reason = text if isinstance(error, MlotoolError) else f"{type(error).__name__}: {text}"
        raise CheckpointError(
            f"{path} does not fit the problems of its config.yaml ({reason}); expected the "
            "checkpoint that this run wrote, by the same code. Put it back, or the code as it was."
        ) from error


def unreadable(path: Path, reason: str) -> str:
    """Return what is said of a checkpoint that cannot be read."""
    return (
        f"{path} cannot be read ({reason.rstrip('.')}); expected a whole checkpoint. "
        "Remove it and go on with resume=<the run folder>, which takes the one before."
    )


def _check_metrics(path: Path, metrics: Mapping[Any, Any]) -> None:
    if not all(isinstance(key, str) and type(value) in (int, float) for key, value in metrics.items()):
        raise CheckpointError(
            f"{path} has wrong 'metrics' in it; expected a number for each key, as a run writes them. Remove it, and "
            "name the run folder for the one before."
        )


def _check_memory(checkpoint: Any, num_bytes: int) -> None:
    """Refuse tensors that claim memory which the file does not have, and those that a copy would blow up."""
    storages: dict[int, int] = {}
    total = 0
    for tensor in _tensors(checkpoint):
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise ValueError(f"it has a tensor of another kind: {tensor.device}, {tensor.layout}")
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
        total += tensor.numel() * tensor.element_size()
    claimed = sum(storages.values())
    if claimed > num_bytes or total > MAX_REPEATED * num_bytes + _SPARE_BYTES:
        raise ValueError(f"its tensors claim {max(claimed, total)} bytes, and the file has {num_bytes}")


def _tensors(node: Any) -> Iterator[Tensor]:
    """Yield all tensors of a tree; one that stands in it several times as often."""
    waiting, num_values = [(node, 0)], 0
    while waiting:
        each, depth = waiting.pop()
        num_values += 1
        if num_values > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError(f"it has more than {MAX_VALUES} values, or more than {MAX_DEPTH} levels")
        if isinstance(each, Tensor):
            yield each
            continue
        if isinstance(each, Mapping):
            each = list(each.values())
        if isinstance(each, list | tuple | set):
            waiting += [(inner, depth + 1) for inner in each]
