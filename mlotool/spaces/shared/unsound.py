"""Where on a path of a shared space a number was first not finite."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from mlotool.core.tracing import is_tracing
from mlotool.spaces.shared.super_graph import Choices, Mixture, SuperGraph


class Unsound:
    """Looks at the results of a space's calls in training, and keeps what is to be told of the first bad one.

    On a CPU a result is looked at after its call; where it is not finite, the same path is computed once more, step by
    step. On other devices that would wait for each mini-batch, and nothing is looked at.

    Attributes:
        found: in a whole sentence, which path it was and where on it a result was first not finite; None where all
            results were finite.
    """

    def __init__(self) -> None:
        self.found: str | None = None
        self._was_bad = False

    def look(self, result: Any, graph: SuperGraph, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> None:
        """Look at the result of a call. Arguments as for `SuperGraph`."""
        if not _is_readable(result) or torch.isfinite(result.detach().sum()):
            self._was_bad = False
            return
        if not self._was_bad:
            self.found = _told(graph, root, inputs, choices) or self.found
        self._was_bad = self.found is not None


def _told(graph: SuperGraph, root: nn.Module, inputs: Sequence[Any], choices: Choices) -> str | None:
    path = ", ".join(f"{name}: {_in_words(each)}" for name, each in choices.items())
    if any(map(_is_bad, pytree.tree_leaves(list(inputs)))):
        return f"The space was called with numbers that are not finite, on the path {path}."
    buffers = [(each, each.clone()) for each in root.buffers()]
    random = torch.get_rng_state()
    found = None
    with torch.no_grad():
        for name, value, module in graph.results(root, inputs, choices):
            if any(map(_is_bad, pytree.tree_leaves(value))):
                bad = [key for key, each in module.named_parameters() if _is_bad(each)] if module is not None else []
                before = f" Its parameter {bad[0]} held numbers that are not finite before." if bad else ""
                found = f"On the path {path} the result of {name} was the first that is not finite.{before}"
                break
        for own, copied in buffers:
            # Not counted as a change: the backward pass of the call that was bad has kept the buffers.
            own.data.copy_(copied)
    torch.set_rng_state(random)
    return found


def _is_readable(result: Any) -> bool:
    return (
        type(result) is Tensor
        and result.device.type == "cpu"
        and not is_tracing()
        and not torch.compiler.is_compiling()
        and not is_functorch_wrapped_tensor(result)
        and torch.utils._python_dispatch._get_current_dispatch_mode() is None
    )


def _is_bad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all())


def _in_words(chosen: Any) -> str:
    if not isinstance(chosen, Mixture):
        return str(chosen)
    weights: Mapping[Any, float] = dict(zip(chosen.candidates, chosen.weights.tolist(), strict=True))
    return " + ".join(f"{weight:.2g} {name}" for name, weight in weights.items())
