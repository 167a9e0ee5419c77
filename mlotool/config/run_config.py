"""The config and the results in a run's folder, which may be a stranger's: read as a recipe is, and held to its rules.

No torch here, and no Hydra until a config of OmegaConf's is asked for.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from types import NoneType
from typing import TYPE_CHECKING, Any

import yaml

from mlotool.config.objective import objective_direction
from mlotool.config.schema import defaults_at, is_plain_name
from mlotool.config.security.safety import is_dangerous, place_faults
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean, fault_list, shown
from mlotool.folders.documents import ends, leaves
from mlotool.folders.run_folder import EXPECTED, STATUSES, RunFolder
from mlotool.folders.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from omegaconf import DictConfig

# What `evaluate` and `load` build from.
BUILT = ("data", "problems", "hypergradient", "analyses", "evaluate")


def max_ticks(config: Mapping[str, Any]) -> int:
    """Return the last tick of a plain config.

    Example:
        >>> max_ticks({"runner": {"max_ticks": 100}, "debug": {"limit_ticks": 20}})
        20
    """
    limit = (config.get("debug") or {}).get("limit_ticks")
    ticks: int = config["runner"]["max_ticks"]
    return ticks if limit is None else min(ticks, limit)


def has_finished(summary: Mapping[str, Any], old: Mapping[str, Any], last_tick: int) -> bool:
    """Say whether a run has nothing left to do.

    Args:
        summary: its summary.json.
        old: its config, as a plain one.
        last_tick: until where it is wanted.
    """
    num_ticks = summary.get("num_ticks")
    if summary.get("status") != "finished" or not isinstance(num_ticks, int):
        return False
    has_stopped_early = num_ticks < max_ticks(old)
    return has_stopped_early or num_ticks >= last_tick


def finished_run(key: str, folder: Path) -> dict[str, Any]:
    """Return the config of a run that has finished, as plain values.

    Args:
        key: of the config that names the folder.
        folder: the run's.

    Raises:
        ConfigError: there is no such folder, it is no run's, or the run has not finished.
    """
    if not folder.is_dir():
        raise ConfigError(f"{key}: found '{folder}', which is not a folder; expected {EXPECTED}")
    run = RunFolder(folder)
    document = run.config()
    if document is None or not isinstance(document.data.get("problems"), dict):
        raise ConfigError(f"{key}: found '{folder}', which has no config.yaml of a run; expected {EXPECTED}")
    status = run.summary().get("status")
    if status != "finished":
        found = status if status in STATUSES else "not finished"
        raise ConfigError(
            f"{key}: found '{folder}', a run that is {found}; expected a finished run. Finish it first: repeat its "
            f"command with resume={folder}."
        )
    return document.data


def load_run_config(
    run_dir: Path | str, overrides: Sequence[str] = (), *, is_own: bool = False, built: Sequence[str] = BUILT
) -> "DictConfig":
    """Return the config of a run folder.

    The folder may be a stranger's: what a recipe may not say, a place outside of the working folder or
    `download: true`, is refused here too, until the user says the same, or another value, as an override.

    Args:
        run_dir: the run folder.
        overrides: `key=value` for keys of the config, such as `data.root=/data`; a list is replaced whole.
        is_own: whether the values are the user's, for a parent process has written the folder, or nothing is built.
        built: the keys that something is built from; what others say does nothing.

    Raises:
        ConfigError: there is no config.yaml, it is none of ours, it says what only the user may say, or it is that of a
            script, from which nothing can be built.
    """
    # Imported here: the report reads configs too, and needs no Hydra.
    from omegaconf import DictConfig, OmegaConf

    from mlotool.config.hydra_errors import config_errors
    from mlotool.config.schema import Config

    run = RunFolder(run_dir)
    path, document = run.path / run.CONFIG, run.config()
    if document is None:
        raise ConfigError(f"'{run_dir}' has no config.yaml; expected {EXPECTED}")
    if not document.data:
        raise ConfigError(f"{path}: found an empty file; expected the config that the run wrote. Put it back.")
    if is_of_script(document.data) and not is_own and "data" in built:
        raise ConfigError(
            f"{run.path}: found a run of a script (mlotool.fit), whose modules and data no recipe describes; expected "
            "a run of a recipe. Load its parameters in the script by mlotool.load(folder, 'problem', into=module), and "
            "evaluate in the script by mlotool.fit(.., evaluate={.., 'splits': {'test': 'end'}})."
        )
    for key, value in leaves(document.data):
        if isinstance(value, str) and "${" in value:
            # Every reference was resolved when it was written; what looks like one now was put there.
            raise ConfigError(f"{path}: {key}: found {value!r}; expected no reference. Remove it.")
    said = dict(_override(path, document.data, word) for word in overrides)
    if not is_own and (faults := [f"{path}: {fault}" for fault in _faults(document.data, said, built)]):
        raise ConfigError(fault_list(faults))
    with config_errors(path):
        config = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(document.data))
        for key, value in said.items():
            OmegaConf.update(config, key, value, merge=False)
    assert isinstance(config, DictConfig)
    return config


def _faults(data: dict[Any, Any], said: dict[str, Any], built: Sequence[str]) -> Iterator[str]:
    """Yield what the config says and only the user may: the run folder may be anybody's."""
    for key, value in leaves({name: data[name] for name in built if name in data}):
        # A list that was replaced has none of its old values.
        if key in said or any(key.startswith(f"{place}[") for place in said):
            continue
        fault = next(place_faults(key, value), None) if isinstance(value, str) else None
        if fault is not None or is_dangerous(key, value):
            what = "a path below the working folder" if fault else "nothing that downloads, unpickles or chooses files"
            text = str(value).lower() if isinstance(value, bool) else value
            yield (
                f"{key}: found {value!r}; expected {what}, since a run folder may be anybody's. If you do want this "
                f"value, write {key}={text} after the run folder (Python: overrides=['{key}={text}'])."
            )


