"""What a program asks of a hypergradient algorithm, and what it hands to one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlotool.core.replay import LossTraits
from mlotool.problem.memory import Memory
from mlotool.problem.trajectory import LowerSnapshots, StepRecord
from mlotool.problem.update import Hyperparameters, State
from mlotool.problem.update_derivative import StepCotangents

Vector = Sequence[Tensor]
"""One tensor a parameter: a point or a direction in a problem's parameter space."""

Reduce = Callable[[Vector], Vector]
"""A mean over ranks; the identity in one process."""


def identity_reduce(vector: Vector) -> Vector:
    """Return `vector`: the mean over one process."""
    return vector


@dataclass(frozen=True)
class Particle:
    """A rollout that goes on where the last one of its number ended.

    Args:
        number: among those of one reader.
        is_new: whether it begins where the problem itself does.
    """

    number: int
    is_new: bool


@dataclass(frozen=True)
class LowerProblem:
    """What an algorithm is told of a lower problem, the same at every pullback.

    Args:
        name: the problem's name.
        reader: the problem whose total gradient it is for: what an algorithm keeps of a pullback belongs to the
            cotangents of one reader.
        num_tasks: length of the parameters' leading task axis; the loss is a sum over tasks that share none of their
            parameters. None without one.
        module: the problem's module.
        reduce: mean over ranks, for derivatives that an algorithm takes itself; the cotangents that a pullback gets and
            the products of `hypergradient/products` are means already.
        precision: in which the loss is evaluated, "fp32", "bf16" or "fp16".
        is_nested: whether solutions of still lower problems are eliminated inside the loss.
        has_linear_step: whether the optimizer's next step is linear in the gradient.
        cotangent_scale: a task's own cotangent is that many times what arrives: `num_tasks` where the reader's loss is
            a mean over the tasks, else 1.
        traits: what was found out about the problem's loss.
        memory: what its algorithm keeps from one pullback to the next, for all readers.
        random: a context in which the program's random numbers are drawn, for what autograd calls later.
    """

    name: str
    reader: str = ""
    num_tasks: int | None = None
    module: nn.Module | None = None
    reduce: Reduce = identity_reduce
    precision: str = "fp32"
    is_nested: bool = False
    has_linear_step: bool = False
    cotangent_scale: float = 1.0
    traits: LossTraits = field(default_factory=LossTraits, compare=False)
    memory: Memory = field(default_factory=Memory, compare=False)
    random: AbstractContextManager[None] = field(default_factory=nullcontext, compare=False)


