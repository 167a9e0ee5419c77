"""A module with the parameters that it plays with in one evaluation: what a loss sees of a problem."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ASSIGNED = re.compile(r"'(?:BoundModule|_Live)' object has no attribute '(\w+)'")


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
        places: of the module, where they are at hand; None looks them up.
        moves_buffers: whether its buffers move although parameters are given.
        compiled: what to call in the module's place.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> BoundModule(layer, {"weight": torch.full((1, 1), 3.0)})(torch.ones(2, 1)).squeeze()
        tensor([3., 3.])
    """

    __slots__ = ("_buffers", "_call", "_module", "_parameters", "_places", "_training")

    def __init__(
        self,
        module: nn.Module,
        parameters: Mapping[str, Tensor] | None = None,
        *,
        training: bool | None = None,
        places: "Places | None" = None,
        moves_buffers: bool = False,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        self._module = module
        self._call = compiled or module
        self._parameters = parameters
        self._training = None if training is module.training else training
        self._places = places
        self._buffers: dict[str, Tensor] | None = {} if moves_buffers else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        if self._training is None:
            return self._forward(args, kwargs)
        with _mode(self._module, self._training):
            return self._forward(args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module, `name`, with the bound parameters."""
        return BoundModule(_Method(self._module, name), self._prefixed(), training=self._training)(*args, **kwargs)

    def at(self, parameters: Mapping[str, Tensor]) -> "BoundModule":
        """Return the same module at other parameters, by name; those left out stay as they are."""
        bound = {**(self._parameters or {}), **parameters}
        return BoundModule(self._module, bound, training=self._training, places=self._places)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current tensors by parameter name, frozen ones included."""
        given = self._parameters or {}
        for name, parameter in self._module.named_parameters():
            yield name, given.get(name, parameter)

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

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._parameters is None:
            return self._call(*args, **kwargs)
        if self._places is None:
            self._places = Places(self._module)
        if self._buffers is None:
            # One copy for the whole evaluation: a module that is called twice sees its own update of a buffer.
            self._buffers = self._places.copy_buffers()
        restore = self._places.fill(self._parameters, self._buffers)
        try:
            return self._call(*args, **kwargs)
        finally:
            restore()

    def _prefixed(self) -> dict[str, Tensor] | None:
        if self._parameters is None:
            return None
        return {f"target.{name}": tensor for name, tensor in self._parameters.items()}


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


class Places:
    """Where a module keeps its parameters and buffers, so that other tensors can take their places for a call.

    `torch.func.functional_call` does the same by name, and looks the names up in each call; with small modules that
    look-up costs as much as a layer. A tensor with several names (tied weights) has several places.

    Args:
        module: its structure must stay as it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = _places_of(module, dict(module.named_parameters()), "_parameters")
        self._buffers = _places_of(module, dict(module.named_buffers()), "_buffers")

    def copy_buffers(self) -> dict[str, Tensor]:
        """Return copies of the current buffers by name."""
        return {name: places[0][0][places[0][1]].clone() for name, places in self._buffers.items()}

    def fill(self, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> Callable[[], None]:
        """Put tensors into the places of those names; return what puts all back as it was.

        A module may assign a new tensor to a buffer; once all is put back, `buffers` holds that one.

        Raises:
            KeyError: the module has no parameter or buffer of such a name; nothing has changed.
        """
        try:
            moves = [(place, tensor) for name, tensor in parameters.items() for place in self._parameters[name]]
        except KeyError as error:
            names = ", ".join(self._parameters)
            raise KeyError(f"found {error} among parameters that are given; expected names of {names}") from None
        moves += [(place, tensor) for name, tensor in buffers.items() for place in self._buffers[name]]
        saved = [(holder, attribute, holder[attribute]) for (holder, attribute), _ in moves]
        for (holder, attribute), tensor in moves:
            holder[attribute] = tensor

        def restore() -> None:
            for name in buffers:
                holder, attribute = self._buffers[name][0]
                buffers[name] = holder[attribute]
            for holder, attribute, tensor in saved:
                holder[attribute] = tensor

        return restore


def _places_of(module: nn.Module, tensors: dict[str, Tensor], kind: str) -> dict[str, list[tuple[dict[str, Any], str]]]:
    names = {id(tensor): name for name, tensor in tensors.items()}
    places: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in tensors}
    for child in module.modules():
        holder = getattr(child, kind)
        for attribute, tensor in holder.items():
            if id(tensor) in names:
                places[names[id(tensor)]].append((holder, attribute))
    return places


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
