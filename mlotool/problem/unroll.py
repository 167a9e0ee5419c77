"""What an algorithm is told of the optimizer steps of a lower problem, where it differentiates them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mlotool.problem.optimizers.rule import Hyperparameters, State, StepCotangents
from mlotool.problem.trajectory import LowerSnapshots, StepRecord

Vector = Sequence[Tensor]
Step = Callable[
    [Vector, Sequence[Tensor | None], Sequence[State], Sequence[Hyperparameters], Vector],
    tuple[list[Tensor], list[State]],
]


@dataclass(frozen=True)
class Unroll:
    """Optimizer steps of a lower problem as functions of what shapes them.

    Args:
        records: the steps that were taken, oldest first; empty where they are to be simulated.
        has_all: whether the first of the records is the first step of the unroll.
        batches: by step to simulate, those that its gradient is averaged over.
        own_loss: `(theta, inputs, batch, lower_snapshots) -> loss` of this rank's part of a batch; the snapshots
            replace lower problems that have moved on. `hypergradient/step_products.py` makes gradients of it that
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
        hyperparameters: `count -> those of the next count steps`, schedules included; one mapping a parameter.
        num_steps: how many of an unroll's steps are recorded before a problem above steps, at least.
        is_traced: whether the problem's next steps run as a trace, of which no graph can be kept.
        modules: those that the loss calls, the problem's own among them.
    """

    records: tuple[StepRecord, ...]
    has_all: bool
    batches: tuple[tuple[Any, ...], ...]
    own_loss: Callable[[Vector, Vector, Any, LowerSnapshots], Tensor]
    step: Step
    step_pullback: (
        Callable[
            [
                Vector,
                Sequence[Tensor | None],
                Sequence[State],
                Sequence[Hyperparameters],
                list[Tensor],
                list[dict[str, Tensor]],
            ],
            StepCotangents,
        ]
        | None
    )
    start: Callable[[Vector], Vector] | None
    begin: Callable[[], tuple[Vector, Sequence[State]]]
    hyperparameters: Callable[[int], list[tuple[Hyperparameters, ...]]]
    num_steps: int = 1
    replay: Step | None = None
    is_traced: bool = False
    modules: tuple[nn.Module, ...] = ()
