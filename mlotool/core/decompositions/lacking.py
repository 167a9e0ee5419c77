"""What is refused though torch computes something."""


def lacking(operator: str) -> NotImplementedError:
    """Return the error that torch raises of an operator without forward mode."""
    return NotImplementedError(f"Trying to use forward AD with {operator} that does not support it")


def lacking_twice(operator: str) -> NotImplementedError:
    """Return the error that torch raises of an operator without a second derivative."""
    return NotImplementedError(f"the derivative for '{operator}' is not implemented")
