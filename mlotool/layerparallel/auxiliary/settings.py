"""What a user sets of the method of auxiliary variables, checked."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from mlotool.core.arguments import is_number
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.layerparallel.auxiliary.step_schedule import StepSchedule

CHOICES = {
    "method": ("penalty", "lagrangian"),
    "variables": ("stored", "auxnet", "recursive"),
    "reduction": ("mean", "sum"),
    "multiplier_rule": ("exact", "paper"),
    "auxnet_optimizer": ("sgd", "adam"),
    "auxnet_gradient": ("local", "chain"),
}

AUTO = "auto"

BETWEEN_PENALTIES = 0.5
"""Rate of stored variables of a stage that has a penalty before and behind it; of three stages on MNIST
0.05 ends 19 points of accuracy lower, 0.3 seven lower, 0.7 two higher; on digits 1 ends three lower
(benchmarks/README.md)."""


@dataclass(frozen=True)
class Settings:
    """The settings of `Auxiliary`, which says what each means, with the defaults that depend on others filled in.

    Example:
        >>> from mlotool.layerparallel import Auxiliary
        >>> settings = Auxiliary(stages=2, beta=4.0).settings
        >>> settings.is_stored, settings.step_size(beta=4.0, weight=0.5), settings.rate(interface=1)
        (True, 0.25, 1.0)
    """

    stages: int
    method: str
    variables: str
    betas: Sequence[StepSchedule]
    reduction: str
    multiplier_rule: str
    lambda_lr: float | None
    lambda_rates: Sequence[float | None]
    lambda_steps: int
    auxnet_lr: StepSchedule
    auxnet_optimizer: str
    auxnet_gradient: str
    auxnet_blocks: int
    distillation_steps: int
    noise: float
    copies: int
    recalibrate: int
    auxnet: nn.Module | None
    table_device: str | None
    streams: bool

    @classmethod
    def of(cls, given: Any, **found: Any) -> "Settings":
        """Return the settings that an object has as attributes of the same names.

        Args:
            given: has those that are not `found`, as `Auxiliary` does.
            found: settings that replace the object's own.
        """
        return cls(**{each.name: getattr(given, each.name) for each in fields(cls) if each.name not in found}, **found)

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return self.stages

    @property
    def device_of_tables(self) -> torch.device | None:
        """Where stored variables are kept; None is where the module is."""
        return None if self.table_device is None else torch.device(self.table_device)

    @property
    def is_stored(self) -> bool:
        """Whether auxiliary variables are stored for each sample."""
        return self.variables == "stored"

    @property
    def is_chained(self) -> bool:
        """Whether networks learn from what those behind them make of their variables."""
        return self.auxnet_gradient == "chain" and self.variables == "auxnet"

    @property
    def has_multipliers(self) -> bool:
        """Whether the method is the augmented Lagrangian, which has multipliers."""
        return self.method == "lagrangian"

    def beta(self, interface: int, step: int) -> float:
        """Return the penalty coefficient of an interface, counted from 1, at a step, counted from 0."""
        return self.betas[interface - 1].at(step)

    def rate(self, interface: int) -> float | None:
        """Return the rate of the auxiliary variables at an interface; None: it follows the curvature."""
        return 1.0 if self.lambda_lr is not None else self.lambda_rates[interface - 1]

    def multiplier_rate(self, beta: float, step_size: float) -> float:
        """Return the step of the multipliers: 2 beta, or what the paper prints, eta / (2 beta).

        Args:
            beta: the penalty coefficient.
            step_size: eta, of the auxiliary variables.
        """
        return 2.0 * beta if self.multiplier_rule == "exact" else step_size / (2.0 * beta)

    def step_size(self, beta: float, weight: float) -> float:
        """Return the step size of auxiliary variables at the rate 1.

        It is `lambda_lr` where that is set, and else `1 / (2 beta c)`, the step at which lambda is stationary for the
        slope at hand (Sun et al. 2021, eq. 17).

        Args:
            beta: the penalty coefficient.
            weight: c, of the penalty at the interface.
        """
        return 1.0 / (2.0 * beta * weight) if self.lambda_lr is None else self.lambda_lr

    def check(self) -> None:
        """Raise ConfigError where a setting is out of range."""
        for key, known in CHOICES.items():
            value = getattr(self, key)
            if value not in known:
                raise ConfigError(
                    f"parallel.{key}: found {value!r}; expected {' or '.join(known)}.{did_you_mean(str(value), known)} "
                    f"Correct parallel.{key}."
                )
        if self.has_multipliers and not self.is_stored:
            raise ConfigError(
                f"parallel.method: found lagrangian with variables={self.variables}; expected stored ones, since no "
                "network gives the multipliers. Set parallel.variables=stored, or parallel.method=penalty."
            )
        if self.copies > 1 and not self.is_stored:
            raise ConfigError(
                f"parallel.copies: found {self.copies} with variables={self.variables}; expected 1, since networks "
                "need no finite number of augmented copies. Set parallel.copies=1."
            )
        least: Mapping[str, float] = {
            "auxnet_blocks": 0,
            "distillation_steps": 1,
            "lambda_steps": 1,
            "copies": 1,
            "recalibrate": 0,
        }
        for key, lowest in least.items():
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ConfigError(
                    f"parallel.{key}: found {value!r}; expected a whole number of at least {lowest}. "
                    f"Correct parallel.{key}."
                )
        for key in ("lambda_lr", "noise"):
            value = getattr(self, key)
            is_finite = is_number(value) and math.isfinite(value)
            if value is not None and not (is_finite and (value > 0 or (key == "noise" and value == 0))):
                wanted = "no negative number" if key == "noise" else "a number above 0"
                raise ConfigError(f"parallel.{key}: found {value!r}; expected {wanted}. Correct parallel.{key}.")


def of_interfaces(value: Any, num_stages: int, key: str) -> list[Any]:
    """Return a setting's value at each of K - 1 interfaces: a list has one for each, anything else is for all.

    Args:
        value: what a user has set.
        num_stages: K.
        key: of the setting, for messages.

    Raises:
        ConfigError: a list of another length.

    Example:
        >>> of_interfaces(10.0, 3, "parallel.beta"), of_interfaces([10.0, 5.0], 3, "parallel.beta")
        ([10.0, 10.0], [10.0, 5.0])
    """
    count = max(num_stages - 1, 1)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    if len(value) != count:
        raise ConfigError(
            f"{key}: found {len(value)} values; expected {count}, one for each interface of {num_stages} stages, or "
            f"one for all. Correct {key}."
        )
    return list(value)


def lambda_rates(value: Any, num_stages: int, variables: str, key: str) -> list[float | None]:
    """Return the rates of auxiliary variables at the K - 1 interfaces; None follows the curvature.

    Args:
        value: what a user has set: a number above 0, `auto`, null for the default, or a list of these.
        num_stages: K.
        variables: how the variables are kept.
        key: of the setting, for messages.

    Raises:
        ConfigError: a value is none of these.

    Example:
        >>> lambda_rates(None, 3, "stored", "rate"), lambda_rates([1, "auto"], 3, "stored", "rate")
        ([0.5, 1.0], [1.0, None])
    """
    found: list[float | None] = []
    for interface, each in enumerate(of_interfaces(value, num_stages, key), start=1):
        # A stage with a penalty behind it pulls its variables as well, and whole steps overshoot.
        default = BETWEEN_PENALTIES if variables == "stored" and interface < num_stages - 1 else 1.0
        if each is not None and each != AUTO and not (is_number(each) and 0 < each < float("inf")):
            raise ConfigError(
                f"{key}: found {each!r}; expected a number above 0, auto, null, or a list of these. Correct {key}."
            )
        found.append(default if each is None else None if each == AUTO else float(each))
    return found
