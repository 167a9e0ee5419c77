"""What to say of a loss that torch cannot differentiate in the way of a second-order product."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from mlotool.core.errors import ConfigError

_REVERSE = "product: reverse in the hypergradient of '{problem}'"
_DIFFERENCE = "hypergradient: finite_difference for '{problem}'"


_SCRIPTED = (
    "problems.{problem}.loss: found '{name}', a module of torch.jit, under product: forward; expected modules of "
    "Python, since such a one has no tangents. Leave out torch.jit.script or trace, or write " + _REVERSE + "."
)


class _Case(NamedTuple):
    """An error of torch.

    Args:
        pattern: of its text; the operator is a group.
        found: in the loss.
        expected: instead.
        remedies: by product.
    """

    pattern: str
    found: str
    expected: str
    remedies: dict[str, str]


_OPERATOR = "operators that are differentiable twice"
_TANGENTS = "operators that have tangents, and whose backward has"

_NOT_TWICE = ("_ctc_loss", "segment_reduce", "_cudnn_rnn")
"""Operators without forward mode of which double backward fails as well."""

_CASES = (
    _Case(
        rf"Trying to use forward AD with '?(?:aten::)?(?P<name>{'|'.join(_NOT_TWICE)})'? that does not support it",
        "{name}, an operator without forward mode",
        _TANGENTS,
        {"forward": f"Write {_DIFFERENCE}, since double backward fails too"},
    ),
    _Case(
        r"Trying to use forward AD with '?(?:aten::)?(?P<name>[\w., ]+?)'? that does not support it",
        "{name}, an operator without forward mode",
        _TANGENTS,
        {"forward": f"Write {_REVERSE}, which needs no tangents"},
    ),
    _Case(
        r"(?:the )?derivative for '?(?:aten::)?(?P<name>[\w., ]+?)'? is not implemented",
        "{name}, an operator without a derivative",
        _OPERATOR,
        dict.fromkeys(("forward", "reverse"), f"Write {_DIFFERENCE}"),
    ),
    _Case(
        r"torch\.utils\.checkpoint: ",
        "torch.utils.checkpoint, which evaluates a block again in a backward pass, as it was in none of its own",
        "blocks that are evaluated again by mlotool.remat, in every backward pass",
        dict.fromkeys(
            ("forward", "reverse"),
            "Write mlotool.remat(block, x) in place of checkpoint(block, x), or leave it out and name the blocks in "
            "problems.{problem}.remat",
        ),
    ),
    _Case(
        r"don't yet support saved tensor hooks",
        "hooks on saved tensors, as torch.utils.checkpoint sets them",
        "none, since they do not see tangents",
        {"forward": f"Write mlotool.remat(block, x) in place of checkpoint(block, x), or {_REVERSE}"},
    ),
    _Case(
        r"must override the setup_context staticmethod",
        "an autograd.Function whose forward takes ctx",
        "one that torch.func can take: forward without ctx, setup_context, and jvp",
        {"forward": f"Write it so, or write {_REVERSE}"},
    ),
    _Case(
        r"You must implement the jvp function for custom autograd\.Function",
        "an autograd.Function without jvp",
        "one that has tangents",
        {"forward": f"Add a staticmethod jvp(ctx, *tangents), or write {_REVERSE}"},
    ),
    _Case(
        r"Trying to set a forward gradient that has a different size",
        "an operator whose tangent torch computes in another shape than its value",
        _TANGENTS,
        {"forward": f"Write {_REVERSE}"},
    ),
    _Case(
        r"Nested forward mode AD is not supported",
        "torch.func.jvp, jacfwd or hessian, which are forward mode themselves",
        "reverse mode inside a loss",
        {"forward": f"Write torch.func.vjp, jacrev or grad there, or write {_REVERSE}"},
    ),
    _Case(
        r"(?P<text>[^.]*`?\.data`? inside functorch transform|You are attempting to call Tensor\.requires_grad_\(\))",
        "a tensor whose .data or requires_grad is set, as hooks of modules on gradients do",
        "tensors that keep what they are",
        {"forward": f"Write x.detach() and torch.where in place of it, or write {_REVERSE}"},
    ),
    _Case(
        r"attempted to call in-place operation \((?:aten::)?(?P<name>[\w.]+)\) that would mutate a captured",
        "{name}, which changes a tensor from outside of the loss in place",
        "buffers of the problem's modules, or new tensors",
        {"forward": f"Register it as a buffer, write x.detach() into it, or write {_REVERSE}"},
    ),
    _Case(
        r"Cannot access (data pointer|storage)",
        "the memory of a tensor, as copy, pickle and libraries outside of torch want it",
        "operations of torch",
        {"forward": f"Write x.clone(), or x.detach().numpy(), in place of it, or write {_REVERSE}"},
    ),
    _Case(
        r"ZeroTensors are immutable",
        "an operator whose backward writes into a tangent that is zero everywhere",
        _TANGENTS,
        {"forward": f"Write {_REVERSE}"},
    ),
)


def explain(error: BaseException, problem: str, product: str = "forward") -> ConfigError | None:
    """Return what to say of an error of torch: operator, product and problem, and what to write; None of any other.

    Args:
        error: what came out of evaluating a loss, or its derivatives.
        problem: whose loss it is.
        product: that was computed: forward or reverse.

    Example:
        >>> error = NotImplementedError("Trying to use forward AD with _ctc_loss that does not support it because ...")
        >>> str(explain(error, "w"))[:91]
        'problems.w.loss: found _ctc_loss, an operator without forward mode, under product: forward;'
    """
    if isinstance(error, ConfigError) or not isinstance(error, RuntimeError | NotImplementedError):
        return None
    text = str(error)
    for case in _CASES:
        match = re.search(case.pattern, text)
        if match is None or product not in case.remedies:
            continue
        found, remedy = case.found.format(**match.groupdict()), case.remedies[product].format(problem=problem)
        return ConfigError(
            f"problems.{problem}.loss: found {found}, under product: {product}; expected {case.expected}. {remedy}."
        )
    return None


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
        found = explain(error, problem, product)
        if found is None:
            raise
        raise found from error


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
        for name, each in module.named_modules():
            if isinstance(each, torch.jit.ScriptModule):
                raise ConfigError(_SCRIPTED.format(problem=problem, name=name or type(each).__name__))
