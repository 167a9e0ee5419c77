"""The shape of the root config: what keys there are, with their types and defaults. No torch.

The annotations say types, ranges and choices (`mlotool.core.settings`), and by `Kind` where a node with a `_target_`
stands, whose settings check_targets.py compares with the target's signature. OmegaConf gets of them what it can hold.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial, reduce
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen

from mlotool.core import settings as ranges
from mlotool.core.messages import shown
from mlotool.core.settings import Count, Precision, parameters, words
from mlotool.problem.settings import ProblemSettings

# As omegaconf has it, whose import completion cannot wait for.
MISSING: Any = "???"
T = TypeVar("T")
_SAMPLERS = Path(__file__).parents[1] / "sweep" / "samplers"

# The config groups that recipes and command lines choose from; `recipe` lives in recipes/, the others in conf/.
GROUPS = ("data", "model", "optimizer", "hypergradient", "parallel", "runner", "logger", "debug", "sweep", "recipe")
OPTION_GROUPS = GROUPS[:-1]

Processes = Annotated[int, Ge(1), Le(1_024)]

# Samplers that are ours, with their classes: a file in sweep/samplers/ that has the class of its name, as evolution.py
# has EvolutionSampler. The others are Optuna's.
OWN_SAMPLERS = {
    file.stem: name
    for file in sorted(_SAMPLERS.glob("[!_]*.py"))
    if f"\nclass {(name := file.stem.title().replace('_', '') + 'Sampler')}(" in file.read_text(encoding="utf-8")
}
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "gp": "GPSampler", "cmaes": "CmaEsSampler",
            "nsga2": "NSGAIISampler", "qmc": "QMCSampler", "brute_force": "BruteForceSampler",
            **OWN_SAMPLERS}  # fmt: skip
# What `sweep.sampler` and `sweep.pruner` may name, with its class: a name and plain options call nothing else.
PRUNERS = {"none": "NopPruner", "median": "MedianPruner", "percentile": "PercentilePruner",
           "successive_halving": "SuccessiveHalvingPruner", "hyperband": "HyperbandPruner",
           "threshold": "ThresholdPruner"}  # fmt: skip

# Samplers that look at one objective.
OF_ONE_OBJECTIVE = (*OWN_SAMPLERS, "cmaes", "gp")

# Metrics that need `num_classes` of the data.
CLASSIFICATION_METRIC_NAMES = (
    *("accuracy", "balanced_accuracy", "precision", "recall", "f1", "auroc", "average_precision"),
    *("calibration_error", "cohen_kappa", "matthews_corrcoef"),
)

_ERRORS = ("cross_entropy", "nats_per_token", "bits_per_token", "mean_squared_error", "mean_absolute_error")
METRIC_NAMES = (*CLASSIFICATION_METRIC_NAMES, *_ERRORS, "r2")
# What `evaluate.metrics` may name; a test holds the names equal to what the runner evaluates, which knows torch.
MetricName = Literal[*METRIC_NAMES]  # type: ignore[valid-type]

# Whether the largest or the smallest value of a metric is the best.
METRIC_DIRECTIONS: dict[str, Literal["max", "min"]] = {
    name: "min" if name in ("calibration_error", *_ERRORS) else "max" for name in METRIC_NAMES
}


_annotations: dict[type, dict[str, Any]] = {}


@dataclass(frozen=True)
class Kind:
    """Marks the place of a node that is built from its `_target_`.

    Args:
        name: what the target makes: "module", "loss", ...
    """

    name: str


def node_kind(annotation: Any) -> str | None:
    """Return of what kind a node is that may stand where an annotation is; None where none may."""
    extras = (extra for member in members(annotation) for extra in getattr(member, "__metadata__", ()))
    return next((extra.name for extra in extras if isinstance(extra, Kind)), None)


@dataclass_transform()
def schema(cls: type[T], settings: type | None = None, without: Sequence[str] = ()) -> type[T]:
    """Make a dataclass that OmegaConf can hold: in the place of ranges, literals and unions it has plain types, or Any.

    Args:
        cls: a class with annotated defaults.
        settings: a class whose arguments are keys as well, with their defaults.
        without: those of them that are no keys.
    """
    hints = dict(cls.__annotations__)
    for name, parameter in parameters(settings).items() if settings else ():
        if name not in (*hints, *without):
            hints[name] = parameter.annotation
            setattr(cls, name, parameter.default)
    cls.__annotations__ = {name: _held(hint) for name, hint in hints.items()}
    _annotations[cls] = hints
    return dataclass(cls)


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union; of another annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _held(annotation: Any) -> Any:
    """Return the type that OmegaConf has for an annotation."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _held(get_args(annotation)[0])
    if origin is Literal:
        return str
    if origin in (dict, list):
        return origin[tuple(map(_held, get_args(annotation)))]
    others = [member for member in members(annotation) if member is not NoneType]
    if len(others) < len(members(annotation)) and len(others) == 1:
        held = _held(others[0])
        return held if held is Any else held | None
    return annotation if annotation in (int, float, bool, str) or is_dataclass(annotation) else Any