@dataclass(slots=True)
class LowerView:
    """A lower problem at one moment: its loss as a pure function, on one batch.

    Args:
        problem: what stays the same.
        theta: its current parameters, detached, one tensor each.
        function: `(theta, inputs) -> loss`, a 0-D tensor; `inputs` are the tensors of all problems that theta*_l
            depends on, in the order in which `AbstractHypergradient.pullback` gets them.
        batch: on which the loss is evaluated.
        batch_number: the batch's position in the stream, where every epoch has the same batches; else None.
        weight: of this rank's batch in the mean over ranks; the loss has it already.
        unroll: the optimizer steps that led to theta, for algorithms that see steps; else None.
        step_pullback: `(theta, gradient, cotangent) -> cotangent`: the derivative, transposed, of the step that the
            problem's optimizer would take next, with respect to the gradient; raises ConfigError for an optimizer
            without a pure form.
        reader_loss: `inputs -> loss` of the reader with this solution and all else held fixed; its derivative is the
            part of the reader's gradient that no pullback sees. None where the solution is not read by a loss.
        particle: which rollout it is for; None where none is kept.
        eliminated: what moves the solutions inside the loss along; None where there are none.
    """

    problem: LowerProblem
    theta: tuple[Tensor, ...]
    function: Callable[[Vector, Vector], Tensor]
    batch: Any = None
    batch_number: int | None = None
    weight: float = 1.0
    unroll: "Unroll | None" = None
    step_pullback: Callable[[Vector, Vector, Vector], list[Tensor]] | None = None
    reader_loss: Callable[[Vector], Tensor] | None = None
    particle: Particle | None = None
    eliminated: "Eliminated | None" = None

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        """Return the loss at `theta`."""
        return self.function(theta, inputs)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices it runs on."""
        return tuple({tensor.device for tensor in self.theta if tensor.is_cuda})


@dataclass(frozen=True)
class Eliminated:
    """The lower solutions inside a loss, which are functions of theta and the inputs.

    Args:
        push: `(theta, inputs, direction) -> directions`: how they move, by problem, when theta moves along direction.
        function: `(theta, inputs, moves) -> loss` with the solutions moved from where they are.
    """

    push: Callable[[Vector, Vector, Vector], Mapping[int, Vector]]
    function: Callable[[Vector, Vector, Mapping[int, Vector]], Tensor]


@dataclass(frozen=True)
class Unroll:
    """Optimizer steps of a lower problem as functions of what shapes them.

    Args:
        records: the steps that were taken, oldest first; empty where they are to be simulated.
        has_all: whether the first of the records is the first step of the unroll.
        batches: by step to simulate, those that its gradient is averaged over.
        loss: `(theta, inputs, batch, lower_snapshots) -> loss`; the snapshots replace lower problems that have moved
            on.
        step: `(theta, gradient, state, hyperparameters, inputs) -> (theta, state)`: a pure step of the problem's
            optimizer, differentiable in all but the hyperparameters; gradients of unused parameters are None.
        step_pullback: `(theta, gradient, state, hyperparameters, cotangent, cotangents of the state) -> cotangents`:
            the derivative of a step, transposed; None where hyperparameters are learned, whose cotangents autograd
            finds.
        start: `inputs -> theta` where the problem starts from the parameters of another one; else None.
        begin: `() -> (theta, state)`: where a simulation begins otherwise.
        hyperparameters: `count -> those of the next count steps`, schedules included; one mapping a parameter.
    """

    records: tuple[StepRecord, ...]
    has_all: bool
    batches: tuple[tuple[Any, ...], ...]
    loss: Callable[[Vector, Vector, Any, LowerSnapshots], Tensor]
    step: Callable[
        [Vector, Sequence[Tensor | None], Sequence[State], Sequence[Hyperparameters], Vector],
        tuple[list[Tensor], list[State]],
    ]
    step_pullback: (
        Callable[
            [
                Vector,
                Sequence[Tensor | None],
                Sequence[State],
                Sequence[Hyperparameters],
                Vector,
                Sequence[dict[str, Tensor]],
            ],
            StepCotangents,
        ]
        | None
    )
    start: Callable[[Vector], Vector] | None
    begin: Callable[[], tuple[Vector, Sequence[State]]]
    hyperparameters: Callable[[int], list[tuple[Hyperparameters, ...]]]


class Pullback(Protocol):
    """The derivative of one solution at one moment, transposed."""

    outputs: tuple[Tensor, ...]
    """The values of theta*_l."""

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the cotangents of the wanted inputs, without a graph.

        Args:
            theta: the values of theta*_l.
            inputs: what it depends on.
            wanted: which of the inputs want a cotangent.
            cotangent: of theta*_l, one tensor a parameter; the mean over ranks already. What is returned is this
                rank's: it is added to a gradient that is averaged as a whole.
        """

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of theta, the inputs and the cotangent."""


@dataclass(frozen=True)
class Connected:
    """A solution that autograd itself connects to its inputs.

    Args:
        outputs: theta*_l, with its graph.
    """

    outputs: tuple[Tensor, ...]

    def first_order(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the cotangents of the wanted inputs, by autograd. Arguments as for `Pullback`."""
        points = [tensor for tensor, flag in zip(inputs, wanted, strict=True) if flag]
        found = torch.autograd.grad(self.outputs, points, list(cotangent), allow_unused=True)
        return [torch.zeros_like(x) if each is None else each for x, each in zip(points, found, strict=True)]


