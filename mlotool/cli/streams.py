"""Stdout and stderr: whatever becomes of what a command says, it does its work."""

import errno
import io
import os
import sys
from typing import TYPE_CHECKING

from mlotool.core.errors import WriteError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_NUMBERS = {"stdout": 1, "stderr": 2}


class _Lasting(io.FileIO):
    """A stream that loses what nobody takes: its reader (`| head`) has gone, or its disk is full.

    Attributes:
        fault: the first error of the system that was more than a reader who has gone.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.fault: OSError | None = None

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or forget."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EPIPE:
                self.fault = self.fault or error
            return memoryview(data).nbytes


def open_streams() -> None:
    """Put streams in the place of stdout and stderr that never raise; to be called once, as a process begins.

    One that is closed (`>&-`) leads to nowhere, and its number is taken: the next file would be given it, and what
    libraries print. Characters that the terminal's encoding does not have are written as escapes.
    """
    for name, number in _NUMBERS.items():
        given = getattr(sys, name)
        if given is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        raw = _Lasting(number)
        encoding = "utf-8" if given is None else given.encoding
        is_by_line = raw.isatty() or name == "stderr"
        text = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=is_by_line
        )
        setattr(sys, name, text)


def check_stdout() -> None:
    """See that what was written to stdout has arrived, as far as somebody wanted it.

    Raises:
        WriteError: it could not be written; all the rest is done.
    """
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Lasting) and raw.fault is not None:
        raise WriteError(
            f"stdout: cannot be written ({raw.fault.strerror}); expected a place that takes what is printed. "
            "Some of that is lost, and nothing else; print to another disk."
        )
