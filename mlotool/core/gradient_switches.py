"""Tangents of forward mode, switched off where a loss switches gradients off.

Torch lets tangents pass `torch.no_grad()`, so that what is a constant to gradients is none to tangents of them.
"""

from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.autograd import grad_mode

_OWN = (
    "mlotool.core.",
    "mlotool.hypergradient.",
    "mlotool.problem.",
    "mlotool.program.",
    "torch._functorch.",
    # A backward that is marked once_differentiable: tangents pass it well.
    "torch.autograd.function",
)
"""Modules whose switching of gradients says nothing about tangents."""


class GradientSwitches:
    """Follows each switch of gradients in a loss.

    Gradients are often off where tangents live: within a backward pass, and in custom functions. So what the end of
    `torch.no_grad` restores says nothing, and the context itself must be known: it is `self` in torch's frames. Its end
    restores what was there for tangents at its beginning.
    """

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def follow(self, frame: FrameType | None, is_on: bool) -> None:
        """Switch tangents as gradients are switched.

        Args:
            frame: that calls `torch._C._set_grad_enabled`, or the `__torch_function__` of a mode that does.
            is_on: what it is called with.
        """
        while frame is not None and frame.f_code.co_name == "__torch_function__":
            # Below other modes; of two that follow switches the inner one has done it.
            if frame.f_globals.get("__name__") == "mlotool.core.forward_mode":
                return
            frame = frame.f_back
        context, is_end = None, False
        while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
            context, is_end = frame.f_locals.get("self"), frame.f_code.co_name == "__exit__"
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__", "").startswith(_OWN):
            return
        if not is_end:
            if context is not None:
                self._before.setdefault(context, torch._C._is_fwd_grad_enabled())
            torch._C._set_fwd_grad_enabled(is_on)
        elif context in self._before:
            torch._C._set_fwd_grad_enabled(self._before.pop(context))
