"""Why members are not trained as one."""


class NotFusedError(Exception):
    """Members cannot be trained as one program.

    Args:
        reason: why, as the end of a sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
