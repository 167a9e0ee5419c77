"""What a run evaluates beside its ticks: all once before the first, metrics over whole splits, analyses at the end."""

import math
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from mlotool.config import Built
from mlotool.config.building import derived_seed
from mlotool.config.check_values import class_faults
from mlotool.config.objective import objective_direction
from mlotool.config.schema import MAX_NAME, is_plain_name
from mlotool.config.user_data import split_of
from mlotool.core.bound_module import BoundModule
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import RESERVED, LossOutput
from mlotool.core.messages import did_you_mean, kind_of
from mlotool.core.private import NormBase, tree_map
from mlotool.core.random_stream import own_random
from mlotool.core.unchanged import is_unchanged, snapshot
from mlotool.core.user_code import Call, WrongResultError, note, noted, user_code
from mlotool.folders.run_folder import RunFolder
from mlotool.layerparallel import MultigridResidual
from mlotool.problem.neutral import check_held
from mlotool.problem.streams.batches import BatchFetcher, Share
from mlotool.program import Problem, Program, Stream
from mlotool.runner.checkpoint import random_state, restore_random_state
from mlotool.runner.values import check_start, related, unsound_path
from mlotool.spaces.shared.shared_space import PATH, SharedSpace

# Called with tick and objective at each evaluation; true ends the run as pruned.
Watch = Callable[[int, float], bool]


@dataclass(frozen=True)
class Objective:
    """A logged key and its direction.

    Args:
        key: `<split>/<metric>` or `<problem>/<metric>`, or None where the recipe has none.
        mode: "min" or "max"; None where there is no key.
        is_tracked: whether it is known during training (a key of an `end` split is not), so that a best checkpoint
            can be kept.
    """

    key: str | None
    mode: str | None
    is_tracked: bool

    @classmethod
    def from_config(cls, config: Any) -> "Objective":
        """Read `objective` of a config that has been checked, and derive its direction."""
        key = config.objective
        splits = {} if config.evaluate is None else dict(config.evaluate.splits)
        source = (key or "").partition("/")[0]
        is_tracked = isinstance(splits.get(source), int) or source in config.problems
        return cls(key, objective_direction(config), is_tracked)

    @property
    def monitor(self) -> str | None:
        """The key that best checkpoints and early stopping watch, if they can."""
        return self.key if self.is_tracked else None

    def check_logged(self, keys: Iterable[str]) -> None:
        """Raise ConfigError if the objective is not among the logged keys."""
        if self.key is not None and self.key not in (known := sorted(keys)):
            raise ConfigError(
                f"objective: found '{self.key}', which is not logged; expected one of {', '.join(known)}."
                f"{did_you_mean(self.key, known)} Correct objective, or add the metric to evaluate.metrics."
            )


# Returns tensors by name: 0-D, a mean over the batch, or one value per sample.
MetricFunction = Callable[[BoundModule, Any], Mapping[str, Any]]

_EXPECTED = "a dict from a name to a 0-D tensor (a mean over the batch) or to a tensor with one value per sample"


def check_unchanged(before: Any, now: Any, result: str) -> None:
    """Refuse a function of the user's that changes what it was given.

    Args:
        before: a snapshot of what it was given.
        now: the same after the call.
        result: what it has returned, and what it was given, in words.
    """
    if not is_unchanged(before, now):
        raise WrongResultError(
            f"{result} that it has changed",
            "one that does not change its arguments, since other functions read them too",
            "Write x = x * 2 in place of x.mul_(2) or x *= 2, and copy a dict before changing its keys.",
        )


