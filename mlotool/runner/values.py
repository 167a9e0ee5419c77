"""The numbers of a run's ticks: losses and metrics over a window, learned values, and whether all are still numbers."""

import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from mlotool.config.schema import is_plain_name
from mlotool.core.arguments import takes_nothing
from mlotool.core.errors import ConfigError, NonFiniteLossError, NonFiniteParametersError
from mlotool.core.user_code import named
from mlotool.problem.rank_mean import Reduce, identity_reduce
from mlotool.program import Problem, Program, StepResult
from mlotool.spaces.shared.shared_space import SharedSpace

Steps = Mapping[str, StepResult]

# Learned values of one problem: more are no curves that one could tell apart.
MAX_VALUES = 32


class Window:
    """Collects what ticks return, as tensors; turns it into numbers at a flush.

    Args:
        num_ticks: ticks that lie before the window.
        reduce: a mean over ranks, of which all flush and check after the same ticks: a NaN of one is one of all.
        explain: `(problem, problems that had stepped before) -> sentences`: what may have made its loss not finite.

    Attributes:
        stepped: the problems that have stepped, as far as losses were checked.

    Cost: a list append a tick; at a flush one stack and one transfer from the device.

    Example:
        >>> from mlotool.program import StepResult
        >>> window = Window()
        >>> window.append({"line": StepResult(torch.tensor(1.0), {})})
        >>> window.append({"line": StepResult(torch.tensor(3.0), {})})
        >>> window.flush()
        {'line/loss': 2.0}
    """

    def __init__(
        self,
        num_ticks: int = 0,
        reduce: Reduce = identity_reduce,
        explain: Callable[[str, set[str]], str] = lambda problem, stepped: "",
    ) -> None:
        self._ticks: list[Steps] = []
        # Numbers of ticks that have been read from the device already, by key.
        self._collected: dict[str, list[float]] = {}
        self._num_ticks_before = num_ticks
        self._reduce = reduce
        self._explain = explain
        self.stepped: set[str] = set()
        self.append = self._ticks.append

    def check(self) -> None:
        """Raise NonFiniteLossError, with the first bad tick, if a loss since the last check is NaN or infinite."""
        steps_taken = [step for steps in self._ticks for step in steps.values()]
        numbers = iter(self._numbers([part for step in steps_taken for part in (step.loss, *step.metrics.values())]))
        for tick, steps in enumerate(self._ticks, start=self._num_ticks_before + 1):
            for problem, step in steps.items():
                loss = next(numbers)
                if not math.isfinite(loss):
                    raise NonFiniteLossError(problem, tick, loss, self._explain(problem, self.stepped))
                self.stepped.add(problem)
                self._collected.setdefault(f"{problem}/loss", []).append(loss)
                for name in step.metrics:
                    self._collected.setdefault(f"{problem}/{name}", []).append(next(numbers))
        self._num_ticks_before += len(self._ticks)
        self._ticks.clear()

    def flush(self) -> dict[str, float]:
        """Check the losses, return the mean of each `<problem>/<metric>` over the window and begin the next one."""
        self.check()
        means = {key: sum(numbers) / len(numbers) for key, numbers in self._collected.items()}
        self._collected = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Check the losses, and return what was collected since the last flush, in plain containers."""
        self.check()
        return {key: list(numbers) for key, numbers in self._collected.items()}

    def load_state_dict(self, state: Mapping[str, Any], num_ticks: int) -> None:
        """Take it back; the next step belongs to tick `num_ticks + 1`."""
        self._ticks.clear()
        self._num_ticks_before = num_ticks
        self._collected = {key: [float(number) for number in numbers] for key, numbers in state.items()}

    def _numbers(self, values: list[Tensor]) -> list[float]:
        """Return the means over ranks of what tensors of one element hold, by one transfer from the device."""
        if not values:
            return []
        # A metric may be on the CPU beside a loss on another device.
        device = values[0].device
        stacked = torch.stack([value.reshape(()).to(device) for value in values]).double()
        return self._reduce([stacked])[0].tolist()


def hyperparameters(problem: Problem, program: Program) -> dict[str, float]:
    """Return the step count and the hyperparameters: the learning rate, and what other problems give."""
    values = {f"{problem.name}/step": float(problem.num_steps)}
    if (rate := learning_rate(problem)) is not None:
        values[f"{problem.name}/lr"] = rate
    with torch.no_grad():
        groups = program.internals.hyperparameters(problem.name)
    for key in problem.settings.optimizer_roles:
        # Of several rates the mean.
        values[f"{problem.name}/{key}"] = torch.stack([group[key].mean() for group in groups or ()]).mean().item()
    return values


def learning_rate(problem: Problem) -> float | None:
    """Return the learning rate of a problem's first parameters; None where its optimizer has none."""
    rate = None if problem.optimizer is None else problem.optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def learned_values(program: Program) -> dict[str, float]:
    """Return the values of the small upper problems of a program by key; for each flush, not for each tick.

    A module that can be called without arguments gives what the losses see, `<problem>/learned_value`, or
    `learned_value_<number>` of several; `learned_<name>` where it returns a dict, or has an attribute `names` with one
    name a value; of others the parameters are read, `<problem>/learned_<name>`. Nothing in training changes by it:
    random numbers and buffers stay as they are.

    Args:
        program: the problems; those count that shape others and have at most `MAX_VALUES` trainable numbers.
    """
    values: dict[str, float] = {}
    for name, problem in program.problems.items():
        is_upper = name in program.graph.upper_to_lower
        is_plain = problem.settings.tasks is None and problem.shards is None and problem.parallel is None
        if is_upper and is_plain and _are_few(list(problem.theta.values())):
            for key, tensor in (_called(problem) or problem.constants()).items():
                numbers = tensor.detach().double().flatten().tolist()
                keys = [key] if len(numbers) == 1 else [f"{key}_{index}" for index in range(len(numbers))]
                values |= {f"{name}/learned_{key}": number for key, number in zip(keys, numbers, strict=True)}
    return values


