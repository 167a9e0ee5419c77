"""Losses, which are pure functions of a batch and of modules (roles); and analyses of finished runs."""

from typing import TYPE_CHECKING, Any

from mlotool.core.settings import discover

_targets = discover(__name__)
globals().update(_targets)
__all__ = list(_targets)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
