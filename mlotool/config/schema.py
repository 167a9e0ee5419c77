"""The shape of the root config: what keys there are, with their types and defaults. No torch.

Nodes of type Any hold a `_target_` and its settings; check_targets.py compares them with the target's signature.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean

# As omegaconf has it, whose import completion cannot wait for.
MISSING: Any = "???"

GROUPS = ("data", "model", "optimizer", "hypergradient", "parallel", "runner", "logger", "debug", "sweep", "recipe")
"""The config groups that recipes and command lines choose from; `recipe` lives in recipes/, the others in conf/."""
OPTION_GROUPS = GROUPS[:-1]

PRECISIONS = ("fp32", "bf16", "fp16")
ACCELERATORS = ("auto", "cpu", "gpu")
TRACES = ("auto", "inductor", "cuda_graph")
SCHEDULER_INTERVALS = ("step", "evaluation")
OBJECTIVE_MODES = ("min", "max")
LOGGER_MODES = ("offline", "online", "disabled")
SWEEP_METHODS = ("grid", "optuna")
SWEEP_LAUNCHERS = ("local", "slurm", "ray")
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "gp": "GPSampler",
    "cmaes": "CmaEsSampler",
    "nsga2": "NSGAIISampler",
    "qmc": "QMCSampler",
    "brute_force": "BruteForceSampler",
    "evolution": "EvolutionSampler",
    "reinforce": "ReinforceSampler",
    "predictor": "PredictorSampler",
}
OWN_SAMPLERS = ("evolution", "reinforce", "predictor")
"""Those that are ours, each in a file of its name in sweep/samplers/; the others are Optuna's."""
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "successive_halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
}
"""What `sweep.sampler` and `sweep.pruner` may name, with its class: a name and plain options call nothing else."""

OF_ONE_OBJECTIVE = ("evolution", "reinforce", "predictor", "cmaes", "gp")
"""Samplers that look at one objective."""

METRIC_DIRECTIONS: dict[str, Literal["max", "min"]] = {
    "accuracy": "max",
    "balanced_accuracy": "max",
    "precision": "max",
    "recall": "max",
    "f1": "max",
    "auroc": "max",
    "average_precision": "max",
    "calibration_error": "min",
    "cohen_kappa": "max",
    "matthews_corrcoef": "max",
    "cross_entropy": "min",
    "nats_per_token": "min",
    "bits_per_token": "min",
    "mean_squared_error": "min",
    "mean_absolute_error": "min",
    "r2": "max",
}
METRIC_NAMES = tuple(METRIC_DIRECTIONS)
"""What `evaluate.metrics` may name, and whether the largest or the smallest value is the best; a test holds the names
equal to what the runner evaluates, which knows torch."""

CLASSIFICATION_METRIC_NAMES = METRIC_NAMES[: METRIC_NAMES.index("cross_entropy")]
"""Those that need `num_classes` of the data."""


@dataclass
class StreamConfig:
    """Batches of one split, without end."""

    split: str = MISSING
    batch_size: int = 100
    shuffle: bool = True
    drop_last: bool = True
    num_workers: int = 0
    repeat: int = 1


@dataclass
class ProblemConfig:
    """One problem: `min over theta of C(theta; U, L; D)`."""

    module: Any = MISSING
    loss: Any = MISSING
    stream: StreamConfig | None = None
    same_batch_as: str | None = None
    optimizer: Any = MISSING
    scheduler: Any = None
    scheduler_interval: str = "step"
    hypergradient: Any = None
    unroll_steps: int = 1
    warmup_steps: int = 0
    roll_back: bool = False
    gradient_clip_norm: float | None = None
    accumulate_batches: int = 1
    reset_to: str | None = None
    tasks: int | None = None
    precision: str | None = None
    compile: bool = False
    channels_last: bool = False
    parallel: Any = None
    shard: Any = False
    remat: Any = None


