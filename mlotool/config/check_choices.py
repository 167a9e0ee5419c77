"""Settings that are one of several words."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.check_ranges import Range, named_faults
from mlotool.config.resolve import is_known, value_at
from mlotool.config.schema import (
    ACCELERATORS,
    LOGGER_MODES,
    OBJECTIVE_MODES,
    OF_ONE_OBJECTIVE,
    PRECISIONS,
    PRUNERS,
    SAMPLERS,
    SCHEDULER_INTERVALS,
    SWEEP_LAUNCHERS,
    SWEEP_METHODS,
    TRACES,
    is_identifier,
    is_plain_name,
    name_fault,
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


def count_faults(values: Values) -> Iterator[str]:
    """Yield the counts, seconds and norms that are too small."""
    at_least_one = [
        *(f"runner.{key}" for key in ("ticks_per_chunk", "log_every", "num_threads", "keep_checkpoints")),
        *("runner.early_stopping_patience", "debug.limit_ticks", "debug.limit_samples", "evaluate.batch_size"),
        "evaluate.recalibrate",
        "debug.limit_unroll_steps",
    ]
    at_least_zero = ["seed", "runner.max_ticks", "debug.limit_warmup_steps"]
    for name in values["problems"]:
        at_least_one += [
            f"problems.{name}.{key}"
            for key in ("unroll_steps", "accumulate_batches", "tasks", "stream.batch_size", "stream.repeat")
        ]
        at_least_zero += [f"problems.{name}.{key}" for key in ("warmup_steps", "stream.num_workers")]
    for low, keys in ((1, at_least_one), (0, at_least_zero)):
        for key in keys:
            value = value_at(values, key)
            if isinstance(value, int) and value < low:
                yield f"{key}: found {value}; expected a whole number of at least {low}. Correct {key}."
    seconds = values["runner"]["checkpoint_seconds"]
    if isinstance(seconds, int | float) and not seconds > 0:
        yield (
            f"runner.checkpoint_seconds: found {seconds}; expected a positive number of seconds. "
            "Correct runner.checkpoint_seconds, or set runner.checkpoint=false."
        )
    for name, problem in values["problems"].items():
        norm = problem.get("gradient_clip_norm")
        if isinstance(norm, int | float) and not norm > 0:
            yield (
                f"problems.{name}.gradient_clip_norm: found {norm}; expected a positive norm or null. "
                f"Correct problems.{name}.gradient_clip_norm."
            )


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
