"""The config of a run whose program a script has made: its settings are checked as those of a recipe are."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

import __main__
from mlotool.config import check_values
from mlotool.config.building import Built
from mlotool.config.hydra_errors import config_errors
from mlotool.config.resolve import resolve_config
from mlotool.config.run_config import MADE_BY, SCRIPT
from mlotool.config.schema import Config, is_plain_name, keys_at
from mlotool.config.unknown_keys import value_faults
from mlotool.config.user_data import given_data
from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list

if TYPE_CHECKING:
    from mlotool.program import Program

_ARGUMENTS = (
    *("ticks", "data", "evaluate", "objective", "objective_mode", "callbacks", "logger", "folder", "name", "seed"),
    "resume",
)
# Keys of `runner` that a script says elsewhere.
_ELSEWHERE = {
    "devices": "Start the script on all of them: python -m torch.distributed.run --nproc-per-node 2 SCRIPT.",
    "max_ticks": "Write mlotool.fit(program, ticks=1000).",
    "precision": "Give it to the problem: mlotool.Problem(..., precision='bf16').",
    "trace": "Give it to the program: mlotool.Program(..., trace='eager').",
}
RUNNER_KEYS = tuple(key for key in keys_at("runner") if key not in (*_ELSEWHERE, "callbacks"))


def built_from(program: "Program", data: Any, settings: Mapping[str, Any]) -> tuple[DictConfig, Built, list[str]]:
    """Return the config of a script's run, with what a recipe's config would have been built into, and warnings.

    Args:
        program: of the script.
        data: splits by name, an object with `split(name)`, or None.
        settings: all other arguments of `mlotool.fit` that are settings of a recipe, by name. None leaves the default,
            but for keys of `runner`.

    Raises:
        ConfigError: with every fault found, one a line.
    """
    from mlotool.program.program import check_saved

    given = {key: value for key, value in settings.items() if key in _ARGUMENTS and value is not None}
    runner = {key: value for key, value in settings.items() if key not in _ARGUMENTS}
    ticks = {"max_ticks": given.pop("ticks")} if "ticks" in given else {}
    callbacks = _listed("callbacks", given.pop("callbacks", ()), "on_train_start", "Lightning callbacks")
    logger, loggers = _logger(given.pop("logger", {}))
    evaluate, metrics = _evaluate(given.pop("evaluate", None))
    _check_runner(runner)
    # Of a program, "eager" is a recipe's `true`.
    trace = {None: False, "eager": True}.get(program.internals.tracing.backend, program.internals.tracing.backend)
    described = {
        "name": _name_of_script(),
        "baseline": "fixed" if program.internals.held.issuperset(program.graph.upper_to_lower) else None,
        **given,
        "data": _described_data(program, data),
        "hypergradient": None,
        "problems": _described_problems(program),
        "graph": {key: {name: list(ends) for name, ends in getattr(program.graph, key).items()} for key in _EDGES},
        "evaluate": evaluate,
        "runner": {**ticks, **runner, "trace": trace, "callbacks": _nodes(callbacks)},
        "logger": {**logger, "loggers": _nodes(loggers)},
    }
    config, warned = _checked(described)
    made = given_data({} if data is None else data, config.seed)
    if config.runner.checkpoint:
        check_saved(program.problems.values())
    return config, Built(program, made, {}, metrics, {}, callbacks, loggers), warned


_EDGES = ("upper_to_lower", "lower_to_upper")


def _checked(described: Mapping[str, Any]) -> tuple[DictConfig, list[str]]:
    if faults := [fault for _, fault in value_faults(described)]:
        raise ConfigError(fault_list(faults))
    with config_errors():
        config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(described)))
    assert isinstance(config, DictConfig)
    values, faults = resolve_config(config)
    for faults_of in (check_values.name_faults, check_values.evaluation_faults):
        faults += faults_of(values)
    if faults:
        raise ConfigError(fault_list(list(dict.fromkeys(faults))))
    nodes = {f"problems.{name}.hypergradient": node["hypergradient"] for name, node in values["problems"].items()}
    used = {key: node for key, node in nodes.items() if node is not None}
    return config, list(check_values.warnings_of(values, used))


def _check_runner(runner: Mapping[str, Any]) -> None:
    for key in runner:
        if key in _ELSEWHERE:
            raise ConfigError(f"fit.{key}: mlotool.fit does not take this argument. {_ELSEWHERE[key]}")
        if key not in RUNNER_KEYS:
            hint = did_you_mean(key, (*_ARGUMENTS, *RUNNER_KEYS))
            raise ConfigError(
                f"fit: found the argument '{key}'; expected one of {', '.join((*_ARGUMENTS, *RUNNER_KEYS))}.{hint} "
                "Correct the name."
            )


def _name_of_script() -> str:
    """Return what the folder is called of a run that has no name: as the script, where there is one."""
    name = Path(getattr(__main__, "__file__", None) or "").stem
    return name if is_plain_name(name) else Config().name


def _evaluate(given: Any) -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Return the config's `evaluate`, in which nodes stand for functions, and the functions by their places."""
    if not isinstance(given, Mapping):
        advice = "Write {'problem': 'classifier', 'metrics': ['accuracy'], 'splits': {'val': 100, 'test': 'end'}}."
        require(given is None, "fit.evaluate", given, "a mapping with the keys of a recipe's evaluate", advice)
        return None, {}
    if given.get("recalibrate") is not None:
        found, expected = given["recalibrate"], "none, as it takes the stream of a recipe"
        require(False, "evaluate.recalibrate", found, expected, "Leave it out.")
    metrics, functions = given.get("metrics"), dict[str, Callable[..., Any]]()
    if not isinstance(metrics, list | tuple):
        return given, {}
    nodes = list[Any]()
    for index, metric in enumerate(metrics):
        is_function = callable(metric) and not isinstance(metric, type)
        if is_function:
            functions[f"evaluate.metrics[{index}]"] = metric
        nodes += _nodes([metric]) if is_function else [metric]
    return {**given, "metrics": nodes}, functions