@dataclass
class FunctionMetric:
    """The means over a split of what a function `f(module, batch) -> {name: Tensor}` returns.

    Args:
        key: where the config names it.
        function: 0-D results count as often as their batch has samples.
    """

    key: str
    function: MetricFunction

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the batches so far."""
        self._totals, self._counts = dict[str, Tensor](), dict[str, int]()

    def update(self, module: BoundModule, batch: Any, size: int) -> None:
        """Take a batch.

        Args:
            module: in eval mode.
            batch: as the data set collates it.
            size: its number of samples.
        """
        with noted(lambda: self._call({"batch": batch})):
            result = self.function(module, batch)
            if not isinstance(result, Mapping) or not result:
                raise WrongResultError(kind_of(result), _EXPECTED, 'Return {"name": values.mean()}.')
            for name, value in result.items():
                self._add(name, value, size)

    def rehearse(self, module: BoundModule, batch: Any, size: int) -> None:
        """Take a batch, and refuse a function that changes it, or the module."""
        arguments = dict(module.named_parameters()), batch
        before = snapshot(arguments)
        self.update(module, batch, size)
        with noted(lambda: self._call({"batch": batch})):
            check_unchanged(before, (dict(module.named_parameters()), batch), "its numbers, and a batch or a module")

    def compute(self, taken: Container[str]) -> dict[str, float]:
        """Return the means.

        Args:
            taken: names that other metrics have.
        """
        with noted(lambda: self._call({})):
            for name in self._totals:
                _check_name(name, taken)
            return {name: float(total) / self._counts[name] for name, total in self._totals.items()}

    def _add(self, name: Any, value: Any, size: int) -> None:
        _check_name(name)
        if isinstance(value, Real):
            value = torch.tensor(float(value))
        is_real = isinstance(value, Tensor) and not (value.is_complex() or value.is_sparse or value.is_meta)
        if not is_real or value.shape not in ((), (size,)):
            raise WrongResultError(
                f"{kind_of(value)} as '{name}' for {size} samples",
                f"a dense tensor of real numbers, of shape () or ({size},)",
                "Take the mean over the other axes; torch.as_tensor(x) makes a tensor.",
            )
        total = value.double().sum() if value.dim() else value.double() * size
        self._totals[name] = self._totals.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0) + size

    def _call(self, given: Mapping[str, Any]) -> Call:
        return Call(self.key, self.function, given, _EXPECTED, "Correct the function.")


@dataclass(frozen=True)
class Recalibration:
    """The running mean and variance of each layer, as averages over some batches, for the time of an evaluation.

        mean = 1/n sum_i mean_i,   var = 1/n sum_i var_i,   over the batches i = 1..n

    Layers that have such statistics are in train mode meanwhile, the others in eval mode, so that the averages are of
    what the evaluation computes. Everything is put back.

    Args:
        batches: gives the batches, the same ones each time.
        seed: of random numbers that are drawn meanwhile.

    Source: Guo et al. 2020, Single Path One-Shot (arXiv 1904.00420), section 3.3; Izmailov et al. 2018 (arXiv
    1803.05407), section 3.2.
    """

    batches: Callable[[], Iterator[Any]]
    seed: int

    @contextmanager
    def applied(self, module: nn.Module, call: Callable[[Any], Any]) -> Iterator[None]:
        """Evaluate with them inside the block.

        Args:
            module: whose layers have the statistics.
            call: runs the module on a batch, as the evaluation does.
        """
        layers = layers_with_statistics(module)
        # The layers' own are left alone: a recorded step, whose backward pass is still to come, has kept them.
        before = [(layer, layer.momentum, dict(layer.named_buffers(recurse=False))) for layer in layers]
        try:
            for layer, _, buffers in before:
                layer._buffers.update({name: buffer.detach().clone() for name, buffer in buffers.items()})
            self._take(module, layers, call)
            yield
        finally:
            for layer, momentum, buffers in before:
                layer.momentum = momentum
                layer._buffers.update(buffers)

    @torch.no_grad()
    def _take(self, module: nn.Module, layers: list[NormBase], call: Callable[[Any], Any]) -> None:
        modes = [(part, part.training) for part in module.modules()]
        devices = {part.device for part in module.buffers() if part.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(self.seed)
            try:
                module.eval()
                for layer in layers:
                    layer.reset_running_stats()
                    # A cumulative average.
                    layer.momentum = None
                    layer.training = True
                for batch in self.batches():
                    call(batch)
            finally:
                for part, training in modes:
                    part.training = training


def layers_with_statistics(module: nn.Module) -> list[NormBase]:
    """Return the layers of a module that keep running statistics: BatchNorm, and InstanceNorm where it tracks them."""
    return [part for part in module.modules() if isinstance(part, NormBase) and part.running_mean is not None]


def make_evaluator(config: Any, built: Built, device: Any = "cpu") -> "Evaluator | None":
    """Return the evaluator of a config, or None where it evaluates nothing."""
    settings, problems = config.evaluate, built.program.problems
    if settings is None:
        return None
    problem = problems[settings.problem]
    names = [metric for metric in settings.metrics if isinstance(metric, str)]
    arguments = settings.get("arguments") or {}
    recalibration = _make_recalibration(config, built, device)
    if isinstance(problem.module, SharedSpace) and problem.module.has_paths and PATH not in arguments:
        warnings.warn(
            f"evaluate: found no path for the shared space of '{problem.name}', so each batch draws one. Set "
            "evaluate.arguments.path.",
            stacklevel=2,
        )
    reading = partial(_reading_given, problem, arguments, problems) if arguments else problem.reading
    size, functions = settings.batch_size, built.metrics
    split = next(iter(settings.splits), None)
    return Evaluator(problem.module, built.data, names, size, device, reading, functions, recalibration, split)


@torch.no_grad()
def _reading_given(
    problem: Problem, sources: Mapping[str, str], problems: Mapping[str, Problem], training: bool | None
) -> BoundModule:
    """Return the evaluated module with what other problems give it, as they are now."""
    arguments = {}
    for argument, source in sources.items():
        name, _, method = source.partition(".")
        reading, module = problems[name].reading(training), problems[name].module
        if method and (hasattr(nn.Module, method) or not callable(getattr(module, method, None))):
            raise ConfigError(
                f"evaluate.arguments.{argument}: found '{source}', no method of {type(module).__name__}. Rename it."
            )
        arguments[argument] = reading.method(method) if method else reading()
    return problem.reading(training).given(**arguments)


def _make_recalibration(config: Any, built: Built, device: Any) -> Recalibration | None:
    """Return what `evaluate.recalibrate` asks for; None where it asks for nothing."""
    name, count = config.evaluate.problem, config.evaluate.get("recalibrate")
    if count is None:
        return None
    problem, source = built.program.problems[name], config.problems[name]
    while source.same_batch_as is not None:
        source = config.problems[source.same_batch_as]
    settings, fault = source.stream, None
    if not layers_with_statistics(problem.module):
        fault = "has no layer with running statistics (BatchNorm, or InstanceNorm with track_running_stats)"
    elif isinstance(problem.module, SharedSpace) and problem.module.has_path_statistics:
        fault = "has running statistics for each path of its shared space (statistics: path)"
    elif settings is None or problem.shards is not None:
        fault = "has no stream" if settings is None else "has a module in shards (shard: true)"
    if fault is not None:
        raise ConfigError(f"evaluate.recalibrate: found {count}, while the problem '{name}' {fault}. Leave it out.")
    dataset = split_of("evaluate.recalibrate", built.data, settings.split)
    seed = derived_seed(config.seed, "recalibrate", name)

    def batches() -> Iterator[Any]:
        stream = Stream(dataset, settings.batch_size, seed=seed, shuffle=settings.shuffle, drop_last=settings.drop_last)
        stream.to(device)
        return (stream.next() for _ in range(count))

    return Recalibration(batches, seed)


# By name: the torchmetrics class and its settings. `macro` is the mean over classes.
CLASSIFICATION_METRICS = {
    "accuracy": ("MulticlassAccuracy", {"average": "micro"}),
    "balanced_accuracy": ("MulticlassAccuracy", {"average": "macro"}),
    "precision": ("MulticlassPrecision", {"average": "macro"}),
    "recall": ("MulticlassRecall", {"average": "macro"}),
    "f1": ("MulticlassF1Score", {"average": "macro"}),
    "auroc": ("MulticlassAUROC", {"average": "macro"}),
    "average_precision": ("MulticlassAveragePrecision", {"average": "macro"}),
    "calibration_error": ("MulticlassCalibrationError", {}),
    "cohen_kappa": ("MulticlassCohenKappa", {}),
    "matthews_corrcoef": ("MulticlassMatthewsCorrCoef", {}),
}
REGRESSION_METRICS = {
    "mean_squared_error": "MeanSquaredError",
    "mean_absolute_error": "MeanAbsoluteError",
    "r2": "R2Score",
}


def _nats_per_token(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (b, t, v) and tokens (b, t)."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


# Losses averaged over samples.
MEAN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "nats_per_token": _nats_per_token,
    "bits_per_token": lambda logits, target: _nats_per_token(logits, target) / math.log(2),
}
METRIC_NAMES = (*CLASSIFICATION_METRICS, *MEAN_LOSSES, *REGRESSION_METRICS)
# Samples of a split on which the metrics are tried before the first tick.
NUM_REHEARSED = 16


@dataclass
class Evaluator:
    """Evaluates one module in eval mode, without gradients.

    Args:
        module: maps a batch's `input` to logits (or to predictions, for the regression metrics).
        data: has `split(name)` and `splits`; for the classification metrics also `num_classes`, or it is the number of
            logits (b, c, ...) of its first samples.
        metrics: names out of METRIC_NAMES.
        batch_size: samples a forward pass.
        device: where the module is.
        reading: as `Problem.reading`: gives the module as it is now, where it may be in shards.
        functions: metrics of the user's, each by the key of the config where it stands.
        recalibration: takes running statistics anew for each evaluation; None leaves them.
        split: that of the first samples whose logits are counted; None takes the first split.

    Raises:
        ConfigError: a metric is unknown.
    """

    module: nn.Module
    data: Any
    metrics: Sequence[str]
    batch_size: int
    device: torch.device | str = "cpu"
    reading: Callable[[bool], BoundModule] | None = None
    functions: Mapping[str, MetricFunction] = field(default_factory=dict)
    recalibration: Recalibration | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        self._num_classes = getattr(self.data, "num_classes", None)
        if self._num_classes is None and not CLASSIFICATION_METRICS.keys().isdisjoint(self.metrics):
            self._num_classes = self._count_classes()
        self._metrics = {name: build_metric(name, self._num_classes).to(self.device) for name in self.metrics}
        self._has_nan = torch.tensor(False, device=self.device)
        self._functions = [FunctionMetric(key, function) for key, function in self.functions.items()]

    def model(self) -> BoundModule:
        """Return what is evaluated; all ranks call it, which may have to gather it."""
        return BoundModule(self.module, training=False) if self.reading is None else self.reading(False)

    @torch.no_grad()
    def evaluate(self, split: str, model: BoundModule | None = None, key: str = "evaluate.splits") -> dict[str, float]:
        """Return `<split>/<metric>` over the whole of `split`.

        Args:
            split: of the data.
            model: what `model` returned; None asks for it.
            key: where the split is named, for messages.
        """
        model = self.model() if model is None else model
        self._reset()
        dataset, anew = split_of(key, self.data, split), self.recalibration
        with nullcontext() if anew is None else anew.applied(self.module, lambda batch: model(batch["input"])):
            for size, batch in Batches(dataset, self.batch_size, self.device).sized():
                self._update(model, batch, size)
        values = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        if bool(self._has_nan):
            # The largest of logits that are NaN would be the first class.
            values |= {name: math.nan for name in values if name in CLASSIFICATION_METRICS}
        for metric in self._functions:
            values.update(metric.compute(taken=values))
        return {f"{split}/{name}": value for name, value in values.items()}

    @torch.no_grad()
    def rehearse(self, split: str) -> list[str]:
        """Update all metrics with the first samples of `split`, and return what `evaluate` will return the values of.

        Raises:
            ConfigError: the split is empty.
        """
        dataset = split_of("evaluate.splits", self.data, split)
        self._reset()
        size, batch = next(Batches(dataset, min(self.batch_size, NUM_REHEARSED), self.device).sized())
        self._update(self.model(), batch, size, is_rehearsal=True)
        if any(name in CLASSIFICATION_METRICS for name in self._metrics):
            lowest, highest = int(batch["target"].min()), int(batch["target"].max())
            if lowest < 0 or highest >= int(self._num_classes or 0):
                raise ConfigError(
                    f"data.num_classes: found {self._num_classes}, while the split '{split}' has targets from {lowest} "
                    f"to {highest}. Correct one of them."
                )
        names = list(self._metrics)
        for metric in self._functions:
            names += metric.compute(taken=names)
        self._reset()
        return [f"{split}/{name}" for name in names]

    @torch.no_grad()
    def _count_classes(self) -> int | None:
        with user_code(ConfigError), own_random():
            dataset = split_of("evaluate.splits", self.data, self.split or next(iter(self.data.splits)))
            batch = next(iter(Batches(dataset, NUM_REHEARSED, self.device, NUM_REHEARSED)))
            is_named = isinstance(batch, Mapping) and "input" in batch
            logits = self.model()(batch["input"]) if is_named else None
        is_logits = isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() > 1
        return logits.shape[1] if is_logits and logits.shape[1] > 1 else None  # type: ignore[union-attr]

    def _reset(self) -> None:
        self._has_nan = torch.zeros_like(self._has_nan)
        for metric in self._metrics.values():
            metric.reset()
        for function in self._functions:
            function.reset()

    def _update(self, model: BoundModule, batch: Any, size: int, *, is_rehearsal: bool = False) -> None:
        if self._metrics:
            expected = f"a batch with input and target, as {', '.join(self._metrics)} need(s) them"
            with noted(lambda: _call("evaluate.problem", self.module, {"batch": batch}, expected, "the data")):
                output, target = model(batch["input"]), batch["target"]
            for name, metric in self._metrics.items():
                given = {"output": output, "target": target}
                with noted(partial(_call, "evaluate.metrics", f"the metric {name}", given, _FITTING, "the module")):
                    if name in CLASSIFICATION_METRICS:
                        _check_classes(output, target)
                        self._has_nan = self._has_nan | output.isnan().any()
                    if name in MEAN_LOSSES:
                        metric.update(MEAN_LOSSES[name](output, target), len(target))
                    else:
                        metric.update(output, target)
        for function in self._functions:
            (function.rehearse if is_rehearsal else function.update)(model, batch, size)


_FITTING = "outputs and targets that fit it"


def _call(key: str, function: Any, given: Mapping[str, Any], expected: str, culprit: str) -> Call:
    advice = (
        f"Correct {culprit}, or set evaluate.metrics to a function of your own, which may read batches of any form."
    )
    return Call(key, function, given, expected, advice)


def _check_classes(output: Tensor, target: Tensor) -> None:
    """Refuse targets that torchmetrics would take for others in silence."""
    is_one_column_each = output.is_floating_point() and output.ndim == target.ndim and output.ndim > 1
    if target.is_floating_point() or is_one_column_each:
        raise TypeError(
            "targets are not class numbers; expected one whole number per sample, as .argmax(1) of one-hot targets"
        )


def build_metric(name: str, num_classes: int | None) -> Any:
    """Build a torchmetrics metric by name, one of METRIC_NAMES.

    Raises:
        ConfigError: the metric needs classes, and the data has none.
    """
    # Imported here: it takes a second, and a run that evaluates nothing does not need it.
    import torchmetrics
    import torchmetrics.classification

    if name in MEAN_LOSSES:
        # Else a batch whose loss is NaN would be left out of the mean.
        return torchmetrics.MeanMetric(sync_on_compute=False, nan_strategy=float("nan"))
    if name in REGRESSION_METRICS:
        return getattr(torchmetrics, REGRESSION_METRICS[name])(sync_on_compute=False)
    fault = next(class_faults([name], num_classes), None)
    if fault is not None:
        raise ConfigError(fault)
    kind, settings = CLASSIFICATION_METRICS[name]
    # The checks of the arguments' values cost as much as the metric itself; with several ranks one evaluates alone.
    common = {"num_classes": num_classes, "validate_args": False, "sync_on_compute": False}
    return getattr(torchmetrics.classification, kind)(**common, **settings)


class Batches:
    """All samples of a data set in their order, in batches on a device; the last may be smaller.

    Args:
        dataset: map-style.
        batch_size: samples per batch.
        device: where the batches go.
        most: samples in all, the first ones; None takes all.
    """

    def __init__(
        self, dataset: Any, batch_size: int, device: torch.device | str = "cpu", most: int | None = None
    ) -> None:
        self._dataset, self._batch_size, self._device = dataset, batch_size, torch.device(device)
        self._size = len(dataset) if most is None else min(most, len(dataset))

    def __len__(self) -> int:
        return math.ceil(self._size / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        """Yield them, from the first one each time."""
        return (batch for _, batch in self.sized())

    def sized(self) -> Iterator[tuple[int, Any]]:
        """Yield them with the number of their samples."""
        for number, begin in enumerate(range(0, self._size, self._batch_size)):
            indices = range(begin, min(begin + self._batch_size, self._size))
            # What samples draw is the same in each evaluation, so that two of them differ by the module alone.
            batch = BatchFetcher(self._dataset, seed=0)[0, number, torch.tensor(indices)]
            yield len(indices), tree_map(self._placed, batch)

    def _placed(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) else value


_EXPECTED_OF_ANALYSIS = "tensors, numbers or texts by name"
_CALL_OF_ANALYSIS = f"a function that takes all batches (for batch in batches) and returns {_EXPECTED_OF_ANALYSIS}"
_AT_THE_END = "Correct it, and repeat the evaluation with resume=auto: the training is kept."


def run_analyses(
    built: Any, folder: RunFolder, device: torch.device | str, log: Callable[[dict[str, float]], None]
) -> None:
    """Run each analysis over its split in eval mode; one that fails keeps no other from its results.

    Tensors of a result go to `artifacts/<analysis>.npz`, texts to `artifacts/<analysis>_<name>.txt`; 0-D tensors are
    logged as `<analysis>/<name>`.

    Args:
        built: has `analyses` by name, something with `function`, `roles`, `split` and `batch_size`; the `program`,
            whose problems play the roles; and `data` with the splits.
        folder: of the run.
        device: where the modules are.
        log: takes the numbers of each.

    Raises:
        BaseException: the first error, once all have been called.
    """
    first: BaseException | None = None
    for name, analysis in built.analyses.items():
        batches = Batches(split_of(f"analyses.{name}.split", built.data, analysis.split), analysis.batch_size, device)
        try:
            result = _result(name, analysis, built.program, batches, _AT_THE_END)
            log(_kept(name, result, folder))
        except KeyboardInterrupt:
            raise
        # Code of the user's may raise SystemExit too.
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def _kept(name: str, result: dict[str, Any], folder: RunFolder) -> dict[str, float]:
    """Write the texts and arrays of a result, and return its numbers."""
    for key in [key for key, value in result.items() if isinstance(value, str)]:
        folder.write_text(f"{folder.ARTIFACTS}/{name}_{key}.txt", f"{result.pop(key)}\n")
    arrays = {key: value for key, value in result.items() if _as_tensor(value).dim() > 0}
    if arrays:
        folder.write_arrays(name, {key: _as_array(value) for key, value in arrays.items()})
    return {f"{name}/{key}": float(value) for key, value in result.items() if key not in arrays}


def rehearse_analyses(built: Any, device: torch.device | str = "cpu") -> None:
    """Call each analysis before the first tick, on a few samples of its split; nothing of ours is written.

    One that fails there is called on all samples: a few may lack what it counts on, such as samples of two classes.
    """
    for name, analysis in built.analyses.items():
        dataset = split_of(f"analyses.{name}.split", built.data, analysis.split)
        try:
            _result(name, analysis, built.program, Batches(dataset, analysis.batch_size, device, NUM_REHEARSED))
        except Exception:
            _result(name, analysis, built.program, Batches(dataset, analysis.batch_size, device))


def _result(
    name: str, analysis: Any, program: Program, batches: Batches, advice: str = "Correct it."
) -> dict[str, Any]:
    """Return what an analysis finds, by the names of its values."""
    problems = {role: at if isinstance(at, str) else at["problem"] for role, at in analysis.roles.items()}
    roles = {role: BoundModule(program.problems[name].module, training=False) for role, name in problems.items()}
    with (
        noted(partial(Call, f"analyses.{name}", analysis.function, {}, _CALL_OF_ANALYSIS, advice)),
        torch.no_grad(),
    ):
        result = analysis.function(batches, **roles)
        if not isinstance(result, Mapping):
            raise WrongResultError(kind_of(result), _EXPECTED_OF_ANALYSIS, "Return a dict.")
        for key, value in result.items():
            _check(key, value)
        return dict(result)


def _check(key: Any, value: Any) -> None:
    _check_name(key)
    try:
        is_right = isinstance(value, str) or _as_array(value).dtype.kind in "biuf"
    except (TypeError, ValueError, RuntimeError):
        is_right = False
    if not is_right:
        advice = "Convert it to a dense tensor of real numbers, or save it from your function."
        raise WrongResultError(f"{kind_of(value)} as '{key}'", _EXPECTED_OF_ANALYSIS, advice)


def _as_tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(value)


def _as_array(value: Any) -> Any:
    tensor = _as_tensor(value).detach().cpu()
    # numpy has no such numbers.
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


_NOT_REPEATABLE = (
    "problems.{name}.stream: a sample was different when it was read again with the same random numbers; expected one "
    "that depends only on its index and on the global generators of torch, numpy and Python. After resume=, or with "
    "other num_workers, batches will differ. If the data set has its own generator, seed it inside __getitem__, by "
    "np.random.default_rng(torch.initial_seed()), and keep nothing from one sample to the next."
)


def rehearse(
    program: Program,
    evaluator: Evaluator | None,
    splits: Iterable[str],
    objective: Objective,
    analyse: Callable[[], None],
) -> None:
    """Evaluate each loss on its first batch, and the metrics and analyses on a few samples of each split.

    Left out are losses with a part that can only be evaluated in a step: a sharded module, and one whose parameters get
    their shape in the first call.

    Args:
        program: that is about to run; its streams have not moved.
        evaluator: of the metrics.
        splits: those that it will evaluate.
        objective: has to be among what is evaluated.
        analyse: rehearses what is to be analyzed at the end.

    Raises:
        ConfigError: one of them fails, or does not return what it should.

    Cost: a forward pass of each problem, and a small one a split; a sample of each stream is read twice.
    """
    rehearse_losses(program)
    if not all(map(_can_rehearse, program.problems.values())):
        return
    with user_code(ConfigError), _traceless(program):
        if evaluator is not None:
            for split in splits:
                keys = evaluator.rehearse(split)
                if (objective.key or "").startswith(f"{split}/"):
                    objective.check_logged(keys)
        analyse()


def rehearse_losses(program: Program) -> None:
    """Evaluate each loss on its first batch; arguments and errors as for `rehearse`."""
    problems = program.problems
    for name, problem in problems.items():
        program.internals.start(name)
        if _can_rehearse(problem):
            check_start(name, problem)
    with user_code(ConfigError):
        batches = {
            name: None if problem.stream is None else problem.stream.peek() for name, problem in problems.items()
        }
        for name, problem in problems.items():
            if isinstance(problem.stream, Stream) and not problem.stream.is_repeatable():
                warnings.warn(_NOT_REPEATABLE.format(name=name), stacklevel=2)
        with _traceless(program):
            for name, batch in batches.items():
                players = {name, *(role.problem for role in problems[name].roles.values())}
                if all(_can_rehearse(problems[player]) for player in players):
                    _rehearse_loss(program, name, batch)


def _can_rehearse(problem: Problem) -> bool:
    return problem.shards is None and not any(map(is_lazy, problem.module.parameters()))


def _rehearse_loss(program: Program, name: str, shared: Any) -> None:
    batch, _ = Share.opened(shared)
    before = snapshot(batch)
    internals = program.internals
    with internals.watched(name, partial(_check_held, program, name)) if internals.held else nullcontext():
        output = internals.rehearse(name, shared)
    try:
        # A step may evaluate a loss many times, and other problems may read its batch.
        check_unchanged(before, batch, "its loss and a batch")
        _check_metrics(output)
        _check_gradient(program, name, output)
        _check_finite(program, name, output)
    # Metrics may be a function of the user's, which is called here.
    except Exception as error:
        note(error, lambda: program.internals.call_of(name, batch))
        raise


def _check_held(program: Program, lower: str, name: str, method: str, output: Any) -> Any:
    """Refuse a control of which a module without a neutral value plays a role below it; return the output."""
    if name in program.internals.held and lower in program.graph.upper_to_lower[name]:
        check_held(name, program.problems[name].module, method, lower)
    return output


def _check_metrics(output: LossOutput) -> None:
    for name in output.metrics:
        _check_name(name, RESERVED)


def _check_name(name: Any, logged: Container[str] = ()) -> None:
    """Refuse a name that would make no key of metrics.csv, or no file."""
    if not is_plain_name(name) or name in logged:
        wanted = f"at most {MAX_NAME} letters, digits, '-', '_' and '.', and no name that is logged already"
        raise WrongResultError(f"the name {str(name)[:MAX_NAME]!r}", wanted, "Rename it.")


def _check_gradient(program: Program, name: str, output: LossOutput) -> None:
    internals = program.internals
    if output.loss.requires_grad or internals.solutions_read_by(name) or internals.is_zeroth_order(name):
        return
    if name in program.internals.held:
        return
    raise WrongResultError(
        "a tensor without a gradient",
        f"a loss that depends on the parameters of '{name}'",
        f"Give it a role for '{name}', or an edge by which '{name}' shapes it; detach() stops gradients.",
    )


def _check_finite(program: Program, name: str, output: LossOutput) -> None:
    """Refuse a loss that is not finite in the first step: no step has made it so."""
    if name not in program.graph.leaves(program.problems) or program.problems[name].settings.precision == "fp16":
        return
    if not math.isfinite(value := float(output.loss)):
        advice = (
            "Look for samples that are not finite, for log, sqrt or a division at zero, and at the initial parameters."
        )
        told = [unsound_path(program.problems[source]) for source in related(name, program.problems)]
        raise WrongResultError(
            f"{value} before the first step", "a finite number", " ".join([*filter(None, told), advice])
        )


@contextmanager
def _traceless(program: Program) -> Iterator[None]:
    """Draw random numbers again afterwards, give no warning twice, leave compiling and parallel solves to the run."""
    problems = list(program.problems.values())
    random, of_program = random_state(), program.random.state_dict()
    parts = (part for problem in problems for part in problem.module.modules())
    parallel = [(part, part.is_serial) for part in parts if isinstance(part, MultigridResidual)]
    compiled = [(problem, problem.compiled) for problem in problems]
    try:
        for problem in problems:
            problem.compiled = None
        for part, _ in parallel:
            part.serial()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Said once, and known from then on.
            warnings.filterwarnings("default", message=r"problems\.\w+\.tasks: torch\.vmap cannot evaluate all tasks")
            yield
    finally:
        for problem, call in compiled:
            problem.compiled = call
        for part, flag in parallel:
            part.serial(flag)
        restore_random_state(random)
        program.random.load_state_dict(of_program)
