"""What a user sets of the method of auxiliary variables, checked, with the defaults that depend on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Literal, Required, TypedDict

from annotated_types import Ge, Gt, Le
from torch import nn

from mlotool.core.arguments import require
from mlotool.core.settings import Count, Layers, NonNegative, Positive, Rounds, Whole, checked
from mlotool.layerparallel.partition.chain import Cut

AUTO = "auto"

BETWEEN_PENALTIES = 0.5
"""Rate of stored variables of a stage that has a penalty before and behind it; of three stages on MNIST
0.05 ends 19 points of accuracy lower, 0.3 seven lower, 0.7 two higher; on digits 1 ends three lower
(benchmarks/README.md)."""


Endless = Annotated[float, Gt(0), Le(inf)]


class _Steps(TypedDict, total=False):
    """A `StepSchedule` in a recipe."""

    start: Required[Positive]
    factor: Positive
    every: Count
    maximum: Endless


Steps = Positive | _Steps


@checked
@dataclass(frozen=True)
class StepSchedule:
    """A number that changes from step to step: `min(start factor^(step // every), maximum)`.

    Args:
        start: its value at the first step.
        factor: by which it is multiplied.
        every: steps from one multiplication to the next.
        maximum: value at which it stays.

    Example:
        >>> beta = StepSchedule.of({"start": 1.0, "factor": 2.0, "every": 10, "maximum": 3.0})
        >>> beta.at(0), beta.at(10), beta.at(20)
        (1.0, 2.0, 3.0)
    """

    start: Positive
    factor: Positive = 1.0
    every: Count = 1
    maximum: Endless = inf

    @staticmethod
    def of(value: Steps) -> "StepSchedule":
        """Return the schedule that a user has set; a number stays the same."""
        return StepSchedule(**value) if isinstance(value, Mapping) else StepSchedule(value)

    def at(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        try:
            return min(self.start * self.factor ** (step // self.every), self.maximum)
        except OverflowError:
            return self.maximum


Rate = Positive | Literal["auto"] | None


@checked
@dataclass(eq=False, repr=False)
class AuxiliarySettings:
    """The settings of `Auxiliary`, which says what each means.

    Attributes:
        betas: the penalty coefficients of the interfaces 1 .. K - 1.
        auxnet_rate: of the networks, by step.

    Raises:
        ConfigError: a setting is out of range, or settings do not go together.

    Example:
        >>> settings = AuxiliarySettings(stages=2, beta=4.0)
        >>> settings.is_stored, settings.rate(interface=1)
        (True, 1.0)
    """

    stages: Annotated[int, Ge(1), Le(10_000)]
    cut: Cut = None
    method: Literal["penalty", "lagrangian"] = "penalty"
    variables: Literal["stored", "auxnet", "recursive"] = "stored"
    auxnet: nn.Module | None = None
    auxnet_blocks: Whole = 1
    auxnet_lr: Steps = 0.1
    auxnet_optimizer: Literal["sgd", "adam"] = "sgd"
    auxnet_gradient: Literal["local", "chain"] = "local"
    distillation_steps: Rounds = 1
    beta: Steps | Sequence[Steps] = 10.0
    reduction: Literal["mean", "sum"] = "mean"
    lambda_lr: Positive | None = None
    lambda_rate: Rate | Sequence[Rate] | None = None
    lambda_steps: Rounds = 1
    multiplier_rule: Literal["exact", "paper"] = "exact"
    noise: NonNegative = 0.0
    copies: Layers = 1
    recalibrate: Whole = 0
    table_device: str | None = None
    processes: bool = False
    streams: bool = False
    record: Whole = 0

    def __post_init__(self) -> None:
        if not self.is_stored:
            # Networks give no multipliers, and know no copies.
            for key, value in (("method", "penalty"), ("copies", 1)):
                expected = f"{value} with variables={self.variables}"
                advice = "Set parallel.variables=stored."
                require(getattr(self, key) == value, f"parallel.{key}", getattr(self, key), expected, advice)
        betas = _of_interfaces(self.beta, self.stages, "parallel.beta")
        self.betas = [StepSchedule.of(beta) for beta in betas]
        self.auxnet_rate = StepSchedule.of(self.auxnet_lr)
        rates = _of_interfaces(self.lambda_rate, self.stages, "parallel.lambda_rate")
        self._rates = [self._rate(rate, interface) for interface, rate in enumerate(rates, start=1)]

    @property
    def is_stored(self) -> bool:
        """Whether auxiliary variables are stored for each sample."""
        return self.variables == "stored"

    @property
    def is_chained(self) -> bool:
        """Whether networks learn from what those behind them make of their variables."""
        return self.auxnet_gradient == "chain" and self.variables == "auxnet"

    def rate(self, interface: int) -> float | None:
        """Return the rate of the auxiliary variables at an interface; None: it follows the curvature."""
        return 1.0 if self.lambda_lr is not None else self._rates[interface - 1]

    def _rate(self, rate: Any, interface: int) -> float | None:
        if rate is not None:
            return None if rate == AUTO else float(rate)
        # A stage with a penalty behind it pulls its variables as well, and whole steps overshoot.
        return BETWEEN_PENALTIES if self.is_stored and interface < self.stages - 1 else 1.0


def _of_interfaces(value: Any, num_stages: int, key: str) -> list[Any]:
    """Return a setting's value at each of K - 1 interfaces: a list has one for each, anything else is for all."""
    count = max(num_stages - 1, 1)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    require(len(value) == count, key, value, f"{count} values for {num_stages} stages, or one for all")
    return list(value)
