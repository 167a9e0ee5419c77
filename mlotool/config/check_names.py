"""Names of problems, splits and analyses: what they may be, and that no two log the same keys."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.names import is_identifier, is_plain_name, name_fault

Values = Mapping[str, Any]


def name_faults(values: Values) -> Iterator[str]:
    """Yield the names that cannot be those of keys, metrics or files."""
    name, problems = values["name"], values["problems"]
    fault = name_fault(name)
    if fault is not None:
        yield f"name: {fault}. Correct it."
    if not problems:
        yield "problems: found none; expected at least one. Choose a recipe: mlotool run +recipe=mwn."
    splits = (values["evaluate"] or {}).get("splits", ())
    for key, names in (("analyses", values["analyses"]), ("evaluate.splits", splits)):
        for each in names:
            if not is_plain_name(each):
                yield (
                    f"{key}: found the name {each!r}; expected letters, digits, '-', '_' and '.', as it names files "
                    "and metrics. Rename it."
                )
    for problem in problems:
        if not is_identifier(problem):
            yield (
                f"problems.{problem}: found the name {problem!r}; expected letters, digits and '_', not beginning with "
                "a digit. Rename the problem."
            )
        if problem in splits:
            yield (
                f"problems.{problem}: '{problem}' is also a split in evaluate.splits; expected different names, as "
                f"both log {problem}/<metric>. Rename the problem."
            )


def namespace_faults(values: Values) -> Iterator[str]:
    """Yield the analyses whose metrics would be logged under the name of a problem or split."""
    splits = (values["evaluate"] or {}).get("splits", ())
    for kind, names in (("problem", values["problems"]), ("split", splits)):
        for name in set(values["analyses"]) & set(names):
            yield (
                f"analyses.{name}: found the name of a {kind}; expected a name of its own, since metrics are logged as "
                f"<name>/<metric>. Rename it to {name}_analysis."
            )
