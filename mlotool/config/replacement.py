"""What a change of `_target_` drops: the settings of the target before belong to that one alone.

Plain dicts and lists; composition asks with Hydra's layers, completion with its own.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlotool.config.defaults import choices_in, full_address
from mlotool.config.schema import OPTION_GROUPS

TARGET = "_target_"
Dropped = dict[str, tuple[str, ...]]
"""Places of a layer that count no more, each with the keys that stay nevertheless."""

_STAYING = (
    (re.compile(r"problems\.[^.]+\.loss"), ("roles",)),
    (re.compile(r"analyses\.[^.]+"), ("roles", "split", "batch_size")),
)


@dataclass(frozen=True)
class Layer:
    """One file of a composition, or one override with a mapping.

    Args:
        content: its keys and values, from the root of the config on.
        choice: the address `group@package` that chose it; None where it is no option of a group.
        defaults: its defaults list.
    """

    content: Mapping[str, Any]
    choice: str | None = None
    defaults: Any = None


@dataclass
class _Current:
    """The target that a place has so far.

    Args:
        target: its name.
        choice: the address that chose it, if one did.
        until: the number of the layer that made this choice; the layers before that one may not replace it.
    """

    target: Any
    choice: str | None
    until: int


@dataclass
class _Plan:
    """What is dropped, layer by layer."""

    layers: Sequence[Layer]
    dropped: list[Dropped] = field(init=False)
    current: dict[str, _Current] = field(default_factory=dict)
    outranked: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.dropped = [{} for _ in self.layers]

    def read(self, index: int, until: int) -> None:
        """Go through one layer."""
        # A recipe that chooses an option writes its settings for that one.
        self.outranked -= {address.partition("@")[2] for address in _overrides(self.layers[index])}
        waiting = [("", self.layers[index].content)]
        while waiting:
            place, node = waiting.pop()
            if self._is_dropped(index, until, place, node):
                self.dropped[index][place] = ()
                continue
            waiting += [
                (f"{place}.{key}".lstrip("."), value) for key, value in node.items() if isinstance(value, Mapping)
            ]

    def _is_dropped(self, index: int, until: int, place: str, node: Mapping[str, Any]) -> bool:
        current, target, choice = self.current.get(place), node.get(TARGET), self.layers[index].choice
        if current is not None and index < current.until and choice != current.choice:
            if target is not None and target != current.target:
                self.outranked.add(place)
            elif target is not None:
                self.outranked.discard(place)
            # What follows without a target belongs to the one that was outranked.
            return place in self.outranked
        self.outranked.discard(place)
        if target is not None:
            if current is not None and current.target != target:
                self._begin_anew(index, place, node)
            self.current[place] = _Current(target, choice, until)
        return False

    def _begin_anew(self, index: int, place: str, node: Mapping[str, Any]) -> None:
        # Whom a loss reads is mlotool's to know, and stays unless it is written anew.
        kept = tuple(key for pattern, keys in _STAYING if pattern.fullmatch(place) for key in keys if key not in node)
        for before in self.dropped[:index]:
            before[place] = tuple(key for key in before.get(place, kept) if key in kept)
        for other in [each for each in self.current if each.startswith(f"{place}.")]:
            del self.current[other]


def choice_of(path: str, package: str) -> str | None:
    """Return the address `group@package` of an option, from its path `group/option`; None for a recipe."""
    group = path.partition("/")[0]
    return full_address(f"{group}@{package}") if "/" in path and group in OPTION_GROUPS else None


def dropped_places(layers: Sequence[Layer], chosen: Collection[str] = ()) -> list[Dropped]:
    """Return, for each layer, the places whose settings count no more.

    A node with another `_target_` than the layers before it begins anew. Where an option was chosen by the command line
    or by a recipe that inherits, nodes of inherited recipes with another `_target_` do not replace it.

    Args:
        layers: in the order in which they are merged.
        chosen: addresses `group@package` that the command line chooses.

    Example:
        >>> below, above = {"data": {"_target_": "A", "x": 1}}, {"data": {"_target_": "B", "y": 2}}
        >>> dropped_places([Layer(below), Layer(above)])
        [{'data': ()}, {}]
    """
    ranks: dict[str, int] = {}
    for index, layer in enumerate(layers):
        ranks.update((address, index) for address in _overrides(layer))
    ranks.update((address, len(layers)) for address in chosen)
    plan = _Plan(layers)
    for index, layer in enumerate(layers):
        plan.read(index, ranks.get(layer.choice or "", index))
    return plan.dropped


def _overrides(layer: Layer) -> list[str]:
    return [address for address, _ in choices_in(layer.defaults, "override")]


def without(node: Mapping[str, Any], places: Dropped) -> dict[str, Any]:
    """Return a plain tree in which some places are empty."""
    return dict(_kept(node, "", places))


def _kept(node: Mapping[str, Any], prefix: str, places: Dropped) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        place = f"{prefix}{key}"
        if not isinstance(value, Mapping):
            yield key, value
        elif place in places:
            yield key, {each: value[each] for each in places[place] if each in value}
        else:
            yield key, dict(_kept(value, f"{place}.", places))
