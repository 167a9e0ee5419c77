"""Who reads the messages: the user of a command line, or one of Python."""

from collections.abc import Iterator
from contextlib import contextmanager

_is_command_line = False


@contextmanager
def command_line() -> Iterator[None]:
    """Let messages say what to write on the command line, not in Python."""
    global _is_command_line
    was, _is_command_line = _is_command_line, True
    try:
        yield
    finally:
        _is_command_line = was


def is_command_line() -> bool:
    """Say whether messages go to the user of a command line."""
    return _is_command_line