def _logger(given: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return keys of the config's `logger`, and Lightning's loggers, which take the place of all others."""
    if isinstance(given, Mapping):
        return {key: x for key, x in given.items() if key != "loggers"}, _loggers(given.get("loggers", ()))
    return {"wandb": False}, _loggers(given)


def _loggers(given: Any) -> list[Any]:
    return _listed("logger", given, "log_metrics", "Lightning loggers, or a mapping with the keys of a recipe's logger")


def _listed(key: str, given: Any, method: str, expected: str) -> list[Any]:
    """Return one or several objects as a list."""
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    for value in listed:
        require(hasattr(value, method) and not isinstance(value, type), f"fit.{key}", value, expected)
    return listed


def _nodes(values: Sequence[Any]) -> list[dict[str, str]]:
    from mlotool.problem.description import path_of

    return [{"_target_": path_of(value)} for value in values]


def _described_problems(program: "Program") -> dict[str, Any]:
    from mlotool.problem.description import keys_of

    return {name: keys_of(problem) for name, problem in program.problems.items()}


def _described_data(program: "Program", data: Any) -> dict[str, Any]:
    """Return in words what the batches are and what is evaluated, by which a run that goes on knows them again."""
    from mlotool.problem.description import path_of

    def words(samples: Any) -> str:
        # A DataLoader's length is that of its batches.
        unit = "batches" if hasattr(samples, "batch_sampler") else "samples"
        size = f", {len(samples)} {unit}" if hasattr(type(samples), "__len__") else ""
        return f"{path_of(samples)}{size}"

    streams = {}
    for name, problem in program.problems.items():
        stream = problem.stream
        if stream is not None:
            has_samples = hasattr(stream, "dataset") and hasattr(stream, "batch_size")
            streams[name] = f"{words(stream.dataset)}, {stream.batch_size} a batch" if has_samples else path_of(stream)
    splits: Any = None if data is None else path_of(data)
    if isinstance(data, Mapping):
        splits = {str(name): words(samples) for name, samples in data.items()}
    held = {"held": sorted(program.internals.held)} if program.internals.held else {}
    return {MADE_BY: SCRIPT, "streams": streams, "splits": splits, **held}
