"""Wrong labels, put in on purpose."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

KINDS = ("uniform", "flip")


def corrupt_labels(target: Tensor, num_classes: int, *, kind: str, rate: float, seed: int) -> Tensor:
    """Return labels of which some are replaced, each independently with probability `rate`.

    - `uniform`: by a label drawn uniformly from ALL classes, its own included, as in Meta-Weight-Net; the share of
      wrong labels is then `rate * (1 - 1 / num_classes)`: rate 0.4 makes 36% of ten classes' labels wrong.
    - `flip`: by the one other class that belongs to its class, drawn once for the whole data set; the share of wrong
      labels is `rate`.

    Args:
        target: (n,) int64 clean labels; left as they are.
        num_classes: at least 2.
        kind: `uniform` or `flip`.
        rate: from 0 to 1.
        seed: 0 or more.

    Returns:
        (n,) int64.

    Source: Shu et al. 2019, Meta-Weight-Net, section 4.2 (there flip noise goes to two other classes, here to one, the
    variant of Patrini et al. 2017).

    Example:
        >>> corrupt_labels(torch.zeros(4, dtype=torch.int64), 2, kind="flip", rate=1.0, seed=0)
        tensor([1, 1, 1, 1])
    """
    _check(kind, rate)
    # [seed, 1]: a stream of its own, independent of the split's [seed, 0].
    generator = np.random.default_rng([seed, 1])
    is_replaced = torch.from_numpy(generator.random(len(target)) < rate)
    if kind == "uniform":
        replacement = torch.from_numpy(generator.integers(0, num_classes, len(target)))
    else:
        # A shift by 1 .. C - 1 never returns to the class itself.
        shifts = torch.from_numpy(generator.integers(1, num_classes, num_classes))
        replacement = (target + shifts[target]) % num_classes
    return torch.where(is_replaced, replacement, target)


def check_label_noise(label_noise: Mapping[str, Any] | None) -> None:
    """Raise ConfigError unless `label_noise` is None or `{kind: .., rate: ..}`."""
    if label_noise is None:
        return
    if set(label_noise) != {"kind", "rate"}:
        unknown = next((key for key in label_noise if key not in ("kind", "rate")), "")
        raise ConfigError(
            f"data.label_noise has the keys {sorted(label_noise)}; expected 'kind' and 'rate'."
            f"{did_you_mean(unknown, ['kind', 'rate'])} Write data.label_noise='{{kind: uniform, rate: 0.4}}'."
        )
    _check(label_noise["kind"], label_noise["rate"])


def _check(kind: str, rate: float) -> None:
    if kind not in KINDS:
        raise ConfigError(
            f"data.label_noise.kind={kind!r}; expected one of {', '.join(KINDS)}.{did_you_mean(kind, KINDS)} "
            "Set data.label_noise.kind=uniform."
        )
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate <= 1:
        raise ConfigError(
            f"data.label_noise.rate={rate}; expected a probability from 0 to 1. Set data.label_noise.rate=0.4."
        )
