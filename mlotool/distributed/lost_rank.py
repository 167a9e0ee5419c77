"""What is said of a process that is gone."""

import re
from typing import Any

from mlotool.core.errors import MlotoolError, RunError

_SIGNS = re.compile(r"connect|peer|socket|broken pipe|remote process|timed? ?out", re.IGNORECASE)
"""What gloo, NCCL and the store of torch.distributed say of a process that no longer answers."""


class naming_the_lost:  # noqa: N801 - a context; one of `contextlib` costs more than what it watches
    """Turns what torch says of a process that is gone into what a user can do.

    Args:
        word: what the processes have: "rank" or "stage".
        own: the number of this one.
        other: of the one that it waits for; None where it waits for all. Then only an error that speaks of a
            connection is taken for a lost process.

    Example:
        >>> with naming_the_lost("stage", 0, 1):
        ...     raise RuntimeError("Connection closed by peer. More of it")
        Traceback (most recent call last):
            ...
        mlotool.core.errors.RunError: Stage 0 has lost the process of stage 1 (Connection closed by peer); expected ...
    """

    def __init__(self, word: str, own: int, other: int | None = None) -> None:
        self._word, self._own, self._other = word, own, other

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, MlotoolError):
            return
        if self._other is None and not _SIGNS.search(str(error)):
            return
        other = f"another {self._word}" if self._other is None else f"{self._word} {self._other}"
        raise RunError(
            f"{self._word.capitalize()} {self._own} has lost the process of {other} "
            f"({str(error).split('. ')[0]}); expected it to stay until the run ends. Look at what that process "
            "has said, and go on with resume=auto."
        ) from error
