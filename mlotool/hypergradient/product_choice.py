"""Which second-order product `product: auto` takes: by a table of what was measured, not by a stopwatch.

| | double backward | forward mode |
|---|---|---|
| blocks are evaluated again (`remat` of the problem) | more memory, 1.1 to 1.4 times as long | taken |
| no blocks | taken | less memory, 1.1 to 1.4 times as long |

Memory of transformers of 32 layers, times of 8 layers of width 128 (benchmarks/mixflow, benchmarks/README.md).
"""

import logging
from collections.abc import Sequence

from mlotool.core.tangents import in_dual_level
from mlotool.hypergradient.diagnostics.forward_probe import check_forward_product
from mlotool.problem.interface import LowerView, Vector

_log = logging.getLogger("mlotool")


def takes_forward(setting: str, has_blocks: bool, is_nested: bool) -> bool:
    """Return whether products are taken by forward mode.

    Args:
        setting: `product` of the hypergradient.
        has_blocks: whether blocks of the problem's module are evaluated again.
        is_nested: whether solutions of lower problems are in its loss.

    Example:
        >>> takes_forward("auto", has_blocks=True, is_nested=False)
        True
    """
    return setting == "forward" or (setting == "auto" and has_blocks and not is_nested)


def chosen_product(setting: str, view: LowerView, theta: Vector, inputs: Vector, wanted: Sequence[bool]) -> str:
    """Return the product to take, which was compared with double backward if it is forward mode.

    Args:
        setting: `product` of the hypergradient.
        view: of the problem.
        theta: the point.
        inputs: what shapes it.
        wanted: which of the inputs want a cotangent.

    Raises:
        ConfigError: forward mode was asked for, and the loss has no tangents or other ones.

    Example:
        >>> import torch
        >>> from mlotool.problem.interface import LowerProblem
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()
        >>> theta, inputs = (torch.tensor([2.0]),), [torch.tensor([1.0])]
        >>> view = LowerView(LowerProblem("w", has_blocks=True), theta, loss)
        >>> chosen_product("auto", view, theta, inputs, [True])
        'forward'
    """
    problem, traits = view.problem, view.problem.traits
    if not takes_forward(setting, problem.has_blocks, problem.is_nested):
        return "reverse" if setting == "auto" else setting
    # Forward mode has one level: within a product of a problem above, what is solved here takes double backward.
    if in_dual_level() or traits.lacks_tangents:
        return "reverse"
    try:
        check_forward_product(view, theta, inputs, tuple(wanted))
    except Exception as error:
        # An error of the user's own code comes again by double backward.
        if setting != "auto":
            raise
        traits.lacks_tangents = True
        _log.info("problems.%s.hypergradient: product auto takes reverse. %s", problem.name, error)
        return "reverse"
    return "forward"
