"""What is looked up in the table of what cannot go together."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlotool.problem.settings import ProblemSettings

if TYPE_CHECKING:
    from mlotool.problem.interface import AbstractHypergradient
    from mlotool.problem.parallel import AbstractParallel


@dataclass(frozen=True)
class Case:
    """One problem with what it is combined with. What is not known yet is left out, and no row holds for it.

    Args:
        name: the problem whose setting would have to change.
        settings: its settings.
        parallel: its layer-parallel training.
        optimizer: its optimizer.
        scheduler: its learning-rate scheduler.
        stream: its stream.
        algorithm: by which a gradient passes through a solution.
        solution: the problem whose solution that is; "" is this one.
        reader: the problem whose gradient passes through it.
        is_nested: that problem eliminates lower solutions inside its own stationarity.
        is_differentiated: a nested problem above needs the derivative of its pullback.
        read: a problem whose solution this problem's gradient passes through.
        num_ranks: processes that share each batch.
        runs_in_part: each call of its module runs a part of it, on several ranks.
        is_traced: its gradient is to run as a traced program.
        is_fused: its gradients are to run as a program of several runs.
        module: what it trains.
    """

    name: str
    settings: ProblemSettings
    parallel: "AbstractParallel | None" = None
    optimizer: Any = None
    scheduler: Any = None
    stream: Any = None
    algorithm: "AbstractHypergradient | None" = None
    solution: str = ""
    reader: str = ""
    is_nested: bool = False
    is_differentiated: bool = False
    read: str = ""
    num_ranks: int = 1
    runs_in_part: bool = False
    is_traced: bool = False
    is_fused: bool = False
    module: Any = None
