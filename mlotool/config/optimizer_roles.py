"""Settings of an optimizer that a problem gives: `lr: {problem: rates}`. No torch."""

from collections.abc import Mapping
from typing import Any


def optimizer_roles(node: Any) -> dict[str, str]:
    """Return the problem's name by setting, for the settings of an optimizer's node that a problem gives.

    Example:
        >>> optimizer_roles({"_target_": "torch.optim.SGD", "lr": {"problem": "rates"}, "momentum": 0.9})
        {'lr': 'rates'}
    """
    if not isinstance(node, Mapping):
        return {}
    return {
        key: value["problem"]
        for key, value in node.items()
        if isinstance(value, Mapping) and set(value) == {"problem"} and isinstance(value["problem"], str)
    }
