"""A module as a chain of stages, each of which goes on where the one before has stopped."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from typing import Any

from torch import nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition.chain import MEASURED, Chain, Cut, bound
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
            them, where it is called with masks or switches that are not its defaults, and where it has too few places
            to cut without them.
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
        try:
            chain.resolve(len(cut) + 1, cut)
        except ConfigError:
            # What holds the blocks may be one itself.
            parents = {name[:end] for name in cut for end in range(len(name)) if name[end] == "."}
            return chain.finer(inputs, parents) or chain
        return chain
    best = _imbalance_of(chain, inputs, num_stages)
    for _ in range(DEPTH):
        if best <= LARGEST_IMBALANCE:
            break
        costs = chain.costs(inputs)
        other = chain.finer(inputs, chain.closed(max(costs, key=costs.__getitem__)))
        reached = inf if other is None else _imbalance_of(other, inputs, num_stages)
        if other is None or reached > best or (reached == best and len(other.names) <= len(chain.names)):
            break
        chain, best = other, reached
    return chain


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


def _imbalance_of(chain: Chain, inputs: Inputs, num_stages: int | None) -> float:
    if num_stages is None or num_stages == 1:
        return 1.0
    too_few = len(chain.names) < num_stages - 1
    return inf if too_few else imbalance(chain.costs_of(chain.balance(num_stages, inputs), inputs))


LARGEST_IMBALANCE = 1.3
"""Of the longest stage over the mean; above it the run warns."""

_log = logging.getLogger("mlotool")


def balanced_cut(chain: Chain, num_stages: int, cut: Cut, inputs: Inputs, key: str) -> list[str]:
    """Return the names of the layers that begin the stages 1 .. K-1, and say how well the stages are balanced.

    Args:
        chain: the module.
        num_stages: K.
        cut: what the user has set.
        inputs: a batch.
        key: of the setting, for messages.

    Raises:
        ConfigError: the module has fewer places to cut than needed, or no such layers.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> chain = Chain(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
        >>> balanced_cut(chain, 2, None, (torch.zeros(4, 8),), "parallel")
        ['2']
    """
    names = chain.resolve(num_stages, cut)
    if num_stages == 1:
        return []
    measure: Measure = seconds if cut == MEASURED else operations
    balanced = chain.balance(num_stages, inputs, measure)
    names = names or balanced
    reached = imbalance(chain.costs_of(names, inputs, measure))
    listed = ", ".join(names)
    _log.info(
        "%s: the stages begin at the input, %s; the longest has %.2f times the mean cost. To have the same stages "
        "again, set cut: [%s].",
        *(key, listed, reached, listed),
    )
    if reached > LARGEST_IMBALANCE:
        is_better = imbalance(chain.costs_of(balanced, inputs, measure)) < reached
        advice = f"Set cut: [{', '.join(balanced)}]." if is_better else "Set fewer stages, or smaller blocks."
        warnings.warn(
            f"{key}.cut: the longest of {num_stages} stages (they begin at the input, {listed}) takes {reached:.2f} "
            f"times their mean; expected at most {LARGEST_IMBALANCE}, since all wait for the longest. {advice}",
            stacklevel=2,
        )
    return names


def imbalance(costs: Sequence[float]) -> float:
    """Return the cost of the most expensive stage over the mean: 1 is a perfect balance.

    Example:
        >>> imbalance([1.0, 3.0])
        1.5
    """
    return max(costs) * len(costs) / (sum(costs) or 1.0)


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
    names = chain.resolve(num_stages, cut)
    advice = "Give the module's input, or a tuple of its inputs, or set cut to the layers that begin stages."
    is_right = bool(whole) or num_stages == 1 or names is not None
    require(is_right, "partition.example", example, "a tensor, by which stages are balanced", advice)
    if names is None:
        names = chain.balance(num_stages, whole) if num_stages > 1 else []
    return chain.stages(names)
