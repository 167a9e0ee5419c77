"""The pickle in a checkpoint, which may be a stranger's: looked through before torch makes anything of it.

torch executes nothing of it (`weights_only=True`), but a few bytes may ask it for all memory (`bytearray(10**11)`), or
for hours (keys of a dict that all have the same hash). So each operation is looked at, and nothing is built.
"""

import pickletools
from typing import Any

MAX_OPERATIONS, MAX_OPERATIONS_A_MEMBER = 200_000, 100
"""A tensor takes about twenty-five, and is a member of its own of the zip file; torch takes a second for a million."""

_KEY, _DICT, _NOTHING, _DICT_ALONE, _MARK, _OTHER = "key", "dict", "()", "(dict,)", "mark", "other"
_CALLED = {
    "collections OrderedDict": (_NOTHING,),
    # Of a scheduler's milestones.
    "collections Counter": (_NOTHING, _DICT_ALONE),
    "_codecs encode": (_OTHER,),
    "torch Size": (_OTHER,),
    "torch device": (_OTHER,),
    "torch._utils _rebuild_tensor_v2": (_OTHER,),
    "torch._utils _rebuild_tensor_v3": (_OTHER,),
    "torch._utils _rebuild_parameter": (_OTHER,),
}
"""What may be called, and with which arguments; what is asked for beside are torch's types alone."""

_LEAVES = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE"), _KEY),
    **dict.fromkeys(("BINFLOAT", "SHORT_BINSTRING", "EMPTY_LIST"), _OTHER),
    "EMPTY_DICT": _DICT,
    "EMPTY_TUPLE": _NOTHING,
}
_MAX_KEY_BITS = 63
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def check_pickle(content: bytes, num_members: int) -> None:
    """Refuse a pickle that is none of a checkpoint's.

    Args:
        content: the pickle.
        num_members: of the zip file in which it is.

    Raises:
        ValueError: it calls what a checkpoint does not, has other keys than texts and numbers, or is too long.
    """
    machine, limit = _Machine(), MAX_OPERATIONS + MAX_OPERATIONS_A_MEMBER * num_members
    for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
        if count == limit:
            raise ValueError(f"its pickle has more than {limit} operations")
        machine.step(operation.name, argument)


class _Machine:
    """The stack of a pickle, with the kind of each value in its place."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._memo: dict[int, str] = {}

    def step(self, name: str, argument: Any) -> None:
        """Take one operation in."""
        stack = self._stack
        if name in _LEAVES:
            stack.append(_LEAVES[name])
        elif name == "LONG1":
            stack.append(_KEY if argument.bit_length() <= _MAX_KEY_BITS else _OTHER)
        elif name == "GLOBAL":
            stack.append(_global(argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            kinds = self._pop(_TUPLES[name])
            stack.append(_DICT_ALONE if kinds == [_DICT] else _OTHER)
        elif name == "TUPLE":
            stack.append(_OTHER if self._pop_mark() else _NOTHING)
        elif name == "BINPERSID":
            stack[-1] = _OTHER
        elif name == "REDUCE":
            self._call(*self._pop(2))
        elif name == "APPEND":
            self._pop(1)
        elif name == "BUILD":
            if self._pop(2)[0] != _DICT:
                raise ValueError("it sets the state of what is no dict")
            stack.append(_DICT)
        elif name == "APPENDS":
            self._pop_mark()
        elif name == "SETITEM":
            _check_keys(self._pop(2)[:1])
        elif name == "SETITEMS":
            _check_keys(self._pop_mark()[::2])
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"it has the operation {name}, which torch does not write")

    def _call(self, function: str, arguments: str) -> None:
        if arguments not in _CALLED.get(function, ()):
            raise ValueError(f"it calls {function[:60]!r} as a checkpoint does not")
        self._stack.append(_DICT if function.startswith("collections") else _OTHER)

    def _pop(self, count: int) -> list[str]:
        kinds = self._stack[-count:]
        if len(kinds) < count or _MARK in kinds:
            raise ValueError("it takes more values than it has")
        del self._stack[-count:]
        return kinds

    def _pop_mark(self) -> list[str]:
        kinds: list[str] = []
        while (kind := self._stack.pop()) != _MARK:
            kinds.append(kind)
        return kinds[::-1]


def _global(name: str) -> str:
    module, _, attribute = name.partition(" ")
    is_type = module == "torch" and (attribute.endswith("Storage") or attribute.islower())
    if name not in _CALLED and not is_type:
        raise ValueError(f"it asks for {name[:60]!r}, which a checkpoint does not")
    return name


def _check_keys(kinds: list[str]) -> None:
    if not all(kind == _KEY for kind in kinds):
        raise ValueError("it has keys that are neither texts nor numbers of 64 bits")
