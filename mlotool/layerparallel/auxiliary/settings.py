"""What a user sets of the method of auxiliary variables, checked."""

from collections.abc import Mapping
from dataclasses import dataclass

from mlotool.core.errors import ConfigError
from mlotool.core.suggest import did_you_mean
from mlotool.layerparallel.auxiliary.equations import Beta

CHOICES = {
    "method": ("penalty", "lagrangian"),
    "variables": ("stored", "auxnet", "recursive"),
    "reduction": ("mean", "sum"),
    "multiplier_rule": ("exact", "paper"),
    "auxnet_optimizer": ("sgd", "adam"),
}


@dataclass(frozen=True)
class Settings:
    """The settings of `Auxiliary`, which says what each means."""

    method: str
    variables: str
    beta: Beta
    reduction: str
    multiplier_rule: str
    lambda_lr: float | None
    lambda_rate: float
    auxnet_lr: float
    auxnet_optimizer: str
    auxnet_blocks: int
    distillation_steps: int
    noise: float
    copies: int
    recalibrate: int

    @property
    def is_stored(self) -> bool:
        """Whether variables are kept by sample."""
        return self.variables == "stored"

    @property
    def has_multipliers(self) -> bool:
        """Whether this is the augmented Lagrangian."""
        return self.method == "lagrangian"

    def multiplier_rate(self, beta: float, step_size: float) -> float:
        """Return the step of the multipliers: 2 beta, or what the paper prints, eta / (2 beta).

        Args:
            beta: the penalty coefficient.
            step_size: eta, of the auxiliary variables.
        """
        return 2.0 * beta if self.multiplier_rule == "exact" else step_size / (2.0 * beta)

    def step_size(self, beta: float, weight: float) -> float:
        """Return eta_lambda: what is set, or `lambda_rate` of the one that solves eq. 17 for the slope at hand."""
        return self.lambda_rate / (2.0 * beta * weight) if self.lambda_lr is None else self.lambda_lr

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
        least: Mapping[str, float] = {"auxnet_blocks": 0, "distillation_steps": 1, "copies": 1, "recalibrate": 0}
        for key, lowest in least.items():
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise ConfigError(
                    f"parallel.{key}: found {value!r}; expected a whole number of at least {lowest}. "
                    f"Correct parallel.{key}."
                )
        for key in ("auxnet_lr", "lambda_lr", "lambda_rate", "noise"):
            value = getattr(self, key)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and (value > 0 or (key == "noise" and value == 0))):
                wanted = "no negative number" if key == "noise" else "a number above 0"
                raise ConfigError(f"parallel.{key}: found {value!r}; expected {wanted}. Correct parallel.{key}.")
