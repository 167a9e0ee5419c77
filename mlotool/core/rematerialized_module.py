"""A module of which some blocks are evaluated by `remat`, without a change of its code.

`remat` stands around a block's `forward`, within its `__call__`: hooks of the block run once, as ever, and what they
change is kept; hooks of modules inside a block run whenever it is evaluated again. A block whose parent calls
`block.forward(x)` straight is seen too.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from mlotool.core.rematerialization import remat


class RematerializedModule:
    """A module with some of its blocks evaluated by `remat`; it is called like the module.

    Only while it is evaluated do the blocks have another `forward`, as an attribute of the instance. At all other times
    the module is as it was: to copy, to save, to look into, or to evaluate for another problem.

    Args:
        module: holds the blocks.
        blocks: some of its submodules; one may be inside another.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.Tanh()))
        >>> x = torch.ones(1, 1)
        >>> torch.equal(RematerializedModule(net, [net[1]])(x), net(x))
        True
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._module = module
        self._forwards = [_Forward(block) for block in blocks]
        for outer in self._forwards:
            inside = {id(each) for each in outer.block.modules()} - {id(outer.block)}
            outer.inside.inner = [each for each in self._forwards if id(each.block) in inside]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the module."""
        return _run(self._forwards, self._module, inputs, options)

    def method(self, name: str) -> Callable[..., Any]:
        """Return another method of the module, in which the same blocks are evaluated by `remat`."""

        def call(*inputs: Any, **options: Any) -> Any:
            return _run(self._forwards, getattr(self._module, name), inputs, options)

        return call


class _Forward:
    """What stands in the place of a block's `forward`.

    Args:
        block: whose it is.

    Attributes:
        block: whose it is.
        inside: what `remat` evaluates.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.inside = _Inside(block)
        # For code that looks at the signature of a forward.
        self.__wrapped__ = block.forward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the block, now and where a derivative needs it."""
        return remat(self.inside, *inputs, **options)


class _Inside(nn.Module):
    """A block without its hooks, as a module: `remat` looks for parameters, buffers and modes there.

    Args:
        block: to evaluate.

    Attributes:
        inner: what stands in the place of the forwards of blocks inside it.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.inner: Sequence[_Forward] = ()
        self._own = block.forward

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the block; in a backward pass nobody else has set the forwards inside."""
        return _run(self.inner, self._own, inputs, options)


def _run(
    forwards: Sequence[_Forward], call: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Return `call(*inputs, **options)` with other forwards in the places of the blocks'."""
    before = [each.block.__dict__.get("forward") for each in forwards]
    try:
        for each in forwards:
            each.block.__dict__["forward"] = each
        return call(*inputs, **options)
    finally:
        for each, own in zip(forwards, before, strict=True):
            if own is None:
                del each.block.__dict__["forward"]
            else:
                each.block.__dict__["forward"] = own
