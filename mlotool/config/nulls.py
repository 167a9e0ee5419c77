"""null where there has to be something: what was expected, and what to write. No torch."""

import re
from collections.abc import Iterator

from mlotool.config.schema import OPTION_GROUPS, describe_type

_EXAMPLES = {
    "data": "digits",
    "model": "mlp",
    "optimizer": "sgd",
    "hypergradient": "finite_difference",
    "parallel": "penalty",
    "runner": "default",
    "logger": "csv",
    "debug": "fast",
    "sweep": "grid",
}
_NO_NAMES = re.compile(r"null|~|none|true|false|[-+]?\d+(\.\d*)?", re.IGNORECASE)
_ADVICE = (
    (r"problems", "Give at least one problem, or choose a recipe: mlotool run mwn."),
    (r"graph(\..*)?", "Leave it out where no problem shapes or reads another one."),
    (r"evaluate\.splits", "Write splits: {{val: 100, test: end}}, or evaluate=null for a run that evaluates nothing."),
    (r"evaluate\.metrics", "Write metrics: [accuracy], or evaluate=null for a run that evaluates nothing."),
    (r"evaluate\.problem", "Name the problem, or write evaluate=null for a run that evaluates nothing."),
    (r"(?P<stream>problems\..+\.stream)\..+", "Write one, or {stream}=null for a loss that is given no batches."),
)


def null_fault(path: str) -> str:
    """Return the message for a key that may not be null.

    Args:
        path: dotted, one that the schema knows.

    Example:
        >>> null_fault("seed")
        'seed: found null; expected a whole number. Write one, or leave seed out.'
    """
    found = ((match, advice) for pattern, advice in _ADVICE if (match := re.fullmatch(pattern, path)))
    match, advice = next(found, (None, f"Write one, or leave {path} out."))
    return f"{path}: found null; expected {describe_type(path)}. {advice.format(**match.groupdict() if match else {})}"


def choice_faults(key: str, text: str) -> Iterator[str]:
    """Yield what is wrong with an override that chooses an option by what is no name.

    Args:
        key: of the override: a group, or `group@place`.
        text: its value.
    """
    group = key.partition("@")[0]
    if group in OPTION_GROUPS and _NO_NAMES.fullmatch(text):
        yield (
            f"{key}: found {text}; expected the name of an option, as in {group}={_EXAMPLES[group]}. Write "
            f"one, or leave {key} out."
        )


def missing_choice(key: str) -> str:
    """Return what to write for a key of which every config has an option; empty for another key."""
    return f"{key}={_EXAMPLES[key]}" if key in _EXAMPLES else ""
