"""The folder of the kit as one file, to bring it from machine to machine: figures, pages, and runs that may go on."""

import tarfile
from pathlib import Path

RUN_FILES = ("config.yaml", "summary.json", "metrics.csv", "provenance.json", "last.ckpt", "best.ckpt")
"""Of a run, what `resume=` needs."""


def pack_state(folder: Path, file: Path) -> None:
    """Write a tar file of what the next call needs."""
    part = file.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            is_top = path.parent == folder and path.suffix in (".json", ".html")
            if path.is_file() and (is_top or path.name in RUN_FILES):
                archive.add(path, path.relative_to(folder))
    part.replace(file)


def unpack_state(file: Path, folder: Path) -> None:
    """Put what an earlier call has left into the folder; a file that is not there yet is nothing."""
    if file.is_file():
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
