"""What a program asks of a hypergradient algorithm, and what it hands to one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mlotool.core.gradient import slopes_of
from mlotool.core.replay import LossTraits
from mlotool.problem.optimizers.rule import Gradient, Hyperparameters, Rates, State, States, StepCotangents, Stepped
from mlotool.problem.optimizers.rule import Vector as Vector
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.trajectory import AbstractStepStore, KeepAll, LowerSnapshots, StepRecord


class Pullback(Protocol):
    """The derivative of one solution at one moment, transposed."""

    outputs: tuple[Tensor, ...]
    """The values of theta*_l."""

    def first_order(
        self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: list[Tensor]
    ) -> list[Tensor]:
        """Return the cotangents of the wanted inputs, without a graph.

        Args:
            theta: the values of theta*_l.
            inputs: what it depends on.
            wanted: which of the inputs want a cotangent.
            cotangent: of theta*_l, one tensor per parameter; the same on all ranks. What is returned is added to a
                gradient that is averaged over them as a whole: it may be this rank's part, or the mean already. The
                list is the pullback's own: it may empty it, so that what it no longer needs is freed.
        """

    def differentiable(self, theta: Vector, inputs: Vector, wanted: Sequence[bool], cotangent: Vector) -> list[Tensor]:
        """Return the same as functions of theta, the inputs and the cotangent."""


Step = Callable[[Vector, Gradient, States, Rates, Vector], Stepped]
StepPullback = Callable[[Vector, Gradient, States, Rates, list[Tensor], list[dict[str, Tensor]]], StepCotangents]


@dataclass(frozen=True)
class Unroll:
    """Optimizer steps of a lower problem as functions of what shapes them.

    Args:
        records: the steps that were taken, oldest first; empty where they are to be simulated.
        has_all: whether the first of the records is the first step of the unroll.
        batches: by step to simulate, those that its gradient is averaged over.
        own_loss: `(theta, inputs, batch, lower_snapshots) -> loss` of this rank's part of a batch; the snapshots
            replace lower problems that have moved on. `hypergradient/unrolled.py` makes gradients of it that
            are means over batches and ranks.
        step: `(theta, gradient, state, hyperparameters, inputs) -> (theta, state)`: a pure step of the problem's
            optimizer, differentiable in all but the hyperparameters; gradients of unused parameters are None.
        step_pullback: `(theta, gradient, state, hyperparameters, cotangent, cotangents of the state) -> cotangents`:
            the derivative of a step, transposed; None where hyperparameters are learned, whose cotangents autograd
            finds.
        start: `inputs -> theta` where the problem starts from the parameters of another one; else None.
        begin: `() -> (theta, state)`: where a simulation begins otherwise.
        replay: `(theta, gradient, state, hyperparameters, inputs) -> (theta, state)`: a step that was taken, again, to
            the bit; not differentiable.
        hyperparameters: `count -> those of the next count steps`, schedules included; one mapping per parameter.
        num_steps: how many of an unroll's steps are recorded before a problem above steps, at least.
        is_traced: whether the problem's next steps run as a trace, of which no graph can be kept.
        modules: those that the loss calls, the problem's own among them.
    """

    records: tuple[StepRecord, ...]
    has_all: bool
    batches: tuple[tuple[Any, ...], ...]
    own_loss: Callable[[Vector, Vector, Any, LowerSnapshots], Tensor]
    step: Step
    step_pullback: StepPullback | None
    start: Callable[[Vector], Vector] | None
    begin: Callable[[], tuple[Vector, Sequence[State]]]
    hyperparameters: Callable[[int], list[tuple[Hyperparameters, ...]]]
    num_steps: int = 1
    replay: Step | None = None
    is_traced: bool = False
    modules: tuple[nn.Module, ...] = ()


@dataclass(slots=True)
class Memory:
    """Holds what an algorithm keeps for one problem; there is one for each problem of a program.

    The settings of an algorithm never change, so one object of them may serve several problems and programs. What does
    change is the value here. An algorithm reads it, computes, and puts a new value in its place; it changes none.

    Args:
        value: what is kept, as `AbstractHypergradient.initial_state` and `load_state` return it.
    """

    value: Any = None


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
    """What a hypergradient method is told of a lower problem and what does not change.

    Args:
        name: the problem's name.
        reader: the problem whose total gradient it is for; what is kept of a pullback belongs to one reader.
        num_tasks: length of the parameters' leading task axis; the loss is a sum over tasks that share none of their
            parameters. None without one.
        module: the problem's module.
        rank_mean: the mean over ranks, by which views, products and recorded steps make theirs.
        precision: in which the loss is evaluated, "fp32", "bf16" or "fp16".
        is_nested: whether solutions of still lower problems are eliminated inside the loss.
        has_blocks: whether blocks of its module are evaluated again in backward passes.
        has_linear_step: whether the optimizer's next step is linear in the gradient.
        cotangent_scale: a task's own cotangent is that many times what arrives: `num_tasks` where the reader's loss is
            a mean over the tasks, else 1.
        num_parts: into how many parts ranks have divided the tasks, each of which has a mean of its own: what arrives
            is that many times what it is in one process.
        traits: what was found out about the problem's loss.
        memory: what its algorithm keeps from one pullback to the next, for all readers.
        random: a context in which the program's random numbers are drawn, for what autograd calls later.
    """

    name: str
    reader: str = ""
    num_tasks: int | None = None
    module: nn.Module | None = None
    rank_mean: RankMean = field(default_factory=RankMean)
    precision: str = "fp32"
    is_nested: bool = False
    has_blocks: bool = False
    has_linear_step: bool = False
    cotangent_scale: float = 1.0
    num_parts: int = 1
    traits: LossTraits = field(default_factory=LossTraits, compare=False)
    memory: Memory = field(default_factory=Memory, compare=False)
    random: AbstractContextManager[None] = field(default_factory=nullcontext, compare=False)


@dataclass(slots=True)
class LowerView:
    """A lower problem at one moment: its loss on one batch, as a pure function.

    If several ranks train together, each has a part of the batch. `view(theta, inputs)`, `gradient` and `slopes` are
    means over the ranks, and so are their derivatives by autograd: a method that uses only these is right on any number
    of ranks. Attributes whose names begin with `own_` are for this rank's part only.

    Args:
        problem: what stays the same.
        theta: its current parameters, detached, one tensor each; only to be read, as they share the parameters' memory.
        own_loss: `(theta, inputs) -> loss` on this rank's part of the batch, a 0-D tensor; `inputs` are the tensors of
            all problems that theta*_l depends on, in the order in which `AbstractHypergradient.pullback` gets them.
        own_batch: this rank's part of the batch.
        batch_number: the batch's position in the stream, where every epoch has the same batches; else None.
        own_weight: of this rank's part in the mean over ranks; the loss has it already.
        unroll: the optimizer steps that led to theta, for algorithms that see steps; else None.
        step_pullback: `(theta, gradient, cotangent) -> cotangent`: the derivative, transposed, of the step that the
            problem's optimizer would take next, with respect to the gradient; raises ConfigError for an optimizer
            without a pure form.
        own_reader_loss: `inputs -> loss` of the reader with this solution and all else held fixed, on this rank's part
            of its batch. None where no loss reads the solution.
        particle: which rollout it is for; None where none is kept.
        eliminated: what moves the solutions inside the loss along; None where there are none.
    """

    problem: LowerProblem
    theta: tuple[Tensor, ...]
    own_loss: Callable[[Vector, Vector], Tensor]
    own_batch: Any = None
    batch_number: int | None = None
    own_weight: float = 1.0
    unroll: Unroll | None = None
    step_pullback: Callable[[Vector, Vector, Vector], list[Tensor]] | None = None
    own_reader_loss: Callable[[Vector], Tensor] | None = None
    particle: Particle | None = None
    eliminated: "Eliminated | None" = None

    def __call__(self, theta: Vector, inputs: Vector) -> Tensor:
        """Return the loss, which can be differentiated to any order.

        Args:
            theta: one tensor per parameter.
            inputs: as `AbstractHypergradient.pullback` gets them, or others of these shapes.
        """
        return self.problem.rank_mean.value(self.own_loss, theta, inputs)

    def gradient(self, theta: Vector, inputs: Vector, *, create_graph: bool = False) -> list[Tensor]:
        """Return `dC/dtheta`, one tensor per parameter; zeros where the loss does not depend on it.

        Cheaper on several ranks than autograd's gradient of the view, which exchanges the loss as well.

        Args:
            theta: one tensor per parameter.
            inputs: as for the loss.
            create_graph: make the result differentiable with respect to theta and the inputs.
        """
        ranks = self.problem.rank_mean
        with torch.enable_grad():
            if create_graph:
                # Partial derivatives: an input may be a function of theta.
                at = ranks.shared([x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in theta])
                loss = self.own_loss(at, ranks.shared(inputs))
            else:
                at = [tensor.detach().requires_grad_() for tensor in theta]
                loss = self.own_loss(at, [tensor.detach() for tensor in inputs])
            return ranks.mean(slopes_of(loss, at, create_graph=create_graph))

    def slopes(self, theta: Vector, inputs: Vector, sources: Vector) -> list[Tensor]:
        """Return the derivatives of the loss with respect to some of its arguments, from one evaluation.

        Args:
            theta: one tensor per parameter.
            inputs: as for the loss.
            sources: tensors among theta and the inputs that require a gradient; all others are constants.

        Returns:
            A tensor per source, without a graph; zeros where the loss does not depend on it.
        """
        with torch.enable_grad():
            return self.problem.rank_mean.mean(slopes_of(self.own_loss(theta, inputs), sources))

    def reader_slopes(self, inputs: Vector, sources: Vector) -> list[Tensor]:
        """Return the derivatives of the reader's loss, with all solutions held fixed: what no pullback sees of them.

        Args:
            inputs: as for the loss.
            sources: tensors among these that require a gradient.

        Returns:
            A tensor per source, without a graph; zeros where no loss reads the solution.
        """
        if self.own_reader_loss is None:
            return [torch.zeros_like(source) for source in sources]
        with torch.enable_grad():
            return self.problem.rank_mean.mean(slopes_of(self.own_reader_loss(inputs), sources))

    def mean_of(self, own: Callable[[Vector], Vector]) -> Callable[[Vector], list[Tensor]]:
        """Return a function of a vector as its mean over ranks.

        Args:
            own: makes a vector from a vector that is the same on all ranks, on this rank's part of the batch
                (`own_batch`); of the same shapes on all ranks.
        """
        ranks = self.problem.rank_mean
        return lambda vector: ranks.mean(own(ranks.shared(vector)))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices it runs on."""
        return tuple({tensor.device for tensor in self.theta if tensor.is_cuda})


