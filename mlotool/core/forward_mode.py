"""Second derivatives of losses that were written for gradients alone: forward over reverse mode, and double backward.

Three things in such a loss would otherwise fail, or go wrong without a word: operators without a derivative in forward
mode, or with one derivative alone; `torch.no_grad()` and `.data`, which stop gradients and let tangents pass; and what
cannot be had at all, of which torch says so in words of its own, or takes what a backward returns for a constant.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from types import FrameType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import grad_mode
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mlotool.core.decompositions import FORWARD, ONCE_IN_OLDER_TORCH, TWICE, Table
from mlotool.core.errors import ConfigError
from mlotool.core.private import set_grad_enabled
from mlotool.core.rematerialization import graph_inside
from mlotool.core.replay import LossTraits, RandomState

_SCRIPTED = (
    "problems.{problem}.loss: found '{name}', a module of torch.jit, under product: forward; expected modules of "
    "Python, since such a one has no tangents. Leave out torch.jit.script or trace, or write product: reverse."
)

_ONCE = (
    "problems.{problem}.loss: found {name}, an autograd.Function whose backward is marked once_differentiable; "
    "expected functions that are differentiable twice. Write hypergradient: finite_difference, or remove the mark."
)

# Words of torch's where it cannot differentiate: in any way of taking a product, and in forward mode.
_ANYHOW = re.compile(r"derivative for .* is not implemented|torch\.utils\.checkpoint: ")
_FORWARD = re.compile(
    r"forward AD|forward gradient|forward mode AD|ZeroTensors|saved tensor hooks|setup_context|the jvp function"
    r"|functorch transform|Tensor\.requires_grad_\(\)|mutate a captured|Cannot access (?:data pointer|storage)"
)


def explain(error: BaseException, problem: str, product: str = "forward") -> ConfigError | None:
    """Return what to say where torch cannot differentiate a loss: its own words, and what to write; None of others.

    Args:
        error: what came out of evaluating a loss, or its derivatives.
        problem: whose loss it is.
        product: that was computed: forward or reverse.

    Example:
        >>> error = NotImplementedError("Trying to use forward AD with _ctc_loss that does not support it because ...")
        >>> str(explain(error, "w"))[:85]
        'problems.w.loss: found what torch cannot differentiate (Trying to use forward AD with'
    """
    text = " ".join(str(error).split())
    is_forward = product == "forward" and _FORWARD.search(text)
    if not isinstance(error, RuntimeError) or not (is_forward or _ANYHOW.search(text)):
        return None
    remedy = f"{'product: reverse or ' if is_forward else ''}hypergradient: finite_difference"
    if "checkpoint" in text or "saved tensor hooks" in text:
        remedy = "mlotool.remat(block, x) in place of torch.utils.checkpoint"
    return ConfigError(
        f"problems.{problem}.loss: found what torch cannot differentiate ({text[:200]}), under product: {product}; "
        f"expected operators that are differentiable twice. Write {remedy}."
    )


@contextmanager
def explained(problem: str, product: str) -> Iterator[None]:
    """Say of an error of torch what `explain` knows of it; any other passes through.

    Args:
        problem: whose loss is evaluated or differentiated.
        product: that is computed: forward or reverse.

    Raises:
        ConfigError: torch cannot differentiate the loss in the way of that product.

    Example:
        >>> with explained("w", "reverse"):
        ...     pass
    """
    try:
        yield
    except Exception as error:
        if explanation := explain(error, problem, product):
            raise explanation from error
        raise


def refuse_scripted(modules: Iterable[nn.Module], problem: str) -> None:
    """Refuse modules of TorchScript, whose outputs have no tangents in torch once they are optimized.

    Nothing says so when they are called, and a TorchFunctionMode does not see what they call.

    Args:
        modules: that a loss calls, with all that is in them.
        problem: whose loss it is.

    Raises:
        ConfigError: there is one.

    Example:
        >>> refuse_scripted([nn.Linear(1, 1)], "w")  # nothing to refuse
    """
    for module in modules:
        for name, value in module.named_modules():
            if isinstance(value, torch.jit.ScriptModule):
                raise ConfigError(_SCRIPTED.format(problem=problem, name=name or type(value).__name__))


# Modules whose switching of gradients says nothing about tangents.
_OWN = (
    "mlotool.core.",
    "mlotool.hypergradient.",
    "mlotool.problem.",
    "mlotool.program.",
    "torch._functorch.",
    # A backward that is marked once_differentiable: tangents pass it well.
    "torch.autograd.function",
)


class GradientSwitches:
    """Follows each switch of gradients in a loss.

    Gradients are often off where tangents live: within a backward pass, and in custom functions. So what the end of
    `torch.no_grad` restores says nothing, and the context itself must be known: it is `self` in torch's frames. Its end
    restores what was there for tangents at its beginning.
    """

    def __init__(self) -> None:
        self._before: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()

    def follow(self, frame: FrameType | None, is_on: bool) -> None:
        """Switch tangents as gradients are switched.

        Args:
            frame: that calls `set_grad_enabled`, or the `__torch_function__` of a mode that does.
            is_on: what it is called with.
        """
        while frame is not None and frame.f_code.co_name == "__torch_function__":
            # Below other modes; of two that follow switches the inner one has done it.
            if frame.f_globals.get("__name__") == "mlotool.core.forward_mode":
                return
            frame = frame.f_back
        context, is_end = None, False
        while frame is not None and frame.f_code.co_filename == grad_mode.__file__:
            context, is_end = frame.f_locals.get("self"), frame.f_code.co_name == "__exit__"
            frame = frame.f_back
        if frame is None or frame.f_globals.get("__name__", "").startswith(_OWN):
            return
        if not is_end:
            if context is not None:
                self._before.setdefault(context, torch._C._is_fwd_grad_enabled())
            torch._C._set_fwd_grad_enabled(is_on)
        elif context in self._before:
            torch._C._set_fwd_grad_enabled(self._before.pop(context))


# Functions of torch in Python that call operators of the tables, at once or in a backward pass.
_OPENED = frozenset({F.multi_head_attention_forward, torch.autograd.grad, torch.autograd.backward, Tensor.backward})


@contextmanager
def forward_mode(problem: str) -> Iterator[None]:
    """Evaluate a loss, and its backward pass, on tensors with tangents.

    Operators without forward mode are replaced by equal ones that have it (`core/decompositions.py`). What is computed
    under `torch.no_grad()`, and what `.data` returns, has no tangent, as it has no gradient.

    Args:
        problem: whose loss it is.

    Raises:
        ConfigError: the loss has an operator, or a construction, that has no tangents here.

    Example:
        >>> from torch.autograd import forward_ad
        >>> from mlotool.core.tangents import dual_level
        >>> with dual_level(), forward_mode("w"):
        ...     x = forward_ad.make_dual(torch.zeros(1), torch.ones(1))
        ...     gradient = torch.func.vjp(lambda x: F.silu(x).sum(), x)[1](torch.ones(()), create_graph=False)[0]
        ...     forward_ad.unpack_dual(gradient).tangent
        tensor([0.5000])
    """
    before = torch._C._is_fwd_grad_enabled()
    with explained(problem, "forward"), _slow_attention(), _uncompiled(), _Decomposition(FORWARD, GradientSwitches()):
        try:
            yield
        finally:
            torch._C._set_fwd_grad_enabled(before)


@contextmanager
def twice_differentiable_mode(problem: str) -> Iterator[None]:
    """Evaluate a loss whose gradient is differentiated by a second backward pass (reverse over reverse).

    Operators that fail there, or are silently wrong, are replaced by equal ones.

    Args:
        problem: whose loss it is.

    Raises:
        ConfigError: the loss has an operator that cannot be differentiated twice.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> with twice_differentiable_mode("w"):
        ...     loss = F.scaled_dot_product_attention(x, x, x).sum()
        ...     slope = torch.autograd.grad(loss, x, create_graph=True)[0]
        ...     bool(torch.autograd.grad(slope.square().sum(), x)[0].isfinite().all())
        True
    """
    with explained(problem, "reverse"), _slow_attention(), _uncompiled(), _Decomposition(TWICE):
        yield


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run what is compiled by torch.compile as it is written.

    A compiled function has no second derivatives, and takes the constants of its trace for the tangents of its inputs.
    """
    # It takes long to import.
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


