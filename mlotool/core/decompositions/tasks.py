"""Tensors of `torch.vmap`, of which each task has its own part."""

from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor


def is_batched(tensor: Tensor) -> bool:
    """Return whether the tensor is one of tasks: Python cannot read its values, and torch.func draws its dropout.

    `is_batchedtensor` alone does not see it where a gradient or a tangent is taken within the tasks.
    """
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False
