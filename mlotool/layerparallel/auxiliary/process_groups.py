"""Which process of a run has which stage."""

import torch.distributed as dist

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.auxiliary.exchange import Place, ProcessExchange
from mlotool.layerparallel.auxiliary.replicas import Replicas


def join(rank: int, num_ranks: int, num_stages: int, key: str) -> ProcessExchange:
    """Return the exchange of rank = part * num_stages + stage; called by all ranks, joined by torch.distributed.

    Args:
        rank: of this process.
        num_ranks: how many there are.
        num_stages: K.
        key: of the setting, for messages.

    Raises:
        ConfigError: the ranks cannot be divided among the stages.
    """
    num_parts, rest = divmod(num_ranks, num_stages)
    if rest or not num_parts:
        raise ConfigError(
            f"{key}.stages: found {num_stages} stages in processes of their own, and {num_ranks} ranks; expected a "
            f"multiple of {num_stages} ranks. Set runner.devices={max(num_parts, 1) * num_stages}, or "
            f"{key}.processes=false for all stages in each rank."
        )
    part, stage = divmod(rank, num_stages)
    if num_parts == 1:
        return ProcessExchange(Place(stage, 0, num_stages), Replicas())
    # All ranks have to make all groups, in one order.
    of_parts = [dist.new_group(list(range(each * num_stages, (each + 1) * num_stages))) for each in range(num_parts)]
    of_stages = [dist.new_group(list(range(each, num_ranks, num_stages))) for each in range(num_stages)]
    return ProcessExchange(Place(stage, part, num_stages, of_parts[part]), Replicas(part, num_parts, of_stages[stage]))
