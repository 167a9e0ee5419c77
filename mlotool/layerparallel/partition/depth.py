"""How deep a module is looked into: blocks stay whole as long as the stages are balanced."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from math import inf

from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition.chain import Chain
from mlotool.layerparallel.partition.choice import LARGEST_IMBALANCE, imbalance
from mlotool.layerparallel.partition.stage import Inputs
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
    chain, has_values = _whole(module, key, inputs, cut)
    if cut is not None:
        return _with(chain, module, key, inputs, cut)
    return chain if num_stages is None else _balanced(chain, module, key, inputs, num_stages, has_values)


def may_be_finer(chain: Chain) -> bool:
    """Say whether a chain that was traced without a batch may have more places to cut with one.

    Example:
        >>> may_be_finer(Chain(nn.Sequential(nn.Linear(2, 2), nn.Tanh())))
        False
    """
    return chain.asks_for_sizes or any(chain.closed(name) for name in ("", *chain.names))


def _whole(module: nn.Module, key: str, inputs: Inputs, cut: Sequence[str] | None) -> tuple[Chain, bool]:
    """Return the chain whose blocks are whole, and whether values were looked at."""
    if plain_values(module) == plain_values(module, inputs):
        with suppress(UntraceableError):
            return Chain(module, key), False
    try:
        return Chain(module, key, inputs), True
    except ConfigError:
        if not cut:
            raise
    return Chain(module, key, inputs, cut), True


def _with(chain: Chain, module: nn.Module, key: str, inputs: Inputs, cut: Sequence[str]) -> Chain:
    """Return a chain with places to cut of these names, if there is one."""
    parents = {name[:end] for name in cut for end in range(len(name)) if name[end] == "."}
    for opened, values in (((), None), ((), inputs), (parents, None), (parents, inputs)):
        with suppress(UntraceableError, ConfigError):
            found = chain if (opened, values) == ((), None) else Chain(module, key, values, opened=opened)
            found.resolve(cut)
            return found
    return chain


def _balanced(chain: Chain, module: nn.Module, key: str, inputs: Inputs, num_stages: int, has_values: bool) -> Chain:
    """Look into the heaviest blocks while the stages are out of balance."""
    best, opened, values = _imbalance(chain, inputs, num_stages), frozenset[str](), inputs if has_values else None
    for _ in range(DEPTH):
        if best <= LARGEST_IMBALANCE:
            break
        for more, with_values in _finer(chain, inputs, values):
            with suppress(UntraceableError, ConfigError):
                other = Chain(module, key, with_values, opened=opened | more)
                reached = _imbalance(other, inputs, num_stages)
                if reached < best or (reached == best and len(other.names) > len(chain.names)):
                    chain, best, opened, values = other, reached, opened | more, with_values
                    break
        else:
            break
    return chain


def _finer(chain: Chain, inputs: Inputs, values: Inputs | None) -> Iterator[tuple[frozenset[str], Inputs | None]]:
    """Yield what may be looked into beside what already is: the heaviest part's blocks, with values or without."""
    costs = chain.costs(inputs)
    heavy = frozenset(chain.closed(max(costs, key=costs.__getitem__)))
    if values is None and chain.asks_for_sizes:
        yield frozenset(), inputs
    if heavy:
        yield heavy, values
    if heavy and values is None:
        yield heavy, inputs


def _imbalance(chain: Chain, inputs: Inputs, num_stages: int) -> float:
    if len(chain.names) < num_stages - 1:
        return inf
    return imbalance(chain.costs_of(chain.balance(num_stages, inputs), inputs)) if num_stages > 1 else 1.0
