"""Decisions that a run or a sweep has found, read from its folder, which may be a stranger's. No torch."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from mlotool.config.resolve import is_known
from mlotool.config.run_config import finished_run, read_run_config
from mlotool.config.schema import is_plain_name
from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.run_files import read_json, read_text

KEY, FOLDER_KEY = "decisions", "decisions_from"
_SPACE = "mlotool.spaces.Space"


def fill_decisions(config: DictConfig) -> None:
    """Write the decisions of a folder into a config, in place; those that it has by name stay.

    Its shared spaces become the models of these decisions.

    Args:
        config: as it was composed.

    Raises:
        ConfigError: the folder has no decisions, or a problem of the config gives a shared space its path.
    """
    folder = config.get(FOLDER_KEY)
    if not isinstance(folder, str):
        return
    modules = dict(_modules(config))
    chooser = next((name for name, module in modules.items() if module.get("_target_") in ARCHITECTURES), None)
    if chooser is not None:
        raise ConfigError(
            f"decisions: found the folder '{folder}' in a recipe whose problem '{chooser}' chooses the paths of a "
            "shared space; expected one that trains one model. Take a recipe of the same "
            "space without that problem, or leave decisions out."
        )
    found = found_decisions(Path(folder))
    with open_dict(config):
        config[KEY] = {**found, **{str(name): config[KEY]._get_node(name)._value() for name in config[KEY]}}
    for module in modules.values():
        if module.get("_target_") == _SPACE and "shared" in module:
            with open_dict(module):
                module.shared = False
                module.paths = None


def _modules(config: DictConfig) -> Iterator[tuple[str, DictConfig]]:
    for name, problem in config.problems.items():
        if OmegaConf.is_missing(problem, "module"):
            continue
        module = problem.module
        if isinstance(module, DictConfig):
            yield str(name), module


# As in mlotool/spaces/decisions.py, which knows torch.
_NAME = re.compile(r"[a-z0-9_]{1,100}")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_ARTIFACT = "decisions"
"""The text of an analysis that holds decisions, as `path_analysis` returns it."""

ARCHITECTURES = tuple(f"mlotool.spaces.{name}" for name in ("PathWeights", "BinaryPaths", "PathPolicy"))
"""Modules that give a shared space its path."""

Decisions = dict[str, str | int]


def found_decisions(folder: Path) -> Decisions:
    """Return the decisions that a run has found; of a sweep's folder those of its best job.

    A run with an analysis that leaves a text `decisions` has found these; another one those of its spaces.

    Args:
        folder: of a finished run, or of a sweep.

    Raises:
        ConfigError: there is no such run, it has not finished, it has made no decisions, or its files are none of ours.
    """
    folder = _best_job(folder) if _is_sweep(folder) else folder
    config = finished_run("decisions", folder)
    found = _of_analyses(folder, config)
    if found is None and not _is_search(config):
        found = _of_spaces(folder, config)
    if not found:
        what = "searches a shared space without an analysis of its paths" if _is_search(config) else "has no decisions"
        raise ConfigError(
            f"decisions: found '{folder}', a run that {what}; expected one of a space of models, or of a search that "
            "writes what it has found. Add analyses.found={_target_: mlotool.losses.path_analysis, roles: {paths: ..}} "
            "to that search, or write the decisions by name."
        )
    return found


def _is_search(config: Mapping[str, Any]) -> bool:
    modules = [each.get("module") for each in config["problems"].values() if isinstance(each, Mapping)]
    nodes = [each for each in modules if isinstance(each, Mapping)]
    return any(each.get("paths") is not None or each.get("_target_") in ARCHITECTURES for each in nodes)


def _of_analyses(folder: Path, config: Mapping[str, Any]) -> Decisions | None:
    """Return what the one analysis has found that says so; None where none does."""
    analyses = config.get("analyses")
    names = [str(each) for each in analyses if is_plain_name(each)] if isinstance(analyses, Mapping) else []
    places = {name: Path("artifacts") / f"{name}_{_ARTIFACT}.txt" for name in names}
    texts = {name: text for name, place in places.items() if (text := read_text(folder, place)) is not None}
    if len(texts) > 1:
        raise ConfigError(
            f"decisions: found '{folder}', in which {', '.join(texts)} have each found decisions; expected one "
            "analysis that does. Write the decisions by name."
        )
    found: Decisions = {}
    for name, text in texts.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            key, _, value = line.partition(": ")
            found[key] = int(value) if _NUMBER.fullmatch(value) else value
            _check(folder / places[name], key, found[key])
    return found if texts else None


def _of_spaces(folder: Path, config: Mapping[str, Any]) -> Decisions:
    """Return what spaces were built by: all of it stands in nodes.json, and in config.yaml what the recipe said."""
    record = (read_json(folder, "nodes.json") or {}).get("problems")
    found: Decisions = {}
    for problem in record.values() if isinstance(record, Mapping) else ():
        made = problem.get("decisions") if isinstance(problem, Mapping) else None
        for each in made if isinstance(made, list) else ():
            name, value = (each.get("name"), each.get("value")) if isinstance(each, Mapping) else (None, None)
            _check(folder / "nodes.json", name, value)
            found[str(name)] = value  # type: ignore[assignment]
    given = config.get("decisions")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        _check(folder / "config.yaml", name, value)
        found[name] = value
    return found


def _check(file: Path, name: object, value: object) -> None:
    # Before it becomes part of a config, where a text may be a reference.
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
    if not is_name or not (type(value) is int or (isinstance(value, str) and _NAME.fullmatch(value))):
        raise ConfigError(
            f"decisions: found {shown(name)}: {shown(value)} in {file}; expected names of a-z, 0-9 and '_', and "
            "such or whole numbers as their values, as a run writes them. Write the decisions by name."
        )


def _is_sweep(folder: Path) -> bool:
    return not (folder / "config.yaml").exists() and (folder / "plan.json").is_file()


def _best_job(sweep: Path) -> Path:
    """Return the job with the best objective; of a point that has several jobs, by their mean, the first."""
    mode = (read_json(sweep, "plan.json") or {}).get("mode")
    points: dict[str, list[tuple[float, Path]]] = {}
    for job, value in _values(sweep):
        points.setdefault(_point(job), []).append((value, job))
    if not points or mode not in ("min", "max"):
        what = "no job has finished with a value" if mode in ("min", "max") else "plan.json does not say what is better"
        raise ConfigError(
            f"decisions: found the sweep '{sweep}', in which {what}; expected one with an objective and finished jobs. "
            "Give the folder of a job, or wait for one."
        )
    sign = 1.0 if mode == "max" else -1.0
    return max(points.values(), key=lambda jobs: sign * fmean(value for value, _ in jobs))[0][1]


def _values(sweep: Path) -> Iterator[tuple[Path, float]]:
    names = sorted(int(each.name) for each in sweep.iterdir() if each.name.isascii() and each.name.isdigit())
    for job in (sweep / str(name) for name in names):
        if not job.is_dir() or job.is_symlink():
            continue
        summary = read_json(job, "summary.json") or {}
        objective = summary.get("objective")
        value = objective.get("value") if isinstance(objective, Mapping) else None
        if summary.get("status") == "finished" and isinstance(value, int | float) and value == value:
            yield job, float(value)


def _point(job: Path) -> str:
    """Return a job's config without its seed and its name, which repeats of a point have in common."""
    document = read_run_config(job)
    values = {} if document is None else {key: value for key, value in document.data.items() if key != "seed"}
    return repr(values)


def decision_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with `decisions`; whether a model asks for them shows when it is built."""
    for name, value in values["decisions"].items():
        if not _NAME.fullmatch(str(name)) or name == "seed":
            yield (
                f"decisions: found the name {shown(name)}; expected a-z, 0-9 and '_', at most 100 of them, but not "
                "seed. `mlotool show RECIPE --nodes PROBLEM` lists the names."
            )
        elif is_known(value) and type(value) is not int and not (isinstance(value, str) and _NAME.fullmatch(value)):
            quotes = " YAML reads yes, no, on and off so: write quotes around them." if isinstance(value, bool) else ""
            yield (
                f"decisions.{name}: found {shown(value)}; expected the name of a candidate, of a-z, 0-9 and '_', or a "
                f"whole number.{quotes} `mlotool show RECIPE --nodes PROBLEM` lists the candidates."
            )
