"""Evaluations that belong together: they share random numbers and the values behind `stop_gradient`.

A finite difference evaluates a loss at perturbed parameters. Whatever is drawn at random, and whatever the
loss treats as a constant, must then be the same in every evaluation, or the difference measures that instead.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mlotool.core.errors import ConfigError
from mlotool.core.messages import kind_of

Evaluation = Callable[[], Sequence[Tensor]]


_CHANGED_CONSTANTS = (
    "A loss calls stop_gradient a different number of times at perturbed parameters; expected the same calls in every "
    "evaluation of a finite difference. Make the calls independent of the parameters, or use product: reverse."
)


class _MissingConstantsError(Exception):
    """A perturbed evaluation met `stop_gradient` before an unperturbed one had recorded its values."""


class _RecordedAllError(Exception):
    """As many values have been recorded as the loss has had so far: the rest of the evaluation is not needed."""


class _Tape:
    """The values of the `stop_gradient` calls of one evaluation, in the order of the calls.

    Args:
        values: what to return; None records instead.
        outer: a tape whose values are recorded, in the place of those of the evaluation.
        num_expected: how many to record before the evaluation is cut short; 0 lets it run to its end.
    """

    def __init__(self, values: list[Tensor] | None, outer: "_Tape | None" = None, num_expected: int = 0) -> None:
        self.recorded: list[Tensor] = []
        self.left = None if values is None else values[::-1]
        self._outer, self._num_expected = outer, num_expected

    def constant(self, tensor: Tensor) -> Tensor:
        if self.left is None:
            self.recorded.append(tensor.detach() if self._outer is None else self._outer.constant(tensor))
            if len(self.recorded) == self._num_expected:
                raise _RecordedAllError
            return self.recorded[-1]
        if not self.left:
            raise _MissingConstantsError
        return self.left.pop()


_TAPE: ContextVar[_Tape | None] = ContextVar("mlotool_stop_gradient_tape", default=None)


def stop_gradient(tensor: Tensor) -> Tensor:
    """Return `tensor` as a constant, for automatic differentiation and for finite differences alike.

    For autograd this is `tensor.detach()`. In an evaluation for a finite difference, it returns the value of the
    unperturbed evaluation. Plain `detach` would return the perturbed value there, which changes the result: on a
    Meta-Weight-Net loss by more than half of the hypergradient.

    Args:
        tensor: a tensor of any shape.

    Returns:
        A tensor of the same shape without a gradient.

    Raises:
        ConfigError: `tensor` is not a tensor.

    Example:
        >>> import torch
        >>> stop_gradient(torch.ones(2, requires_grad=True)).requires_grad
        False
    """
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"stop_gradient: found {kind_of(tensor)}; expected a tensor. Call it for tensors alone.")
    tape = _TAPE.get()
    return tensor.detach() if tape is None else tape.constant(tensor)


T = TypeVar("T", bound=_Tape | None)


@contextmanager
def _using(tape: T) -> Iterator[T]:
    token = _TAPE.set(tape)
    try:
        yield tape
    finally:
        _TAPE.reset(token)


class ConstantsOfPart:
    """The values behind `stop_gradient` in a part of an evaluation that may be taken again by itself."""

    def __init__(self) -> None:
        self._values: list[Tensor] | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take down what the calls within return, where they do not just detach."""
        outer = _TAPE.get()
        if outer is None:
            yield
            return
        with _using(_Tape(None, outer)) as tape:
            yield
        self._values = tape.recorded

    @contextmanager
    def again(self) -> Iterator[None]:
        """Return the same values to the same calls."""
        with _using(None if self._values is None else _Tape(self._values)):
            yield


