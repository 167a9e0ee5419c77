"""Settings that are one of several words."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.resolve import is_known, value_at
from mlotool.config.schema import (
    ACCELERATORS,
    LOGGER_MODES,
    OBJECTIVE_MODES,
    PRECISIONS,
    SCHEDULER_INTERVALS,
    TRACES,
)
from mlotool.core.messages import did_you_mean

Values = Mapping[str, Any]


def choice_faults(values: Values) -> Iterator[str]:
    """Yield the settings whose word is none of those that they may be."""
    choices = {
        "runner.precision": PRECISIONS,
        "runner.accelerator": ACCELERATORS,
        "logger.mode": LOGGER_MODES,
        **({"objective_mode": OBJECTIVE_MODES} if values["objective_mode"] is not None else {}),
        **{f"problems.{name}.scheduler_interval": SCHEDULER_INTERVALS for name in values["problems"]},
        **{
            f"problems.{name}.precision": PRECISIONS
            for name in values["problems"]
            if value_at(values, f"problems.{name}.precision") is not None
        },
    }
    for key, options in choices.items():
        value = value_at(values, key)
        if is_known(value) and value not in options:
            yield (
                f"{key}: found '{value}'; expected one of {', '.join(options)}.{did_you_mean(value, options)} "
                f"Correct {key}."
            )
    trace = values["runner"]["trace"]
    if is_known(trace) and not (isinstance(trace, bool) or trace in TRACES):
        yield (
            f"runner.trace: found {trace!r}; expected true, false or one of {', '.join(TRACES)}."
            f"{did_you_mean(str(trace), TRACES)} Correct runner.trace."
        )
    for name, problem in values["problems"].items():
        remat = problem.get("remat")
        if is_known(remat) and not (remat is None or isinstance(remat, str) or _is_texts(remat)):
            yield (
                f"problems.{name}.remat: found {remat!r}; expected paths of blocks of the module, auto or null. Write "
                f"problems.{name}.remat: [blocks.*] or auto."
            )
    if values["resume"] == "":
        yield "resume: found ''; expected auto, a run folder or a checkpoint of one, or null. Correct resume."
    if values["inherit"] == "":
        yield "inherit: found ''; expected a run folder, a checkpoint in one or null. Correct inherit."
    devices = values["runner"]["devices"]
    if is_known(devices) and devices != "auto" and not (isinstance(devices, int) and devices >= 1):
        yield (
            f"runner.devices: found {devices!r}; expected a whole number of at least 1, or auto for every GPU. Correct "
            "runner.devices."
        )
    yield from _division_faults(values)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _division_faults(values: Values) -> Iterator[str]:
    if values["runner"]["devices"] == 1:
        return
    for name, problem in values["problems"].items():
        if problem.get("tasks") is not None:
            yield (
                f"problems.{name}.tasks: found {problem['tasks']} with runner.devices={values['runner']['devices']}; "
                "expected null, since the tasks are the batch's first axis, which ranks would divide. Set "
                "runner.devices=1."
            )
