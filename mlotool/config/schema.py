"""The shape of the root config: what keys there are, with their types and defaults. No torch.

Nodes of type Any hold a `_target_` and its settings; check_targets.py compares them with the target's signature.
"""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


@dataclass
class LoggerConfig:
    """Where numbers go beside metrics.csv."""

    mode: str = "offline"
    wandb: bool = True
    tensorboard: bool = False
    project: str = "mlotool"


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