@schema
class StreamConfig:
    """Batches of one split, without end.

    Args:
        split: The split of the data that the batches come from: train, meta, val or test, or another one that the data
            has.
        batch_size: Number of samples in a batch, over all processes; null: that of the split's DataLoader, or 100.
        shuffle: Whether each epoch has a new order of the samples; null: as in the split's DataLoader, or true.
        drop_last: Whether the last batch of an epoch is left out if it is smaller than the others; null: as in the
            split's DataLoader, or true.
        num_workers: Number of processes that load batches ahead; 0 loads them in the run's own process; null: as in the
            split's DataLoader, or 0.
        repeat: How many steps in a row use the same batch.
    """

    split: str = MISSING
    batch_size: Count | None = None
    shuffle: bool | None = None
    drop_last: bool | None = None
    num_workers: Annotated[int, Ge(0), Le(256)] | None = None
    repeat: Count = 1


@partial(schema, settings=ProblemSettings, without=("optimizer_roles",))
class ProblemConfig:
    """One problem, `min over theta of C(theta; U, L; D)`; its other keys are the fields of `ProblemSettings`.

    Args:
        module: The module that is trained: an option of conf/model/, or a node with a `_target_` that makes an
            `nn.Module`.
        loss: A function `(batch, *, role, ..)` that returns a number; `roles` says which problem's module each keyword
            receives. null: the module is a LightningModule, and its `training_step` is the loss.
        stream: The batches of this problem, from one split; null if the loss needs no batch, or if `same_batch_as` is
            set.
        same_batch_as: The name of a problem whose last batch this problem uses, in place of a `stream`.
        optimizer: A node of any `torch.optim` class, or an option of conf/optimizer/. `groups: [{match: fc.*, lr:
            0.01}]` gives the parameters whose names match settings of their own; `lr: {problem: rate}` is a learning
            rate that the problem `rate` learns. Without a `_target_`, it is the optimizer that a LightningModule's
            `configure_optimizers` returns.
        scheduler: A node of any `torch.optim.lr_scheduler` class; null: the learning rate does not change.
        hypergradient: How gradients pass through the solution of this problem; null: as the top-level key
            `hypergradient` says.
        precision: Precision in which this problem's loss is computed: fp32, bf16 or fp16; null: `runner.precision`.
        channels_last: Whether images are stored with their channels last (channels-last memory format), which is often
            faster for convolutions on GPUs.
        neutral: The value at which `baseline=fixed` holds the outputs of this problem's module, such as 1.0 for
            weights; null: the value that the module's class declares.
        parallel: How this problem's training steps compute the layers of the module in parallel: an option of
            conf/parallel/; null: one layer after the other.
    """

    module: Annotated[Any, Kind("module")] = MISSING
    loss: Annotated[Any, Kind("loss")] | None = None
    stream: StreamConfig | None = None
    same_batch_as: str | None = None
    optimizer: Annotated[Any, Kind("optimizer")] | None = None
    scheduler: Annotated[Any, Kind("scheduler")] | None = None
    hypergradient: Annotated[Any, Kind("hypergradient")] | None = None
    precision: Precision | None = None
    channels_last: bool = False
    neutral: float | None = None
    parallel: Annotated[Any, Kind("parallel")] | None = None


