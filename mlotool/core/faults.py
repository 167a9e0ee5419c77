"""What is wrong with somebody's input, in a message of bounded size: a small file can have very many faults."""

from collections.abc import Sequence

MAX_FAULTS = 20
MAX_LENGTH = 1_000
MAX_SHOWN = 100
_TAIL = 200
_MAX_LINES = 60


def fault_list(faults: Sequence[str]) -> str:
    """Return the first faults, one a line, and how many more there are.

    Example:
        >>> print(fault_list([f"fault {index}" for index in range(22)]).splitlines()[-1])
        ... and 2 more
    """
    lines = [shortened(fault) for fault in faults[:MAX_FAULTS]]
    return "\n".join([*lines, *([f"... and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else [])])


def shortened(line: str) -> str:
    """Return a line without its middle where it is long: its beginning says what was found, its end what to do."""
    return line if len(line) <= MAX_LENGTH else f"{line[: MAX_LENGTH - _TAIL]} [...] {line[-_TAIL:]}"


def shown(value: object) -> str:
    """Return a value as Python writes it, cut where it is long: for what a message quotes, beside what it says of it.

    Example:
        >>> shown("stages.*"), len(shown("x" * 10_000))
        ("'stages.*'", 103)
    """
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def bounded(message: str) -> str:
    """Return a message of any origin, with its long lines and its number of lines cut down."""
    lines = message.split("\n")
    surplus = [f"... and {len(lines) - _MAX_LINES} lines more"] if len(lines) > _MAX_LINES else []
    return "\n".join([*map(shortened, lines[:_MAX_LINES]), *surplus])
