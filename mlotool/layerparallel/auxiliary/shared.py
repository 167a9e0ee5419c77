"""Parameters that several stages use, such as a head's that is tied to the embedding, where each stage is a process."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlotool.layerparallel.auxiliary.transport import AbstractTransport
from mlotool.layerparallel.partition.stage import Stage


class SharedParameters:
    """Adds up the gradients of parameters that stages share, so that all their processes step alike.

    The sum is taken in the order of the stages, as one process does: it is the same bit by bit.

    Args:
        stages: all stages of a module.
        number: of this process's stage.

    Example:
        >>> from torch import nn
        >>> from mlotool.layerparallel.auxiliary.transport import LocalTransport
        >>> from mlotool.layerparallel.partition import partition
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> SharedParameters(partition(net, 2, ["1"]), number=0).totals({}, LocalTransport())
        {}
    """

    def __init__(self, stages: Sequence[Stage], number: int) -> None:
        self._number = number
        own = stages[number].parameters
        self._shared = {
            other: [name for name in own if name in stage.parameters]
            for other, stage in enumerate(stages)
            if other != number and not own.keys().isdisjoint(stage.parameters)
        }
        self._blanks = {name: own[name] for names in self._shared.values() for name in names}

    def totals(self, slopes: Mapping[str, Tensor | None], transport: AbstractTransport) -> dict[str, Tensor]:
        """Return the sums over all stages, by the names of the parameters that this stage shares.

        Args:
            slopes: this stage's, by name; None is zero.
            transport: to and from the other stages.
        """
        own = {
            name: torch.zeros_like(blank) if slopes.get(name) is None else slopes[name]
            for name, blank in self._blanks.items()
        }
        parts: dict[str, dict[int, Tensor]] = {name: {self._number: each} for name, each in own.items()}  # type: ignore[dict-item]
        for other, names in self._shared.items():
            flat = torch.cat([parts[name][self._number].reshape(-1) for name in names])
            transport.expect("shared", other, self._number, torch.empty_like(flat))
            transport.send("shared", self._number, other, flat)
        for other, names in self._shared.items():
            flat = transport.receive("shared", other, self._number)
            pieces = flat.split([self._blanks[name].numel() for name in names])
            for name, piece in zip(names, pieces, strict=True):
                parts[name][other] = piece.view_as(self._blanks[name])
        return {name: sum(found[stage] for stage in sorted(found)) for name, found in parts.items()}  # type: ignore[misc]