@dataclass
class GraphConfig:
    """Who shapes whom, and who reads whose solution."""

    upper_to_lower: dict[str, list[str]] = field(default_factory=dict)
    lower_to_upper: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class EvaluateConfig:
    """Metrics of one problem's module over whole splits; a split's value is the ticks between evaluations, or end.

    What `arguments` names is given to the module beside a batch's input: by argument, what another problem's module
    returns, `architecture`, or what a method of it returns, `architecture.found`.
    """

    problem: str = MISSING
    arguments: dict[str, str] = field(default_factory=dict)
    metrics: list[Any] = field(default_factory=lambda: ["accuracy"])
    splits: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 500
    recalibrate: int | None = None


@dataclass
class RunnerConfig:
    """How long and on what; conf/runner/default.yaml says what each key means."""

    max_ticks: int = 1000
    ticks_per_chunk: int = 200
    log_every: int = 50
    accelerator: str = "auto"
    devices: int | str = 1
    precision: str = "fp32"
    tf32: bool = False
    trace: Any = "auto"
    deterministic: bool = True
    num_threads: int | None = None
    checkpoint: bool = True
    checkpoint_seconds: float = 30.0
    keep_checkpoints: int = 1
    early_stopping_patience: int | None = None
    progress_bar: bool = True
    report: bool = True
    callbacks: list[Any] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggerConfig:
    """Where numbers go beside metrics.csv."""

    mode: str = "offline"
    wandb: bool = True
    tensorboard: bool = False
    project: str = "mlotool"
    loggers: list[Any] = field(default_factory=list)


@dataclass
class DebugConfig:
    """Limits that win over what a recipe says."""

    limit_ticks: int | None = None
    limit_samples: int | None = None
    limit_warmup_steps: int | None = None
    limit_unroll_steps: int | None = None


@dataclass
class SweepConfig:
    """How `mlotool run -m` goes through its jobs; conf/sweep/ says what each key means."""

    method: str = "grid"
    params: dict[str, Any] = field(default_factory=dict)
    fuse: Any = 1
    workers: int = 1
    devices: list[str] | None = None
    jobs_per_device: int = 1
    launcher: str = "local"
    launcher_options: Any = None
    num_trials: int = 20
    repeats: int = 1
    second_objective: str | None = None
    second_objective_mode: str | None = None
    seed: int = 0
    sampler: str = "tpe"
    sampler_options: Any = None
    pruner: str = "none"
    pruner_options: Any = None
    storage: str | None = None


@dataclass
class Config:
    """The root."""

    name: str = "unnamed"
    seed: int = 0
    resume: str | None = None
    inherit: str | None = None
    data: Any = MISSING
    hypergradient: Any = MISSING
    problems: dict[str, ProblemConfig] = field(default_factory=dict)
    graph: GraphConfig = field(default_factory=GraphConfig)
    evaluate: EvaluateConfig | None = None
    decisions: dict[str, Any] = field(default_factory=dict)
    decisions_from: str | None = None
    analyses: dict[str, Any] = field(default_factory=dict)
    objective: str | None = None
    objective_mode: str | None = None
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


ROOT_KEYS = tuple(each.name for each in fields(Config))


def keys_at(path: str) -> tuple[str, ...]:
    """Return the keys that the schema knows below a dotted path; none where it leaves them open.

    Example:
        >>> keys_at("problems.classifier.stream")
        ('split', 'batch_size', 'shuffle', 'drop_last', 'num_workers', 'repeat')
    """
    kind = _dataclass_at(path)
    return () if kind is None else tuple(each.name for each in fields(kind))


def defaults_at(path: str) -> dict[str, Any]:
    """Return the values that the schema gives the keys below a dotted path, once there are any.

    Example:
        >>> defaults_at("logger")
        {'mode': 'offline', 'wandb': True, 'tensorboard': False, 'project': 'mlotool'}
    """
    kind = _dataclass_at(path)
    return {} if kind is None else asdict(kind())


def new_node(path: str) -> Any:
    """Return a new node of the schema for a dotted path, with its defaults; None where the schema has none there."""
    kind = _dataclass_at(path)
    return None if kind is None else kind()


