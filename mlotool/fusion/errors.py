"""Why members are not trained as one."""


class NotFusedError(Exception):
    """Members cannot be trained as one program.

    Args:
        reason: why, as the end of a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def reason_of(error: Exception) -> str:
    """Return why an error keeps members from being one program.

    Args:
        error: a NotFusedError, or one that nobody has foreseen.

    Example:
        >>> reason_of(NotFusedError("they have different problems")), reason_of(KeyError("a"))
        ('they have different problems', "KeyError: 'a'")
    """
    if isinstance(error, NotFusedError):
        return error.reason
    return f"{type(error).__name__}: {error}".splitlines()[0]
