"""Where a module keeps its parameters and buffers, so that other tensors can take their places for a call.

`torch.func.functional_call` does the same by name, and looks the names up in each call; with small modules that look-up
costs as much as a layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

Slot = tuple[dict[str, Any], str]
"""A dictionary of a submodule (`_parameters` or `_buffers`) and the key in it."""


class Slots:
    """The slots of some of a module's parameters, in a fixed order, and of all its buffers.

    A tensor with several names (tied weights) has several slots.

    Args:
        module: its structure must stay as it is.
        names: of the parameters, in the order in which tensors will be put there.

    Attributes:
        has_buffers: whether the module has any.

    Raises:
        KeyError: the module has no parameter of such a name.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> slots = Slots(layer, ["weight"])
        >>> own = slots.put([torch.full((1, 1), 3.0)])
        >>> layer(torch.ones(1, 1))
        tensor([[3.]])
        >>> slots.put_back(own)
    """

    __slots__ = ("_all", "_buffers", "_targets", "has_buffers", "module", "names")

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        parameters = slots_of(module, dict(module.named_parameters()), "_parameters")
        self.module = module
        self.names = tuple(names)
        unknown = [name for name in self.names if name not in parameters]
        if unknown:
            raise KeyError(_unknown(repr(unknown[0]), parameters))
        self._targets = [
            (holder, attribute, position)
            for position, name in enumerate(self.names)
            for holder, attribute in parameters[name]
        ]
        self._buffers = list(slots_of(module, dict(module.named_buffers()), "_buffers").values())
        self.has_buffers = bool(self._buffers)
        positions = {name: position for position, name in enumerate(self.names)}
        self._all = [(name, positions.get(name), *places[0]) for name, places in parameters.items()]

    def put(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Put one tensor a name into the slots; return what was there, for `put_back`."""
        found = [holder[attribute] for holder, attribute, _ in self._targets]
        for holder, attribute, position in self._targets:
            holder[attribute] = tensors[position]
        return found

    def put_back(self, found: Sequence[Any]) -> None:
        """Take back what `put` returned."""
        for (holder, attribute, _), tensor in zip(self._targets, found):  # noqa: B905 - of one length, and hot
            holder[attribute] = tensor

    def buffers(self) -> list[Tensor]:
        """Return the buffers that are there now, each once."""
        return [places[0][0][places[0][1]] for places in self._buffers]

    def put_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Put tensors into the slots of the buffers, in the order of `buffers`."""
        for places, tensor in zip(self._buffers, buffers, strict=True):
            for holder, attribute in places:
                holder[attribute] = tensor

    def named_tensors(self, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters of the module by name, with `tensors` for those that have a slot here."""
        for name, position, holder, attribute in self._all:
            yield name, holder[attribute] if position is None else tensors[position]


class Places:
    """All slots of a module by name, for callers that fill others each time.

    Args:
        module: its structure must stay as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = slots_of(module, dict(module.named_parameters()), "_parameters")
        self._buffers = slots_of(module, dict(module.named_buffers()), "_buffers")

    def copy_buffers(self) -> dict[str, Tensor]:
        """Return copies of the current buffers by name."""
        return {name: places[0][0][places[0][1]].clone() for name, places in self._buffers.items()}

    def fill(self, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> Callable[[], None]:
        """Put tensors into the places of those names; return what puts all back as it was.

        A module may assign a new tensor to a buffer; once all is put back, `buffers` holds that one.

        Raises:
            KeyError: the module has no parameter or buffer of such a name; nothing has changed.
        """
        try:
            moves = [(place, tensor) for name, tensor in parameters.items() for place in self._parameters[name]]
        except KeyError as error:
            raise KeyError(_unknown(error, self._parameters)) from None
        moves += [(place, tensor) for name, tensor in buffers.items() for place in self._buffers[name]]
        saved = [(holder, attribute, holder[attribute]) for (holder, attribute), _ in moves]
        for (holder, attribute), tensor in moves:
            holder[attribute] = tensor

        def restore() -> None:
            for name in buffers:
                holder, attribute = self._buffers[name][0]
                buffers[name] = holder[attribute]
            for holder, attribute, tensor in saved:
                holder[attribute] = tensor

        return restore


def slots_of(module: nn.Module, tensors: Mapping[str, Tensor], kind: str) -> dict[str, list[Slot]]:
    """Return, by name, the slots of `tensors`.

    Args:
        module: holds them.
        tensors: by name, each once.
        kind: "_parameters" or "_buffers".
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    slots: dict[str, list[Slot]] = {name: [] for name in tensors}
    for child in module.modules():
        holder = getattr(child, kind)
        for attribute, tensor in holder.items():
            if id(tensor) in names:
                slots[names[id(tensor)]].append((holder, attribute))
    return slots


def _unknown(name: object, known: Iterable[str]) -> str:
    return f"found {name} among parameters that are given; expected names of {', '.join(known)}"