@schema
class GraphConfig:
    """Which problem shapes which, and which problem reads whose solution.

    Args:
        upper_to_lower: For each upper problem, a list of the lower problems that it shapes: their loss, initialization
            or optimizer uses its parameters.
        lower_to_upper: For each lower problem, a list of the upper problems that read it: their loss uses the trained
            lower module.
    """

    upper_to_lower: dict[str, list[str]] = field(default_factory=dict)
    lower_to_upper: dict[str, list[str]] = field(default_factory=dict)


@schema
class EvaluateConfig:
    """How a problem's module is evaluated on whole splits.

    The module is called with a batch's input and with `arguments`. Each of them names another problem, whose module's
    output is passed on (`architecture`), or one of its methods (`architecture.found`).

    Args:
        problem: The name of the problem whose module is evaluated.
        arguments: Further arguments of the module. For each name, a problem, whose module is called and its output
            passed on (`architecture`), or a method of its module (`architecture.found`).
        metrics: Names of known metrics, or nodes with a `_target_` of your own.
        splits: For each split, the number of ticks between two evaluations; or `end`, which evaluates the best
            checkpoint and the last tick when the run ends.
        batch_size: Number of samples that are evaluated at once.
        recalibrate: Number of batches from which BatchNorm's running statistics are collected anew before each
            evaluation; null: evaluate with the statistics of training.
    """

    problem: str = MISSING
    arguments: dict[str, str] = field(default_factory=dict)
    metrics: list[MetricName | Annotated[Any, Kind("metric")]] = field(default_factory=lambda: ["accuracy"])
    splits: dict[str, Count | Literal["end"]] = field(default_factory=dict)
    batch_size: Count = 500
    recalibrate: Count | None = None


@schema
class TrainerConfig:
    """Settings of Lightning's Trainer that no other key decides.

    Args:
        profiler: Lightning's profiler of the Trainer's loop: simple, advanced or pytorch; null: none.
        enable_model_summary: Whether the terminal shows the modules and their sizes.
        log_every_n_steps: Number of chunks (`ticks_per_chunk`) between two values that callbacks such as
            LearningRateMonitor log.
        detect_anomaly: Whether an error names the operation that produces NaN in a backward pass; much slower.
    """

    profiler: Literal["simple", "advanced", "pytorch"] | None = None
    enable_model_summary: bool = False
    log_every_n_steps: Count = 1
    detect_anomaly: bool = False


