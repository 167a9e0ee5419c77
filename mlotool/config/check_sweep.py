"""The `sweep` node of a config: names and numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.check_ranges import Range, named_faults
from mlotool.config.resolve import is_known
from mlotool.config.schema import OBJECTIVE_MODES, OF_ONE_OBJECTIVE, PRUNERS, SAMPLERS, SWEEP_LAUNCHERS, SWEEP_METHODS
from mlotool.core.messages import did_you_mean

_PROCESSES, _JOBS = Range(1, most=1_024, whole=True), Range(1, most=1_000_000, whole=True)
_COUNTS = {"workers": _PROCESSES, "jobs_per_device": _PROCESSES, "num_trials": _JOBS, "repeats": _JOBS}

AUTO = "auto"
"""What `sweep.fuse` may be beside a number: as many jobs as there are, up to a limit."""


def sweep_node_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with `sweep`; Optuna's own options are checked where Optuna is there."""
    sweep = values["sweep"]
    choices = {"method": SWEEP_METHODS, "launcher": SWEEP_LAUNCHERS, "sampler": SAMPLERS, "pruner": PRUNERS}
    for key, options in choices.items():
        if is_known(sweep[key]) and sweep[key] not in options:
            yield (
                f"sweep.{key}: found '{sweep[key]}'; expected one of {', '.join(options)}."
                f"{did_you_mean(sweep[key], options)} Correct sweep.{key}."
            )
    yield from named_faults("sweep", sweep, _COUNTS)
    fuse = sweep["fuse"]
    found = "null" if fuse is None else fuse if str(fuse).strip() else "nothing"
    if is_known(fuse) and fuse != AUTO and not (type(fuse) is int and _JOBS.holds(fuse)):
        yield (
            f"sweep.fuse: found {found}; expected {_JOBS}, the jobs of a process, or "
            f"auto.{did_you_mean(str(fuse), (AUTO,))} Correct sweep.fuse."
        )
    if sweep["devices"] == []:
        yield "sweep.devices: found []; expected GPUs such as [0, 1], or null for all. Correct sweep.devices."
    for key in ("launcher_options", "sampler_options", "pruner_options"):
        if is_known(sweep[key]) and not isinstance(sweep[key], Mapping | None):
            yield (
                f"sweep.{key}: found {sweep[key]!r}; expected names with values. Write 'sweep.{key}={{name: value}}' "
                "on the command line."
            )
    options = sweep["launcher_options"]
    if sweep["launcher"] == "local" and isinstance(options, Mapping) and options:
        yield (
            f"sweep.launcher_options: found {options} with sweep.launcher=local, which has none; expected "
            "sweep.launcher=slurm or ray. Choose one, or leave the options out."
        )
    if sweep["method"] == "grid" and is_known(sweep["repeats"]) and sweep["repeats"] > 1:
        yield (
            f"sweep.repeats: found {sweep['repeats']} in a grid; expected 1, as there each seed is a value. Write "
            f"'seed=range(0,{sweep['repeats']})'."
        )
    second, mode = sweep["second_objective"], sweep["second_objective_mode"]
    if second is not None and mode not in OBJECTIVE_MODES:
        yield (
            f"sweep.second_objective_mode: found {mode} beside sweep.second_objective={second}; expected "
            f"{' or '.join(OBJECTIVE_MODES)}. Write sweep.second_objective_mode=min."
        )
    if second is not None and sweep["sampler"] in OF_ONE_OBJECTIVE:
        yield (
            f"sweep.sampler: found {sweep['sampler']} beside sweep.second_objective={second}; expected a sampler that "
            "takes two objectives: nsga2, tpe, random, qmc or brute_force. Write sweep.sampler=nsga2."
        )
    if is_known(sweep["seed"]) and sweep["seed"] < 0:
        yield f"sweep.seed: found {sweep['seed']}; expected a whole number of at least 0. Correct sweep.seed."
