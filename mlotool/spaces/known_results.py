"""Shapes of results, kept from one space to the next: to compute those of a layer takes milliseconds."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

MAX_KNOWN = 10_000

_OURS = ("torch.nn.", "mlotool.")
_OF_ALL = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (int, float, str, type(None), torch.dtype)


class _Kind(NamedTuple):
    """What a stand-in has of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_known: dict[Hashable, Any] = {}


def call_key(node: fx.Node, root: nn.Module, given: tuple[Any, ...]) -> Hashable | None:
    """Return what the shapes of a node's result depend on; None where only its call can tell.

    Args:
        node: of a graph.
        root: the model.
        given: operation, what it calls, and its arguments with shapes for tensors.
    """
    if node.op == "call_module":
        target: Hashable = _structure(root.get_submodule(str(node.target)))
    elif node.op == "call_method" or getattr(node.target, "__module__", "").split(".")[0] in ("torch", "_operator"):
        target = node.target
    else:
        return None
    if target is None:
        return None
    return node.op, target, repr(given[2]), torch.get_default_dtype(), str(torch.get_default_device())


def known_result(key: Hashable) -> Any:
    """Return a new stand-in of what a call with this key returns, or None; in the mode of stand-ins."""
    kept = _known.get(key)
    return None if kept is None else pytree.tree_map_only(_Kind, _stand_in, kept[0], is_leaf=_is_kind)


def keep_result(key: Hashable, result: Any) -> None:
    """Take note of what a call returns that does nothing else: no result is one of its arguments, or a view of it."""
    if not all(_is_plain(each) or _is_strided(each) for each in pytree.tree_leaves(result)):
        return
    if len(_known) >= MAX_KNOWN:
        _known.clear()
    kept = pytree.tree_map_only(Tensor, lambda each: _Kind(each.shape, each.stride(), each.dtype, each.device), result)
    _known[key] = (kept,)


def _structure(module: nn.Module) -> Hashable | None:
    """Return what the shapes of a module's result depend on; None for code of others, which may read anything."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    # What a layer of torch's keeps for itself follows from its settings.
    is_of_torch = type(module).__module__.startswith("torch.")
    settings = tuple(
        each for each in vars(module).items() if each[0] not in _OF_ALL and not (is_of_torch and each[0][0] == "_")
    )
    if not type(module).__module__.startswith(_OURS) or any(hooks) or not all(_is_plain(each) for _, each in settings):
        return None
    children = tuple((name, each and _structure(each)) for name, each in module._modules.items())
    if any(each is None for _, each in children):
        return None
    tensors = tuple(
        (name, None if each is None else (each.shape, each.dtype, each.device))
        for name, each in (*module._parameters.items(), *module._buffers.items())
    )
    return type(module), settings, tensors, children


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _is_kind(value: Any) -> bool:
    return isinstance(value, _Kind)


def _stand_in(kind: _Kind) -> Tensor:
    return torch.empty_strided(kind.size, kind.stride, dtype=kind.dtype, device=kind.device)
