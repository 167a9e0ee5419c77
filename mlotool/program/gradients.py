"""How the total gradient of each problem is taken."""

from mlotool.problem.interface import identity_reduce
from mlotool.problem.zeroth_order import AbstractZerothOrder
from mlotool.program.engine import Engine
from mlotool.program.traced_gradient import Traced, can_be_traced
from mlotool.program.training_gradient import AbstractGradient, Differentiated, Estimated, LayerParallel, Sharded


def gradient_of(
    number: int, engine: Engine, zeroth_order: AbstractZerothOrder | None, trace: tuple[str, int] | None
) -> AbstractGradient:
    """Return how the total gradient of a problem is taken.

    Args:
        number: of the problem.
        engine: of the program.
        zeroth_order: what estimates it; None where it is differentiated.
        trace: the backend of its training steps' trace, where there can be one, and the step at which it begins; None
            leaves them to the plan.
    """
    problem = engine.problems[number]
    if zeroth_order is not None:
        return Estimated(number, engine, zeroth_order)
    if problem.parallel is not None:
        return LayerParallel(number, engine, problem.parallel)
    plan = Differentiated(number, engine)
    if problem.settings.shard:
        return Sharded(number, engine, plan)
    if trace is None or engine.reduce is not identity_reduce or not can_be_traced(number, engine):
        return plan
    return Traced(number, engine, plan, *trace)
