"""A module as a chain of stages, each of which goes on where the one before has stopped."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from torch import nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition.chain import Chain, bound
from mlotool.layerparallel.partition.costs import Measure, operations, seconds
from mlotool.layerparallel.partition.stage import Inputs, Stage
from mlotool.layerparallel.partition.trace import UntraceableError, plain_values

DEPTH = 6
"""Times that heavy blocks are looked into, one within the other."""


def chain_for(
    module: nn.Module, key: str, inputs: Inputs, cut: Sequence[str] | None, num_stages: int | None = None
) -> Chain:
    """Return the chain of a module that is called with these inputs.

    Args:
        module: to be cut.
        key: the setting that the module belongs to, for messages.
        inputs: a batch, in the order of the forward's arguments. Its values are looked at where the forward decides by
            them, where it is called with masks or switches that are not its defaults, and where stages are out of
            balance without them.
        cut: names of the blocks that begin stages. What holds them is looked into; where not all of the module can be
            traced, only that is.
        num_stages: K. Blocks with blocks of their own are looked into while K stages cannot be balanced. None leaves
            them whole.

    Raises:
        ConfigError: the module cannot be traced.

    Example:
        >>> import torch
        >>> from mlotool.layerparallel.partition.chain import bound
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 2, 4, batch_first=True), num_layers=3)
        >>> chain_for(encoder, "parallel", bound(encoder, [torch.zeros(1, 5, 2)], {}), cut=None).names
        ['layers.1', 'layers.2']
    """
    chain = _whole(module, key, inputs, cut)
    if cut is not None:
        return _with(chain, inputs, cut)
    return chain if num_stages is None else _balanced(chain, inputs, num_stages)


def may_be_finer(chain: Chain) -> bool:
    """Say whether a chain that was traced without a batch may have more places to cut with one.

    Example:
        >>> may_be_finer(Chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
        False
    """
    return chain.asks_for_sizes or any(chain.closed(name) for name in ("", *chain.names))


def _whole(module: nn.Module, key: str, inputs: Inputs, cut: Sequence[str] | None) -> Chain:
    """Return the chain whose blocks are whole; values are looked at only where that is needed."""
    if plain_values(module) == plain_values(module, inputs):
        with suppress(UntraceableError):
            return Chain(module, key)
    try:
        return Chain(module, key, inputs)
    except ConfigError:
        if not cut:
            raise
    return Chain(module, key, inputs, cut)


def _with(chain: Chain, inputs: Inputs, cut: Sequence[str]) -> Chain:
    """Return a chain with places to cut of these names, if there is one."""
    parents = {name[:end] for name in cut for end in range(len(name)) if name[end] == "."}
    for opened, values in (((), None), ((), inputs), (parents, None), (parents, inputs)):
        with suppress(UntraceableError, ConfigError):
            other = chain if (opened, values) == ((), None) else chain.finer(values, opened)
            other.resolve(cut)
            return other
    return chain


def _balanced(chain: Chain, inputs: Inputs, num_stages: int) -> Chain:
    """Look into the heaviest blocks while the stages are out of balance."""
    best = _imbalance_of(chain, inputs, num_stages)
    for _ in range(DEPTH):
        if best <= LARGEST_IMBALANCE:
            break
        for other in _finer(chain, inputs):
            reached = _imbalance_of(other, inputs, num_stages)
            if reached < best or (reached == best and len(other.names) > len(chain.names)):
                chain, best = other, reached
                break
        else:
            break
    return chain


def _finer(chain: Chain, inputs: Inputs) -> Iterator[Chain]:
    """Yield chains that look into the heaviest part's blocks as well, with values or without."""
    costs = chain.costs(inputs)
    heavy = frozenset(chain.closed(max(costs, key=costs.__getitem__)))
    ways: list[tuple[frozenset[str], Inputs | None]] = [(heavy, chain.inputs)] if heavy else []
    if chain.inputs is None:
        ways = [(frozenset(), inputs)] * chain.asks_for_sizes + ways + [(heavy, inputs)] * bool(heavy)
    for opened, values in ways:
        with suppress(UntraceableError, ConfigError):
            yield chain.finer(values, opened)


def _imbalance_of(chain: Chain, inputs: Inputs, num_stages: int) -> float:
    if len(chain.names) < num_stages - 1:
        return inf
    return imbalance(chain.costs_of(chain.balance(num_stages, inputs), inputs)) if num_stages > 1 else 1.0


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
        *(key, ", ".join(names), imbalance(counted), imbalance(timed)),
        *(" / ".join(f"{1e3 * each:.3g}" for each in timed), ", ".join(names)),
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
        f"{found:.2f} times their mean, by the {unit}; expected at most {LARGEST_IMBALANCE}, since all wait for the "
        f"longest. {advice}",
        stacklevel=2,
    )


def partition(module: nn.Module, num_stages: int, cut: Sequence[str] | None = None, example: Any = None) -> list[Stage]:
    """Cut a module into stages which, one after the other, are the module bit for bit.

        module(x) = stage_{K-1}(... stage_1(stage_0(None, (x,)), (x,)) ..., (x,))

    Residual networks (ours, torchvision's), transformers, any `nn.Sequential`: the forward is traced, and may be cut
    before every layer or block that is reached by one tensor alone; stages may change its shape, and may share
    parameters.

    Args:
        module: whose layers the stages run.
        num_stages: K.
        cut: names of the layers or groups of layers that begin the stages 1 .. K-1; None balances the operations of
            a training step with `example`.
        example: the module's input, or a tuple of its inputs; needed where `cut` is None, and where the forward's
            Python code decides by values.

    Raises:
        ConfigError: the module cannot be traced, has fewer blocks than stages, or no such layers.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> [stage.layers for stage in partition(net, 2, example=torch.zeros(1, 2))]
        [['0', '1'], ['2', '3', '4']]
    """
    inputs = example if isinstance(example, tuple) else (example,)
    whole = () if example is None else bound(module, inputs, {})
    try:
        chain = chain_for(module, "partition", whole, cut, num_stages) if whole else Chain(module, "partition")
    except UntraceableError as error:
        raise ConfigError(
            f"partition.example: found None for {type(module).__name__}, whose forward decides by values ({error}); "
            "expected a batch, by which it is traced. Give the module's input, or a tuple of its inputs."
        ) from error
    names = resolved(chain, num_stages, cut)
    advice = "Give the module's input, or a tuple of its inputs, or set cut to the layers that begin stages."
    is_right = bool(whole) or num_stages == 1 or names is not None
    require(is_right, "partition.example", example, "a tensor, by which stages are balanced", advice)
    if names is None:
        names = chain.balance(num_stages, whole) if num_stages > 1 else []
    return chain.stages(names)
