"""What stages and their networks must be: a row a sample, and smaller than what they stand for."""

import logging
from collections.abc import Sequence

from torch import Tensor, nn

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.partition.stage import Inputs, Stage

_log = logging.getLogger("mlotool")


def check_rows(key: str, name: str, state: Tensor, inputs: Inputs) -> None:
    """Refuse a cut where the state has other rows than samples.

    Args:
        key: of the setting, for messages.
        name: of the layer before which it is cut.
        state: (s, ...), there.
        inputs: of the module, a batch of s samples.

    Raises:
        ConfigError: it has.

    Example:
        >>> import torch
        >>> check_rows("parallel", "blocks.3", torch.ones(4, 8), (torch.ones(4, 2),))
    """
    size = next((len(each) for each in inputs if isinstance(each, Tensor) and each.ndim), None)
    if size is not None and (state.ndim == 0 or len(state) != size):
        raise ConfigError(
            f"{key}.cut: the state before {name} has the shape {tuple(state.shape)} for a batch of {size}; expected a "
            "row for each sample, as auxiliary variables are those of samples. Cut elsewhere, as in cut: [blocks.3], "
            "or reshape inside of a block."
        )


def check_networks(key: str, parts: Sequence[nn.Module], stages: Sequence[Stage], num_blocks: int) -> None:
    """Say where a thinned copy is no smaller than its stage, and refuse one without parameters.

    Args:
        key: of the setting, for messages.
        parts: thinned copies of all stages but the last one.
        stages: all stages.
        num_blocks: that each copy has at most.

    Raises:
        ConfigError: nothing is left of a stage that could learn.

    Example:
        >>> from mlotool.layerparallel.partition.cut import partition
        >>> net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        >>> check_networks("parallel", [nn.Linear(3, 3)], partition(net, 2, ["1"]), num_blocks=1)
    """
    for number, (part, stage) in enumerate(zip(parts, stages, strict=False)):
        own, of_stage = part.parameters(), stage.parameters.values()
        size, whole = (sum(each.numel() for each in parameters) for parameters in (own, of_stage))
        if whole and not size:
            raise ConfigError(
                f"{key}.auxnet_blocks: found {num_blocks}, which leaves nothing of stage {number} that could learn; "
                "expected at least one block. Set auxnet_blocks=1, or give a smaller network by auxnet."
            )
        if size == whole:
            _log.info(
                "%s: the network of stage %d is a copy of the whole stage, since that has at most auxnet_blocks=%d "
                "blocks that keep the shape: it takes as long as the stage. A smaller network is given by auxnet.",
                key,
                number,
                num_blocks,
            )
