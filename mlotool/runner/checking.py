"""What is tried of a config before a run: each loss once, and its hypergradients beside the most exact ones."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pytorch_lightning import seed_everything

from mlotool.config import Built, build, hypergradient_options
from mlotool.core.errors import ConfigError
from mlotool.hypergradient.compare import Response, Slope, compare, solved_slope
from mlotool.program import Program, Schedule
from mlotool.runner.evaluation import Objective, make_evaluator, rehearse, rehearse_analyses, rehearse_losses
from mlotool.runner.process_settings import torch_settings

SOLUTION = "of the solution, by a converged solve"
# What the most exact hypergradient is the gradient of.
STEPS = "through the last unroll_steps steps"


@dataclass(frozen=True)
class Check:
    """What was found for one upper problem.

    Args:
        upper: its name.
        num_parameters: of the upper problem.
        lowers: by problem below it that it influences, the algorithm as text.
        ticks: of training before.
        responses: the most exact one first, then the recipe's, then the options.
        slope: against finite differences of the solved program.
        reference: what the most exact one is the gradient of.
    """

    upper: str
    num_parameters: int
    lowers: Mapping[str, str]
    ticks: int
    responses: tuple[Response, ...]
    slope: Slope
    reference: str


def rehearse_built(config: Any, built: Built) -> None:
    """Evaluate each loss, metric and analysis once on a few samples, as a run does before its first tick.

    Args:
        config: a composed config.
        built: what `build` has made of it.

    Raises:
        ConfigError: one of them fails, or does not return what it should.
    """
    splits = {} if config.evaluate is None else dict(config.evaluate.splits)
    evaluator, objective = make_evaluator(config, built), Objective.from_config(config)
    rehearse(built.program, evaluator, splits, objective, partial(rehearse_analyses, built))


def check_hypergradients(config: Any, *, ticks: int = 0) -> Iterator[Check]:
    """Yield a comparison for each problem that shapes others.

    Args:
        config: a composed config.
        ticks: of training before the comparison.

    Raises:
        ConfigError: the config cannot run, or no problem shapes another.
    """
    runner = config.runner
    with torch_settings(num_threads=runner.num_threads, deterministic=runner.deterministic, tf32=runner.tf32):
        seed_everything(config.seed, workers=True, verbose=False)
        program = build(config).program
        rehearse_losses(program)
        for problem in program.problems.values():
            problem.module.double()
            if problem.stream is not None:
                problem.stream.to(dtype=torch.float64)
        schedule = Schedule(program)
        for _ in range(ticks):
            schedule.tick()
        if program.internals.held:
            raise ConfigError(
                "baseline: found fixed, with which no hypergradient is computed; expected null. Leave it out."
            )
        uppers = [name for name in program.problems if program.graph.upper_to_lower.get(name)]
        if not uppers:
            raise ConfigError(
                f"graph.upper_to_lower: found no edges in '{config.name}', so there is no hypergradient. Try mwn."
            )
        options = hypergradient_options(config)
        for name in uppers:
            yield _check(program, name, ticks, options)


def _check(program: Program, upper: str, ticks: int, options: Mapping[str, Callable[[], Any]]) -> Check:
    batches, lowers = {}, {}
    hypergradients = [problem.hypergradient for problem in program.problems.values()]
    kinds = {STEPS if algorithm.sees_steps else SOLUTION for algorithm in hypergradients if algorithm is not None}
    for name, problem in program.problems.items():
        algorithm = problem.hypergradient
        if algorithm is not None:
            lowers[name] = repr(algorithm)
        if problem.stream is not None:
            batch, num_steps = (
                problem.stream.last(),
                problem.settings.unroll_steps * problem.settings.accumulate_batches,
            )
            batches[name] = [batch] * num_steps if algorithm is not None and algorithm.sees_steps else batch
    size = sum(tensor.numel() for tensor in program.problems[upper].theta.values())
    responses = tuple(compare(program, upper, batches, options))
    return Check(upper, size, lowers, ticks, responses, solved_slope(program, upper, batches), "; ".join(sorted(kinds)))