@schema
class RunnerConfig:
    """How long a run trains, on which devices, and what it writes.

    Args:
        max_ticks: Length of the run. A tick is one optimizer step of each lowest-level problem, and of the problems
            above that are due then. 0 only evaluates.
        ticks_per_chunk: Number of ticks that Lightning's Trainer, and its callbacks, see as one batch.
        log_every: Number of ticks between two rows of metrics.csv; a row has the means over these ticks.
        accelerator: cpu, gpu, or auto: a GPU if torch finds one, else the CPU.
        devices: Number of processes that share each batch: one per GPU, or any number on the CPU; `auto`: all GPUs.
        precision: fp32, bf16 or fp16: autocast around each problem's loss, unless `problems.<name>.precision` says
            otherwise. Finite differences and solvers stay in fp32.
        tf32: On a GPU, whether fp32 matrix products may be computed in TF32, which is faster and has about three
            digits. Hypergradients by finite differences need fp32.
        trace: Whether the steps of a tick are recorded once and then run as one program of tensor operations (a trace).
            `true`: from the second step on. `auto`: from a problem's 2,000th step on, unless your own code takes part.
            `inductor`: as `true`, and compiled. `cuda_graph`: as `true`, with all operations launched at once on a GPU.
            `false`: never.
        deterministic: Whether torch uses only deterministic algorithms.
        num_threads: Number of CPU threads of torch; null: torch's choice.
        checkpoint: Whether checkpoints are written: the best one by the objective, and the last one.
        checkpoint_seconds: Seconds between two writes of the last checkpoint; more if writing takes over 1% of the
            time.
        keep_checkpoints: How many of the last checkpoints are kept; the names of the earlier ones contain their tick.
        early_stopping_patience: Number of evaluations without a better objective after which a run ends (nan counts as
            not better); null: no early stopping.
        progress_bar: Whether the terminal shows a progress bar.
        report: Whether report.html is written at the end.
        changes: Optimizer settings that change after the given ticks, in the form in which `sweep=pbt` reports them:
            `{500: {problems.classifier.optimizer.lr: 0.01}}`.
        callbacks: A list of Lightning's callbacks, as nodes: `[{_target_:
            pytorch_lightning.callbacks.LearningRateMonitor}]`.
        trainer: Settings of Lightning's Trainer that no other key decides: `{profiler: simple}`.
    """

    max_ticks: Annotated[int, Ge(0), Le(10**12)] = 1000
    ticks_per_chunk: Count = 200
    log_every: Count = 50
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: Processes | Literal["auto"] = 1
    precision: Precision = "fp32"
    tf32: bool = False
    trace: bool | Literal["auto", "inductor", "cuda_graph"] = "auto"
    deterministic: bool = True
    num_threads: ranges.Threads | None = None
    checkpoint: bool = True
    checkpoint_seconds: ranges.Positive = 30.0
    keep_checkpoints: Count = 1
    early_stopping_patience: Count | None = None
    progress_bar: bool = True
    report: bool = True
    changes: Mapping[int, Mapping[str, Any]] | None = None
    callbacks: list[Annotated[Any, Kind("callback")]] = field(default_factory=list)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@schema
class LoggerConfig:
    """Where metrics are logged, beside metrics.csv.

    Args:
        mode: The mode of Weights & Biases (W&B): offline, which needs neither account nor network; online, which
            uploads; or disabled, which logs nothing to W&B. null: offline with logger.wandb=true, else disabled.
        wandb: Whether metrics are logged to W&B; null: if logger.mode is offline or online.
        tensorboard: Whether metrics are logged to TensorBoard (`pip install mlotool[tensorboard]`).
        project: The project in W&B.
        loggers: A list of Lightning's loggers, as nodes: `[{_target_: pytorch_lightning.loggers.CSVLogger, save_dir:
            logs}]`. Loggers that may upload are allowed on the command line only, not in a recipe.
    """

    mode: Literal["offline", "online", "disabled"] | None = None
    wandb: bool | None = None
    tensorboard: bool = False
    project: str = "mlotool"
    loggers: list[Annotated[Any, Kind("logger")]] = field(default_factory=list)


def wandb_mode(mode: str | None, wandb: bool | None) -> str | None:
    """Return the mode in which W&B is started, from the values of `logger`; None where it gets nothing.

    Example:
        >>> wandb_mode("online", None), wandb_mode(None, True), wandb_mode(None, None), wandb_mode("online", False)
        ('online', 'offline', None, None)
    """
    return None if mode == "disabled" or not (mode if wandb is None else wandb) else mode or "offline"


@schema
class DebugConfig:
    """Limits for a quick test, which take precedence over a recipe's own values.

    Args:
        limit_ticks: The most ticks of a run; null: no limit.
        limit_samples: The most samples of each split; null: no limit.
        limit_warmup_steps: The most warm-up steps of each problem, so that the problems above it step too; null: no
            limit.
        limit_unroll_steps: The most `unroll_steps` of each problem; null: no limit.
    """

    limit_ticks: Count | None = None
    limit_samples: Count | None = None
    limit_warmup_steps: ranges.Whole | None = None
    limit_unroll_steps: Count | None = None


