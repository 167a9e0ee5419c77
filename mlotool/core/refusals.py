"""Which errors of a constructor say that its settings make nothing, and which that its code or its call is wrong."""

from mlotool.core.advice import is_out_of_memory
from mlotool.core.errors import MlotoolError

_KINDS = (ValueError, RuntimeError, AssertionError)
_MISTAKES = (MlotoolError, NotImplementedError, RecursionError, UnicodeError)


def is_refusal(error: BaseException) -> bool:
    """Say whether an error is one by which constructors refuse values: the assertions of torch's are some as well.

    Example:
        >>> is_refusal(ValueError("in_channels must be divisible by groups")), is_refusal(TypeError("gruops"))
        (True, False)
    """
    return isinstance(error, _KINDS) and not isinstance(error, _MISTAKES) and not is_out_of_memory(error)
