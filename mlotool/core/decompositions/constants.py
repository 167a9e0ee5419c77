"""What a loss takes out of its graph, taken out of forward mode too."""

from typing import Any

from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def data(x: Tensor, *_: Any) -> Tensor:
    """Return `x.data`: torch leaves the tangent that is inside of a tensor of torch.func, and refuses `torch.vmap`."""
    return x.detach()


def detach_in_place(x: Tensor) -> Tensor:
    """Detach a tensor of a transform of torch.func, and what is inside of it: torch leaves the tangent of that."""
    inside = x.detach_()
    while _functorch.is_functorch_wrapped_tensor(inside):
        inside = _functorch.get_unwrapped(inside)
        with temporarily_clear_interpreter_stack():
            inside.detach_()
    return x


def numpy(x: Tensor, **kwargs: Any) -> Any:
    """Return `x.numpy()`, which torch refuses within `torch.func.vjp`; not within `torch.vmap`."""
    while _functorch.is_gradtrackingtensor(x):
        x = _functorch.get_unwrapped(x)
    with temporarily_clear_interpreter_stack():
        return x.detach().numpy(**kwargs)


def to_list(x: Tensor) -> Any:
    """Return `x.tolist()`, which torch 2.9 refuses within `torch.func.vjp`."""
    while _functorch.is_gradtrackingtensor(x):
        x = _functorch.get_unwrapped(x)
    with temporarily_clear_interpreter_stack():
        return x.detach().tolist()


def array(x: Tensor, dtype: Any = None, copy: bool | None = None) -> Any:
    """Return `numpy.asarray(x)`, likewise."""
    found = numpy(x)
    return found if dtype is None else found.astype(dtype, copy=bool(copy))