@schema
class PbtConfig:
    """How the members of population based training (`sweep=pbt`) exchange their states.

    Args:
        interval: Number of ticks between two exchanges, a multiple of the ticks between two evaluations of the
            objective; null: a tenth of the run.
        fraction: Fraction of the members that are replaced: the worst members continue from the state of one of the
            best, of which there are as many.
        resample: Probability with which each setting of a replaced member is drawn anew from its range.
        factor: Factor by which a setting that is not drawn anew is multiplied or divided.
    """

    interval: Count | None = None
    fraction: Annotated[float, Gt(0), Le(0.5)] = 0.25
    resample: Annotated[float, Ge(0), Le(1)] = 0.25
    factor: Annotated[float, Gt(1), Le(1000)] = 1.25


@schema
class SweepConfig:
    """Which jobs `mlotool run -m` runs, and how.

    Args:
        method: `grid`: every combination; `optuna`: trials that learn from those before; `pbt`: population based
            training, whose jobs train at the same time and copy each other.
        params: The keys that vary, each with its choices (or ranges, for `optuna`), written as on the command line:
            `{seed: '0,1,2'}`.
        fuse: How many jobs train in one process, as one vectorized program if possible; auto: up to 32.
        workers: How many jobs run at the same time; from 2 on, each in its own process.
        devices: The GPUs that workers use in turn, such as `[0, 1]`; null: all GPUs of the machine.
        jobs_per_device: How many jobs may share a GPU.
        launcher: Where jobs run: local, slurm (`pip install mlotool[slurm]`) or ray (`pip install mlotool[ray]`).
        launcher_options: Options of the launcher: submitit's parameters, or those of `ray.remote`. `{cluster: local}`
            tries out the slurm launcher on this machine.
        num_trials: How many settings a search tries, or how many members `pbt` has. Failed, pruned and infeasible
            trials count; settings that are drawn a second time do not. With a larger number, `resume=auto` continues a
            sweep that has ended.
        repeats: How many jobs each setting of a search has, with consecutive seeds; the search uses their mean.
        recipe_first: Whether the first trial of a search has the recipe's own values, as far as they are in the ranges,
            and the first candidates of model spaces.
        first: A list of settings that a search tries next: `[{problems.classifier.optimizer.lr: 0.03}]`.
        second_objective: A second metric that each job logs at its end, or `<problem>/num_parameters`. The search then
            looks for settings that no other setting beats in both, the Pareto front (`sampler: nsga2`).
        second_objective_mode: Whether the second objective is better if larger (max) or smaller (min).
        seed: Seed of the search.
        sampler: How a search chooses the next setting. evolution, reinforce and predictor are samplers of mlotool, all
            others of Optuna.
        sampler_options: Arguments of the sampler's class: `{n_startup_trials: 5}` for tpe, `{population_size: 20}` for
            evolution.
        pruner: The rule that ends bad trials early. If results are noisy, it ends some good trials too.
        pruner_options: Arguments of the pruner's class: `{n_startup_trials: 10}` for median.
        pbt: How the members of population based training exchange their states (`method: pbt`).
        storage: Where the search stores its trials, as a storage URL of Optuna, such as `postgresql://..` if jobs run
            on several machines; null: study.db in the sweep's folder.
    """

    method: Literal["grid", "optuna", "pbt"] = "grid"
    params: dict[str, Any] = field(default_factory=dict)
    fuse: ranges.Rounds | Literal["auto"] = 1
    workers: Processes = 1
    devices: Annotated[list[str], MinLen(1)] | None = None
    jobs_per_device: Processes = 1
    launcher: Literal["local", "slurm", "ray"] = "local"
    launcher_options: Mapping[str, Any] | None = None
    num_trials: ranges.Rounds = 20
    repeats: ranges.Rounds = 1
    recipe_first: bool = True
    first: list[Any] = field(default_factory=list)
    second_objective: str | None = None
    second_objective_mode: Literal["min", "max"] | None = None
    seed: ranges.Seed = 0
    sampler: Literal[*SAMPLERS] = "tpe"  # type: ignore[valid-type]
    sampler_options: Mapping[str, Any] | None = None
    pruner: Literal[*PRUNERS] = "none"  # type: ignore[valid-type]
    pruner_options: Mapping[str, Any] | None = None
    pbt: PbtConfig = field(default_factory=PbtConfig)
    storage: str | None = None


