"""The private names of torch that several files use, in one place, each with its reason in docs/dependencies.md."""

import torch
from torch import _guards as guards
from torch._C import _functorch as functorch
from torch._C import _set_grad_enabled as set_grad_enabled
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.utils import _device as device_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd

__all__ = [
    "AutoDispatchBelowAutograd",
    "BatchNorm",
    "DataDependentOutputException",
    "DropoutNd",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "NormBase",
    "TorchDispatchMode",
    "current_dispatch_mode",
    "device_mode",
    "functorch",
    "get_unwrapped",
    "guards",
    "is_batchedtensor",
    "is_functorch_wrapped_tensor",
    "pytree",
    "register_pytree_node",
    "set_grad_enabled",
    "temporarily_clear_interpreter_stack",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unset_fake_temporarily",
]
