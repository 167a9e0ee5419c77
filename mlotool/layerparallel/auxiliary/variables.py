"""What a stage needs of its auxiliary variables, whether a table keeps them or networks give them.

One object a stage. Interface k lies between the stages k - 1 and k; lambda_k is where stage k begins.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from mlotool.layerparallel.auxiliary.settings import AuxiliarySettings
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.exchange import Transport

# s: samples of a batch, ...: the shape of a state


class AbstractVariables(ABC):
    """The auxiliary variables of stage k: lambda_k, where it begins, and lambda_{k+1}, at which its end is aimed.

    In a step `Worker` calls `start` (where a serial pass is needed), `await_variable`, `prepare`, `target`, `correct`,
    `await_slope` and `finish`, in this order.

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbours.
        seed: of the noise on auxiliary variables.

    Attributes:
        own: lambda_k (s, ...) of the step at hand; None for the first stage, and between steps.
        is_first: whether there is no interface before the stage.
        is_last: whether there is no interface behind the stage.

    Example:
        >>> from mlotool.layerparallel.auxiliary.stored_variables import StoredVariables
        >>> last: AbstractVariables = StoredVariables(1, AuxiliarySettings(stages=2), Transport(), seed=0)
        >>> last.is_first, last.is_last, last.multiplier()
        (False, True, None)
    """

    def __init__(self, number: int, settings: AuxiliarySettings, transport: Transport, seed: int) -> None:
        self.number, self.settings, self.transport = number, settings, transport
        self.is_first, self.is_last = number == 0, number == settings.stages - 1
        self.own: Tensor | None = None
        self._seed = seed
        self._generator: torch.Generator | None = None

    def start(self, step: StageStep, state: Tensor) -> None:
        """Take the state (s, ...) with which a serial pass enters the stage."""

    @abstractmethod
    def prepare(self, step: StageStep) -> None:
        """Find lambda_k and keep it as `own`; send the neighbours what they need."""

    @abstractmethod
    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return lambda_{k+1} and kappa_{k+1}, (s, ...) each; None for kappa is zero. The last stage has none."""

    def multiplier(self) -> Tensor | None:
        """Return kappa_k, (s, ...); None is zero."""
        return None

    @abstractmethod
    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Move lambda_k and kappa_k.

        Args:
            step: the one at hand.
            state: X^{k-1}, (s, ...), where the stage before has ended.
            slope: (s, ...), the derivative of the augmented Lagrangian with respect to lambda_k, times the rate; the
                sum of these, where lambda_k moves several times.
        """

    def await_variable(self, step: StageStep) -> None:
        """Wait for what `prepare` needs of other stages; a method of its own, so that waiting is timed apart."""

    def await_slope(self, step: StageStep) -> None:
        """Wait for what `finish` needs of other stages."""

    def finish(self, step: StageStep) -> None:
        """Do what can be done only after the next stage has corrected its variables."""

    def to(self, device: torch.device) -> None:
        """Move what is kept from step to step to a device."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step."""
        return {"noise": None if self._generator is None else self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` has returned."""
        self._generator = None
        if state["noise"] is not None:
            self._generator = torch.Generator(device)
            self._generator.set_state(state["noise"].cpu())

    def _perturbed(self, step: StageStep, clean: Tensor) -> Tensor:
        if not self.settings.noise:
            return clean
        if self._generator is None:
            self._generator = torch.Generator(clean.device).manual_seed(self._seed)
        # For the whole batch, of which this is a part: the noise does not depend on the number of parts.
        begin, size = step.rows(self.transport.replicas.rank)
        shape = size, *clean.shape[1:]
        drawn = torch.randn(shape, dtype=clean.dtype, device=clean.device, generator=self._generator)
        return clean + self.settings.noise * drawn[begin : begin + len(clean)]