@schema
class Config:
    """The top-level keys of a config.

    Args:
        name: Name of the run: of its folder below outputs/, and in W&B.
        seed: Seed of all random numbers: splits, noise, parameters, the order of samples. Two runs with equal seeds on
            the same machine are bit-identical.
        resume: The run to resume, with bit-identical results: a run folder, or a checkpoint in it; or `auto`, the
            newest unfinished run with the same config (a new run, if there is none).
        inherit: The folder of a finished run, or a checkpoint in it, from whose parameters the problems of the same
            names start. Names and shapes of the parameters have to be equal; a model of a shared space takes its part
            of the space's parameters. The run begins at tick 0.
        data: An option of conf/data/, or a node with a `_target_` of your own: an object with `split(name)`.
        baseline: `fixed`: a control run. Problems that shape others take no steps, and their outputs are held at
            neutral values: weights at 1, labels as given, hyperparameters at their initial values. null: all problems
            train.
        hypergradient: How gradients pass through solutions: an option of conf/hypergradient/, or a node. For all
            problems that do not set their own `hypergradient`.
        problems: The optimization problems, by name.
        graph: Which problem shapes which, and which problem reads whose solution. A recipe with one problem has no
            graph.
        evaluate: How the trained module is evaluated on whole splits; null: not at all.
        decisions: Values of a model space's decisions, by name; a decision that is not named takes its first candidate.
            Or the folder of a run or a sweep, whose decisions are used.
        decisions_from: The folder of a finished run, or of a sweep, whose learned or searched decisions are used;
            `decisions=FOLDER` does the same.
        analyses: Functions that analyze the trained problems when a run ends; their results are written to metrics.csv
            and to the report.
        objective: The metric, as split/metric, that decides on the best checkpoint, on early stopping and on the best
            job of a sweep.
        objective_mode: Whether the objective is better if larger (`max`) or smaller (`min`). Needed for your own
            metrics only.
        runner: How long a run trains, on which devices, and what it writes; conf/runner/ has options.
        logger: Where metrics are logged, beside metrics.csv; conf/logger/ has options.
        debug: Limits for a quick test, which take precedence over a recipe's own values; `debug=fast` runs for a few
            seconds.
        sweep: Which jobs `mlotool run -m` runs, and how; conf/sweep/ has options.
    """

    name: str = "unnamed"
    seed: ranges.Seed = 0
    resume: Annotated[str, MinLen(1)] | None = None
    inherit: Annotated[str, MinLen(1)] | None = None
    data: Annotated[Any, Kind("data")] = MISSING
    baseline: Literal["fixed"] | None = None
    hypergradient: Annotated[Any, Kind("hypergradient")] = MISSING
    problems: dict[str, ProblemConfig] = field(default_factory=dict)
    graph: GraphConfig = field(default_factory=GraphConfig)
    evaluate: EvaluateConfig | None = None
    decisions: dict[str, Any] = field(default_factory=dict)
    decisions_from: str | None = None
    analyses: dict[str, Annotated[Any, Kind("analysis")]] = field(default_factory=dict)
    objective: str | None = None
    objective_mode: Literal["min", "max"] | None = None
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


ROOT_KEYS = tuple(key.name for key in fields(Config))


def annotations_of(kind: Any) -> Mapping[str, Any]:
    """Return what a class of the schema asks for, by key; nothing for another type."""
    return _annotations.get(kind, {}) if isinstance(kind, type) else {}


def annotation_at(path: str) -> Any:
    """Return what the schema asks for at a dotted path, with its range and choices; Any where it leaves that open."""
    return reduce(_annotation_below, filter(None, path.split(".")), Config)


def _annotation_below(annotation: Any, key: str) -> Any:
    for member in members(annotation):
        if member in _annotations:
            return _annotations[member].get(key, Any)
        if get_origin(member) is dict:
            return get_args(member)[1]
    return Any