@contextmanager
def _slow_attention() -> Iterator[None]:
    """Keep modules of attention from kernels for inference, which have no derivative.

    They take them wherever no tensor seems to require a gradient, as within `torch.vmap`.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _Decomposition(TorchFunctionMode):
    """Puts other operators in the place of some.

    Args:
        table: from operators to these.
        switches: what follows `torch.no_grad` and its like.
    """

    def __init__(self, table: Table, switches: GradientSwitches | None = None) -> None:
        super().__init__()
        self._table = table
        self._switches = switches

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or what stands in its place."""
        other = self._table.get(func)
        if other is not None:
            return other(*args, **(kwargs or {}))
        if func in _OPENED:
            with self:
                return _opened(func)(*args, **(kwargs or {}))
        if self._switches is not None and func is set_grad_enabled:
            self._switches.follow(sys._getframe(1), *args)
        return func(*args, **kwargs) if kwargs else func(*args)


@cache
def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that does not ask modes to take its place, so that they see what it calls.

    Such a function calls the mode again when it is called under it, and for the mode's own call there is no mode.
    """
    assert isinstance(function, FunctionType)
    checks = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    scope = {**function.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    found = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


# All functions that the decorator makes share their code.
_MARK = once_differentiable(lambda ctx: None).__code__

# Nodes of the operators in `mlotool.core.decompositions.TWICE`, and of what torch.compile has made.
_NODES = (
    "CompiledFunction",
    *("ScaledDotProduct.*Attention.*", "WeightNormInterface", "Hardsigmoid", "MultiMarginLoss", "MultilabelMarginLoss"),
    *("EmbeddingBag", ".*LinearCrossEntropy.*", *ONCE_IN_OLDER_TORCH),
)
_REPLACEABLE = re.compile(f"({'|'.join(_NODES)})Backward")


def twice_differentiable(
    problem: str, traits: LossTraits, devices: tuple[torch.device, ...], evaluate: Callable[[], Tensor]
) -> Tensor:
    """Return a value of the loss whose gradient can be differentiated.

    Its graph is searched once a problem. Where operators are in it that fail in double backward, or are silently wrong
    there (fused attention, weight normalization), the loss is evaluated with equal ones from then on.

    Args:
        problem: whose loss it is.
        traits: of the loss; says from then on which it is.
        devices: CUDA devices whose generators are used.
        evaluate: returns the value.

    Raises:
        ConfigError: it depends on the parameters through a function that is differentiable once.

    Example:
        >>> theta, traits = torch.tensor([2.0], requires_grad=True), LossTraits()
        >>> twice_differentiable("w", traits, (), lambda: (theta ** 2).sum()).tolist(), traits.is_twice_differentiable
        (4.0, True)
    """
    if traits.is_twice_differentiable:
        return evaluate()
    if not traits.replaces_operators:
        random = RandomState(devices)
        loss = evaluate()
        function = _found([loss], _marked)
        if function is not None:
            raise ConfigError(_ONCE.format(problem=problem, name=function))
        if _found([loss], _replaceable) is None:
            traits.is_twice_differentiable = True
            return loss
        traits.replaces_operators = True
        random.restore()
    with twice_differentiable_mode(problem):
        return evaluate()


def _marked(node: Any) -> str | None:
    function = getattr(node, "_forward_cls", None)
    if function is None or getattr(function.backward, "__code__", None) is not _MARK:
        return None
    return str(function.__name__)


def _replaceable(node: Any) -> str | None:
    return str(node.name()) if _REPLACEABLE.match(node.name()) else None


def _found(tensors: Sequence[Tensor], look: Callable[[Any], str | None]) -> str | None:
    """Return the first that `look` finds at a node of the graph of tensors, also inside blocks of `remat`.

    The tensors are held meanwhile: without them torch 2.9 gives up what the nodes of functions have saved.
    """
    seen, waiting = set(), [tensor.grad_fn for tensor in tensors]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # By itself, as what has been seen holds its tensors: then those of one block of `remat` at a time.
        name = look(node) or _found(graph_inside(node), look)
        if name is not None:
            return name
        waiting += [other for other, _ in node.next_functions]
    return None
