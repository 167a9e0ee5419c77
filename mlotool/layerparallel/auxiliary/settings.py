"""What a user sets of the method of auxiliary variables, checked, with the defaults that depend on others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torch import nn

from mlotool.core.arguments import Rule, at_least, is_number, require, require_all
from mlotool.layerparallel.partition.chain import MEASURED, Cut

AUTO = "auto"

BETWEEN_PENALTIES = 0.5
"""Rate of stored variables of a stage that has a penalty before and behind it; of three stages on MNIST
0.05 ends 19 points of accuracy lower, 0.3 seven lower, 0.7 two higher; on digits 1 ends three lower
(benchmarks/README.md)."""


_POSITIVE = Rule(lambda value: is_number(value) and 0 < value < inf, "a number above 0")


def _one_of(*choices: str) -> Rule:
    return Rule(lambda value: value in choices, " or ".join(choices))


def _is_cut(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return value in (None, MEASURED) or (is_list and all(isinstance(name, str) for name in value))


_RULES = {
    **dict.fromkeys(("stages", "distillation_steps", "lambda_steps", "copies"), at_least(1)),
    **dict.fromkeys(("auxnet_blocks", "recalibrate"), at_least(0)),
    "cut": Rule(_is_cut, f"names of layers, {MEASURED} or null", "Write cut: [layer3], or cut: measured."),
    "method": _one_of("penalty", "lagrangian"),
    "variables": _one_of("stored", "auxnet", "recursive"),
    "auxnet": Rule(
        lambda value: isinstance(value, nn.Module | None),
        "a smaller model",
        "Write auxnet: {_target_: mlotool.models.ResNet, ..}, or null for thinned stages.",
    ),
    "auxnet_optimizer": _one_of("sgd", "adam"),
    "auxnet_gradient": _one_of("local", "chain"),
    "reduction": _one_of("mean", "sum"),
    "lambda_lr": Rule(lambda value: value is None or _POSITIVE.is_right(value), "a number above 0, or null"),
    "multiplier_rule": _one_of("exact", "paper"),
    "noise": Rule(lambda value: is_number(value) and 0 <= value < inf, "no negative number"),
}


@dataclass(frozen=True)
class StepSchedule:
    """A number that changes from step to step: `min(start factor^(step // every), maximum)`.

    Args:
        start: its value at the first step.
        factor: by which it is multiplied.
        every: steps from one multiplication to the next.
        maximum: value at which it stays.

    Example:
        >>> beta = StepSchedule.of({"start": 1.0, "factor": 2.0, "every": 10, "maximum": 3.0}, "parallel.beta")
        >>> beta.at(0), beta.at(10), beta.at(20)
        (1.0, 2.0, 3.0)
    """

    start: float
    factor: float = 1.0
    every: int = 1
    maximum: float = float("inf")

    @staticmethod
    def of(value: Any, key: str) -> "StepSchedule":
        """Return the schedule that a user has set; a number stays the same.

        Args:
            value: a number, or a mapping with `start` and any of `factor`, `every`, `maximum`.
            key: of the setting, for messages.

        Raises:
            ConfigError: there is no `start`, an unknown entry, or a value out of range.
        """
        entries: dict[str, Any] = dict(value) if isinstance(value, Mapping) else {"start": value}
        maximum = Rule(lambda number: is_number(number) and number > 0, "")
        rules = {"start": _POSITIVE, "factor": _POSITIVE, "every": at_least(1), "maximum": maximum}
        is_known = "start" in entries and entries.keys() <= rules.keys()
        is_right = is_known and all(rules[name].is_right(number) for name, number in entries.items())
        require(is_right, key, value, "a number above 0, or {start: .., factor: .., every: .., maximum: ..} of such")
        every = entries.pop("every", 1)
        return StepSchedule(every=every, **{name: float(number) for name, number in entries.items()})

    def at(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        try:
            return min(self.start * self.factor ** (step // self.every), self.maximum)
        except OverflowError:
            return self.maximum


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
        >>> settings.is_stored, settings.step_size(beta=4.0, weight=0.5), settings.rate(interface=1)
        (True, 0.25, 1.0)
    """

    stages: int
    cut: Cut = None
    method: str = "penalty"
    variables: str = "stored"
    auxnet: nn.Module | None = None
    auxnet_blocks: int = 1
    auxnet_lr: float | Mapping[str, float] = 0.1
    auxnet_optimizer: str = "sgd"
    auxnet_gradient: str = "local"
    distillation_steps: int = 1
    beta: float | Mapping[str, float] | Sequence[Any] = 10.0
    reduction: str = "mean"
    lambda_lr: float | None = None
    lambda_rate: float | str | Sequence[float | str] | None = None
    lambda_steps: int = 1
    multiplier_rule: str = "exact"
    noise: float = 0.0
    copies: int = 1
    recalibrate: int = 0
    table_device: str | None = None
    processes: bool = False
    streams: bool = False
    record: int = 0

    def __post_init__(self) -> None:
        require_all("parallel", vars(self), _RULES)
        if not self.is_stored:
            # Networks give no multipliers, and know no copies.
            for key, value in (("method", "penalty"), ("copies", 1)):
                expected = f"{value} with variables={self.variables}"
                advice = "Set parallel.variables=stored."
                require(getattr(self, key) == value, f"parallel.{key}", getattr(self, key), expected, advice)
        betas = _of_interfaces(self.beta, self.stages, "parallel.beta")
        self.betas = [StepSchedule.of(beta, "parallel.beta") for beta in betas]
        self.auxnet_rate = StepSchedule.of(self.auxnet_lr, "parallel.auxnet_lr")
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

    @property
    def has_multipliers(self) -> bool:
        """Whether the method is the augmented Lagrangian, which has multipliers."""
        return self.method == "lagrangian"

    def rate(self, interface: int) -> float | None:
        """Return the rate of the auxiliary variables at an interface; None: it follows the curvature."""
        return 1.0 if self.lambda_lr is not None else self._rates[interface - 1]

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

    def _rate(self, rate: Any, interface: int) -> float | None:
        is_right = rate in (None, AUTO) or _POSITIVE.is_right(rate)
        require(is_right, "parallel.lambda_rate", rate, "a number above 0, auto, null, or a list of these")
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
