"""How the total gradient of each problem is taken."""

from mlotool.problem.interface import AbstractZerothOrder
from mlotool.program.engine import Engine
from mlotool.program.training_gradient import AbstractGradient, Differentiated, Estimated, LayerParallel, Sharded


def gradient_of(number: int, engine: Engine, zeroth_order: AbstractZerothOrder | None) -> AbstractGradient:
    """Return how the total gradient of a problem is taken.

    Args:
        number: of the problem.
        engine: of the program.
        zeroth_order: what estimates it; None where it is differentiated.
    """
    problem = engine.problems[number]
    if zeroth_order is not None:
        return Estimated(number, engine, zeroth_order)
    if problem.parallel is not None:
        return LayerParallel(number, engine, problem.parallel)
    plan = Differentiated(number, engine)
    return Sharded(number, engine, plan) if problem.settings.shard else plan
