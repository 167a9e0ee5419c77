"""Values that fit their own setting, but not each other: names, sweeps, and numbers that are none."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlotool.config.reading import leaves
from mlotool.config.resolve import is_known
from mlotool.config.schema import (
    OF_ONE_OBJECTIVE,
    is_identifier,
    is_plain_name,
    name_fault,
    value_faults,
)
from mlotool.config.trusted import is_of_user

Values = Mapping[str, Any]


def name_faults(values: Values) -> Iterator[str]:
    """Yield the names that cannot be those of keys, metrics or files, or that two things have."""
    problems, analyses = values["problems"], values["analyses"]
    splits = (values["evaluate"] or {}).get("splits", ())
    fault = name_fault(values["name"])
    if fault is not None:
        yield f"name: {fault}. Correct it."
    if not problems:
        yield "problems: found none; expected at least one. Choose a recipe: mlotool run +recipe=mwn."
    for key, names in (("analyses", analyses), ("evaluate.splits", splits)):
        for name in names:
            if not is_plain_name(name):
                yield (
                    f"{key}: found the name {name!r}; expected letters, digits, '-', '_' and '.', as it names files "
                    "and metrics. Rename it."
                )
    for problem in problems:
        if not is_identifier(problem):
            yield (
                f"problems.{problem}: found the name {problem!r}; expected letters, digits and '_', not beginning with "
                "a digit. Rename the problem."
            )
    for key, names, suffix, kind, others in (
        ("problems", problems, "problem", "split in evaluate.splits", splits),
        ("analyses", analyses, "analysis", "problem", problems),
        ("analyses", analyses, "analysis", "split", splits),
    ):
        for name in [name for name in names if name in others]:
            yield (
                f"{key}.{name}: found the name of a {kind}; expected a name of its own, since metrics are logged as "
                f"<name>/<metric>. Rename it to {name}_{suffix}."
            )


def division_faults(values: Values) -> Iterator[str]:
    """Yield the problems whose batches cannot be divided among ranks."""
    devices = values["runner"]["devices"]
    for name, problem in values["problems"].items() if devices != 1 else ():
        if problem.get("tasks") is not None:
            yield (
                f"problems.{name}.tasks: found {problem['tasks']} with runner.devices={devices}; expected null, since "
                "the tasks are the batch's first axis, which ranks would divide. Set runner.devices=1."
            )


def sweep_faults(values: Values) -> Iterator[str]:
    """Yield what is wrong with `sweep` alone; Optuna's own options are checked where Optuna is there."""
    sweep = values["sweep"]
    yield from value_faults(sweep, "sweep")
    options = sweep["launcher_options"]
    if sweep["launcher"] == "local" and isinstance(options, Mapping) and options:
        yield (
            f"sweep.launcher_options: found {options} with sweep.launcher=local, which has none; expected "
            "sweep.launcher=slurm or ray. Choose one, or leave the options out."
        )
    if sweep["method"] == "grid" and is_known(sweep["repeats"]) and sweep["repeats"] != 1:
        yield (
            f"sweep.repeats: found {sweep['repeats']} in a grid; expected 1, as there each seed is a value. Write "
            f"'seed=range(0,{sweep['repeats']})'."
        )
    second, mode = sweep["second_objective"], sweep["second_objective_mode"]
    if second is not None and mode is None:
        yield (
            f"sweep.second_objective_mode: found null beside sweep.second_objective={second}; expected min or max. "
            "Write sweep.second_objective_mode=min."
        )
    if second is not None and sweep["sampler"] in OF_ONE_OBJECTIVE:
        yield (
            f"sweep.sampler: found {sweep['sampler']} beside sweep.second_objective={second}; expected a sampler that "
            "takes two objectives: nsga2, tpe, random, qmc or brute_force. Write sweep.sampler=nsga2."
        )


def nan_faults(values: Values, known: Sequence[str]) -> Iterator[str]:
    """Yield where NaN stands, but for the keys that `known` messages name already, and settings of the user's code."""
    keys = {message.partition(": ")[0] for message in known}
    nodes = {f"problems.{name}.{key}": node for name, own in values["problems"].items() for key, node in own.items()}
    nodes |= {"data": values["data"], "hypergradient": values["hypergradient"]}
    nodes |= {f"analyses.{name}": node for name, node in values["analyses"].items()}
    of_user = tuple(
        f"{key}." for key, node in nodes.items() if isinstance(node, Mapping) and is_of_user(node.get("_target_"))
    )
    for key, value in leaves({name: node for name, node in values.items() if name != "sweep"}):
        if isinstance(value, float) and math.isnan(value) and key not in keys and not key.startswith(of_user):
            yield f"{key}: found nan; expected a number. Correct {key}."
