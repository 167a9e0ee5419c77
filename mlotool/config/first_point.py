"""The first job of a sweep, composed before any is started: what is wrong with it is wrong with all of them."""

from mlotool.config.checks import check
from mlotool.config.composition import compose
from mlotool.config.sweep_plan import SweepPlan
from mlotool.core.errors import ConfigError


def check_first_point(plan: SweepPlan) -> None:
    """Refuse a sweep whose keys there are not, or whose intervals begin where no value may be.

    A choice that is wrong fails in a job of its own, as others may be right.

    Raises:
        ConfigError: with what is wrong.
    """
    words = [f"{each.key}={each.first}" for each in plan.dimensions]
    config = compose(None, [*(word for word in plan.fixed if not word.startswith("hydra.")), *words])
    try:
        check(config)
    except ConfigError as error:
        of_all = ("sweep.", *(f"{each.key.lstrip('+')}: " for each in plan.dimensions if not each.choices))
        faults = [line for line in str(error).splitlines() if line.startswith(of_all)]
        if faults:
            raise ConfigError("\n".join(faults)) from None