@dataclass(frozen=True)
class Eliminated:
    """The lower solutions inside a loss, which are functions of theta and the inputs.

    Args:
        push: `(theta, inputs, direction) -> directions`: how they move, by problem, when theta moves along direction.
        own_loss: `(theta, inputs, moves) -> loss` with the solutions moved from where they are.
    """

    push: Callable[[Vector, Vector, Vector], Mapping[int, Vector]]
    own_loss: Callable[[Vector, Vector, Mapping[int, Vector]], Tensor]


class AbstractHypergradient(ABC):
    """Base class of hypergradient methods: how gradients pass through a problem's solution.

    A method holds settings only, which never change. What it keeps from one backward pass to the next is a value in the
    program's `Memory` of the problem. A cotangent of a tensor is the derivative of the upper loss with respect to it; a
    pullback is the backward pass through a solution, from the cotangent of the solution to those of its inputs.

    Example:
        One step of gradient descent, differentiated with respect to what shapes its loss:
        `theta*_l = theta - lr dC_l(theta, x)/dtheta`, so the cotangent v is pulled back to `-lr M^T v`.

        >>> @dataclass(frozen=True)
        ... class OneStep(AbstractHypergradient):
        ...     lr: float = 0.1
        ...     def pullback(self, view, inputs):
        ...         return OneStepPullback(self, view, view.theta)
        >>> @dataclass
        ... class OneStepPullback:
        ...     settings: OneStep
        ...     view: LowerView
        ...     outputs: tuple
        ...     def first_order(self, theta, inputs, wanted, cotangent):
        ...         x = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(inputs, wanted)]
        ...         gradient = self.view.gradient(theta, x, create_graph=True)
        ...         sources = [tensor for tensor, flag in zip(x, wanted) if flag]
        ...         found = torch.autograd.grad(gradient, sources, cotangent)
        ...         return [-self.settings.lr * each for each in found]
        >>> loss = lambda theta, inputs: ((theta[0] - inputs[0]) ** 2).sum()  # M = -2
        >>> x, view = [torch.tensor([1.0])], LowerView(LowerProblem("w"), (torch.tensor([3.0]),), loss)
        >>> OneStep().pullback(view, x).first_order(view.theta, x, [True], [torch.ones(1)])
        [tensor([0.2000])]

    Attributes:
        curvature: whether derivatives of the "total" or of the "partial" gradient are taken; see `Implicit`.
        batch: the batch of the backward pass, the "last" or a "fresh" one.
        sees_steps: whether it is an `AbstractStepwise`.
        moves_solutions: whether it evaluates the loss at perturbed parameters, so that solutions inside the loss have
            to follow.
        pushes_solutions: whether it needs to know how solutions inside the loss move (`push`).
        can_push: whether it can compute how the solution moves with its inputs (`push`).
        needs_full_precision: whether it takes differences of losses or gradients at nearby points, for which autocast
            is too inexact.
        is_constant: whether it takes the solution for a constant, so that no gradient passes through.
        is_traceable: whether a trace of one backward pass holds for the next, since nothing but recorded steps is kept.
    """

    curvature: str = "total"
    batch: str = "last"
    sees_steps: bool = False
    needs_full_precision: bool = False
    is_constant: bool = False
    is_traceable: bool = False
    moves_solutions: bool = False
    pushes_solutions: bool = False
    can_push: bool = False

    @abstractmethod
    def pullback(self, view: LowerView, inputs: Vector) -> Pullback | None:
        """Return the backward pass through the solution theta*_l; None treats theta*_l as a constant.

        Args:
            view: of the problem.
            inputs: the tensors that theta*_l depends on.
        """

    def push(self, view: LowerView, inputs: Vector, directions: Vector) -> list[Tensor]:
        """Return how theta*_l moves when its inputs move along `directions`, one tensor per parameter."""
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