def _override(path: Path, data: dict[Any, Any], word: str) -> tuple[str, Any]:
    key, sign, text = word.partition("=")
    known = dict(leaves(data)) | dict(_lists(data))
    if not sign or key not in known:
        raise ConfigError(
            f"found the override '{word}'; expected <key>=<value> with a key that {path} has."
            f"{did_you_mean(key, known)} Correct it."
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if not isinstance(known[key], list):
        return key, value if isinstance(value, str | int | float | bool | None) else text
    if not isinstance(value, list):
        raise ConfigError(f"found the override '{word}'; expected a list, as {path} has there. Write '{key}=[..]'.")
    return key, value


def _lists(node: Any, prefix: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield the lists of a tree with their dotted keys."""
    if isinstance(node, list):
        yield prefix, node
        for index, item in enumerate(node):
            yield from _lists(item, f"{prefix}[{index}]")
    elif isinstance(node, dict):
        for key, item in node.items():
            yield from _lists(item, f"{prefix}.{key}".lstrip("."))


# In the `data` of a run whose program a script has made, in the place of a node.
MADE_BY, SCRIPT = "made_by", "mlotool.fit"


def is_of_script(config: Mapping[str, Any]) -> bool:
    """Say whether a config is that of `mlotool.fit`: it tells of modules, losses and data, and builds none of them.

    Example:
        >>> is_of_script({"data": {"made_by": "mlotool.fit"}}), is_of_script({"data": {"_target_": "mine.Data"}})
        (True, False)
    """
    data = config.get("data")
    return isinstance(data, Mapping) and data.get(MADE_BY) == SCRIPT


# What a resumed run may change: how long it goes on, what is kept and shown. None of it changes a tick.
MAY_DIFFER = (
    *("resume", "decisions_from", "runner.max_ticks", "runner.checkpoint_seconds", "runner.keep_checkpoints"),
    *("runner.progress_bar", "runner.report", "runner.trainer.*", "logger.*", "debug.limit_ticks"),
    "problems.*.stream.num_workers",
)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the keys, with both values, in which two plain configs differ; those of MAY_DIFFER aside.

    A key that only one of them has counts with the schema's default in the other: an older version wrote fewer.

    Example:
        >>> differences({"seed": 0, "runner": {"max_ticks": 5}}, {"seed": 1, "runner": {"max_ticks": 9}})
        ['seed: 0 there, 1 here']
    """
    # The direction of an objective is derived where it is not written out.
    sides = [{**dict(ends(config)), "objective_mode": objective_direction(config)} for config in (old, new)]
    different = []
    for key in sorted({key for side in sides for key in side if not may_differ(key)}):
        parent, _, name = key.rpartition(".")
        there, here = (side[key] if key in side else defaults_at(parent).get(name, "nothing") for side in sides)
        if there != here or type(there) is not type(here):
            different.append(f"{key}: {there!r} there, {here!r} here")
    return different


def may_differ(key: str) -> bool:
    """Say whether a resumed run may have another value at a dotted key."""
    return any(fnmatchcase(key, pattern) for pattern in MAY_DIFFER)


DECISIONS_KEY, FOLDER_KEY = "decisions", "decisions_from"
_SPACE = "mlotool.spaces.Space"
# As in mlotool/spaces/decisions.py, which knows torch.
_NAME = re.compile(r"[a-z0-9_]{1,100}")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
# Modules that give a shared space its path.
ARCHITECTURES = tuple(f"mlotool.spaces.{name}" for name in ("PathWeights", "BinaryPaths", "PathPolicy"))

Decisions = dict[str, str | int]


def fill_decisions(config: "DictConfig") -> None:
    """Write the decisions of a folder into a config, in place; those that it has by name stay.

    Its shared spaces become the models of these decisions.

    Args:
        config: as it was composed.

    Raises:
        ConfigError: the folder has no decisions, or a problem of the config gives a shared space its path.
    """
    from omegaconf import DictConfig, OmegaConf, open_dict

    folder = config.get(FOLDER_KEY)
    if not isinstance(folder, str):
        return
    nodes = {
        str(name): problem.module
        for name, problem in config.problems.items()
        if not OmegaConf.is_missing(problem, "module") and isinstance(problem.module, DictConfig)
    }
    chooser = next((name for name, module in nodes.items() if module.get("_target_") in ARCHITECTURES), None)
    if chooser is not None:
        raise ConfigError(
            f"decisions: found the folder '{folder}' in a recipe whose problem '{chooser}' chooses the paths of a "
            "shared space. Take a recipe of the same space without that problem, or leave decisions out."
        )
    decisions = found_decisions(Path(folder))
    with open_dict(config):
        named = {str(name): config[DECISIONS_KEY]._get_node(name)._value() for name in config[DECISIONS_KEY]}
        config[DECISIONS_KEY] = decisions | named
        for module in nodes.values():
            if module.get("_target_") == _SPACE and "shared" in module:
                module.shared = False
                module.paths = None


def found_decisions(folder: Path) -> Decisions:
    """Return the decisions that a run has found; of a sweep's folder those of its best job.

    A run with an analysis that leaves a text `decisions` has found these; another one those of its spaces.

    Args:
        folder: of a finished run, or of a sweep.

    Raises:
        ConfigError: there is no such run, it has not finished, it has made no decisions, or its files are none of ours.
    """
    if not RunFolder(folder).has(RunFolder.CONFIG) and SweepFolder(folder).has(SweepFolder.PLAN):
        folder = _best_job(SweepFolder(folder))
    config = finished_run("decisions", folder)
    decisions = _of_analyses(folder, config)
    problems = [node for node in config["problems"].values() if isinstance(node, Mapping)]
    nodes = [problem["module"] for problem in problems if isinstance(problem.get("module"), Mapping)]
    is_search = any(node.get("paths") is not None or node.get("_target_") in ARCHITECTURES for node in nodes)
    if decisions is None and not is_search:
        decisions = _of_spaces(folder, config)
    if not decisions:
        what = "searches a shared space without an analysis of its paths" if is_search else "has no decisions"
        raise ConfigError(
            f"decisions: found '{folder}', a run that {what}. Add "
            "analyses.found={_target_: mlotool.losses.path_analysis, roles: {paths: ..}} to a search, or write the "
            "decisions by name."
        )
    return decisions


def _of_analyses(folder: Path, config: Mapping[str, Any]) -> Decisions | None:
    """Return what the one analysis has found that says so; None where none does."""
    analyses = config.get("analyses")
    names = [str(name) for name in analyses if is_plain_name(name)] if isinstance(analyses, Mapping) else []
    places = [Path(RunFolder.ARTIFACTS) / f"{name}_decisions.txt" for name in names]
    texts = {place: text for place in places if (text := RunFolder(folder).text(place)) is not None}
    if len(texts) > 1:
        listed = ", ".join(map(str, texts))
        raise ConfigError(f"decisions: found {listed} in '{folder}'; expected one of them. Write decisions by name.")
    decisions: Decisions = {}
    for place, text in texts.items():
        for line in filter(None, map(str.strip, text.splitlines())):
            key, _, value = line.partition(": ")
            decisions[key] = int(value) if _NUMBER.fullmatch(value) else value
            _check_decision(folder / place, key, decisions[key])
    return decisions if texts else None


def _of_spaces(folder: Path, config: Mapping[str, Any]) -> Decisions:
    """Return what spaces were built by: all of it stands in nodes.json, and in config.yaml what the recipe said."""
    record, decisions = (RunFolder(folder).json(RunFolder.NODES) or {}).get("problems"), dict[Any, Any]()
    for problem in record.values() if isinstance(record, Mapping) else ():
        made = problem.get(DECISIONS_KEY) if isinstance(problem, Mapping) else None
        for decision in made if isinstance(made, list) else ():
            name, value = map(decision.get, ("name", "value")) if isinstance(decision, Mapping) else (None, None)
            _check_decision(folder / RunFolder.NODES, name, value)
            decisions[name] = value
    said = config.get(DECISIONS_KEY)
    for name, value in said.items() if isinstance(said, Mapping) else ():
        _check_decision(folder / RunFolder.CONFIG, name, value)
        decisions[name] = value
    return decisions


def _is_value(value: object) -> bool:
    return type(value) is int or (isinstance(value, str) and _NAME.fullmatch(value) is not None)


def _check_decision(file: Path, name: object, value: object) -> None:
    # Before it becomes part of a config, where a text may be a reference.
    if not (isinstance(name, str) and _NAME.fullmatch(name) and _is_value(value)):
        raise ConfigError(
            f"decisions: found {shown(name)}: {shown(value)} in {file}; expected names of a-z, 0-9 and '_', with such "
            "names or whole numbers as values. Write the decisions by name."
        )


def _best_job(sweep: SweepFolder) -> Path:
    """Return the job with the best objective; of a point that has several jobs, by their mean, the first."""
    mode = sweep.plan().get("mode")
    points: dict[str, list[tuple[float, Path]]] = {}
    for job in sweep.jobs():
        summary = job.summary()
        objective = summary.get("objective")
        value = objective.get("value") if isinstance(objective, Mapping) else None
        if summary.get("status") == "finished" and isinstance(value, int | float) and value == value:
            document = job.config()
            # Repeats of a point have all in common but their seed.
            point = {} if document is None else {key: document.data[key] for key in document.data if key != "seed"}
            points.setdefault(repr(point), []).append((float(value), job.path))
    if not points or mode not in ("min", "max"):
        what = "no job has finished with a value" if mode in ("min", "max") else "plan.json does not say what is better"
        raise ConfigError(f"decisions: found the sweep '{sweep.path}', in which {what}. Give the folder of a job.")
    sign = 1.0 if mode == "max" else -1.0
    return max(points.values(), key=lambda jobs: sign * fmean(value for value, _ in jobs))[0][1]


def decision_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with `decisions`; whether a model asks for them shows when it is built."""
    listed = "`mlotool show RECIPE --nodes PROBLEM` lists them."
    for name, value in values[DECISIONS_KEY].items():
        if not _NAME.fullmatch(str(name)) or name == "seed":
            yield f"decisions: found the name {shown(name)}; expected a-z, 0-9 and '_', but not seed. {listed}"
        # Anything but a plain value has a fault of its own.
        elif isinstance(value, list | dict | str | bool | float | NoneType) and not _is_value(value):
            quotes = (
                " YAML reads yes, no, on and off as true or false: put quotes around them."
                if isinstance(value, bool)
                else ""
            )
            wanted = "the name of a candidate, of a-z, 0-9 and '_', or a whole number"
            yield f"decisions.{name}: found {shown(value)}; expected {wanted}.{quotes} {listed}"
