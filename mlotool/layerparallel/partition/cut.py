"""A module as a chain of stages, each of which goes on where the one before has stopped."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mlotool.core.arguments import is_whole, require
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition.chain import Chain, bound
from mlotool.layerparallel.partition.depth import chain_for
from mlotool.layerparallel.partition.stage import Stage
from mlotool.layerparallel.partition.trace import UntraceableError


def partition(
    module: nn.Module,
    num_stages: int,
    cut: Sequence[str] | None = None,
    example: Any = None,
) -> list[Stage]:
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
    require(isinstance(module, nn.Module), "partition.module", module, "an nn.Module", "Give one that is built.")
    is_right = is_whole(num_stages, 1)
    require(is_right, "partition.num_stages", num_stages, "a whole number of at least 1", "Write num_stages=2.")
    is_right = cut is None or (isinstance(cut, list | tuple) and all(isinstance(each, str) for each in cut))
    require(is_right, "partition.cut", cut, "names of layers or null", "Write cut=['2'].")
    advice = "Give the module's input, or a tuple of its inputs, or set cut to the layers that begin stages."
    inputs = example if isinstance(example, tuple) else (example,)
    has_example = any(isinstance(each, Tensor) for each in inputs)
    try:
        whole = bound(module, inputs, {}) if has_example else ()
        chain = chain_for(module, "partition", whole, cut, num_stages) if has_example else Chain(module)
        chain.check(num_stages, cut)
        if cut is not None or num_stages == 1:
            return chain.stages(chain.resolve(cut or ()))
        require(has_example, "partition.example", example, "a tensor, by which stages are balanced", advice)
        return chain.stages(chain.balance(num_stages, bound(module, inputs, {})))
    except ConfigError:
        raise
    except UntraceableError as error:
        raise ConfigError(
            f"partition.example: found None for {type(module).__name__}, whose forward decides by values ({error}); "
            "expected a batch, by which it is traced. Give the module's input, or a tuple of its inputs."
        ) from error
    except Exception as error:  # it runs the user's layers
        reason = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        require(False, "partition.example", example, f"an input that {type(module).__name__} takes ({reason})", advice)
        raise