class AbstractStepwise(AbstractHypergradient):
    """Base class of methods that differentiate the optimizer's steps, and so also their start and learning rate.

    Attributes:
        horizon: how many of the last steps it sees; None sees all since a problem above stepped.
        keeps_graphs: whether the graphs of the recorded steps' gradients are kept, whatever they take.
        trajectory: of which of the recorded steps the parameters are kept.
    """

    sees_steps = True
    horizon: int | None = None
    keeps_graphs: bool = False
    trajectory: AbstractStepStore = KeepAll()

    def records_graphs(self, state: Any) -> bool:
        """Return whether the graph of the next recorded step is kept. Argument as for `state_dict`."""
        return self.keeps_graphs

    def saves_gradients(self, prefers_forward: bool) -> bool:
        """Return whether the gradients of recorded steps are kept, where `product: auto` is forward mode or not."""
        return False


class AbstractDirector(AbstractHypergradient):
    """Base class of methods that also change the direction of the problem's own steps."""

    @abstractmethod
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
            problem: its name.
            theta: its parameters, detached.
            gradient: on the batch, the mean over ranks, one tensor per parameter; None where it is unused.
            batch: as in `LowerView`.
            batch_number: likewise.
            memory: of the problem.
        """


class AbstractZerothOrder(AbstractHypergradient):
    """Base class of methods that estimate the whole gradient of a problem above from values of its loss.

    The program calls `gradient` with the loss as a function of the upper parameters, in which each solution below is
    computed by `rollout`.

    Attributes:
        is_persistent: whether rollouts continue from one gradient to the next.
    """

    is_persistent: bool = False

    @abstractmethod
    def rollout(self, view: LowerView, inputs: Vector) -> tuple[Tensor, ...]:
        """Return the solution theta*_l for these inputs, without a graph.

        Args:
            view: of the problem.
            inputs: the tensors that theta*_l depends on.
        """

    @abstractmethod
    def gradient(
        self,
        loss: Callable[[Vector, Particle | None], Tensor],
        theta: Vector,
        memory: Memory,
        *,
        devices: tuple[torch.device, ...] = (),
        num_tasks: int | None = None,
        reader: str = "",
    ) -> list[Tensor]:
        """Return an estimate of the gradient of `loss` at `theta`.

        Args:
            loss: `(theta, particle) -> loss`, a 0-D tensor; with tasks one value per task, which depends on that one's
                part of theta alone. The particle goes to the rollouts.
            theta: parameters of a problem above, one tensor each.
            memory: of a problem below, the same at each gradient of the one above.
            devices: CUDA devices whose random numbers the loss draws.
            num_tasks: length of the leading task axis of theta; None without one.
            reader: the problem above: what is kept from one gradient to the next belongs to it.
        """
