"""The arrays of a .npz file of a run folder, within limits that are checked before anything is unpacked."""

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlotool.core.errors import RunFileError
from mlotool.core.run_files import open_file, open_zip

MAX_FILE_BYTES = 200_000_000
MAX_ARRAY_BYTES = 400_000_000
"""Of the arrays that are read, unpacked: ten million samples."""

MAX_NAMES_BYTES = 100_000
"""Of the list of arrays."""

_NUMBERS = "biuf"


def read_arrays(run_dir: Path, name: str, needed: Collection[str], wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return some arrays of a .npz file; none where it lacks one that is needed. Nothing in it is executed.

    Args:
        run_dir: the run folder.
        name: of the file in it.
        needed: arrays that it must have.
        wanted: arrays that are taken where it has them.

    Raises:
        RunFileError: it is none of a run's files, or its arrays are no numbers or too large.
    """
    try:
        with open_file(run_dir, name, MAX_FILE_BYTES) as file, open_zip(file, MAX_NAMES_BYTES) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
            if not set(needed) <= set(sizes):
                return {}
            names = [each for each in (*needed, *wanted) if each in sizes]
            total = sum(sizes[each] for each in names)
            if total > MAX_ARRAY_BYTES:
                raise ValueError(f"its arrays have {total} bytes, and at most {MAX_ARRAY_BYTES} are read")
            return {each: _read_array(archive, each) for each in names}
    except RunFileError:
        raise
    # Of bytes at random it may be any error: zlib's, and those of Python's parser, which numpy reads headers with.
    except Exception as error:
        raise RunFileError(
            f"{run_dir / name}: found what cannot be drawn ({error}); expected the arrays that a run writes. Remove it."
        ) from error


def _read_array(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"'{name}' has version {version} of the format")
        shape, _, dtype = readers[version](member)
        # Before numpy makes room for what the header claims.
        num = int(np.prod([int(each) for each in shape], dtype=object))
        if dtype.kind not in _NUMBERS or num < 0 or num * dtype.itemsize > info.file_size:
            raise ValueError(f"'{name}' claims {num} values of type {str(dtype)[:40]} in {info.file_size} bytes")
    with archive.open(info) as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
    return array
