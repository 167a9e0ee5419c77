"""What is refused though torch computes something."""


def lacking(operator: str) -> NotImplementedError:
    """Return the error that torch raises of an operator without forward mode."""
    return NotImplementedError(f"Trying to use forward AD with {operator} that does not support it")
