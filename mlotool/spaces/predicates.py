"""Predicates of places, for `at: {where: ..}`."""

from typing import Any

from mlotool.spaces.targets import Place


class KeepsShape:
    """Places that return the shape that they read.

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 4))
        >>> norm = Insert("norm", {"where": KeepsShape()}, {"none": None, "layer": torch.nn.LayerNorm})
        >>> list(Space(base, [norm], inputs=[2]).decisions)
        ['norm_0']
    """

    def __call__(self, place: Place) -> bool:
        """Say whether it does."""
        return place.input_shape is not None and place.input_shape == place.output_shape


class HasSetting:
    """Places whose module has a setting of a value, such as a stride of 1.

    Args:
        name: of the module's attribute.
        value: that it has; a number stands for a tuple of that number too.

    Example:
        >>> base = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Conv2d(2, 2, 3, stride=2))
        >>> kernel = Operator("kernel", {"where": HasSetting("stride", 2)}, {"keep": None})
        >>> list(Space(base, [kernel], inputs=[1, 9, 9]).decisions)
        ['kernel_0']
    """

    def __init__(self, name: str, value: Any) -> None:
        # YAML has no tuples.
        self._name, self._value = name, tuple(value) if isinstance(value, list) else value

    def __call__(self, place: Place) -> bool:
        """Say whether it has."""
        found = getattr(place.module, self._name, None)
        return bool(found == self._value or (isinstance(found, tuple) and all(each == self._value for each in found)))
