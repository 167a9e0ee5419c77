"""A module with the parameters that it plays with in one evaluation: what a loss sees of a problem."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call


class BoundModule:
    """A module bound to given parameters; a loss receives one for each of its roles.

    Without `parameters` it is the module as it stands: its own parameters, and buffers that move. With them it
    is a pure function: the given tensors take the parameters' places, and the buffers are a throw-away copy, so
    BatchNorm normalises by the batch in train mode but its running statistics stay.

    Args:
        module: the problem's module.
        parameters: tensors by parameter name, or None for the module's own. Names that are left out
            (frozen parameters) keep the module's.
        training: train or eval mode for this role; None leaves the module's mode.
        has_tied_weights: False promises that no parameter has two names, which saves a search in each call.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> BoundModule(layer, {"weight": torch.full((1, 1), 3.0)})(torch.ones(2, 1)).squeeze()
        tensor([3., 3.])
    """

    __slots__ = ("_has_tied_weights", "_module", "_parameters", "_tensors", "_training")

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor] | None = None,
        *,
        training: bool | None = None,
        has_tied_weights: bool = True,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._training = None if training is module.training else training
        self._has_tied_weights = has_tied_weights
        self._tensors: dict[str, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if self._training is None:
            return self._forward(args, kwargs)
        with _mode(self._module, self._training):
            return self._forward(args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module, `name`, with the bound parameters."""
        return BoundModule(_Method(self._module, name), self._prefixed(), training=self._training)(*args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current tensors by parameter name, frozen ones included."""
        given = self._parameters or {}
        for name, parameter in self._module.named_parameters():
            yield name, given.get(name, parameter)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the current tensors of all parameters."""
        return (tensor for _, tensor in self.named_parameters())

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._parameters is None:
            return self._module(*args, **kwargs)
        if self._tensors is None:
            # One copy for the whole evaluation: a module that is called twice sees its own update of a buffer.
            self._tensors = dict(self._parameters)
            self._tensors.update((name, buffer.clone()) for name, buffer in self._module.named_buffers())
        return functional_call(self._module, self._tensors, args, kwargs, tie_weights=self._has_tied_weights)

    def _prefixed(self) -> dict[str, Tensor] | None:
        if self._parameters is None:
            return None
        return {f"target.{name}": tensor for name, tensor in self._parameters.items()}


class _Method(nn.Module):
    """A module whose forward is another module's method: the public way to bind one functionally."""

    def __init__(self, target: nn.Module, name: str) -> None:
        super().__init__()
        self.target = target
        self.name = name
        self.training = target.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return getattr(self.target, self.name)(*args, **kwargs)


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, was_training in modes:
            child.training = was_training
