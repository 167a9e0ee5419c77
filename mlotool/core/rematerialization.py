"""Rematerialization: a block's activations are dropped, and computed again where a derivative needs them.

`torch.utils.checkpoint` does the same for a first backward pass only: the activations that it computes again become a
part of the graph of the gradient, and stay there until that graph is differentiated. Here the backward pass of a block
is itself a block: it is evaluated without a graph, and again in its own backward pass, at any order. What a
second-order product holds is then the inputs of the blocks, and the inside of one.

What a call depends on besides its arguments is taken down when it is made (`BlockCall`): parameters and buffers, train
or eval mode, autocast, kernels of attention, modes of torch's functions, random numbers, and the values behind
`stop_gradient`. An evaluation without one of them would return something else, and nothing would say so.

A counter, a cache or a running mean in an attribute, Python's or numpy's random numbers, a generator of its own: any of
these makes of the second evaluation another function than the first one was, and its derivative is then that of a
network that nobody has evaluated. What is compared is cheap enough to be compared always: the form of all results, a
few of their entries, the tensors that modules keep in attributes, and what the block is handed besides tensors. For the
first call of a block, the second, the fourth and so on (some blocks change later) it is all entries, the shapes of all
that was computed, and the tensors in any object that the block keeps.

In a module (`RematerializedModule`) `remat` stands around a block's `forward`, within its `__call__`: hooks of the
block run once, as ever, and what they change is kept; hooks of modules inside a block run whenever it is evaluated.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from types import FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mlotool.core import private
from mlotool.core.bound_module import AbstractEvaluation, Slot, in_slots, lazy_copy
from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of
from mlotool.core.private import is_functorch_wrapped_tensor, tree_flatten, tree_leaves, tree_unflatten
from mlotool.core.replay import ConstantsOfPart, RandomState
from mlotool.core.tangents import any_has_tangent, apart, joined
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import ANY_KERNELS, SAME_KERNELS, IteratorFoundError, ObjectState, fingerprint, leaves_of

# Of a result, that are compared always.
_NUM_ENTRIES = 64
# Arguments that cannot change.
_STAYS = (Tensor, str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.layout)
_OF_MODULES = frozenset([*nn.Module().__dict__, "_flat_weights"])

# By block.
_num_calls: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


class BlockCall:
    """A call of a block: its first evaluation, and the same again.

    Args:
        block: a module, or a function of tensors.
        inputs: positional arguments, in any nesting.
        options: arguments by name, likewise.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> call = BlockCall(layer, (torch.ones(1),), {})
        >>> len(call.tensors), call(torch.ones(1), torch.full((1, 1), 3.0))[0]
        (2, tensor([3.]))
    """

    def __init__(self, block: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        leaves, self._structure = tree_flatten((inputs, options))
        self._block = block
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._objects = [value for value in self._constants if not isinstance(value, _STAYS)]
        modules = list(block.modules()) if isinstance(block, nn.Module) else []
        parameters = [slot for module in modules for slot in _filled(module._parameters)]
        self._buffers = [slot for module in modules for slot in _filled(module._buffers)]
        self._slots = [*parameters, *self._buffers]
        self._modes = [(module, module.training) for module in modules]
        self._function_modes = _get_current_function_mode_stack()
        # What it takes: tensors among the arguments, parameters, copies of the buffers. They are a graph's to drop, and
        # the call, which lives as long, does not keep them.
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + [x[name] for x, name in parameters]
        self.tensors += [lazy_copy(holder[name].detach()) for holder, name in self._buffers]
        self._devices = tuple({tensor.device for tensor in self.tensors if tensor.is_cuda})
        self._autocasts = [_autocast_on(kind) for kind in sorted({tensor.device.type for tensor in self.tensors})]
        self._attention = _attention_kernels()
        self._is_whole = _is_looked_at(block)
        self._hidden = ConstantsOfPart()
        # After the first evaluation: what it has computed, the state of its arguments, random state, and what it
        # returned.
        self._evaluation: _Evaluated | None = None
        self._state = ObjectState([])
        self._random: RandomState | None = None
        self._moved: list[tuple[Slot, bool]] | None = None
        self._num_outputs = 0
        self._returned: tuple[list[Any], Any] = ([], None)

    def __call__(self, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """Return the tensors that the block returns, then the buffers that have moved, all but the first time None."""
        if self._moved is None:
            return self._first(tensors)
        assert self._evaluation is not None
        if not self._state.is_same(self._state_of_objects()):
            self._refuse_argument(self._objects[0], "has changed since the first evaluation")
        before = {id(tensor): tensor for _, tensor in self._kept_tensors()}
        with ExitStack() as stack:
            for settings in self._autocasts:
                stack.enter_context(torch.autocast(**settings))
            if self._attention != _attention_kernels():
                stack.enter_context(sdpa_kernel(self._attention))
            stack.enter_context(_modes(self._modes))
            stack.enter_context(self._hidden.again())
            if self._random is not None:
                stack.enter_context(self._random.replayed())
            shapes = stack.enter_context(_noted_shapes(self._is_whole))
            with self._in_slots(tensors) as arguments:
                returned = self._called(*self._given(arguments))
        outputs = _returned_tensors(tree_leaves(returned), tensors)
        for place, tensor in self._kept_tensors():
            fault = f"a block that keeps a tensor with a gradient in {place}"
            is_right = tensor.grad_fn is None or id(tensor) in before
            _require(
                is_right,
                fault,
                "a block that returns all tensors with a gradient",
                "Return it too, or keep x.detach().",
            )
        what = "" if is_tracing() else self._evaluation.difference(_Evaluated(outputs, shapes, self._is_whole))
        fault = f"a block, {_name_of(self._block)}, that {what} when it was evaluated again"
        _require(not what, fault, "the same function each time", _ADVICE)
        return (*outputs, *[None] * len(self._moved))

    def finish(self, values: Sequence[Tensor | None]) -> Any:
        """Move the buffers of the block itself; return what the block returned, with the tensors of its evaluation.

        Args:
            values: of the first evaluation.
        """
        assert self._moved is not None
        for ((holder, name), is_new), value in zip(self._moved, values[self._num_outputs :], strict=True):
            assert value is not None
            if is_new:
                # A result of the call, which would bring its graph along.
                holder[name] = value.detach()
            else:
                with torch.no_grad():
                    holder[name].copy_(value)
        leaves, structure = self._returned
        return tree_unflatten([values[leaf.place] if isinstance(leaf, _Result) else leaf for leaf in leaves], structure)

    def _first(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        random, self._state = RandomState(self._devices), self._state_of_objects()
        versions = [tensor._version for tensor in tensors]
        # None of the tensors requires a gradient here: a result that does has it from somewhere else.
        noted, slots = _noted_shapes(self._is_whole), self._in_slots(tensors)
        with torch.enable_grad(), self._hidden.noted(), noted as shapes, slots as arguments:
            inputs, options = self._given(arguments)
            buffers = [(holder[name], holder[name]._version) for holder, name in self._buffers]
            before, before_form = tree_flatten((inputs, options))
            leaves, structure = tree_flatten(self._called(inputs, options))
            # Lists and dictionaries are copies, in which a cache would be lost.
            now, form = tree_flatten((inputs, options))
            if form != before_form or any(a is not b for a, b in zip(before, now, strict=True)):
                self._refuse_argument([*inputs, *options.values()], "is changed when the block is evaluated")
            after = [holder[name] for holder, name in self._buffers]
        fault = "a block that changes one of its inputs or parameters in place"
        advice = "Write x = x + y for x += y, and renormalize weights outside of it."
        _require(versions == [tensor._version for tensor in tensors], fault, "that they stay", advice)
        if not random.equals(RandomState(self._devices)):
            self._random = random
        outputs = _returned_tensors(leaves, tensors)
        fault = "a block that reads a tensor that requires a gradient and is not among its inputs"
        expected = "that only its inputs and parameters require one"
        _require(not any(x.requires_grad for x in outputs), fault, expected, "Pass it to the block as an argument.")
        opaque = next((leaf for leaf in leaves if not isinstance(leaf, Tensor) and _tensors_in(leaf)), None)
        fault = f"a block that returns {kind_of(opaque)}, which holds tensors"
        advice = "Return these, or register the class with register_pytree_node."
        _require(opaque is None, fault, "tensors in lists, tuples and dictionaries", advice)
        self._evaluation = _Evaluated(outputs, shapes, self._is_whole)
        self._num_outputs = len(outputs)
        places = {key: place for place, key in enumerate(_once(leaves))}
        entries = [_Result(places[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._returned = entries, structure
        self._moved, values = [], list[Tensor]()
        originals = tensors[len(tensors) - len(self._buffers) :]
        for slot, (buffer, version), value, original in zip(self._buffers, buffers, after, originals, strict=True):
            if value is not buffer or value._version != version or _has_moved(value, original):
                self._moved.append((slot, value is not buffer))
                values.append(value.detach())
        return (*outputs, *values)

    def _given(self, arguments: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors, kinds = iter(arguments), zip(self._constants, self._is_tensor, strict=True)
        leaves = [next(tensors) if is_tensor else value for value, is_tensor in kinds]
        inputs, options = tree_unflatten(leaves, self._structure)
        return inputs, options

    def _called(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            # A mode that handles the autograd function of this call is off meanwhile.
            now = _get_current_function_mode_stack()
            for mode in [value for value in self._function_modes if value not in now]:
                stack.enter_context(mode)
            return self._block(*inputs, **options)

    @contextmanager
    def _in_slots(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Put parameters, and buffers that may move, into their slots for a while; return the arguments."""
        count, last = len(tensors) - len(self._slots), len(tensors) - len(self._buffers)
        with in_slots(self._slots, [*tensors[count:last], *[lazy_copy(value) for value in tensors[last:]]]):
            yield tensors[:count]

    def _state_of_objects(self) -> ObjectState:
        """Return what the arguments that may change hold now."""
        try:
            return ObjectState(self._objects)
        except IteratorFoundError:
            self._refuse_argument(self._objects[0], "is an iterator, or contains one, which can be read only once")

    def _refuse_argument(self, value: Any, what: str) -> NoReturn:
        fault = f"a block, {_name_of(self._block)}, one of whose arguments, {kind_of(value)}, {what}"
        advice = "Do not pass a cache (use_cache=False in Hugging Face's models)."
        raise ConfigError(f"remat: found {fault}; expected arguments that do not change. {advice}") from None

    def _kept_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the block keeps in attributes, with their places; in any object where it is whole."""
        for module, _ in self._modes:
            for name in module.__dict__.keys() - _OF_MODULES:
                value = module.__dict__[name]
                # What hooks of `torch.nn.utils.weight_norm` and `spectral_norm` make of parameters anew is theirs.
                is_made = any(f"{name}_{ending}" in module._parameters for ending in ("orig", "v"))
                if not is_made and (self._is_whole or isinstance(value, Tensor | list | tuple | dict)):
                    for tensor in _tensors_in(value, is_whole=self._is_whole):
                        yield f"the attribute '{name}' of its {type(module).__name__}", tensor
        if self._is_whole and isinstance(self._block, FunctionType | MethodType | partial):
            for tensor in _tensors_in(self._block):
                yield "what the function is bound with", tensor


def _is_looked_at(block: Any) -> bool:
    """Say whether a call of a block is looked at as a whole: the first one, the second, the fourth and so on."""
    # Functions are often made anew for each call, and share their code.
    block = block.__code__ if isinstance(block, FunctionType) else block
    try:
        number = _num_calls[block] = _num_calls.get(block, 0) + 1
    except TypeError:  # it cannot be held weakly, or hashed
        number = 1
    return not number & (number - 1)


_ADVICE = (
    "Use only torch's default generators, keep changing values in buffers, use no cache; or do not apply remat to it."
)


def _require(is_right: bool, fault: str, expected: str, advice: str) -> None:
    if not is_right:
        raise ConfigError(f"remat: found {fault}; expected {expected}. {advice}")


def _name_of(block: Any) -> str:
    return getattr(block, "__name__", None) or type(getattr(block, "block", block)).__name__


def _tensors_in(value: Any, *, is_whole: bool = True) -> list[Tensor]:
    """Return the tensors in containers, or, as a whole, in any object; of an object with an iterator none."""
    try:
        leaves = leaves_of([value], into_modules=False) if is_whole else tree_leaves(value)
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    except IteratorFoundError:
        return []


class _Evaluated:
    """What a block has computed, in a few numbers.

    Args:
        results: of the block.
        shapes: of all tensors that it computed, where they were noted.
        is_whole: whether all entries of the results count.
    """

    def __init__(self, results: Sequence[Tensor], shapes: set[torch.Size], is_whole: bool) -> None:
        self._shapes = shapes
        self._forms = [(result.shape, result.dtype) for result in results]
        self._numbers = [] if is_tracing() else [_numbers(result, is_whole) for result in results]
        self._is_rounded = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))

    def difference(self, other: "_Evaluated") -> str:
        """Return in words what another evaluation did otherwise; "" where it did the same."""
        if other._forms != self._forms:
            return f"returned {other._forms} in place of {self._forms}"
        if new := other._shapes - self._shapes:
            return f"computed a tensor of another shape, {tuple(min(new))},"
        for before, now, (_, dtype) in zip(self._numbers, other._numbers, self._forms, strict=True):
            if before is None or now is None:
                continue
            share = (ANY_KERNELS if self._is_rounded or now.is_cuda else SAME_KERNELS).of(dtype)
            # What has overflowed is no sign of anything.
            if bool((before - now).abs().max() > share * torch.maximum(before[1], now[1])):
                return "returned something else"
        return ""


def _numbers(result: Tensor, is_whole: bool) -> Tensor | None:
    """Return the fingerprint of a result, or of a few of its entries; None where there are no values to read.

    Within transforms of torch.func it is that of the tensor inside, with all axes that `torch.vmap` hides.
    """
    while is_functorch_wrapped_tensor(result):
        result = private.get_unwrapped(result)
    if result.is_meta:
        return None
    with private.temporarily_clear_interpreter_stack(), torch.no_grad():
        result = apart([result])[0][0].detach()
        if is_whole or result.layout != torch.strided or result.numel() <= _NUM_ENTRIES:
            return fingerprint(result)
        places = torch.arange(_NUM_ENTRIES, device=result.device) * (result.numel() - 1) // (_NUM_ENTRIES - 1)
        return fingerprint(torch.take(result, places))


_SHAPES: ContextVar["_Shapes | None"] = ContextVar("mlotool_remat_shapes", default=None)


class _Shapes(TorchFunctionMode):
    """Notes the shapes of what functions of torch return, but for blocks inside: these are compared by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[torch.Size] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if _SHAPES.get() is self:
            self.note(result)
        return result

    def note(self, result: Any) -> None:
        """Note the shapes of tensors."""
        values = result if isinstance(result, tuple | list) else (result,)
        self.shapes.update(value.shape for value in values if isinstance(value, Tensor))


