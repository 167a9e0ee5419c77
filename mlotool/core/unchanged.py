"""Whether code of the user's has left alone what it was given."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device
from torch.utils._pytree import tree_flatten, tree_map


def snapshot(value: Any) -> Any:
    """Return a tree (dicts, lists, tuples) with copies of its tensors."""
    return tree_map(lambda each: each.detach().clone() if isinstance(each, Tensor) else each, value)


def deep_copy(value: Any) -> Any:
    """Return a deep copy, of tensors that are parts of larger ones without what else these hold.

    Args:
        value: a tree with any leaves.

    Example:
        >>> deep_copy({"row": torch.zeros(100, 2)[0]})["row"].untyped_storage().nbytes()
        8
    """
    tensors = [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return copy.deepcopy(value, {id(each): each.detach().clone() for each in tensors})


def is_unchanged(before: Any, now: Any) -> bool:
    """Say whether a tree has the form and the tensors that its snapshot has.

    Example:
        >>> batch = {"input": torch.zeros(2)}
        >>> before = snapshot(batch)
        >>> is_unchanged(before, batch), is_unchanged(before, {"input": batch["input"].add_(1)})
        (True, False)
    """
    (old, old_form), (new, new_form) = tree_flatten(before), tree_flatten(now)
    return old_form == new_form and all(is_same(a, b) for a, b in zip(old, new, strict=True))


def is_same(a: Any, b: Any) -> bool:
    """Say whether two tensors have the same values, NaN included; of other things True."""
    if not isinstance(a, Tensor) or a is b or a.is_meta:
        return True
    return torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num())


def torch_settings() -> dict[str, Any]:
    """Return what torch keeps for a whole process, by the function that changes it."""
    return {
        "torch.set_grad_enabled": torch.is_grad_enabled(),
        "torch.set_default_dtype": torch.get_default_dtype(),
        # None is another state than the CPU by name, for which each call passes through a mode of torch's.
        "torch.set_default_device": _device.CURRENT_DEVICE,
    }


def restore_torch_settings(settings: dict[str, Any]) -> list[str]:
    """Put back what `torch_settings` returned; return the functions that had changed some of it."""
    changed = [name for name, value in torch_settings().items() if value != settings[name]]
    if "torch.set_grad_enabled" in changed:
        torch.set_grad_enabled(settings["torch.set_grad_enabled"])
    if "torch.set_default_dtype" in changed:
        torch.set_default_dtype(settings["torch.set_default_dtype"])
    if "torch.set_default_device" in changed:
        torch.set_default_device(settings["torch.set_default_device"])
    return changed
