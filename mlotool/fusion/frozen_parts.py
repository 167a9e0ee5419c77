"""Which parts of modules are frozen, and whether those of two modules are the same function."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_OF_MODULES = nn.Module().__dict__.keys() | {"forward"}
_HOOKS = tuple(name for name, value in nn.Module().__dict__.items() if "hook" in name and isinstance(value, Mapping))
_IN_ONE_MODE = (
    "Dropout",
    "AlphaDropout",
    "BatchNorm",
    "InstanceNorm",
    "RReLU",
    "Attention",
    "Transformer",
    "RNN",
    "LSTM",
    "GRU",
)
"""In the names of torch's modules that train mode changes."""


def frozen_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the largest parts of a module that have parameters, none of which is trained, by name.

    Parts with hooks, which may change what goes in and out, are none of them.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
        >>> _ = model[0].requires_grad_(False)
        >>> list(frozen_parts(model))
        ['0']
    """
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        if name and not any(name.startswith(f"{other}.") for other in found) and _is_frozen(part):
            found[name] = part
    return found


def mode_dependent(part: nn.Module) -> list[nn.Module]:
    """Return the modules in a part whose function may be another one in train mode than in eval mode."""
    return [each for each in part.modules() if _may_depend_on_mode(each)]


def are_same_function(part: nn.Module, other: nn.Module) -> bool:
    """Say whether two frozen parts are of the same classes with the same settings, parameters and buffers.

    Example:
        >>> are_same_function(nn.Softplus(2.0), nn.Softplus(2.0)), are_same_function(nn.Softplus(2.0), nn.Softplus(3.0))
        (True, False)
    """
    ours, theirs = dict(part.named_modules()), dict(other.named_modules())
    return [*ours] == [*theirs] and all(_is_same_module(ours[name], theirs[name]) for name in ours)


def have_same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are the same in every bit; entries that are NaN, and zeros of either sign, count too."""
    if (tensor.dtype, tensor.shape, tensor.device) != (other.dtype, other.shape, other.device):
        return False
    width = _INTEGERS.get(tensor.element_size()) if tensor.is_floating_point() else None
    if width is None or not (tensor.is_contiguous() and other.is_contiguous()):
        return torch.equal(tensor, other)
    return torch.equal(tensor.detach().view(width), other.detach().view(width))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_frozen(part: nn.Module) -> bool:
    parameters = list(part.parameters())
    is_frozen = bool(parameters) and not any(each.requires_grad or is_lazy(each) for each in parameters)
    return is_frozen and not any(vars(each).get(name) for each in part.modules() for name in _HOOKS)


def _may_depend_on_mode(module: nn.Module) -> bool:
    kind = type(module)
    if not kind.__module__.startswith("torch.nn.modules."):
        # Its code may ask for the mode.
        return True
    return any(word in kind.__name__ for word in _IN_ONE_MODE)


def _is_same_module(module: nn.Module, other: nn.Module) -> bool:
    if type(module) is not type(other):
        return False
    for kind in ("_parameters", "_buffers"):
        if not _is_same(getattr(module, kind), getattr(other, kind)):
            return False
    return _is_same(_settings(module), _settings(other))


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if isinstance(value, Tensor):
        return have_same_bits(value, other)
    if isinstance(value, Mapping):
        return [*value] == [*other] and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, nn.Module):
        return are_same_function(value, other)
    try:
        return bool(value == other)
    except Exception:
        # What cannot be compared may be anything.
        return False
