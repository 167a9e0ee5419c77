"""Imports of which hundreds of thousands of objects come."""

import atexit
import gc
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType


def import_large(name: str) -> ModuleType:
    """Import a module without looking for garbage meanwhile, or, afterwards, among what came with it.

    Python looks through all objects again and again while they become more, which is a fifth of the time that torch and
    Lightning take; what modules hold stays to the end of the process.
    """
    if name in sys.modules:
        return sys.modules[name]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        module = import_module(name)
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()
    # Python's end wants to find all objects: extensions take those that it does not find for lost, and print so.
    atexit.register(gc.unfreeze)
    return module


def import_torch(*, with_wandb: bool) -> None:
    """Import torch, and before it what W&B imports when a run begins.

    pydantic looks for the source of each class of W&B's launch package among all modules that there are: that takes
    four times as long once there are torch's.

    Args:
        with_wandb: whether a run of this process will log to W&B.
    """
    if with_wandb:
        # W&B goes on without it as well.
        with suppress(ImportError):
            import_large("wandb.sdk.launch")
    import_large("torch")
