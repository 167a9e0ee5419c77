"""The obvious rival: torch's DistributedDataParallel, a share of each batch on each rank."""

from collections.abc import Callable

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.layerparallel.workload import AbstractWorkload
from mlotool.distributed.collectives import Ranks


def check(num_ranks: int, workload: AbstractWorkload) -> None:
    """Refuse what cannot be divided.

    Raises:
        ValueError: a batch has no equal parts.
    """
    if workload.batch_size % num_ranks:
        raise ValueError(f"a batch of {workload.batch_size} has no {num_ranks} equal parts")


def build(ranks: Ranks, workload: AbstractWorkload) -> Callable[[], list[Tensor]]:
    """Return a rank's cycle: its share of one batch and one step of SGD. It returns the averaged gradients.

    Args:
        ranks: among which each batch is divided.
        workload: what is trained.

    Raises:
        ValueError: as of `check`.
    """
    check(ranks.size, workload)
    share = workload.batch_size // ranks.size
    model = DistributedDataParallel(workload.make_model())
    optimizer = workload.make_optimizer(model.parameters())
    batches, own = workload.batches(), slice(share * ranks.rank, share * (ranks.rank + 1))

    def cycle() -> list[Tensor]:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        workload.loss(model(inputs[own]), targets[own]).backward()
        optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    return cycle
