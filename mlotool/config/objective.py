"""Whether a larger or a smaller objective is better. No torch, and no OmegaConf: the page of a run asks too."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from mlotool.config.schema import METRIC_DIRECTIONS

Values = Mapping[str, Any]
Direction = Literal["max", "min"]


def objective_direction(values: Values) -> Direction | None:
    """Return whether a run's best objective is its largest or its smallest; None where nobody knows.

    What is known of a metric counts before what is written: the folder of an older run may say `max` of an error.
    `direction_faults` refuses such a contradiction where a run begins.

    Args:
        values: a config, or the plain values of a config.yaml.

    Example:
        >>> objective_direction({"objective": "classifier/loss"})
        'min'
        >>> evaluate = {"problem": "classifier", "metrics": ["accuracy"], "splits": {"val": 100}}
        >>> objective_direction({"objective": "val/accuracy", "evaluate": evaluate})
        'max'
        >>> objective_direction({"objective": "val/after", "objective_mode": "min"})
        'min'
    """
    if values.get("objective") is None:
        return None
    return known_direction(values) or _written(values)


def known_direction(values: Values) -> Direction | None:
    """Return the direction of the objective as its key alone tells it; None for keys of users' losses and analyses.

    Known are `<anything>/loss`, and the metrics that `evaluate.metrics` names.
    """
    source, _, name = str(values.get("objective")).partition("/")
    if name == "loss":
        return "min"
    # A function of the user's may give a metric any name: only those that are listed by name mean what they say.
    is_named = source in _listed(values, "splits") and name in _listed(values, "metrics")
    return METRIC_DIRECTIONS.get(name) if is_named else None


def direction_faults(values: Values) -> Iterator[str]:
    """Yield what is wrong with `objective_mode`: a contradiction, or nothing where it cannot be derived."""
    key, written = values.get("objective"), values.get("objective_mode")
    if not isinstance(key, str) or not isinstance(written, str | None):
        return
    known = known_direction(values)
    if known is None and written is None:
        yield (
            f"objective_mode: found null, and it is not known whether larger or smaller values of objective={key} are "
            "better; expected max or min. Set objective_mode=max if larger values are better."
        )
    elif known is not None and _written(values) not in (None, known):
        better = f"{'larger' if known == 'max' else 'smaller'} values of {key.partition('/')[2]} are better"
        yield f"objective_mode: found '{written}' with objective={key}; expected {known}, as {better}. Remove it."


def _listed(values: Values, key: str) -> list[Any]:
    # The page of a run reads what may have been edited.
    evaluate = values.get("evaluate")
    names = evaluate.get(key) if isinstance(evaluate, Mapping) else None
    return list(names) if isinstance(names, Mapping | Sequence) else []


def _written(values: Values) -> Direction | None:
    mode = values.get("objective_mode")
    return mode if mode in ("min", "max") else None