class RandomState:
    """The state of torch's generators, on the CPU and on the devices in use.

    Args:
        devices: CUDA devices whose generators belong to it.
        before: another state, to which those of the devices are added.
    """

    def __init__(self, devices: tuple[torch.device, ...] = (), before: "RandomState | None" = None) -> None:
        self._cpu: Tensor = torch.default_generator.get_state() if before is None else before._cpu
        self._cuda: list[tuple[torch.device, Tensor]] = [] if before is None else [*before._cuda]
        for device in devices:
            self._cuda.append((device, torch.cuda.get_rng_state(device)))

    def restore(self, devices: Container[torch.device] | None = None) -> None:
        """Set the generators back.

        Args:
            devices: CUDA devices whose generators are set; None sets all that it has.
        """
        torch.default_generator.set_state(self._cpu)
        for device, state in self._cuda:
            if devices is None or device in devices:
                torch.cuda.set_rng_state(state, device)

    def equals(self, other: "RandomState") -> bool:
        """Return whether nothing was drawn between the two."""
        pairs = zip([self._cpu, *dict(self._cuda).values()], [other._cpu, *dict(other._cuda).values()], strict=True)
        return all(torch.equal(mine, its) for mine, its in pairs)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Draw again what was drawn from here on; afterwards the generators go on as if nothing had been."""
        now = RandomState(tuple(device for device, _ in self._cuda))
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the states, in plain containers."""
        return {"cpu": self._cpu, "cuda": [[str(device), state] for device, state in self._cuda]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "RandomState":
        """Return the states that were saved."""
        saved = cls()
        saved._cpu = state["cpu"].cpu()
        saved._cuda = [(torch.device(device), entry.cpu()) for device, entry in state["cuda"]]
        return saved


@dataclass(eq=False)
class LossTraits:
    """What was found out about a loss.

    Args:
        num_constants: calls of `stop_gradient` in one evaluation: where there are some, a replay records at once.
        has_compared_product: whether its products have been compared with other ones, and need no more looks.
        num_pullbacks: how many were taken by finite differences.
        num_comparisons: how often they have been.
        is_twice_differentiable: whether the loss has been searched for functions that are differentiable once, in vain.
        replaces_operators: whether double backward takes other operators in the place of some of the loss.
        lacks_tangents: whether forward mode has been found not to do for it.
        warned_of: what a warning was given of, which is given once.
    """

    num_constants: int = 0
    has_compared_product: bool = False
    num_pullbacks: int = 0
    num_comparisons: int = 0
    is_twice_differentiable: bool = False
    replaces_operators: bool = False
    lacks_tangents: bool = False
    warned_of: set[object] = field(default_factory=set)


class Replay:
    """Runs several evaluations with the same random numbers and the same `stop_gradient` values.

    Args:
        base: the unperturbed evaluation; it is run, without gradients, only if a perturbed one meets
            `stop_gradient`.
        devices: CUDA devices whose generators are used.
        traits: of the loss; kept from one replay to the next, it saves the evaluation that would find out.
    """

    def __init__(
        self, base: Evaluation, devices: tuple[torch.device, ...] = (), traits: LossTraits | None = None
    ) -> None:
        self._base, self._devices, self._traits = base, devices, traits or LossTraits()
        self._random: RandomState | None = None
        self._constants: list[Tensor] | None = None
        self._has_result = False

    def __call__(self, evaluation: Evaluation) -> Sequence[Tensor]:
        """Return what `evaluation` returns, with everything but its parameters held fixed.

        Raises:
            ConfigError: the loss calls `stop_gradient` more or less often than at the unperturbed parameters.
        """
        if self._traits.num_constants and self._constants is None:
            self._record(self._traits.num_constants)
        result = self._run(evaluation)
        if result is None and not self._has_result:
            # The constants are not known yet, or the loss has changed them: record all there are.
            self._record(0)
            result = self._run(evaluation)
        if result is None:
            raise ConfigError(_CHANGED_CONSTANTS)
        self._has_result = True
        return result

    def _run(self, evaluation: Evaluation) -> Sequence[Tensor] | None:
        """Return None where the evaluation and the recorded constants do not fit."""
        self._rewind()
        tape = _Tape(self._constants or [])
        token = _TAPE.set(tape)
        try:
            result = evaluation()
        except _MissingConstantsError:
            return None
        finally:
            _TAPE.reset(token)
        return None if tape.left else result

    def _rewind(self) -> None:
        """Begin at the random numbers of the first evaluation."""
        if self._random is None:
            self._random = RandomState(self._devices)
        else:
            self._random.restore()

    def _record(self, num_expected: int) -> None:
        self._rewind()
        tape = _Tape(None, num_expected=num_expected)
        with torch.no_grad(), suppress(_RecordedAllError), _using(tape):
            self._base()
        self._constants = tape.recorded
        self._traits.num_constants = len(tape.recorded)
