"""What every data object has: splits by name."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from torch.utils.data import Dataset

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

D = TypeVar("D", bound=Dataset[dict[str, Any]])


class AbstractData(Generic[D]):
    """Base of the data objects; a leaf makes the splits and sets `num_classes` and what else models are sized by.

    Args:
        datasets: by name of the split, in the order in which `splits` lists them.
    """

    num_classes: int

    def __init__(self, datasets: Mapping[str, D]) -> None:
        self._datasets = dict(datasets)

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits that have samples."""
        return tuple(self._datasets)

    def split(self, name: str) -> D:
        """Return one split."""
        if name not in self._datasets:
            raise ConfigError(
                f"This data has no split '{name}'; expected one of {', '.join(self.splits)}."
                f"{did_you_mean(name, self.splits)} Name one of them, or give it samples with data.sizes.{name}=100."
            )
        return self._datasets[name]


def check_literal(key: str, given: Any, found: Any, what: str) -> None:
    """Raise ConfigError unless a value that stands in the configuration, for models to refer to, is the data's own."""
    if given != found:
        raise ConfigError(f"data.{key}={given}; expected {found}, {what}. Set data.{key}={found}.")


def check_choice(key: str, given: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the value of a setting is one of `choices`."""
    if given not in choices:
        raise ConfigError(
            f"data.{key}={given!r}; expected one of {', '.join(choices)}.{did_you_mean(given, choices)} "
            f"Set data.{key}={choices[0]}."
        )


def check_splits(sizes: Mapping[str, float], allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless all splits that are asked for are ones that the data can have."""
    for name in sizes:
        if name not in allowed:
            raise ConfigError(
                f"data.sizes names the split '{name}'; expected some of {', '.join(allowed)}."
                f"{did_you_mean(name, allowed)} Remove data.sizes.{name}, or correct its name."
            )
