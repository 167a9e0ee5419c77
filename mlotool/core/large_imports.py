"""Imports of which hundreds of thousands of objects come."""

import atexit
import gc
import sys
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
