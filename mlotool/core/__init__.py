"""What every other package shares: roles, loss outputs, rematerialization, the detach for finite differences."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlotool.core.bound_module import BoundModule
    from mlotool.core.errors import ConfigError, MlotoolError, RunError
    from mlotool.core.loss_output import LossOutput
    from mlotool.core.rematerialization import remat
    from mlotool.core.replay import stop_gradient

_HOMES = {
    "bound_module": ("BoundModule",),
    "errors": ("ConfigError", "MlotoolError", "RunError"),
    "loss_output": ("LossOutput",),
    "rematerialization": ("remat",),
    "replay": ("stop_gradient",),
}
__all__ = ["BoundModule", "ConfigError", "LossOutput", "MlotoolError", "RunError", "remat", "stop_gradient"]


def __getattr__(name: str) -> Any:
    # Lazy (PEP 562): errors and suggestions are needed where torch must not be imported.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"mlotool.core.{home}"), name)
    raise AttributeError(f"module 'mlotool.core' has no attribute '{name}'")
