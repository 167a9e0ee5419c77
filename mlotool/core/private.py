"""The private names of torch that several files use, in one place, each with its reason in docs/dependencies.md."""

from operator import attrgetter

import torch
from torch import _guards
from torch._C import _functorch
from torch._functorch import pyfunctorch
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.nn.modules import batchnorm
from torch.utils import _device, _python_dispatch, _pytree

guards = _guards
device_mode = _device
pytree = _pytree

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
packet_of = attrgetter("_overloadpacket")
run_backward = Variable._execution_engine.run_backward
schema_of = attrgetter("_schema")
set_grad_enabled = torch._C._set_grad_enabled
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
get_unwrapped = _functorch.get_unwrapped
is_batchedtensor = _functorch.is_batchedtensor
is_functorch_wrapped_tensor = _functorch.is_functorch_wrapped_tensor
temporarily_clear_interpreter_stack = pyfunctorch.temporarily_clear_interpreter_stack

DataDependentOutputException = fake_tensor.DataDependentOutputException
DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
FakeTensor = fake_tensor.FakeTensor
FakeTensorMode = fake_tensor.FakeTensorMode
unset_fake_temporarily = fake_tensor.unset_fake_temporarily

BatchNorm = batchnorm._BatchNorm
NormBase = batchnorm._NormBase

TorchDispatchMode = _python_dispatch.TorchDispatchMode
current_dispatch_mode = _python_dispatch._get_current_dispatch_mode
tree_flatten = _pytree.tree_flatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
tree_unflatten = _pytree.tree_unflatten