def describe_type(path: str) -> str:
    """Return in words what the schema expects at a dotted path.

    Example:
        >>> describe_type("runner.num_threads"), describe_type("seed")
        ('a whole number or null', 'a whole number')
    """
    kind = _kind_at(path)
    return " or ".join(_word(each) for each in _members(kind))


def is_boolean(path: str) -> bool:
    """Say whether the schema has true or false at a dotted path.

    Example:
        >>> is_boolean("problems.classifier.compile"), is_boolean("seed"), is_boolean("data.download")
        (True, False, False)
    """
    return bool in _members(_kind_at(path))


def is_container(path: str) -> bool:
    """Say whether the schema itself has keys or items at a dotted path.

    Example:
        >>> is_container("problems.classifier"), is_container("seed"), is_container("data")
        (True, False, False)
    """
    return any(is_dataclass(each) or get_origin(each) in (dict, list) for each in _members(_kind_at(path)))


def _dataclass_at(path: str) -> Any:
    return next((each for each in _members(_kind_at(path)) if is_dataclass(each)), None)


def _kind_at(path: str) -> Any:
    kind: Any = Config
    for part in filter(None, path.split(".")):
        kind = _child(kind, part)
    return kind


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _child(kind: Any, key: str) -> Any:
    # `StreamConfig | None`: the class is what has keys.
    kind = next((each for each in _members(kind) if each is not NoneType), Any)
    if isinstance(kind, type) and is_dataclass(kind):
        return _types(kind).get(key, Any)
    arguments = get_args(kind)
    return arguments[1] if len(arguments) == 2 else Any


@cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _word(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}
    if kind in words:
        return words[kind]
    if is_dataclass(kind):
        return f"keys out of {', '.join(each.name for each in fields(kind))}"
    return {dict: "a mapping", list: "a list"}.get(get_origin(kind), "a value")


Place = tuple[str, ...]

_NODES = (
    "runner",
    "evaluate",
    "logger",
    "sweep",
    "problems.<name>",
    "problems.<name>.stream",
    "graph",
)
_ELSEWHERE = {
    "lr": "problems.<name>.optimizer.lr",
    "learning_rate": "problems.<name>.optimizer.lr",
    "momentum": "problems.<name>.optimizer.momentum",
    "weight_decay": "problems.<name>.optimizer.weight_decay",
    "max_epochs": "runner.max_ticks",
    "epochs": "runner.max_ticks",
    "num_epochs": "runner.max_ticks",
    "max_steps": "runner.max_ticks",
    "steps": "runner.max_ticks",
    "train_iters": "runner.max_ticks",
    "patience": "runner.early_stopping_patience",
    "fast_dev_run": "debug=fast",
    "device": "runner.accelerator",
    "gpus": "runner.devices",
    "ckpt_path": "resume",
    "output_dir": "hydra.run.dir",
    "batch_size": "problems.<name>.stream.batch_size",
    "precision": "runner.precision",
    "trainer": "runner",
    "strategy": "runner.devices",
    "metric": "evaluate.metrics",
    "monitor": "objective",
    "solver": "hypergradient.solver",
    "n_trials": "sweep.num_trials",
    "config": "hypergradient",
}
"""Names of other programs' settings, and those that stand in several nodes."""


def place_of(key: str) -> str:
    """Return where a key is meant to stand; empty where nobody knows.

    Example:
        >>> place_of("max_ticks"), place_of("lr"), place_of("nothing")
        ('runner.max_ticks', 'problems.<name>.optimizer.lr', '')
    """
    name = key.lower()
    found = (f"{node}.{name}" for node in _NODES if name in keys_at(node.replace("<name>", "name")))
    return _ELSEWHERE.get(name) or next(found, "")


