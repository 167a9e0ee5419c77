"""A module with the parameters that it plays with in one evaluation: what a loss sees of a problem."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.lazy_copy import lazy_copy
from mlotool.core.rematerialized_module import RematerializedModule
from mlotool.core.slots import Slots
from mlotool.core.unchanged import is_same

_ASSIGNED = re.compile(r"'(?:BoundModule|Live|LiveParts)' object has no attribute '(\w+)'")


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

    Raises:
        KeyError: the module has no parameter of such a name.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> BoundModule(layer, {"weight": torch.full((1, 1), 3.0)})(torch.ones(2, 1)).squeeze()
        tensor([3., 3.])
    """

    __slots__ = ("_buffers", "_call", "_module", "_slots", "_tensors", "_training")

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor] | None = None, *, training: bool | None = None
    ) -> None:
        self._module = module
        self._call: Callable[..., Any] = module
        self._training = training
        self._slots = None if parameters is None else Slots(module, tuple(parameters))
        self._tensors: Sequence[Tensor] | None = None if parameters is None else tuple(parameters.values())
        self._buffers: list[Tensor] | None = None

    @classmethod
    def in_slots(
        cls,
        slots: Slots,
        tensors: Sequence[Tensor] | None,
        training: bool | None,
        call: Callable[..., Any],
        buffers: list[Tensor] | None = None,
    ) -> "BoundModule":
        """Return a module whose slots are at hand.

        Args:
            slots: of the module.
            tensors: one a slot; None for the module's own.
            training: as above.
            call: the module, or what is called in its place.
            buffers: what to put into the buffers' places; empty leaves those there, which then move; None copies them.
        """
        bound = cls.__new__(cls)
        bound._module = slots.module
        bound._call = call
        bound._training = training
        bound._slots = slots
        bound._tensors = tensors
        bound._buffers = buffers
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        training, slots, tensors = self._training, self._slots, self._tensors
        # The hot path: the same as `_run`, without a function call more than it needs.
        is_in_mode = training is None or training is self._module.training
        if not is_in_mode:
            return self._run(self._call, args, kwargs)
        if slots is None or tensors is None:
            return self._call(*args, **kwargs)
        if slots.has_buffers:
            return self._run(self._call, args, kwargs)
        own = slots.put(tensors)
        try:
            return self._call(*args, **kwargs)
        finally:
            slots.put_back(own)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module, `name`, with the bound parameters."""
        whole = self._call
        call = whole.method(name) if isinstance(whole, RematerializedModule) else getattr(self._module, name)
        return self._run(call, args, kwargs)

    def at(self, parameters: Mapping[str, Tensor]) -> "BoundModule":
        """Return the same module at other parameters, by name; those left out stay as they are."""
        bound = dict(zip(self._slots.names, self._tensors, strict=True)) if self._slots and self._tensors else {}
        other = BoundModule(self._module, {**bound, **parameters}, training=self._training)
        if isinstance(self._call, RematerializedModule):
            other._call = self._call
        return other

    def given(self, **arguments: Any) -> "BoundModule":
        """Return the same module, each call of which has these arguments too."""
        bound = copy(self)
        bound._call = partial(self._call, **arguments)
        return bound

    def moved_buffer(self) -> str | None:
        """Return the name of a buffer of which calls have moved the copy; None where none has."""
        if self._slots is None or not self._buffers:
            return None
        names = [name for name, _ in self._module.named_buffers()]
        pairs = zip(names, self._buffers, self._slots.buffers(), strict=True)
        moved = (name for name, now, own in pairs if not is_same(now, own))
        # What a module of mlotool's counts is for reports: how often a shared space has taken its paths.
        return next((name for name in moved if not self._is_counted(name)), None)

    def _is_counted(self, buffer: str) -> bool:
        owner = self._module.get_submodule(buffer.rpartition(".")[0])
        return any(each.__module__.startswith("mlotool.") for each in type(owner).__mro__)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current tensors by parameter name, frozen ones included."""
        if self._slots is None or self._tensors is None:
            return self._module.named_parameters()
        return self._slots.named_tensors(self._tensors)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the current tensors of all parameters."""
        return (tensor for _, tensor in self.named_parameters())

    def __getattr__(self, name: str) -> Any:
        """Say what there is: reached only where there is no such attribute."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"a role has no '{name}'; it can be called like its module, and has method(name, ...), at(parameters), "
            "parameters() and named_parameters()"
        )

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._training is not None and self._training is not self._module.training:
            with _mode(self._module, self._training):
                return self._run_in_mode(call, args, kwargs)
        return self._run_in_mode(call, args, kwargs)

    def _run_in_mode(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots, tensors = self._slots, self._tensors
        if slots is None or tensors is None:
            return call(*args, **kwargs)
        own = slots.put(tensors)
        try:
            if slots.has_buffers:
                return self._with_buffers(slots, call, args, kwargs)
            return call(*args, **kwargs)
        finally:
            slots.put_back(own)

    def _with_buffers(
        self, slots: Slots, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._buffers is None:
            # One copy for the whole evaluation: a module that is called twice sees its own update of a buffer.
            self._buffers = [buffer if buffer is None else lazy_copy(buffer) for buffer in slots.buffers()]
        if not self._buffers:
            return call(*args, **kwargs)
        own = slots.buffers()
        slots.put_buffers(self._buffers)
        try:
            return call(*args, **kwargs)
        finally:
            # A module may have assigned a new tensor.
            self._buffers = slots.buffers()
            slots.put_buffers(own)


MOVING_BUFFERS: list[Tensor] = []
"""For `BoundModule.in_slots`: the module's own buffers stay in their places, and move."""


def tell_of_attribute(error: BaseException) -> None:
    """Say in the error of code that has set an attribute of a role what it may do in its place.

    Not by `__setattr__`: that would cost each role of each evaluation some microseconds.
    """
    found = _ASSIGNED.match(str(error)) if isinstance(error, AttributeError) else None
    if found is not None:
        error.args = (
            f"found the attribute '{found[1]}' set on a role, which takes none: a loss leaves modules as they "
            "are. Keep the value in a variable or a setting of the loss; write {problem: <name>, mode: eval} as the "
            "role for eval mode",
        )


def compile_module(module: nn.Module) -> Callable[..., Any]:
    """Return what runs a module by `torch.compile`, with whatever tensors are in its parameters' places.

    It is compiled once for each kind of them: its own, detached ones, and solutions.
    """
    compiled = torch.compile(module)

    def run(*args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # Tracing looks at every tensor's gradient, that of a solution included.
            warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
            return compiled(*args, **kwargs)

    return run


@contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, was_training in modes:
            child.training = was_training