@contextmanager
def _watching(mode: _Shapes | None) -> Iterator[None]:
    token = _SHAPES.set(mode)
    try:
        yield
    finally:
        _SHAPES.reset(token)


def computed_as_one(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function does, of which a block around notes the result alone."""
    mode = _SHAPES.get()
    with _watching(None):
        result = function(*args, **kwargs)
    if mode is not None:
        mode.note(result)
    return result


@contextmanager
def _noted_shapes(is_noted: bool) -> Iterator[set[torch.Size]]:
    """Note the shapes of all that is computed within."""
    if not is_noted or is_tracing():
        yield set()
        return
    with _Shapes() as mode, _watching(mode):
        yield mode.shapes


def _autocast_on(kind: str) -> dict[str, Any]:
    """Return the settings of autocast on one kind of device."""
    is_on, is_cached = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    return {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": is_on, "cache_enabled": is_cached}


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
    return {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}


def _returned_tensors(leaves: Sequence[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that a block has returned; of what it was given and returns as it is, an alias."""
    given = {id(tensor) for tensor in tensors}
    return [leaf.view_as(leaf) if key in given else leaf for key, leaf in _once(leaves).items()]


def _filled(holder: dict[str, Any]) -> list[Slot]:
    return [(holder, name) for name, value in holder.items() if value is not None]


def _has_moved(buffer: Tensor, original: Tensor) -> bool:
    # Kernels of BatchNorm change its statistics without counting a version; those of sparse tensors count.
    if buffer.layout != torch.strided or private.is_batchedtensor(buffer):
        return False
    return not torch.equal(buffer, original)


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


# Tensors in, tensors out, the same ones each time; of an argument that is unused, the cotangent is None.
_Evaluation = Callable[..., Sequence[Tensor | None]]

_REVERSE_OVER_FORWARD = (
    "remat: found reverse mode over forward mode; expected forward mode over reverse mode, which gives the same. Take "
    "the gradient inside, and its derivative along a direction outside."
)

_IS_PLAIN: ContextVar[bool] = ContextVar("mlotool_plain_remat", default=False)

_in_transform = torch._C._are_functorch_transforms_active


def remat(block: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Return `block(*inputs, **options)`, keeping only inputs and outputs for derivatives, not the activations inside.

    The block is evaluated again in the backward pass, and again in the backward pass of the backward pass. So a
    second-order product through n blocks holds the n inputs and the activations of one block. All evaluations use the
    same random numbers, autocast, train or eval mode, buffers, and values of `stop_gradient`. Without gradients,
    `remat` is a plain call. It supports double backward, forward mode, `torch.vmap` and `torch.func`, also nested,
    except reverse mode over forward mode.

    Args:
        block: a module, or a function of tensors. All tensors that it is differentiated with respect to have to be
            among its parameters and inputs. It may change its buffers, which count as constants, but none of its
            inputs.
        inputs: the block's inputs, in any nesting of lists, tuples and dictionaries. The block may change neither the
            inputs nor objects among them: a cache is refused.
        options: the block's keyword arguments, with the same rules.

    Returns:
        What the block returns. If inputs or parameters require a gradient, all floating-point results do too; those
        that the block has detached have a zero gradient. Do not change a result in place that shares memory with an
        input, a parameter or another result.

    Raises:
        ConfigError: the block uses a tensor that requires a gradient and is not among its inputs and parameters,
            changes an argument, or computes something else when it is evaluated again.

    Cost: one more evaluation of the block for each backward pass through it.

    Source: Chen et al. 2016 (arXiv 1604.06174), extended to the backward pass of a backward pass; Kemaev et al. 2025
        (MixFlow-MG), section 4.

    Example:
        >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
        >>> torch.equal(remat(layer, x), layer(x))
        True
    """
    if _IS_PLAIN.get():
        return block(*inputs, **options)
    with _watching(None):
        call = BlockCall(block, inputs, options)
        tensors, call.tensors = call.tensors, []
        is_recorded = torch.is_grad_enabled() and (_in_transform() or any(tensor.requires_grad for tensor in tensors))
        if is_recorded or any_has_tangent(tensors):
            return call.finish(_evaluate(call, tensors))
    return block(*inputs, **options)


def graph_inside(node: Any) -> list[Tensor]:
    """Return what a node of `remat` stands for, with its graph, made again; nothing for any other node.

    Args:
        node: of an autograd graph, outside of `torch.func`.
    """
    if getattr(node, "_forward_cls", None) is not _Remat:
        return []
    points, wanted = node.saved_tensors[: node.count], node.needs_input_grad[2 : 2 + node.count]
    with torch.enable_grad():
        results = node.function(*[x.detach().requires_grad_(flag) for x, flag in zip(points, wanted, strict=True)])
    return [value for value in results if value is not None and value.requires_grad]


def _evaluate(function: _Evaluation, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return `function(*tensors)`, of which only the tensors are kept for derivatives.

    Args:
        function: reads no other tensor that has a derivative.
        tensors: with tangents of forward mode, or without.
    """
    count = len(tensors)
    if _in_transform():
        # The transform at hand takes the tensors apart, and calls `apply` again with what is inside.
        results = _Remat.apply(function, count, *tensors, *[None] * count)
        return results[: len(results) // 2]
    values, tangents = apart(tensors)
    if not (torch.is_grad_enabled() and any(value.requires_grad for value in values)):
        with torch.no_grad():
            return function(*tensors)
    results = _Remat.apply(function, count, *values, *tangents)
    return joined(results[: len(results) // 2], results[len(results) // 2 :])


class _Remat(Function):
    """A function whose backward evaluates it again; that backward is such a function itself.

    Tangents of forward mode are arguments and results of their own: autograd would otherwise call this for the values
    alone, and then once more for the tangents.
    """

    @classmethod
    def apply(cls, function: _Evaluation, count: int, *both: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the values, then their tangents; where the arguments are not taken apart, neither are the values."""
        points = [value for value in both[:count] if value is not None]
        if not _in_transform() and any_has_tangent(points):
            results = _evaluate(function, points)
            return (*results, *[None] * len(results))
        return super().apply(function, count, *both)

    @staticmethod
    def forward(function: _Evaluation, count: int, *both: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the values, then their tangents.

        Args:
            function: to evaluate.
            count: of its arguments.
            both: the values of the arguments, then their tangents.
        """
        # Forward mode is switched off within a custom function.
        with forward_ad._set_fwd_grad_enabled(True):
            given = [None if value is None else value.detach() for value in both]
            points = [value for value in given[:count] if value is not None]
            results, tangents = apart(function(*joined(points, given[count:])))
        return (*_own(results, points), *tangents)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Keep the arguments."""
        ctx.function, ctx.count, *both = inputs
        ctx.save_for_backward(*both)
        ctx.save_for_forward(*both)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the cotangents of the arguments, which have tangents where the arguments have."""
        count, both = ctx.count, ctx.saved_tensors
        given, of_tangents = cotangents[: len(cotangents) // 2], cotangents[len(cotangents) // 2 :]
        if any(tangent is not None for tangent in of_tangents):
            raise RuntimeError(_REVERSE_OVER_FORWARD)
        wanted = _wanted(ctx, both[:count])
        pullback = _Pullback(ctx.function, count, wanted, [value is not None for value in given])
        points = joined(both[:count], both[count:])
        pulled = iter(_evaluate(pullback, [*points, *[value for value in given if value is not None]]))
        return (None, None, *[next(pulled) if flag else None for flag in wanted], *[None] * count)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the tangents of the values, for `torch.func.jvp`."""
        points = joined(ctx.saved_tensors[: ctx.count], tangents[2 : 2 + ctx.count])
        with forward_ad._set_fwd_grad_enabled(True):
            pushed = apart(ctx.function(*points))[1]
        return (*pushed, *[None] * len(pushed))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: _Evaluation, count: int, *both: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        """Return the values along a leading axis: what is evaluated again is the function along that axis."""
        axes = in_dims[2 : 2 + count]

        def batched(*tensors: Tensor) -> Sequence[Tensor | None]:
            return list(torch.vmap(function, in_dims=axes, randomness=info.randomness)(*tensors))

        results = _evaluate(batched, [value for value in both[:count] if value is not None])
        nothing = [None] * len(results)
        return (*results, *nothing), (*[None if value is None else 0 for value in results], *nothing)


def _own(results: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor | None]:
    """Return results that may be changed in place: torch allows that for no view that a custom function has made.

    A view is a tensor of its own where nothing else is on its memory. Other ones stay views, of which torch refuses
    changes: they would have to reach an input, or another result.
    """
    plain = [value for value in (*given, *results) if value is not None and not is_functorch_wrapped_tensor(value)]
    counts = Counter(value.untyped_storage()._cdata for value in plain if value.layout == torch.strided)
    views = {id(value) for value in plain if value._is_view() and counts[value.untyped_storage()._cdata] == 1}
    return [value.data if value is not None and id(value) in views else value for value in results]


@dataclass(frozen=True)
class _Pullback:
    """The pullback of a function, as a function: arguments and cotangents in, cotangents of the arguments out.

    Args:
        function: the one that is differentiated.
        count: of its arguments.
        wanted: which of them want a cotangent.
        has_cotangent: which of its results have one.
    """

    function: "_Evaluation"
    count: int
    wanted: Sequence[bool]
    has_cotangent: Sequence[bool]

    def __call__(self, *given: Tensor) -> Sequence[Tensor | None]:
        """Return a cotangent for each argument that wants one; None where nothing depends on it."""
        points, cotangents = given[: self.count], given[self.count :]
        # Within the evaluation of its own pullback, the results need a graph.
        create_graph = torch.is_grad_enabled()
        if _in_transform():
            return self._by_transform(points, cotangents)
        if not create_graph and any_has_tangent(given):
            # The transform records whatever requires a gradient, with or without `torch.no_grad`.
            return self._by_transform(_constants(points), _constants(cotangents))
        values, tangents = apart(points)
        with torch.enable_grad():
            leaves = [
                value.view_as(value) if create_graph and value.requires_grad else value.detach().requires_grad_(flag)
                for value, flag in zip(values, self.wanted, strict=True)
            ]
            results = self._with_cotangent(self.function(*joined(leaves, tangents)))
            pairs = [(y, v) for y, v in zip(results, cotangents, strict=True) if y.requires_grad]
            sources = [leaf for leaf, flag in zip(leaves, self.wanted, strict=True) if flag]
            if not pairs or not sources:
                return [None] * len(sources)
            return torch.autograd.grad(
                [y for y, _ in pairs], sources, [v for _, v in pairs], create_graph=create_graph, allow_unused=True
            )

    def _by_transform(self, points: Sequence[Tensor], cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the same by torch.func.

        Within one of its transforms autograd cannot be called. And where there are tangents, autograd would record them
        as well: twice the memory, part of it in circles that last as long as the level of forward mode.
        """

        def function(*sources: Tensor) -> tuple[Tensor, ...]:
            moved = iter(sources)
            arguments = [next(moved) if flag else point for point, flag in zip(points, self.wanted, strict=True)]
            return tuple(self._with_cotangent(self.function(*arguments)))

        sources = [point for point, flag in zip(points, self.wanted, strict=True) if flag]
        return torch.func.vjp(function, *sources)[1](tuple(cotangents))

    def _with_cotangent(self, results: Sequence[Tensor | None]) -> list[Tensor]:
        return [y for y, flag in zip(results, self.has_cotangent, strict=True) if flag and y is not None]


def _wanted(node: Any, arguments: Sequence[Tensor | None]) -> list[bool]:
    """Return which arguments of a node want a cotangent from the backward pass at hand.

    What requires a gradient need not be asked for: of the pullback of a block, a cross product wants the cotangent of
    the cotangents alone, and neither the block's parameters nor its input.

    Args:
        node: of `_Remat`, whose backward is running.
        arguments: of its function.
    """
    flags: tuple[bool, ...] = node.needs_input_grad[2 : 2 + len(arguments)]
    if _in_transform():
        return list(flags)
    edges = iter(node.next_functions)
    before = [None if value is None else next(edges)[0] for value in arguments]
    return [flag and _is_asked_for(value) for flag, value in zip(flags, before, strict=True)]


def _is_asked_for(node: Any) -> bool:
    """Return whether the backward pass at hand leads to a node; a leaf is refused by name where it does."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True


def _constants(tensors: Sequence[Tensor]) -> list[Tensor]:
    values, tangents = apart(tensors)
    slopes = [None if tangent is None else tangent.detach() for tangent in tangents]
    return joined([value.detach() for value in values], slopes)


class RematerializedModule(AbstractEvaluation):
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
        self._insides = [_Inside(block) for block in blocks]
        for outer in self._insides:
            inner = {id(value) for value in outer.block.modules()} - {id(outer.block)}
            outer.inner = [inside for inside in self._insides if id(inside.block) in inner]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the module."""
        return _run(self._insides, self._module, inputs, options)

    def method(self, name: str) -> Callable[..., Any]:
        """Return another method of the module, in which the same blocks are evaluated by `remat`."""

        def call(*inputs: Any, **options: Any) -> Any:
            return _run(self._insides, getattr(self._module, name), inputs, options)

        return call


class _Inside(nn.Module):
    """A block without its hooks, as a module: `remat` looks for parameters, buffers and modes there.

    Args:
        block: to evaluate.

    Attributes:
        inner: those of blocks inside it.
        outside: what stands in the place of the block's `forward`: it evaluates the block now, and where a derivative
            needs it.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.inner: Sequence[_Inside] = ()
        self._own = block.forward
        # For code that looks at the signature of a forward.
        self.outside = wraps(block.forward)(partial(remat, self))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the block; in a backward pass nobody else has set the forwards inside."""
        return _run(self.inner, self._own, inputs, options)


def _run(insides: Sequence[_Inside], call: Callable[..., Any], inputs: Any, options: dict[str, Any]) -> Any:
    """Return `call(*inputs, **options)` with other forwards in the places of the blocks'."""
    attributes = [inside.block.__dict__ for inside in insides]
    before = [values.get("forward") for values in attributes]
    try:
        for values, inside in zip(attributes, insides, strict=True):
            values["forward"] = inside.outside
        return call(*inputs, **options)
    finally:
        for values, forward in zip(attributes, before, strict=True):
            values["forward"] = forward
            if forward is None:
                del values["forward"]
