"""Models that recipes use; any other nn.Module works as well."""

from typing import TYPE_CHECKING, Any

from mlotool.core.settings import discover

_targets = discover(__name__)
globals().update(_targets)
__all__ = list(_targets)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
