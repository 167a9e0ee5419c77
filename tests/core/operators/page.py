"""The page docs/internals/forward_mode.md: `python -m tests.core.operators.page > docs/internals/forward_mode.md`."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mlotool.core.decompositions import FORWARD, TWICE
from mlotool.core.errors import ConfigError
from mlotool.core.forward_mode import forward_mode, twice_differentiable_mode
from tests.core.operators import OPERATORS
from tests.core.operators.building import inputs_of
from tests.core.operators.products import difference, direction, distance, forward, loss_of, reverse

_HEAD = """# Second-order products of losses that were written for gradients

A product is a second derivative. `product: reverse` takes it by a backward pass through a backward pass, `product:
forward` by tangents of forward mode through one (`hypergradient/products/forward.py`). A loss that trains well may
lack either, or have a wrong one, and torch says nothing of that. `core/forward_mode.py` has a context for each:

- `forward_mode(problem)`: operators of the first table below are replaced; what is computed under `torch.no_grad()`,
  and what `.data`, `detach_()` and `.numpy()` give, has no tangent; compiled modules run uncompiled; kernels for
  inference of `nn.MultiheadAttention` are off. An error of torch becomes one that names operator, problem and remedy.
- `twice_differentiable_mode(problem)`: the rows of that table with a "yes", for double backward.

They are `TorchFunctionMode`s: they see each call from Python, within `torch.vmap`, torch.func, `remat` blocks and the
backward pass too. What is called from C++ they do not see. Functions of torch in Python are opened for them one by one
(`_OPENED`): `torch.autograd.grad` would else hide a whole backward pass.

A mode cannot ask where `torch.no_grad()` ends: gradients are also off within a backward pass and within custom
functions, where tangents live. So each context is known by the frame that switches gradients, and its end restores what
its beginning found (`core/forward_mode.py`). mlotool's own switching and torch.func's is left alone.

A mode takes about 3 us a call from Python: a product of a network of nine small layers, 1.8 ms, takes 1.26 of its time
(CPU, one thread, median of nine interleaved ratios).

## What stands in the place of an operator
"""

_MEASURED = """
## Operators as they are, and with the contexts

Measured with torch {version} on a CPU in float64, {count} operators, each against finite differences of the fourth
order, with all arguments moving and with one. All others are right everywhere. "wrong" is silent.

| operator | double backward | tangents of the gradient | twice_differentiable_mode | forward_mode |
|---|---|---|---|---|
"""

_REST = """
Every sample of torch's own operator database that is smooth and differentiable (4,950 samples of 544 operators) was
compared likewise, once: what is not right under `forward_mode` is refused by name, but for `linalg.det` of a singular matrix
(NaN). Double backward is silently wrong besides for `as_strided_scatter`, and for `max_unpool` where windows overlap.

## What else a loss may do

| | double backward | tangents of the gradient | forward_mode |
|---|---|---|---|
| `torch.no_grad`, `set_grad_enabled(False)` (context, decorator, call) | right | wrong | right |
| `torch.inference_mode`, `detach`, `item`, `tolist`, `float(x)`, `torch.tensor(x)`, `nn.Parameter(x)`, `copy_` | right | right | right |
| `.data`, `.data` changed in place, `detach_()` | right | wrong | right |
| `x.detach().numpy()` | right | error | right |
| `x + (round(x) - x).detach()`, `round`, `argmax`, gates | right | right | right |
| `x.register_hook` that changes gradients | wrong: called in the second pass too | right | right |
| module hooks on gradients, `requires_grad_()`, assignments to `.data`, `copy.copy` | right | error | error |
| `autograd.Function` with `setup_context` and `jvp` | right | right | right |
| the same with a backward that is no derivative (straight through) | right | as `jvp` says | as `jvp` says |
| without `jvp`, or with a forward that takes `ctx` | right | error | error |
| `once_differentiable` | wrong; refused by mlotool | right | right |
| `torch.utils.checkpoint` (not reentrant) | right | error | error: write `mlotool.remat` |
| the same, reentrant | error | error | error |
| `torch.compile` | error, but for the backend eager | right, or an error of an operator | right, uncompiled |
| modules of `torch.jit` | right | wrong once they are optimized | refused by `refuse_scripted` where that is called |
| functions of `torch.jit` | right | wrong once they are optimized | wrong |
| `torch.func.jvp`, `jacfwd`, `hessian` | right | error | error: write `vjp`, `jacrev` |
| dropout of attention on a GPU | - | - | error: kernels draw other numbers than operators |
"""  # noqa: E501


def page() -> str:
    """Return the page; takes some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [f"| {name} | {' | '.join(found)} |\n" for name in OPERATORS if (found := _measured(name)) is not None]
    version = torch.__version__.partition("+")[0]
    return _HEAD + _replacements() + _MEASURED.format(version=version, count=len(OPERATORS)) + "".join(rows) + _REST


def _replacements() -> str:
    """Return a row for each function of the tables, with its formula."""
    names: dict[Callable[..., Any], list[str]] = {}
    for operator, other in FORWARD.items():
        names.setdefault(other, []).append(_name_of(operator))
    rows = ["\n| operator | what it becomes | in double backward too |\n|---|---|---|\n"]
    for other, operators in names.items():
        formula = (inspect.getdoc(other) or "").partition("\n")[0].replace("|", "\\|")
        twice = "yes" if other in TWICE.values() else ""
        if formula:
            rows.append(f"| {', '.join(dict.fromkeys(operators))} | {formula} | {twice} |\n")
    return "".join(rows)


def _name_of(operator: Callable[..., Any]) -> str:
    if operator == Tensor.data.__get__:  # type: ignore[attr-defined]
        return "`.data`"
    return f"`{operator.__name__}`"


def _measured(name: str) -> list[str] | None:
    """Return what becomes of an operator by each way; None where all are right."""
    spec, operator = OPERATORS[name]
    loss, tensors = loss_of(operator), inputs_of(spec)
    vector = direction(tensors)
    cases: list[list[Tensor | None]] = [list(vector)]
    if len(vector) > 1:
        cases += [[u if k == index else None for k, u in enumerate(vector)] for index in range(len(vector))]
    found = [
        _judged(lambda given, whole: reverse(loss, tensors, whole), loss, tensors, cases[:1]),
        _judged(lambda given, whole: forward(loss, tensors, given), loss, tensors, cases),
        _judged(
            lambda _, whole: reverse(loss, tensors, whole, lambda: twice_differentiable_mode("w")),
            loss,
            tensors,
            cases[:1],
        ),
        _judged(lambda given, _: forward(loss, tensors, given, lambda: forward_mode("w")), loss, tensors, cases),
    ]
    return None if found == ["right"] * 4 else found


def _judged(
    product: Callable[[Sequence[Tensor | None], list[Tensor]], list[Tensor]],
    loss: Callable[..., Tensor],
    tensors: list[Tensor],
    cases: list[list[Tensor | None]],
) -> str:
    """Return the worst of the cases."""
    found = ["right"]
    for given in cases:
        whole = [torch.zeros_like(x) if u is None else u for x, u in zip(tensors, given, strict=True)]
        try:
            error = distance(product(given, whole), difference(loss, tensors, whole))
        except ConfigError:
            found.append("refused")
        except (RuntimeError, NotImplementedError):
            found.append("error")
        else:
            found.append("right" if error < 1e-7 else "NaN" if error != error else "wrong")
    return max(found, key=["right", "refused", "error", "NaN", "wrong"].index)


if __name__ == "__main__":
    print(page(), end="")
