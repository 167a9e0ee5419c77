"""The whole config, checked before anything is built; without torch."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from mlotool.config.check_evaluation import evaluation_faults, evaluation_warnings
from mlotool.config.check_machine import machine_faults
from mlotool.config.check_ranges import nan_faults, number_faults
from mlotool.config.check_sweep import sweep_node_faults
from mlotool.config.check_targets import target_faults
from mlotool.config.dry_build import construction_faults
from mlotool.config.dry_parts import part_faults
from mlotool.config.names import is_identifier, is_plain_name, name_fault
from mlotool.config.optimizer_roles import optimizer_roles
from mlotool.config.resolve import as_schema, is_known, resolve_config
from mlotool.config.schema import (
    ACCELERATORS,
    LOGGER_MODES,
    OBJECTIVE_MODES,
    PRECISIONS,
    SCHEDULER_INTERVALS,
    TRACES,
)
from mlotool.config.translation import translate
from mlotool.core.errors import ConfigError
from mlotool.core.faults import fault_list
from mlotool.core.suggest import did_you_mean
from mlotool.problem.node import ProblemNode
from mlotool.program.graph import Graph

Values = Mapping[str, Any]


def check(config: Any, targets: bool = False, machine: bool = False, *, parts: bool = False) -> list[str]:
    """Check a config as a whole; without `targets` nothing is built, and no target is called.

    Args:
        config: a composed config.
        targets: also compare third-party targets (torch's) with their signatures, which imports them, and build
            optimizers, schedulers and hypergradients once, on a parameter of no problem.
        machine: also ask whether this machine has the GPU, the folders and the files that the config names.
        parts: with `targets`: also build data, modules and the whole program once, as a run does, where they are small
            and their files are there; nothing is downloaded.

    Returns:
        Warnings.

    Raises:
        ConfigError: with every fault found, one a line.
    """
    return checked(config, targets=targets, machine=machine, parts=parts)[1]


def checked(
    config: Any, *, targets: bool, machine: bool = False, parts: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Check a config; return it as plain values, and the warnings."""
    try:
        values, faults = resolve_config(as_schema(config))
    except OmegaConfBaseException as error:
        raise translate(error) from None
    checks: tuple[Callable[[Values], Iterator[str]], ...] = (
        _name_faults,
        _choice_faults,
        _range_faults,
        _namespace_faults,
        number_faults,
        _graph_faults,
        _direction_faults,
        _stream_faults,
        evaluation_faults,
        sweep_node_faults,
        lambda values: target_faults(values, targets=targets),
    )
    faults += [fault for each in checks for fault in each(values)]
    faults += nan_faults(values, faults)
    if machine:
        faults += machine_faults(values)
    if targets:
        faults += construction_faults(values, dict(_hypergradients(values)), faults)
        if parts:
            faults += part_faults(values, faults)
    if faults:
        raise ConfigError(fault_list(list(dict.fromkeys(faults))))
    return values, [*_warnings(values), *evaluation_warnings(values)]


def _name_faults(values: Values) -> Iterator[str]:
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


def _choice_faults(values: Values) -> Iterator[str]:
    choices = {
        "runner.precision": PRECISIONS,
        "runner.accelerator": ACCELERATORS,
        "logger.mode": LOGGER_MODES,
        **({"objective_mode": OBJECTIVE_MODES} if values["objective_mode"] is not None else {}),
        **{f"problems.{name}.scheduler_interval": SCHEDULER_INTERVALS for name in values["problems"]},
        **{
            f"problems.{name}.precision": PRECISIONS
            for name in values["problems"]
            if _at(values, f"problems.{name}.precision") is not None
        },
    }
    for key, options in choices.items():
        value = _at(values, key)
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
    if values["resume"] == "":
        yield "resume: found ''; expected auto, a run folder or a checkpoint of one, or null. Correct resume."
    devices = values["runner"]["devices"]
    if is_known(devices) and devices != "auto" and not (isinstance(devices, int) and devices >= 1):
        yield (
            f"runner.devices: found {devices!r}; expected a whole number of at least 1, or auto for every GPU. Correct "
            "runner.devices."
        )
    yield from _division_faults(values)


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


def _range_faults(values: Values) -> Iterator[str]:
    at_least_one = [
        *(f"runner.{key}" for key in ("max_ticks", "ticks_per_chunk", "log_every", "num_threads", "keep_checkpoints")),
        *("runner.early_stopping_patience", "debug.limit_ticks", "debug.limit_samples", "evaluate.batch_size"),
        "debug.limit_unroll_steps",
    ]
    at_least_zero = ["seed", "debug.limit_warmup_steps"]
    for name in values["problems"]:
        at_least_one += [
            f"problems.{name}.{key}"
            for key in ("unroll_steps", "accumulate_batches", "tasks", "stream.batch_size", "stream.repeat")
        ]
        at_least_zero += [f"problems.{name}.{key}" for key in ("warmup_steps", "stream.num_workers")]
    for low, keys in ((1, at_least_one), (0, at_least_zero)):
        for key in keys:
            value = _at(values, key)
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


def _graph_faults(values: Values) -> Iterator[str]:
    nodes = {
        name: ProblemNode(dict(_played(problem)), _other_uses(problem)) for name, problem in values["problems"].items()
    }
    try:
        Graph(**values["graph"]).validate(nodes)
    except ConfigError as error:
        yield from str(error).splitlines()


def _direction_faults(values: Values) -> Iterator[str]:
    """Yield the problems that can learn nothing as the edges point, and how the edges would be right."""
    graph = Graph(**values["graph"])
    for name, problem in values["problems"].items():
        players = {other for _, other in _played(problem)}
        if not players or name in players or graph.lowers(name):
            continue
        advice = " ".join(
            f"Write graph.upper_to_lower.{name}: [{other}] and graph.lower_to_upper.{other}: [{name}]."
            for other in sorted(players & {*graph.readers(name), *graph.uppers(name)})
        )
        yield (
            f"graph: '{name}' reads no problem's solution, and its loss does not use its own module, so that it cannot "
            "learn; expected a role for itself, or edges that make it the upper problem. "
            + (f"The edges are the wrong way round? {advice}" if advice else f"Add a role for '{name}' to its loss.")
        )


def _other_uses(problem: Values) -> dict[str, str]:
    uses = {f"optimizer.{key}": name for key, name in optimizer_roles(problem.get("optimizer")).items()}
    start = problem.get("reset_to")
    return uses if not isinstance(start, str) or start == "initial" else {**uses, "reset_to": start}


def _played(problem: Values) -> Iterator[tuple[str, str]]:
    loss = problem.get("loss")
    roles = loss.get("roles") if isinstance(loss, Mapping) else None
    for role, value in roles.items() if isinstance(roles, Mapping) else ():
        name = value.get("problem") if isinstance(value, Mapping) else value
        if isinstance(name, str):
            yield role, name


def _stream_faults(values: Values) -> Iterator[str]:
    problems = values["problems"]
    for name, problem in problems.items():
        other = problem.get("same_batch_as")
        streaming = [each for each, node in problems.items() if node.get("stream") and each != name]
        if isinstance(other, str) and problem.get("stream"):
            advice = f"Write problems.{name}.stream: null, or remove same_batch_as."
            yield (
                f"problems.{name}.same_batch_as: found '{other}' beside a stream; expected one of the two, as the "
                f"problem sees the batches of '{other}' or its own. "
                f"{advice if other in streaming else 'Remove same_batch_as.'}"
            )
        elif isinstance(other, str) and other not in streaming:
            yield (
                f"problems.{name}.same_batch_as: found '{other}'; expected another problem, one that has a stream: "
                f"{', '.join(streaming) or 'there is none'}.{did_you_mean(other, streaming)} Correct it, or remove it."
            )
    sizes = values["data"].get("sizes") if isinstance(values["data"], Mapping) else None
    if not isinstance(sizes, Mapping):
        return
    splits = [name for name, size in sizes.items() if size]
    used = {
        f"problems.{name}.stream.split": problem["stream"].get("split")
        for name, problem in values["problems"].items()
        if problem.get("stream")
    }
    used.update({f"evaluate.splits.{name}": name for name in (values["evaluate"] or {}).get("splits", ())})
    for name, analysis in values["analyses"].items():
        if isinstance(analysis, Mapping):
            used[f"analyses.{name}.split"] = analysis.get("split", "train")
    for key, split in used.items():
        if is_known(split) and split not in splits:
            yield (
                f"{key}: found '{split}'; expected a split of the data: {', '.join(splits)}."
                f"{did_you_mean(split, splits)} Correct it, or set data.sizes.{split}=100."
            )


def _namespace_faults(values: Values) -> Iterator[str]:
    splits = (values["evaluate"] or {}).get("splits", ())
    for kind, names in (("problem", values["problems"]), ("split", splits)):
        for name in set(values["analyses"]) & set(names):
            yield (
                f"analyses.{name}: found the name of a {kind}; expected a name of its own, since metrics are logged as "
                f"<name>/<metric>. Rename it to {name}_analysis."
            )


def _warnings(values: Values) -> Iterator[str]:
    data = values["data"]
    if data.get("download") is True:
        yield f"data.download: files that are missing will be downloaded to '{data.get('root')}'."
    yield from _ignored(values)


def _idle(values: Values) -> Iterator[str]:
    """Yield the upper problems that wait for more steps than the run has."""
    debug, ticks = values["debug"], values["runner"]["max_ticks"]
    limits = {key: debug.get(f"limit_{key}") for key in ("warmup_steps", "unroll_steps")}
    if not isinstance(ticks, int) or debug["limit_ticks"] is not None:
        return
    for lower, uppers in values["graph"]["lower_to_upper"].items():
        problem = values["problems"].get(lower) or {}
        steps = 0
        for key, limit in limits.items():
            found = problem.get(key)
            steps += min(found, found if limit is None else limit) if isinstance(found, int) else 0
        if uppers and steps > ticks:
            yield (
                f"runner.max_ticks: found {ticks}, while {', '.join(uppers)} waits for {steps} steps of '{lower}' "
                f"(warmup_steps and unroll_steps); expected at least as many. Nothing above '{lower}' is trained: set "
                f"runner.max_ticks={2 * steps}."
            )


def _unused(values: Values) -> Iterator[str]:
    """Yield hypergradients and schedulers that nothing asks for."""
    readers, splits = values["graph"]["lower_to_upper"], (values["evaluate"] or {}).get("splits", {})
    for name, problem in values["problems"].items():
        if problem.get("hypergradient") is not None and not readers.get(name):
            lower = next((low for low, uppers in readers.items() if name in uppers), None)
            yield (
                f"problems.{name}.hypergradient: found one, while no problem reads the solution of '{name}'; expected "
                "it at the lower problem, through whose solution it leads. "
                + (f"Move it to problems.{lower}.hypergradient." if lower else "Remove it.")
            )
        is_idle = not any(isinstance(every, int) for every in splits.values())
        if problem.get("scheduler") is not None and problem.get("scheduler_interval") == "evaluation" and is_idle:
            yield (
                f"problems.{name}.scheduler_interval: found evaluation, while nothing is evaluated during training, so "
                f"the scheduler never steps; expected evaluate.splits.val=100, or step. Set "
                f"problems.{name}.scheduler_interval=step."
            )


def _broken_episodes(values: Values) -> Iterator[str]:
    """Yield the problems whose tasks change between the steps that are to learn them."""
    for name, problem in values["problems"].items():
        steps, stream = problem.get("unroll_steps"), problem.get("stream") or {}
        repeat = stream.get("repeat")
        if problem.get("tasks") is None or not isinstance(steps, int) or not isinstance(repeat, int):
            continue
        if repeat % max(steps, 1):
            yield (
                f"problems.{name}.stream.repeat: found {repeat} with unroll_steps={steps} and tasks; expected a "
                f"multiple of {steps}, or the tasks change before all of their steps are done. Set "
                f"problems.{name}.stream.repeat={steps}."
            )


def _ignored(values: Values) -> Iterator[str]:
    """Yield the settings that have no effect."""
    for name, problem in values["problems"].items():
        stream, key = problem["stream"] or {}, f"problems.{name}.stream.batch_size"
        split, batch_size = f"data.sizes.{stream.get('split')}", stream.get("batch_size")
        size = _at(values, split)
        if isinstance(size, int) and isinstance(batch_size, int) and 0 < size < batch_size:
            yield (
                f"{key}: found {batch_size}, while {split}={size}; expected no more than the split has, so each batch "
                f"has {size} samples. Set {key}={size}, or {split}={batch_size}."
            )
    yield from _unused(values)
    yield from _broken_episodes(values)
    yield from _idle(values)
    logger = values["logger"]
    if logger["mode"] != "offline" and logger["wandb"] is False:
        yield (
            f"logger.mode: found '{logger['mode']}' with logger.wandb=false, which ignores it; expected W&B to log. "
            "Set logger.wandb=true, or leave logger.mode out."
        )


def _hypergradients(values: Values) -> Iterator[tuple[str, Any]]:
    """Yield the hypergradients that are used, with their keys."""
    is_root_used = False
    for name in values["graph"]["lower_to_upper"]:
        own = values["problems"].get(name, {}).get("hypergradient")
        if own is not None:
            yield f"problems.{name}.hypergradient", own
        else:
            is_root_used = True
    if is_root_used:
        yield "hypergradient", values["hypergradient"]


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values