class AbstractHypergradient(ABC):
    """How gradients pass through a problem's solution: settings, which never change.

    What an algorithm keeps from one pullback to the next is a value in the program's `Memory` of the problem.

    Attributes:
        curvature: whether the stationarity is that of the "total" or the "partial" gradient.
        batch: at which batch the pullback is taken, the "last" or a "fresh" one.
        sees_steps: whether it differentiates the optimizer's steps, and so what shapes their start or their rate.
        horizon: of the steps that it sees, how many of the last ones; None sees all since a problem above stepped.
        keeps_graphs: whether the graphs of the recorded steps' gradients are kept.
        is_persistent: whether it has rollouts of its own that go on from one gradient to the next.
        moves_solutions: whether it evaluates the loss at moved parameters, so that solutions inside it have to follow.
        can_push: whether it can tell how the solution moves with its inputs (`push`).
        needs_full_precision: whether it compares losses or gradients at nearby points, which autocast would blur.
        is_constant: whether it takes the solution for a constant, so that no gradient passes through.
        is_traceable: whether a pullback keeps nothing, so that a trace of one holds for the next.
        differentiates_twice: whether it needs second derivatives of the problem's loss by automatic differentiation.
    """

    curvature: str = "total"
    batch: str = "last"
    sees_steps: bool = False
    keeps_graphs: bool = False
    is_persistent: bool = False
    needs_full_precision: bool = False
    is_constant: bool = False
    is_traceable: bool = False
    differentiates_twice: bool = False
    horizon: int | None = None
    moves_solutions: bool = False
    can_push: bool = False

    @abstractmethod
    def pullback(self, view: LowerView, inputs: Vector) -> "Pullback | Connected | None":
        """Return how a cotangent of theta*_l is pulled back; None takes theta*_l for a constant.

        Args:
            view: of the problem.
            inputs: the tensors that theta*_l depends on.
        """

    def push(self, view: LowerView, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return how theta*_l moves when its inputs move along `directions`, one tensor a parameter."""
        raise NotImplementedError

    def check_batches(self, problem: str, stream: Any, num_draws: int) -> None:
        """Refuse a stream of batches that the algorithm cannot do with.

        Args:
            problem: the problem whose solution it differentiates.
            stream: that one's; None where it has no batches.
            num_draws: batches it draws from one pullback to the next.

        Raises:
            ConfigError: it cannot.
        """

    @property
    def directs_steps(self) -> bool:
        """Whether the problem's own steps follow another direction than its gradient (`step_direction`)."""
        return type(self).step_direction is not AbstractHypergradient.step_direction

    def step_direction(
        self,
        problem: str,
        theta: Vector,
        gradient: Sequence[Tensor | None],
        batch: Any,
        batch_number: int | None,
        memory: Memory,
    ) -> list[Tensor | None]:
        """Return what the problem itself steps along in the place of its gradient on one batch.

        Args:
            problem: the problem whose solution it differentiates.
            theta: its parameters, detached.
            gradient: on the batch, the mean over ranks, one tensor a parameter; None where it is unused.
            batch: the batch.
            batch_number: as in `LowerView`.
            memory: of the problem.
        """
        return list(gradient)

    def check_problem(self, problem: str, num_tasks: int | None) -> None:
        """Refuse a problem that the algorithm cannot do with whatever the graph, or a missing package.

        Args:
            problem: the problem whose solution it differentiates.
            num_tasks: length of its task axis; None without one.

        Raises:
            ConfigError: it cannot.
        """

    def initial_state(self) -> Any:
        """Return what is kept before the first pullback; None for an algorithm that keeps nothing."""
        return None

    def statistics(self, state: Any) -> dict[str, float]:
        """Return numbers to log about the last pullback, by name. Argument as for `state_dict`."""
        return {}

    def state_dict(self, state: Any) -> dict[str, Any]:
        """Return what a resumed run needs of the state, in plain containers.

        Args:
            state: the value of a problem's `Memory`.
        """
        return {}

    def load_state(self, saved: dict[str, Any]) -> Any:
        """Return the state that `state_dict` has saved."""
        return self.initial_state()
