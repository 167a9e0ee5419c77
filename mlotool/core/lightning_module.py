"""A LightningModule inside a loss: what it logs, its batches, and what stands in the place of Lightning's Trainer.

Nothing here imports Lightning: a module with `training_step` and `configure_optimizers` counts as a LightningModule.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.core.bound_module import AbstractEvaluation
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import RESERVED
from mlotool.core.messages import kind_of
from mlotool.core.user_code import WrongResultError

# What the modules that are evaluated log, with its graph; the last one is of the loss at hand.
_logs: list[dict[str, Tensor]] = []


def is_lightning_module(module: Any) -> bool:
    """Say whether a module has the two methods that every LightningModule has.

    Example:
        >>> is_lightning_module(nn.Linear(1, 1))
        False
    """
    return all(callable(getattr(module, name, None)) for name in ("training_step", "configure_optimizers"))


@contextmanager
def collected_logs() -> Iterator[dict[str, Tensor]]:
    """Collect what LightningModules log meanwhile: 0-D tensors by name, with their graph."""
    _logs.append({})
    try:
        yield _logs[-1]
    finally:
        _logs.pop()


def logged() -> Mapping[str, Tensor]:
    """Return what LightningModules have logged since the loss at hand was called."""
    return _logs[-1] if _logs else {}


class LightningEvaluation(AbstractEvaluation):
    """A LightningModule that is evaluated inside a loss: it logs metrics of the loss, and its Trainer is a stand-in.

    While it is evaluated `log`, `log_dict` and `trainer` are others; at all other times the module is as it was.

    Args:
        module: has `training_step` and `configure_optimizers`.
        inner: what is called in its place; the module itself where nothing is.
        trainer: the stand-in; `batch_idx` of it is what a step gets.
    """

    logs_values = True

    def __init__(self, module: nn.Module, inner: Callable[..., Any], trainer: Any) -> None:
        self._module, self._inner, self._trainer = module, inner, trainer
        self._loggers = [child for child in module.modules() if is_lightning_module(child)]
        self._num_inputs: dict[str, int] = {}

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Evaluate the module."""
        with self._attached():
            return self._inner(*inputs, **options)

    def method(self, name: str) -> Callable[..., Any]:
        """Return another method; a step (`training_step`) gets the batch as a DataLoader gives it, and `batch_idx`."""

        def call(*inputs: Any, **options: Any) -> Any:
            if name.endswith("_step") and inputs:
                inputs = self._step_inputs(name, inputs, options)
            inner = self._inner
            evaluate = inner.method(name) if isinstance(inner, AbstractEvaluation) else getattr(self._module, name)
            with self._attached():
                return evaluate(*inputs, **options)

        return call

    def _step_inputs(self, name: str, inputs: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
        batch, *others = inputs
        if name not in self._num_inputs:
            parameters = inspect.signature(getattr(self._module, name)).parameters.values()
            required = [each for each in parameters if each.default is inspect.Parameter.empty]
            is_open = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
            self._num_inputs[name] = 2 if is_open else len(required)
        if not others and "batch_idx" not in options and self._num_inputs[name] > 1:
            others = [self._trainer.batch_idx]
        return (as_loaded(batch), *others)

    @contextmanager
    def _attached(self) -> Iterator[None]:
        before = [vars(child).get("_trainer") for child in self._loggers]
        for child in self._loggers:
            child.log, child.log_dict = _log, _log_dict  # type: ignore[assignment]
            # Lightning's setter goes through the children, which are all here.
            vars(child)["_trainer"] = self._trainer
        self._trainer.of_run = before[0]
        try:
            yield
        finally:
            for child, trainer in zip(self._loggers, before, strict=True):
                del child.log, child.log_dict
                vars(child)["_trainer"] = trainer


class LoadedPair(list[Any]):
    """A batch of pairs as a DataLoader gives it, `[input, target]`, whose parts have names as well.

    Example:
        >>> batch = LoadedPair({"input": 1, "target": 2, "index": 3})
        >>> x, y = batch
        >>> x, y, batch["index"]
        (1, 2, 3)
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        super().__init__([named["input"], named["target"]])
        self._named = named

    def __getitem__(self, key: Any) -> Any:
        """Return a part by its place or its name."""
        return self._named[key] if isinstance(key, str) else super().__getitem__(key)


def as_loaded(batch: Any) -> Any:
    """Return a batch in the form that a DataLoader gives: a pair for what recipes name `input` and `target`."""
    is_pair = isinstance(batch, Mapping) and {"input", "target"} <= batch.keys() <= {"input", "target", "index"}
    return LoadedPair(batch) if is_pair else batch


def loss_of_step(result: Any, step: str, log: str | None = None) -> Tensor:
    """Return the loss of what a step of a LightningModule has returned.

    Args:
        result: a 0-D tensor, or a dict that has one as `loss`.
        step: the name of the method.
        log: the name under which the step has logged its loss, where it does not return it.

    Raises:
        WrongResultError: there is no loss.
    """
    if log is not None:
        if _key(log) not in logged():
            names = ", ".join(logged()) or "nothing"
            raise WrongResultError(f"{names} by self.log in {step}", f"'{log}' among them", "Correct `log`.")
        return logged()[_key(log)]
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        advice = (
            f"Return the loss. If {step} only logs it, write the name: log=val_loss." if step != "training_step" else ""
        )
        expected = "its loss: a 0-D tensor, or a dict that has one as `loss`"
        raise WrongResultError(f"{kind_of(result)} from {step}", expected, advice or "Return the loss in each call.")
    return loss


def _log(name: str, value: Any, *_: Any, logger: bool | None = None, reduce_fx: Any = "mean", **__: Any) -> None:
    """Stand in for `LightningModule.log`: the value is a metric of the loss at hand, a mean over the ticks of a row."""
    if reduce_fx not in ("mean", "avg", torch.mean):
        raise ConfigError(
            f"self.log('{name}'): found reduce_fx={getattr(reduce_fx, '__name__', reduce_fx)}; expected 'mean', since "
            "a logged value is the mean over the steps of a row of metrics.csv. Remove it."
        )
    # A metric that was given is reset whether its value is wanted or not.
    number = _number(name, value)
    if _logs and logger is not False:
        _logs[-1][_key(name)] = number


def _log_dict(values: Any, *_: Any, **options: Any) -> None:
    """Stand in for `LightningModule.log_dict`."""
    for name, value in (_computed(values) if _is_metric(values) else values).items():
        _log(name, value, **options)


def _key(name: str) -> str:
    """Return a name as metrics.csv takes it behind the problem's: 'train/acc' is train.acc, 'loss' logged_loss.

    Example:
        >>> _key("train/acc"), _key("loss")
        ('train.acc', 'logged_loss')
    """
    key = re.sub(r"[^A-Za-z0-9_.\-]", ".", name)
    return f"logged_{key}" if key in RESERVED else key


def _is_metric(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("compute", "reset", "update"))


def _computed(metric: Any) -> Any:
    """Return what a metric of torchmetrics has of this batch, which it forgets: nobody else would reset it."""
    with torch.no_grad():
        value = metric.compute()
        metric.reset()
    return value


def _number(name: str, value: Any) -> Tensor:
    value = _computed(value) if _is_metric(value) else value
    tensor = value if isinstance(value, Tensor) else None
    if tensor is None and isinstance(value, bool | int | float):
        tensor = torch.tensor(float(value))
    if tensor is None or tensor.numel() != 1 or tensor.is_complex():
        raise WrongResultError(f"{kind_of(value)} in self.log('{name}', ..)", "a real number", "Take its mean.")
    return tensor.reshape(()) if tensor.is_floating_point() else tensor.reshape(()).float()