def unknown_key(path: str, options: Sequence[str]) -> str:
    """Return the message for a key that nothing expects.

    Args:
        path: dotted, the key included.
        options: the keys there are in its place.
    """
    parent, _, key = path.rpartition(".")
    if not parent:
        options = [*ROOT_KEYS, *(group for group in GROUPS if group not in ROOT_KEYS)]
    hint = did_you_mean(key, options)
    if not parent and not hint and (place := place_of(key)):
        hint = f" Did you mean {place}?"
    known = f"one of {', '.join(options)}" if options else "no keys"
    where = f" in {parent}" if parent else ""
    return f"{path}: unknown key '{key}'; expected {known}{where}.{hint} Correct the key, or remove it."


def removed_key(path: str) -> str:
    """Return the message for `~path` where the schema has a key."""
    kind = describe_type(path)
    value = "null" if kind.endswith("null") else ".."
    return f"~{path}: found a key removed that every config has; expected {kind}. Write {path}={value}."


def schema_faults(content: Mapping[str, Any]) -> dict[Place, str]:
    """Return the places of a file's or an override's content that do not fit the schema, with messages.

    Args:
        content: plain values, from the root of the config on.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.structured(Config)
    return {place: fault for place, fault in _walk(config, content, ()) if fault}


def _walk(config: Any, node: Mapping[str, Any], above: Place) -> Iterator[tuple[Place, str]]:
    known = keys_at(".".join(above)) if above else (*ROOT_KEYS, "hydra", "defaults")
    for key, value in node.items():
        place = (*above, str(key))
        path = ".".join(place)
        if known and key not in known:
            yield place, unknown_key(path, known)
        elif isinstance(value, Mapping) and value and is_container(path):
            yield from _walk(config, value, place)
        elif place not in (("hydra",), ("defaults",)):
            yield place, _type_fault(config, place, value)


def _type_fault(config: Any, place: Place, value: Any) -> str:
    """Return what is wrong with a value, which is written into a config of the schema."""
    from omegaconf.errors import OmegaConfBaseException

    tree = value
    for part in reversed(place):
        tree = {part: tree}
    try:
        config.merge_with(tree)
    # OmegaConf 2.4 raises a TypeError of its own for a list in the place of a mapping.
    except (OmegaConfBaseException, TypeError):
        path = ".".join(place)
        found = "null" if value is None else repr(value)
        return f"{path}: found {found}; expected {describe_type(path)}. Correct it."
    return ""


def boolean_faults(key: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with a number at a dotted path where the schema has true or false.

    OmegaConf alone would take a 3 for true.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and is_boolean(key):
        yield f"{key}: found {value!r}; expected true or false. Correct {key}."


def check_overrides(words: Sequence[str]) -> None:
    """Refuse overrides that give a number for true or false, and a `name` that is too long for a folder.

    Args:
        words: `key=value`, as on the command line; a value may be several, for a sweep.

    Raises:
        ConfigError: with every fault found, one a line.

    Example:
        >>> check_overrides(["problems.classifier.compile=true", "seed=3"])
    """
    faults: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key == "name" and len(text) > MAX_NAME and "$" not in text:
            faults.append(f"name: {name_fault(text)}. Correct it.")
        for each in text.split(","):
            faults += boolean_faults(key.lstrip("+"), _number(each))
    if faults:
        raise ConfigError("\n".join(faults))


def _number(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


MAX_NAME = 100
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def is_plain_name(name: Any) -> bool:
    """Say whether `name` can name a folder: it neither leaves its parent nor hides."""
    return isinstance(name, str) and len(name) <= MAX_NAME and _PLAIN.fullmatch(name) is not None


def name_fault(name: Any) -> str | None:
    """Return what was found and expected where a run's `name` can name no folder; None where it can."""
    if is_plain_name(name):
        return None
    if isinstance(name, str) and len(name) > MAX_NAME:
        return f"found {len(name)} characters, {name[:20]!r}...; expected at most {MAX_NAME}, as it names a folder"
    return f"found {name!r}; expected letters, digits, '-', '_' and '.', as it names the output folder"


def is_identifier(name: Any) -> bool:
    """Say whether `name` can name a problem: it stands in keys, metrics and graphs."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None
