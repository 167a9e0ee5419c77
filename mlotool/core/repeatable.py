"""Whether a block that is evaluated again is the function that it was.

A counter, a cache or a running mean in an attribute, Python's or numpy's random numbers, a generator of its own: any of
these makes of the second evaluation another function than the first one was, and its derivative is then that of a
network that nobody has evaluated. Nothing else would say so.

What is compared is cheap enough to be compared always: the form of all results, a few of their entries, the tensors
that modules keep in attributes, and what the block is handed besides tensors. For the first call of a block, the
second, the fourth and so on (some blocks change later) it is all entries, the shapes of all that was computed, and the
tensors in any object that the block keeps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of
from mlotool.core.private import functorch as _functorch
from mlotool.core.private import (
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
    tree_flatten,
    tree_leaves,
)
from mlotool.core.tangents import apart
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import IteratorFoundError, ObjectState, fingerprint, leaves_of, tolerance

_CHANGED = (
    "remat: found a block, {block}, that {what} when it was evaluated again; expected the same function each time. "
    "Draw from torch's default generators alone, keep what changes in buffers, keep no cache; or leave it out of "
    "remat."
)

_KEPT = (
    "remat: found a block whose {module} keeps a tensor that has a derivative in {place}; expected that it returns "
    "what has derivatives. Return it as well, or keep x.detach()."
)

# Of a result, that are compared always.
_NUM_ENTRIES = 64

# Of the norm: what the same kernels on a CPU may differ by, with a graph and without.
_STRICT = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-5, torch.complex64: 2e-5}

# By block.
_calls: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


class FirstEvaluation:
    """What a block has computed, in a few numbers.

    Args:
        block: which has.

    Example:
        >>> first = FirstEvaluation(torch.tanh)
        >>> with first.watched() as shapes:
        ...     result = torch.tanh(torch.ones(2))
        >>> first.keep(shapes, [result])
        >>> first.compare(shapes, [result])  # nothing to refuse
    """

    def __init__(self, block: Callable[..., Any]) -> None:
        # Functions are often made anew for each call, and share their code.
        self._block = block.__code__ if isinstance(block, FunctionType) else block
        try:
            number = _calls[self._block] = _calls.get(self._block, 0) + 1
        except TypeError:
            # It cannot be held weakly, or hashed.
            number = 1
        self.is_whole = not number & (number - 1)
        self._is_rounded = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        self._shapes: set[torch.Size] = set()
        self._forms: list[tuple[torch.Size, torch.dtype]] = []
        self._numbers: list[Tensor | None] = []

    @contextmanager
    def watched(self) -> Iterator[set[torch.Size]]:
        """Note the shapes of all that is computed within, where this call of the block is looked at as a whole."""
        if not self.is_whole or is_tracing():
            yield set()
            return
        with _Shapes() as mode, _watching(mode):
            yield mode.shapes

    def keep(self, shapes: set[torch.Size], results: Sequence[Tensor]) -> None:
        """Keep what there is to compare.

        Args:
            shapes: that were noted.
            results: of the block.
        """
        if not is_tracing():
            self._shapes, self._forms, self._numbers = shapes, _forms(results), self._numbers_of(results)

    def compare(self, shapes: set[torch.Size], results: Sequence[Tensor]) -> None:
        """Raise ConfigError unless this is the same. Arguments as above."""
        if is_tracing():
            return
        now = _forms(results)
        if now != self._forms:
            difference = next((pair for pair in zip(self._forms, now, strict=False) if pair[0] != pair[1]), None)
            first, second = map(_described, difference or ((), ()))
            self._refuse(
                f"returned {second} in place of {first}" if difference else "returned another number of tensors"
            )
        if new := shapes - self._shapes:
            self._refuse(f"computed a tensor of another shape, {tuple(min(new))},")
        for before, number, result in zip(self._numbers, self._numbers_of(results), results, strict=True):
            if before is not None and number is not None and not self._is_same(before, number, result):
                self._refuse("returned something else")

    def _numbers_of(self, results: Sequence[Tensor]) -> list[Tensor | None]:
        return [_numbers(result, self.is_whole) for result in results]

    def _is_same(self, before: Tensor, now: Tensor, result: Tensor) -> bool:
        if before.shape != now.shape or not now.numel():
            return True
        loose = tolerance(result.dtype)
        share = loose if self._is_rounded or now.is_cuda else _STRICT.get(result.dtype, loose)
        # What has overflowed is no sign of anything.
        return bool((before - now).abs().max() <= share * torch.maximum(before.norm(), now.norm()))

    def _refuse(self, what: str) -> None:
        raise ConfigError(_CHANGED.format(block=name_of(self._block), what=what))


def name_of(block: Any) -> str:
    """Return what to call a block in messages: the name of a function, or of a module's class."""
    return getattr(block, "co_name", None) or type(getattr(block, "block", block)).__name__


