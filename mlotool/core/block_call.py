"""One call of a block of a network as a function of tensors, which can be evaluated again later.

What a call depends on besides its arguments is taken down when it is made: parameters and buffers, train or eval mode,
autocast, kernels of attention, modes of torch's functions (such as a default device), random numbers, and the values
behind `stop_gradient`. An evaluation without one of them would return something else, and nothing would say so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mlotool.core.described import kind_of
from mlotool.core.errors import ConfigError
from mlotool.core.handed import Handed
from mlotool.core.lazy_copy import lazy_copy, share_memory
from mlotool.core.repeatable import FirstEvaluation, Kept, holds_tensors
from mlotool.core.replay import ConstantsOfPart, RandomState
from mlotool.core.slots import Slot

_CHANGED_INPUT = (
    "remat: found a block that changes one of its inputs or parameters in place; expected that they stay, since the "
    "block is evaluated on them again. Write x = x + y for x += y at the beginning of the block; renormalise weights "
    "(max_norm), or let them follow others, outside of it."
)

_CAPTURED = (
    "remat: found a block that reads a tensor which requires a gradient and is neither one of its inputs nor one of "
    "its parameters; expected all such tensors among these, since the gradient of any other would be lost. Hand it to "
    "the block as an argument, or make it a parameter of the block."
)

_OPAQUE = (
    "remat: found a block that returns {kind}, which holds tensors; expected tensors in lists, tuples and "
    "dictionaries, since the gradient of any others would be lost. Return one of these, or register the class with "
    "torch.utils._pytree.register_pytree_node."
)


class BlockCall:
    """A call of a block: its first evaluation, and the same again.

    Args:
        block: a module, or a function of tensors.
        inputs: positional arguments, in any nesting.
        options: arguments by name, likewise.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> call, tensors = BlockCall.of(layer, (torch.ones(1),), {})
        >>> len(tensors), call(torch.ones(1), torch.full((1, 1), 3.0))[0]
        (2, tensor([3.]))
    """

    @classmethod
    def of(
        cls, block: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple["BlockCall", list[Tensor]]:
        """Return the call, and what it takes: the tensors among the arguments, parameters, and copies of the buffers.

        The call does not keep them: it lives as long as a graph does, and they are a graph's to drop. Arguments as for
        the class.
        """
        call = cls(block, inputs, options)
        given = [each for each in tree_leaves((inputs, options)) if isinstance(each, Tensor)]
        parameters = call._slots[: len(call._slots) - len(call._buffers)]
        tensors = [*given, *[holder[name] for holder, name in parameters]]
        tensors += [lazy_copy(holder[name].detach()) for holder, name in call._buffers]
        call._devices = tuple({each.device for each in tensors if each.is_cuda})
        call._autocasts = [_Autocast.now(kind) for kind in sorted({each.device.type for each in tensors})]
        return call, tensors

    def __init__(self, block: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        leaves, self._structure = tree_flatten((inputs, options))
        self._block = block
        self._is_tensor = [isinstance(each, Tensor) for each in leaves]
        self._constants = [None if isinstance(each, Tensor) else each for each in leaves]
        modules = list(block.modules()) if isinstance(block, nn.Module) else []
        parameters = [slot for each in modules for slot in _filled(each._parameters)]
        self._buffers = [slot for each in modules for slot in _filled(each._buffers)]
        self._slots = [*parameters, *self._buffers]
        self._modes = [(each, each.training) for each in modules]
        self._function_modes = _get_current_function_mode_stack()
        self._devices: tuple[torch.device, ...] = ()
        self._autocasts: list[_Autocast] = []
        self._attention = _attention_kernels()
        # After the first evaluation: what it was given and has computed, random state, values behind `stop_gradient`,
        # and what it returned.
        self._handed: Handed | None = None
        self._evaluation: FirstEvaluation | None = None
        self._random: RandomState | None = None
        self._hidden: ConstantsOfPart | None = None
        self._moved: list[tuple[Slot, bool]] | None = None
        self._num_outputs = 0
        self._returned: tuple[list[Any], Any] = ([], None)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """Return the tensors that the block returns, then the buffers that have moved, all but the first time None."""
        if self._moved is None:
            return self._first(tensors)
        assert self._hidden is not None and self._handed is not None and self._evaluation is not None
        self._handed.check_again()
        kept = Kept(self._block, [module for module, _ in self._modes], is_whole=self._evaluation.is_whole)
        with ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(autocast.again())
            if self._attention != _attention_kernels():
                stack.enter_context(sdpa_kernel(self._attention))
            stack.enter_context(_modes(self._modes))
            stack.enter_context(self._hidden.again())
            if self._random is not None:
                stack.enter_context(self._random.replayed())
            shapes = stack.enter_context(self._evaluation.watched())
            with self._in_slots(tensors) as arguments:
                returned = self._called(*self._given(arguments))
        outputs = _returned_tensors(tree_leaves(returned), tensors)
        kept.compare()
        self._evaluation.compare(shapes, outputs)
        return (*outputs, *[None] * len(self._moved))

    def finish(self, found: Sequence[Tensor | None]) -> Any:
        """Move the buffers of the block itself; return what the block returned, with the tensors of its evaluation.

        Args:
            found: by the first evaluation.
        """
        assert self._moved is not None
        for ((holder, name), is_new), value in zip(self._moved, found[self._num_outputs :], strict=True):
            assert value is not None
            if is_new:
                # A result of the call, which would bring its graph along.
                holder[name] = value.detach()
            else:
                with torch.no_grad():
                    holder[name].copy_(value)
        leaves, structure = self._returned
        return tree_unflatten([found[each.place] if isinstance(each, _Result) else each for each in leaves], structure)

    def _first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        random, self._hidden = RandomState(self._devices), ConstantsOfPart()
        evaluation = self._evaluation = FirstEvaluation(self._block)
        before = [each._version for each in tensors]
        # None of the tensors requires a gradient here: a result that does has it from somewhere else.
        with (
            torch.enable_grad(),
            self._hidden.noted(),
            evaluation.watched() as shapes,
            self._in_slots(tensors) as arguments,
        ):
            inputs, options = self._given(arguments)
            self._handed = Handed(self._block, inputs, options)
            versions = [holder[name]._version for holder, name in self._buffers]
            given = [holder[name] for holder, name in self._buffers]
            with self._handed.left_alone(inputs, options):
                leaves, structure = tree_flatten(self._called(inputs, options))
            after = [holder[name] for holder, name in self._buffers]
        if before != [each._version for each in tensors]:
            raise ConfigError(_CHANGED_INPUT)
        if not random.equals(RandomState(self._devices)):
            self._random = random
        outputs = _returned_tensors(leaves, tensors)
        if any(each.requires_grad for each in outputs):
            raise ConfigError(_CAPTURED)
        opaque = next((each for each in leaves if not isinstance(each, Tensor) and holds_tensors(each)), None)
        if opaque is not None:
            raise ConfigError(_OPAQUE.format(kind=kind_of(opaque)))
        evaluation.keep(shapes, outputs)
        self._num_outputs = len(outputs)
        places = {key: place for place, key in enumerate(_once(leaves))}
        self._returned = (
            [_Result(places[id(each)]) if isinstance(each, Tensor) else each for each in leaves],
            structure,
        )
        self._moved, values = [], list[Tensor]()
        originals = tensors[len(tensors) - len(self._buffers) :]
        for slot, before, version, value, original in zip(
            self._buffers, given, versions, after, originals, strict=True
        ):
            if value is not before or value._version != version or _has_moved(value, original):
                self._moved.append((slot, value is not before))
                values.append(value.detach())
        return (*outputs, *values)

    def _given(self, arguments: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = iter(arguments)
        leaves = [
            next(tensors) if is_tensor else each
            for each, is_tensor in zip(self._constants, self._is_tensor, strict=True)
        ]
        inputs, options = tree_unflatten(leaves, self._structure)
        return inputs, options

    def _called(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            # A mode that handles the autograd function of this call is off meanwhile.
            now = _get_current_function_mode_stack()
            for mode in [each for each in self._function_modes if each not in now]:
                stack.enter_context(mode)
            return self._block(*inputs, **options)

    @contextmanager
    def _in_slots(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Put parameters, and buffers that may move, into their slots for a while; return the arguments."""
        count, last = len(tensors) - len(self._slots), len(tensors) - len(self._buffers)
        own = [holder[name] for holder, name in self._slots]
        given = [*tensors[count:last], *[lazy_copy(each) for each in tensors[last:]]]
        try:
            for (holder, name), tensor in zip(self._slots, given, strict=True):
                holder[name] = tensor
            yield tensors[:count]
        finally:
            for (holder, name), tensor in zip(self._slots, own, strict=True):
                holder[name] = tensor


