"""Which stages a module is cut into: named by the user, or balanced; and how well they are balanced."""

import logging
import warnings
from collections.abc import Sequence

from mlotool.core.arguments import require
from mlotool.layerparallel.partition.chain import Chain
from mlotool.layerparallel.partition.costs import Measure, operations, seconds
from mlotool.layerparallel.partition.stage import Inputs

Cut = Sequence[str] | str | None
"""Names of the layers that begin the stages 1 .. K-1; `measured`: balanced by time; None: by counted operations."""

MEASURED = "measured"

LARGEST_IMBALANCE = 1.3
"""Of the longest stage over the mean; above it the run warns."""

SHORTEST_STAGE = 5e-3
"""Seconds; stages of a shorter mean are not worth a warning about their times."""

_log = logging.getLogger("mlotool")


def check_cut(cut: Cut, key: str) -> None:
    """Refuse what is no cut.

    Args:
        cut: what a user has set.
        key: of the setting, for messages.

    Raises:
        ConfigError: it is none of the kinds of `Cut`.

    Example:
        >>> check_cut(["layer3"], "parallel.cut")
    """
    is_list = isinstance(cut, Sequence) and not isinstance(cut, str) and all(isinstance(each, str) for each in cut)
    is_right = cut is None or cut == MEASURED or is_list
    require(is_right, key, cut, f"names of layers, {MEASURED} or null", "Write cut: [layer3], or cut: measured.")


def resolved(chain: Chain, num_stages: int, cut: Cut) -> list[str] | None:
    """Return the layers that a user has named, by their full names; None where the stages are to be balanced.

    Args:
        chain: the module.
        num_stages: K.
        cut: what the user has set.

    Raises:
        ConfigError: the module has fewer places to cut than needed, or no such layers.

    Example:
        >>> from torch import nn
        >>> resolved(Chain(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), num_stages=2, cut=["1"])
        ['1']
    """
    names = None if cut is None or isinstance(cut, str) else cut
    chain.check(num_stages, names)
    return None if names is None else chain.resolve(names)


def balanced_cut(chain: Chain, num_stages: int, cut: Cut, inputs: Inputs, key: str) -> list[str]:
    """Return the names of the layers that begin the stages 1 .. K-1, and say how well the stages are balanced.

    Args:
        chain: the module.
        num_stages: K.
        cut: what the user has set.
        inputs: a batch.
        key: of the setting, for messages.

    Raises:
        ConfigError: as of `resolved`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> chain = Chain(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
        >>> balanced_cut(chain, 2, None, (torch.zeros(4, 8),), "parallel")
        ['2']
    """
    names = resolved(chain, num_stages, cut)
    if num_stages == 1:
        return []
    if names is None:
        names = chain.balance(num_stages, inputs, seconds if cut == MEASURED else operations)
    counted, timed = (chain.costs_of(names, inputs, measure) for measure in (operations, seconds))
    _log.info(
        "%s: the stages begin at the input, %s; the longest has %.2f times the mean of the counted operations, and of "
        "the first batch's time %.2f (%s ms). To have the same stages again, set cut: [%s].",
        key,
        ", ".join(names),
        imbalance(counted),
        imbalance(timed),
        " / ".join(f"{1e3 * each:.3g}" for each in timed),
        ", ".join(names),
    )
    _warn(chain, names, cut, inputs, key, (counted, timed))
    return names


def imbalance(costs: Sequence[float]) -> float:
    """Return the cost of the most expensive stage over the mean: 1 is a perfect balance.

    Example:
        >>> imbalance([1.0, 3.0])
        1.5
    """
    return max(costs) * len(costs) / (sum(costs) or 1.0)


def _warn(
    chain: Chain, names: list[str], cut: Cut, inputs: Inputs, key: str, costs: tuple[list[float], list[float]]
) -> None:
    counted, timed = costs
    is_long = sum(timed) / len(timed) >= SHORTEST_STAGE
    measure: Measure = seconds if is_long else operations
    found = imbalance(timed if is_long else counted)
    if found <= LARGEST_IMBALANCE:
        return
    better = chain.balance(len(timed), inputs, measure)
    reachable = imbalance(chain.costs_of(better, inputs, measure))
    unit = "time of the first batch" if is_long else "counted operations"
    if better == names or reachable >= found:
        advice = "No cut is better: set fewer stages, or a module of smaller blocks."
    else:
        advice = f"Set cut: [{', '.join(better)}], which has {reachable:.2f}" + (
            "." if cut == MEASURED or not is_long else f", or cut: {MEASURED}."
        )
    warnings.warn(
        f"{key}.cut: the longest of {len(timed)} stages (they begin at the input, {', '.join(names)}) takes "
        f"{found:.2f} times their mean, by the {unit}; expected at most {LARGEST_IMBALANCE}, "
        f"since all wait for the longest. {advice}",
        UserWarning,
        stacklevel=2,
    )