_SHAPES: ContextVar["_Shapes | None"] = ContextVar("mlotool_remat_shapes", default=None)


@contextmanager
def _watching(mode: "_Shapes | None") -> Iterator[None]:
    token = _SHAPES.set(mode)
    try:
        yield
    finally:
        _SHAPES.reset(token)


def unwatched() -> AbstractContextManager[None]:
    """Return a context in which a block around has nothing noted: blocks inside it are compared by themselves."""
    return _watching(None)


class _Shapes(TorchFunctionMode):
    """Notes the shapes of what functions of torch return."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        found = func(*args, **(kwargs or {}))
        if _SHAPES.get() is not self:
            return found
        for value in found if isinstance(found, tuple | list) else (found,):
            if isinstance(value, Tensor):
                self.shapes.add(value.shape)
        return found


class Kept:
    """The tensors that a block keeps by itself, before an evaluation.

    Args:
        block: a module, or a function.
        modules: those of the block.
        is_whole: whether to look into objects of any class too.

    Example:
        >>> before = Kept(nn.Tanh(), [nn.Tanh()], is_whole=True)
        >>> before.compare()  # nothing to refuse
    """

    def __init__(self, block: Any, modules: Sequence[nn.Module], *, is_whole: bool) -> None:
        self._block = block
        self._modules = modules
        self._is_whole = is_whole
        self._before = {id(tensor): tensor for _, _, tensor in self._tensors()}

    def compare(self) -> None:
        """Raise ConfigError where the evaluation has left one that depends on something."""
        for owner, place, tensor in self._tensors():
            if tensor.grad_fn is not None and id(tensor) not in self._before:
                raise ConfigError(_KEPT.format(module=owner, place=place))

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        for module in self._modules:
            for name in module.__dict__.keys() - _OF_MODULES:
                value = module.__dict__[name]
                is_looked_at = self._is_whole or isinstance(value, Tensor | list | tuple | dict)
                if is_looked_at and not _is_of_torch(module, name):
                    for entry in self._inside(value):
                        yield type(module).__name__, f"its attribute '{name}'", entry
        if self._is_whole and isinstance(self._block, FunctionType | MethodType | partial):
            for entry in self._inside(self._block):
                yield "function", "what it is bound with", entry

    def _inside(self, value: Any) -> list[Tensor]:
        if not self._is_whole:
            return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        try:
            return [leaf for leaf in leaves_of([value], into_modules=False) if isinstance(leaf, Tensor)]
        except IteratorFoundError:
            return []


_OF_MODULES = frozenset([*nn.Module().__dict__, "_flat_weights"])


def _is_of_torch(module: nn.Module, name: str) -> bool:
    """Return whether an attribute has parameters, which are arguments of a call, or what hooks make of them anew.

    The hooks are those of `torch.nn.utils.weight_norm` and `spectral_norm`.
    """
    return name in _OF_MODULES or any(f"{name}_{value}" in module._parameters for value in ("orig", "v"))


def _forms(results: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(result.shape, result.dtype) for result in results]


def _described(form: Any) -> str:
    shape, dtype = form
    return f"a tensor of shape {tuple(shape)} of {str(dtype).removeprefix('torch.')}"


def _numbers(result: Tensor, is_whole: bool) -> Tensor | None:
    """Return the fingerprint of a result, or a few of its entries; None where there are no values to read.

    Within transforms of torch.func it is that of the tensor inside, with all axes that `torch.vmap` hides.
    """
    while is_functorch_wrapped_tensor(result):
        result = _functorch.get_unwrapped(result)
    if result.is_meta:
        return None
    with temporarily_clear_interpreter_stack(), torch.no_grad():
        result = apart([result])[0][0].detach()
        if is_whole or result.layout != torch.strided:
            return fingerprint(result)
        last = max(result.numel() - 1, 0)
        places = torch.arange(_NUM_ENTRIES, device=result.device) * last // (_NUM_ENTRIES - 1)
        entries = torch.take(result, places if result.numel() else places[:0])
        return (entries if entries.is_complex() else entries.double()).nan_to_num(0.0, 0.0, 0.0)


def holds_tensors(value: Any) -> bool:
    """Return whether tensors are among the attributes or items of something that is no tensor itself.

    Args:
        value: any, as a dataclass.

    Example:
        >>> from types import SimpleNamespace
        >>> holds_tensors(SimpleNamespace(x=[torch.ones(1)])), holds_tensors("text")
        (True, False)
    """
    try:
        return any(isinstance(leaf, Tensor) for leaf in leaves_of([value], into_modules=False))
    except IteratorFoundError:
        return False


_ARGUMENT = (
    "remat: found a block, {block}, whose argument {place}, {kind}, {what}; expected arguments that stay as they are. "
    "Hand over no cache (use_cache=False of Hugging Face's models)."
)
_CHANGED_BY_BLOCK = "is changed by the evaluation of the block"
_LATER = "has changed before the block was evaluated again"
_USED_UP = "is an iterator, or holds one, so that an evaluation uses it up"

_STAYS = (Tensor, str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.layout)


class Handed:
    """The arguments of a call of a block, of which it keeps no tensors.

    Args:
        block: that is called.
        inputs: positional arguments.
        options: arguments by name.

    Raises:
        ConfigError: there is an iterator among them.

    Example:
        >>> handed = Handed(len, ([],), {})
        >>> with handed.left_alone(([],), {}):
        ...     pass  # nothing to refuse
    """

    def __init__(self, block: Callable[..., Any], inputs: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._block = block
        found = {
            place: [leaf for leaf in tree_leaves(value) if not isinstance(leaf, _STAYS)]
            for place, value in _places(inputs, options)
        }
        self._objects = {place: objects for place, objects in found.items() if objects}
        self._states = {place: self._state(place) for place in self._objects}

    @contextmanager
    def left_alone(self, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[None]:
        """Refuse an evaluation that changes its arguments.

        Args:
            inputs: as the evaluation is given them: copies of their containers.
            options: likewise.
        """
        before = {place: tree_flatten(value) for place, value in _places(inputs, options)}
        yield
        self._compare(_CHANGED_BY_BLOCK)
        for place, value in _places(inputs, options):
            (old, old_form), (new, new_form) = before[place], tree_flatten(value)
            if old_form != new_form or any(a is not b for a, b in zip(old, new, strict=True)):
                self._refuse(place, value, _CHANGED_BY_BLOCK)

    def check_again(self) -> None:
        """Refuse objects that are not what they were in the first evaluation."""
        self._compare(_LATER)

    def _compare(self, what: str) -> None:
        for place, before in self._states.items():
            if not before.is_same(self._state(place)):
                self._refuse(place, self._objects[place][0], what)

    def _state(self, place: str) -> ObjectState:
        try:
            return ObjectState(self._objects[place])
        except IteratorFoundError:
            self._refuse(place, self._objects[place][0], _USED_UP)
            raise

    def _refuse(self, place: str, value: Any, what: str) -> None:
        raise ConfigError(
            _ARGUMENT.format(block=name_of(self._block), place=place, kind=kind_of(value), what=what)
        ) from None


def _places(inputs: tuple[Any, ...], options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"number {number}", value) for number, value in enumerate(inputs, 1))
    yield from ((f"'{name}'", value) for name, value in options.items())
