"""The pickle in a checkpoint, which may be a stranger's: looked through before torch makes anything of it.

torch executes nothing of it (`weights_only=True`), but a few bytes may ask it for all memory (`bytearray(10**11)`), or
for hours (keys of a dict that all have the same hash). So each operation is looked at, and nothing is built: a stack
holds the kind of each value, as `pickletools` names it.
"""

import pickletools
from typing import Any

from mlotool.core.plain_state import MAX_KEY_BITS, MAX_PLAIN, PLAIN_A_TENSOR

OPERATIONS_A_VALUE = 4
"""At most, as torch writes the values that a checkpoint can hold."""

_MARK, _DICT = pickletools.markobject, pickletools.pydict
_NOTHING, _DICT_ALONE = "()", "(dict,)"
_KEYS = (pickletools.pyunicode, pickletools.pyint, pickletools.pybool, pickletools.pyfloat, pickletools.pynone)
_OPERATIONS = frozenset(
    (
        *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID"),
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINUNICODE", "SHORT_BINSTRING", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
        *("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
        *("APPEND", "APPENDS", "SETITEM", "SETITEMS"),
    )
)
"""What torch writes."""

_DICTS = {"collections OrderedDict": (_NOTHING,), "collections Counter": (_NOTHING, _DICT_ALONE)}
"""With the arguments with which they are called; Counter is one of a scheduler's milestones."""

_CALLED = (
    *("torch device", "torch._utils _rebuild_parameter"),
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"),
)
"""What may be called besides; what is asked for and not called are torch's types alone."""


def check_pickle(content: bytes, num_members: int) -> None:
    """Refuse a pickle that is none of a checkpoint's.

    Args:
        content: the pickle.
        num_members: of the zip file in which it is, one for each tensor.

    Raises:
        ValueError: it calls what a checkpoint does not, has keys that may all have the same hash, or is too long.
    """
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    limit = OPERATIONS_A_VALUE * (MAX_PLAIN + PLAIN_A_TENSOR * num_members)
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if count == limit:
            raise ValueError(f"its pickle has more than {limit} operations")
        if operation.name not in _OPERATIONS:
            raise ValueError(f"it has the operation {operation.name}, which torch does not write")
        if operation.name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif operation.name.endswith("GET"):
            stack.append(memo[argument])
        else:
            stack += _made(operation, argument, _taken(stack, operation.stack_before))


def _taken(stack: list[Any], before: list[Any]) -> list[Any]:
    """Take from the stack what an operation takes, and return it without a mark."""
    place, num_below = len(stack), len(before)
    if _MARK in before:
        num_below = before.index(_MARK)
        place = max((index for index in range(len(stack) - 1, -1, -1) if stack[index] is _MARK), default=-1)
    taken = [each for each in stack[max(place - num_below, 0) :] if each is not _MARK]
    if place < num_below or len(taken) < num_below or _MARK in stack[place - num_below : place]:
        raise ValueError("it takes more values than it has")
    del stack[place - num_below :]
    return taken


def _made(operation: Any, argument: Any, taken: list[Any]) -> list[Any]:
    """Return the kinds of what an operation puts onto the stack."""
    name = operation.name
    if name.startswith("SETITEM") and not all(kind in _KEYS for kind in taken[1::2]):
        raise ValueError("it has keys that are neither texts nor numbers of 64 bits")
    if name == "LONG1" and argument.bit_length() > MAX_KEY_BITS:
        return [pickletools.anyobject]
    if name == "EMPTY_TUPLE" or (name == "TUPLE" and not taken):
        return [_NOTHING]
    if name == "TUPLE1" and taken == [_DICT]:
        return [_DICT_ALONE]
    if name == "GLOBAL":
        return [_global(argument)]
    if name == "REDUCE":
        return [_result(*taken)]
    if name == "BUILD":
        if taken[0] is not _DICT:
            raise ValueError("it sets the state of what is no dict")
        return [_DICT]
    found: list[Any] = operation.stack_after
    return found


def _result(function: Any, arguments: Any) -> Any:
    if function in _CALLED:
        return pickletools.anyobject
    if arguments not in _DICTS.get(function, ()):
        raise ValueError(f"it calls {str(function)[:60]!r} as a checkpoint does not")
    return _DICT


def _global(name: str) -> str:
    module, _, attribute = name.partition(" ")
    is_type = module in ("torch", "torch.storage") and (attribute.endswith("Storage") or attribute.islower())
    if name not in _CALLED and name not in _DICTS and not is_type:
        raise ValueError(f"it asks for {name[:60]!r}, which a checkpoint does not")
    return name