def is_listed(problem: Problem) -> bool:
    """Say whether `learned_values` lists what a module returns: it is small, and can be called without arguments."""
    return _are_few(list(problem.theta.values())) and takes_nothing(problem.module.forward)


def _are_few(values: list[Any]) -> bool:
    """Say whether values are real tensors of a few numbers."""
    if not all(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        return False
    # The shape of a lazy layer's parameters is found in its first call.
    return not any(map(is_lazy, values)) and 0 < sum(value.numel() for value in values) <= MAX_VALUES


def _names_of(module: Any, count: int) -> list[str]:
    """Return a module's own names of its values; none where it has not one for each of them."""
    names = getattr(module, "names", None)
    if not isinstance(names, list | tuple) or not all(map(is_plain_name, names)):
        return []
    # That of the target domain of a mixture comes after those of its parts.
    return [*names[:count]] if len(set(names)) == len(names) >= count else []


def _called(problem: Problem) -> Mapping[str, Tensor]:
    """Return what the module gives when it is called; nothing where it takes arguments, or gives no few numbers."""
    if not takes_nothing(problem.module.forward):
        return {}
    try:
        devices = [device for device in problem.devices if device.type == "cuda"]
        with torch.no_grad(), torch.random.fork_rng(devices):
            output = problem.pure(None, False)()
    # Of a user's forward it may be any error: it is not how the losses use the module.
    except Exception:
        return {}
    values = output if isinstance(output, Mapping) else {"value": output}
    if isinstance(output, Tensor) and output.dim() == 1 and (names := _names_of(problem.module, len(output))):
        values = dict(zip(names, output, strict=True))
    return values if _are_few(list(values.values())) else {}


def explain(problems: Mapping[str, Problem], name: str, stepped: Container[str]) -> str:
    """Return, in whole sentences, what may have made the loss of a problem not finite, and what to do.

    A loss is NaN because of its batch, or of parameters that were bad before it was computed: its own, or those of
    problems whose modules it calls, which another problem's step may have spoiled. So the problem where it shows is
    rarely the one whose learning rate is too large.

    Args:
        problems: of the program, by name.
        name: of the problem whose loss was the first that is not finite.
        stepped: the problems that had stepped before.
    """
    sources = [problems[source] for source in related(name, problems)]
    suspects = [source for source in sources if source.name in stepped]
    sentences = [*map(unsound_path, sources), _advice(suspects) if suspects else None]
    sentences.append(
        f"{'Else look' if suspects else 'No step had changed anything that it depends on: look'} for NaN in the data "
        f"of '{name}' and for log, sqrt or a division at zero in its loss."
    )
    if problems[name].settings.precision == "fp16":
        sentences.append(f"The largest number in fp16 is 65,504: problems.{name}.precision=bf16 has the range of fp32.")
    return " ".join(filter(None, sentences))


def unsound_path(problem: Problem) -> str | None:
    """Return on which path of a shared space a result was first not finite; None where nothing is known of one."""
    module = problem.module
    if not isinstance(module, SharedSpace) or module.unsound is None:
        return None
    return f"In the shared space of '{problem.name}': {module.unsound}"


def related(name: str, problems: Mapping[str, Problem]) -> list[str]:
    """Return the problem and all whose parameters its own depend on, the nearest first."""
    names = [name]
    # It grows meanwhile.
    for reached in names:
        node = problems[reached].node
        uses = dict.fromkeys([*node.roles.values(), *node.other_uses.values()])
        names += [other for other in uses if other in problems and other not in names]
    return names


def _advice(suspects: Iterable[Problem]) -> str:
    rates = []
    for problem in suspects:
        giver, rate = problem.settings.optimizer_roles.get("lr"), learning_rate(problem)
        if giver is not None:
            rates.append(f"the learning rate that '{giver}' gives '{problem.name}'")
        else:
            rates.append(f"problems.{problem.name}.optimizer.lr" + ("" if rate is None else f" ({rate:g} now)"))
    which = "" if len(rates) == 1 else "the one that is too large of "
    return f"Lower {which}{' and '.join(rates)}, or set that problem's gradient_clip_norm=1.0."


def check_parameters(program: Program, tick: int) -> None:
    """Raise NonFiniteParametersError where theta of a problem has a NaN or an infinity.

    A loss does not show it: it is computed before the step, and the gradient of a finite loss may be NaN.

    Args:
        program: the problems.
        tick: the last one done, for the message.

    Cost: a pass over the parameters and a transfer from the device a problem; for a round, not for a tick.
    """
    bad = []
    for name, problem in program.problems.items():
        is_finite = _are_finite(problem.constants().values())
        if problem.shards is not None:
            # Each rank sees its own part: all find what one of them has found.
            [share] = program.internals.engine.rank_mean.mean([torch.tensor(float(is_finite))])
            is_finite = share.item() == 1.0
        if not is_finite:
            bad.append(name)
    if bad:
        # What a gradient passes through, or is made with, may be at fault as well.
        suspects = [program.problems[name] for name in dict.fromkeys([*bad, *related(bad[0], program.problems)])]
        sentences = [unsound_path(program.problems[bad[0]]), _advice(suspects)]
        raise NonFiniteParametersError(bad[0], tick, bad[1:], " ".join(filter(None, sentences)))


def check_start(name: str, problem: Problem) -> None:
    """Refuse a module, not one in shards, whose parameters have a NaN or an infinity before anything was trained.

    Raises:
        ConfigError: it has one.
    """
    for path, tensor in problem.constants().items():
        if not _are_finite([tensor]):
            raise ConfigError(
                f"problems.{name}.module: found {tensor[~tensor.isfinite()][0].item()} in the parameter '{path}' of "
                f"{named(problem.module)} before the first step. Correct its __init__, or the file that it comes from."
            )


def _are_finite(tensors: Iterable[Any]) -> bool:
    # Of a sharded tensor this rank's part; an empty tensor has no largest magnitude.
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    filled = [part for part in parts if part.numel()]
    # The largest magnitude: a sum of squares overflows where every number is finite.
    return not filled or bool(torch.stack(torch._foreach_norm(filled, math.inf)).isfinite().all())