def dataclass_at(path: str) -> Any:
    """Return the class of the schema whose keys stand below a dotted path; None where it leaves them open."""
    return next((member for member in members(annotation_at(path)) if member in _annotations), None)


def keys_at(path: str) -> tuple[str, ...]:
    """Return the keys that the schema knows below a dotted path; none where it leaves them open.

    Example:
        >>> keys_at("problems.classifier.stream")
        ('split', 'batch_size', 'shuffle', 'drop_last', 'num_workers', 'repeat')
    """
    return tuple(annotations_of(dataclass_at(path)))


def defaults_at(path: str) -> dict[str, Any]:
    """Return the values that the schema gives the keys below a dotted path, once there are any.

    Example:
        >>> defaults_at("logger")
        {'mode': None, 'wandb': None, 'tensorboard': False, 'project': 'mlotool', 'loggers': []}
    """
    kind = dataclass_at(path)
    return {} if kind is None else asdict(kind())


def describe_type(path: str) -> str:
    """Return in words what the schema expects at a dotted path.

    Example:
        >>> describe_type("runner.num_threads"), describe_type("runner.precision")
        ('a whole number of at least 1 and at most 1,024 or null', 'one of fp32, bf16, fp16')
    """
    annotation, keys = annotation_at(path), keys_at(path)
    if keys:
        return f"keys out of {', '.join(keys)}{' or null' if NoneType in members(annotation) else ''}"
    return "a value" if annotation is Any or node_kind(annotation) else words(annotation)


def is_boolean(path: str) -> bool:
    """Say whether the schema has true or false at a dotted path.

    Example:
        >>> is_boolean("problems.classifier.compile"), is_boolean("seed"), is_boolean("data.download")
        (True, False, False)
    """
    return {*members(annotation_at(path))} - {NoneType} == {bool}


def is_container(path: str) -> bool:
    """Say whether the schema itself has keys or items at a dotted path.

    Example:
        >>> is_container("problems.classifier"), is_container("seed"), is_container("data")
        (True, False, False)
    """
    return any(member in _annotations or get_origin(member) in (dict, list) for member in members(annotation_at(path)))


KeyPath = tuple[str, ...]


def walk(value: Any, annotation: Any = Config, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield what a config holds where the schema has no more keys: its path, the value and the annotation.

    The annotation of a key that the schema does not know is None.

    Args:
        value: the config, as plain values, or a part of it.
        annotation: what the schema asks for there.
        path: of the part.

    Example:
        >>> list(walk({"evaluate": {"metrics": ["f2"], "split": 1}}))[-1]
        (('evaluate', 'split'), 1, None)
    """
    for member in members(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if isinstance(value, Mapping) and (member in _annotations or origin is dict):
            for key, item in value.items():
                below = arguments[1] if origin is dict else _annotations[member].get(key)
                yield from walk(item, below, (*path, str(key)))
            return
        if isinstance(value, list) and origin is list:
            for index, item in enumerate(value):
                yield from walk(item, arguments[0], (*path[:-1], f"{path[-1]}[{index}]"))
            return
    yield path, value, annotation


def is_node(value: Any) -> bool:
    """Say whether a value is a node that says by `_target_` what to build."""
    return isinstance(value, Mapping) and "_target_" in value


def boolean_faults(key: str, value: Any) -> Iterator[str]:
    """Yield what is wrong with a number where the schema has true or false: OmegaConf alone would take a 3 for true."""
    if isinstance(value, int | float) and not isinstance(value, bool) and is_boolean(key):
        yield f"{key}: found {value!r}; expected true or false. Correct {key}."


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
    kinds = f"letters, digits, '-', '_' and '.', at most {MAX_NAME}, as it names a folder"
    return f"name: found {shown(name)}; expected {kinds}. Correct it."


def is_identifier(name: Any) -> bool:
    """Say whether `name` can name a problem: it stands in keys, metrics and graphs."""
    return isinstance(name, str) and _IDENTIFIER.fullmatch(name) is not None
