"""What a block is handed besides tensors, which is to stay as it is: the block is evaluated on it again."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from mlotool.core.described import kind_of
from mlotool.core.errors import ConfigError
from mlotool.core.object_state import IteratorFoundError, ObjectState
from mlotool.core.repeatable import name_of

_REFUSAL = (
    "remat: found a block, {block}, whose argument {place}, {kind}, {what}; expected arguments that stay as they are, "
    "since the block is evaluated on them again. Hand over no cache (use_cache=False of Hugging Face's models), and "
    "let the block return what it would add to an argument."
)
_CHANGED = "is changed by the evaluation of the block"
_LATER = "has changed before the block was evaluated again"
_USED_UP = "is an iterator, or holds one, so that an evaluation uses it up"

_STAYS = (Tensor, str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.layout)


class Handed:
    """The arguments of a call of a block, of which it keeps no tensors.

    Args:
        block: that is called.
        inputs: positional arguments.
        options: arguments by name.

    Raises:
        ConfigError: there is an iterator among them.

    Example:
        >>> handed = Handed(len, ([],), {})
        >>> with handed.left_alone(([],), {}):
        ...     pass  # nothing to refuse
    """

    def __init__(self, block: Callable[..., Any], inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._block = block
        found = {
            place: [each for each in tree_leaves(value) if not isinstance(each, _STAYS)]
            for place, value in _places(inputs, options)
        }
        self._objects = {place: objects for place, objects in found.items() if objects}
        self._states = {place: self._state(place) for place in self._objects}

    @contextmanager
    def left_alone(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[None]:
        """Refuse an evaluation that changes its arguments.

        Args:
            inputs: as the evaluation is given them: copies of their containers.
            options: likewise.
        """
        before = {place: tree_flatten(value) for place, value in _places(inputs, options)}
        yield
        self._compare(_CHANGED)
        for place, value in _places(inputs, options):
            (old, old_form), (new, new_form) = before[place], tree_flatten(value)
            if old_form != new_form or any(a is not b for a, b in zip(old, new, strict=True)):
                self._refuse(place, value, _CHANGED)

    def check_again(self) -> None:
        """Refuse objects that are not what they were in the first evaluation."""
        self._compare(_LATER)

    def _compare(self, what: str) -> None:
        for place, before in self._states.items():
            if not before.is_same(self._state(place)):
                self._refuse(place, self._objects[place][0], what)

    def _state(self, place: str) -> ObjectState:
        try:
            return ObjectState(self._objects[place])
        except IteratorFoundError:
            self._refuse(place, self._objects[place][0], _USED_UP)
            raise

    def _refuse(self, place: str, value: Any, what: str) -> None:
        raise ConfigError(
            _REFUSAL.format(block=name_of(self._block), place=place, kind=kind_of(value), what=what)
        ) from None


def _places(inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"number {number}", value) for number, value in enumerate(inputs, 1))
    yield from ((f"'{name}'", value) for name, value in options.items())
