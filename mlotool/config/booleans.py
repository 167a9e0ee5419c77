"""Overrides that Hydra and OmegaConf take for something else, or refuse without their key. No torch.

Where the schema has true or false, a number is refused: OmegaConf alone would take a 3 for true.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mlotool.config.names import MAX_NAME, name_fault
from mlotool.config.nulls import choice_faults
from mlotool.config.schema import is_boolean
from mlotool.core.errors import ConfigError


def boolean_faults(key: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with a value at a dotted path, where it is a number in the place of true or false."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and is_boolean(key):
        yield f"{key}: found {value!r}; expected true or false. Correct {key}."


def check_overrides(words: Sequence[str]) -> None:
    """Refuse overrides that give a number where the schema has true or false, or no name where a group wants one,
    and a `name` that is too long for a folder.

    Args:
        words: `key=value`, as on the command line; a value may be several, for a sweep.

    Raises:
        ConfigError: with every fault found, one a line.

    Example:
        >>> check_overrides(["problems.classifier.compile=true", "seed=3"])
    """
    faults: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        faults += choice_faults(key.lstrip("+"), text)
        if key == "name" and len(text) > MAX_NAME and "$" not in text:
            faults.append(f"name: {name_fault(text)}. Correct it.")
        for each in text.split(","):
            faults += boolean_faults(key.lstrip("+"), _number(each))
    if faults:
        raise ConfigError("\n".join(faults))


def _number(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
