"""A module at given tensors: the slots they go into, buffers that are copied for it, and what a loss sees of a problem.

`torch.func.functional_call` puts tensors into a module by name, and looks the names up in each call; with small modules
that look-up costs as much as a layer.
"""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.private import BatchNorm, is_functorch_wrapped_tensor
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import is_same

# Below this a copy costs nothing, and the addresses of small buffers stay as they are.
LARGE_BYTES = 1 << 14


def lazy_copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor.

    On a CPU torch copies the memory where a kernel is about to write to one of them, whether it counts a version or
    not. It does not see who writes by an address that was taken before, as a numpy array on the tensor's memory. On
    other devices the copy is made at once: `torch._foreach_add_` and its like write there past what torch sees.

    Args:
        tensor: without a graph.

    Example:
        >>> large = torch.zeros(1 << 14)
        >>> bool(lazy_copy(large).add_(1.0).any()), bool(large.any())
        (True, False)
    """
    is_large = tensor.layout == torch.strided and tensor.device.type == "cpu" and tensor.nbytes >= LARGE_BYTES
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and not is_functorch_wrapped_tensor(tensor)
    # Memory that is not torch's (of numpy, of a file, shared with other processes) raises.
    with suppress(RuntimeError):
        if is_large and is_plain and not is_tracing():
            return torch._lazy_clone(tensor)
    return tensor.clone()


_NO_METHOD = (
    "found the attribute '{name}' of a role; expected a call of the role, or of a method of {kind}, since a role is "
    "the module with other parameters. Write role(x), role.method('name', x), or "
    "dict(role.named_parameters())['{name}']."
)

# A dictionary of a submodule (`_parameters` or `_buffers`) and the key in it.
Slot = tuple[dict[str, Any], str]


class in_slots:  # noqa: N801 - a context, as in contextlib
    """Have tensors in slots for a while.

    Args:
        slots: each once.
        tensors: one a slot.
    """

    __slots__ = ("_before", "_slots", "_tensors")

    def __init__(self, slots: Sequence[Slot], tensors: Sequence[Any]) -> None:
        self._slots, self._tensors = slots, tensors

    def __enter__(self) -> None:
        _check_count(self._tensors, self._slots)
        self._before = _exchanged(self._slots, self._tensors)

    def __exit__(self, *error: object) -> None:
        _exchanged(self._slots, self._before)


def _check_count(tensors: Sequence[Any], places: Sequence[Any]) -> None:
    if len(tensors) != len(places):
        raise ValueError(f"found {len(tensors)} tensors for {len(places)} places; expected one each")


def _exchanged(slots: Sequence[Slot], tensors: Sequence[Any]) -> list[Any]:
    """Put a tensor into each slot, and return those that were there."""
    before = []
    for (holder, name), tensor in zip(slots, tensors):  # noqa: B905 - of one length; `strict` takes as long as the loop
        before.append(holder[name])
        holder[name] = tensor
    return before


class Slots:
    """The slots of some of a module's parameters, in a fixed order, and of all its buffers.

    A tensor with several names (tied weights) has several slots.

    Args:
        module: its structure must stay as it is.
        names: of the parameters, in the order in which tensors will be put there.

    Attributes:
        has_buffers: whether the module has any.

    Raises:
        KeyError: the module has no parameter of such a name.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(1, 1, bias=False)
        >>> slots = Slots(layer, ["weight"])
        >>> with slots.filled([torch.full((1, 1), 3.0)]):
        ...     layer(torch.ones(1, 1)).tolist()
        [[3.0]]
    """

    def __init__(self, module: nn.Module, names: Sequence[str] = ()) -> None:
        self.module = module
        self.names = tuple(names)
        self._parameters = slots_of(module, dict(module.named_parameters()), "_parameters")
        self._buffers = slots_of(module, dict(module.named_buffers()), "_buffers")
        # Each with the place of its tensor among those that are put.
        self._slots = [(*slot, place) for place, name in enumerate(self.names) for slot in self._of_parameter(name)]
        positions = {name: place for place, name in enumerate(self.names)}
        self._all = [(name, positions.get(name), *slots[0]) for name, slots in self._parameters.items()]
        self.has_buffers = bool(self._buffers)

    def put(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Put one tensor per name into the slots, of which nothing is checked; return what `put_back` takes."""
        before = []
        for holder, name, place in self._slots:
            before.append(holder[name])
            holder[name] = tensors[place]
        return before

    def put_back(self, before: Sequence[Any]) -> None:
        """Put what `put` has returned into the slots."""
        for (holder, name, _), tensor in zip(self._slots, before):  # noqa: B905 - as in `_exchanged`
            holder[name] = tensor

    @contextmanager
    def filled(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Have one tensor per name in the slots for a while."""
        _check_count(tensors, self.names)
        before = self.put(tensors)
        try:
            yield
        finally:
            self.put_back(before)

    def buffers(self) -> list[Tensor]:
        """Return the buffers that are there now, each once."""
        return [slots[0][0][slots[0][1]] for slots in self._buffers.values()]

    def put_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Put tensors into the slots of the buffers, in the order of `buffers`."""
        for slots, tensor in zip(self._buffers.values(), buffers, strict=True):
            for holder, attribute in slots:
                holder[attribute] = tensor

    def copy_buffers(self) -> dict[str, Tensor]:
        """Return copies of the current buffers by name."""
        return dict(zip(self._buffers, map(torch.clone, self.buffers()), strict=True))

    def fill(self, parameters: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> Callable[[], None]:
        """Put tensors into the slots of any names; return what puts all back as it was.

        A module may assign a new tensor to a buffer; once all is put back, `buffers` holds that one.

        Raises:
            KeyError: the module has no parameter or buffer of such a name; nothing has changed.
        """
        moves = [(slot, tensor) for name, tensor in parameters.items() for slot in self._of_parameter(name)]
        moves += [(slot, tensor) for name, tensor in buffers.items() for slot in self._buffers[name]]
        filled = in_slots([slot for slot, _ in moves], [tensor for _, tensor in moves])
        filled.__enter__()

        def restore() -> None:
            for name in buffers:
                holder, attribute = self._buffers[name][0]
                buffers[name] = holder[attribute]
            filled.__exit__()

        return restore

    def named_tensors(self, tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield all parameters of the module by name, with `tensors` for those that have a slot here."""
        for name, place, holder, attribute in self._all:
            yield name, holder[attribute] if place is None else tensors[place]

    def _of_parameter(self, name: str) -> list[Slot]:
        if name not in self._parameters:
            known = ", ".join(self._parameters)
            raise KeyError(f"found {name!r} among parameters that are given; expected names of {known}")
        return self._parameters[name]


def slots_of(module: nn.Module, tensors: Mapping[str, Tensor], kind: str) -> dict[str, list[Slot]]:
    """Return, by name, the slots of `tensors`.

    Args:
        module: holds them.
        tensors: by name, each once.
        kind: "_parameters" or "_buffers".
    """
    names = {id(tensor): name for name, tensor in tensors.items()}
    slots: dict[str, list[Slot]] = {name: [] for name in tensors}
    for child in module.modules():
        holder = getattr(child, kind)
        for attribute, tensor in holder.items():
            if id(tensor) in names:
                slots[names[id(tensor)]].append((holder, attribute))
    return slots


class AbstractEvaluation(ABC):
    """A module that is evaluated in another way than by its own code alone; `method` returns another of its methods.

    Attributes:
        logs_values: whether calls may log values, as those of a LightningModule do.
    """

    logs_values: bool = False

    @abstractmethod
    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the module."""

    @abstractmethod
    def method(self, name: str) -> Callable[..., Any]:
        """Return another method of the module, evaluated in the same way."""


class BoundModule:
    """A problem's module, called with given parameters; a loss receives one for each of its roles.

    Without `parameters`, a call runs the module with its own parameters, and may update its buffers. With `parameters`,
    it is a pure function of these tensors: buffers are updated in a temporary copy only. So BatchNorm in train mode
    normalizes by the batch, but its running statistics do not change.

    Args:
        module: the problem's module.
        parameters: tensors by parameter name, of the parameters' shapes; None takes the module's own. A parameter that
            is left out, such as a frozen one, keeps the module's tensor.
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

        Raises:
            ValueError: there are more tensors than slots, or fewer.
        """
        # By hand: each role of each evaluation comes here.
        if tensors is not None and len(tensors) != len(slots.names):
            _check_count(tensors, slots.names)
        bound = cls.__new__(cls)
        bound._module, bound._training, bound._call = slots.module, training, call
        bound._slots, bound._tensors, bound._buffers = slots, tensors, buffers
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self._run(self._call, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return another method of the module, of its class's own: `model.encode(x)` is `model.method("encode", x)`."""
        kind = None if name.startswith("_") else type(self._module)
        if kind is not None and inspect.isfunction(getattr(kind, name, None)) and not hasattr(nn.Module, name):
            return partial(self.method, name)
        raise AttributeError(_NO_METHOD.format(name=name, kind=getattr(kind, "__name__", "the module")))

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the module's method `name` with the bound parameters."""
        whole = self._call
        call = whole.method(name) if isinstance(whole, AbstractEvaluation) else getattr(self._module, name)
        return self._run(call, args, kwargs)

    def at(self, parameters: Mapping[str, Tensor]) -> "BoundModule":
        """Return the same module with other parameters, given by name; those that are left out stay as they are."""
        bound = dict(zip(self._slots.names, self._tensors, strict=True)) if self._slots and self._tensors else {}
        other = BoundModule(self._module, {**bound, **parameters}, training=self._training)
        if isinstance(self._call, AbstractEvaluation):
            other._call = self._call
        return other

    def given(self, **arguments: Any) -> "BoundModule":
        """Return the same module, with arguments that are added to each call."""
        bound = copy(self)
        bound._call = partial(self._call, **arguments)
        return bound

    @property
    def logs(self) -> bool:
        """Whether calls may log values, as those of a LightningModule do."""
        # Asked in each evaluation: an instance check of an abstract class takes ten times as long.
        return getattr(type(self._call), "logs_values", False) is True

    def batch_statistics(self) -> str | None:
        """Return the name of a layer that normalizes over the batch in this role's mode; None if there is none."""
        for name, layer in self._module.named_modules():
            is_training = layer.training if self._training is None else self._training
            # Without running statistics it does so in either mode.
            if isinstance(layer, BatchNorm) and (is_training or layer.running_mean is None):
                return name
        return None

    def watched(self, see: Callable[[str, Any], Any]) -> "BoundModule":
        """Return the same module, whose outputs are replaced by what `see` returns for them.

        Args:
            see: a function of the method's name ("" for a call of the module itself) and of the output.
        """
        bound = copy(self)
        bound._call = _Watched(self._module, self._call, see)
        return bound

    def moved_buffer(self) -> str | None:
        """Return the name of a buffer whose temporary copy was changed by a call; None if there is none."""
        if self._slots is None or not self._buffers:
            return None
        pairs = zip(self._module.named_buffers(), self._buffers, strict=True)
        moved = [name for (name, own), now in pairs if not is_same(now, own)]
        owners = {name: type(self._module.get_submodule(name.rpartition(".")[0])) for name in moved}
        # What a module of mlotool's counts is for reports: how often a shared space has taken its paths.
        counted = [x for x, kind in owners.items() if any(k.__module__.startswith("mlotool.") for k in kind.__mro__)]
        return next((name for name in moved if name not in counted), None)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current tensors by parameter name, frozen ones included."""
        if self._slots is None or self._tensors is None:
            return self._module.named_parameters()
        return self._slots.named_tensors(self._tensors)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the current tensors of all parameters."""
        return (tensor for _, tensor in self.named_parameters())

    def _run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        slots, tensors, training = self._slots, self._tensors, self._training
        if training is not None and training is not self._module.training:
            with _in_mode(self._module, training):
                return self._run(call, args, kwargs)
        if slots is None or tensors is None:
            return call(*args, **kwargs)
        # Each evaluation of a loss comes here: a context costs it two calls.
        before = slots.put(tensors)
        try:
            if not slots.has_buffers:
                return call(*args, **kwargs)
            with self._with_buffers(slots):
                return call(*args, **kwargs)
        finally:
            slots.put_back(before)

    @contextmanager
    def _with_buffers(self, slots: Slots) -> Iterator[None]:
        if self._buffers is None:
            # One copy for the whole evaluation: a module that is called twice sees its own update of a buffer.
            self._buffers = [buffer if buffer is None else lazy_copy(buffer) for buffer in slots.buffers()]
        if not self._buffers:
            yield
            return
        own = slots.buffers()
        slots.put_buffers(self._buffers)
        try:
            yield
        finally:
            # A module may have assigned a new tensor.
            self._buffers = slots.buffers()
            slots.put_buffers(own)


class _Watched(AbstractEvaluation):
    def __init__(self, module: nn.Module, call: Callable[..., Any], see: Callable[[str, Any], Any]) -> None:
        self._module, self._call, self._see = module, call, see

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        return self._see("", self._call(*inputs, **options))

    def method(self, name: str) -> Callable[..., Any]:
        whole = self._call
        call = whole.method(name) if isinstance(whole, AbstractEvaluation) else getattr(self._module, name)
        return lambda *inputs, **options: self._see(name, call(*inputs, **options))


# For `BoundModule.in_slots`: the module's own buffers stay in their places, and move.
MOVING_BUFFERS: list[Tensor] = []


def compile_module(module: nn.Module) -> Callable[..., Any]:
    """Return what runs a module by `torch.compile`, with whatever tensors are in its parameters' places.

    It is compiled once for each kind of them: its own, detached ones, and solutions.
    """
    # Tracing looks at every tensor's gradient, that of a solution included.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    return torch.compile(module)


@contextmanager
def _in_mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    module.train(bool(training))
    try:
        yield
    finally:
        for child, was_training in modes:
            child.training = was_training
