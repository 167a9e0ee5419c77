"""Optional packages, imported when they are asked for."""

from importlib import import_module
from typing import Any

from mlotool.core.errors import ConfigError


def import_extra(module: str, key: str, extra: str) -> Any:
    """Import a package that an extra of ours brings.

    Args:
        module: its name.
        key: the setting that wants it, as it was written.
        extra: of `pip install mlotool[..]`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: the package {error.name} is not installed; expected the extra '{extra}'. Run: "
            f"pip install 'mlotool[{extra}]'"
        ) from error