class _Autocast(NamedTuple):
    """The settings of autocast on one kind of device."""

    kind: str
    is_on: bool
    dtype: torch.dtype
    is_cached: bool

    @classmethod
    def now(cls, kind: str) -> "_Autocast":
        dtype = torch.get_autocast_dtype(kind)
        return cls(kind, torch.is_autocast_enabled(kind), dtype, torch.is_autocast_cache_enabled())

    def again(self) -> torch.autocast:
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.is_on, cache_enabled=self.is_cached)


_ATTENTION = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}


def _attention_kernels() -> list[SDPBackend]:
    # A loss chooses one that is differentiable twice by `with sdpa_kernel(...)`, which has ended in a backward pass.
    return [kernel for kernel, is_on in _ATTENTION.items() if is_on()]


class _Result(NamedTuple):
    """Stands for a tensor among what a block returned.

    Args:
        place: of it among the results; a tensor that is returned twice has one.
    """

    place: int


def _once(leaves: Sequence[Any]) -> dict[int, Tensor]:
    """Return the tensors that a block has returned, by identity, each once: what changes one in place changes both."""
    return {id(each): each for each in leaves if isinstance(each, Tensor)}


def _returned_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a block has returned; of what it was given and returns as it is, an alias."""
    given = {id(each) for each in tensors}
    return [each.view_as(each) if key in given else each for key, each in _once(leaves).items()]


def _filled(holder: dict[str, Any]) -> list[Slot]:
    return [(holder, name) for name, each in holder.items() if each is not None]


def _has_moved(buffer: Tensor, original: Tensor) -> bool:
    # Kernels of BatchNorm change its statistics without counting a version; those of sparse tensors count.
    if buffer.layout != torch.strided or torch._C._functorch.is_batchedtensor(buffer):
        return False
    return not (share_memory(buffer, original) or torch.equal(buffer, original))


@contextmanager
def _modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    changed = [(module, module.training) for module, training in modes if module.training is not training]
    try:
        for module, training in modes:
            module.training = training
        yield
    finally:
        for module, training in changed:
            module.training = training
