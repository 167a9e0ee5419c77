"""Every loss, metric and analysis once, on one batch, before anything is written: what cannot work is said at once.

Nothing is left of it: parameters and buffers are copies, random numbers are drawn again, streams only look ahead.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parameter import is_lazy

from mlotool.config.schema import is_plain_name
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.unchanged import snapshot
from mlotool.core.user_code import WrongResultError, note, user_code
from mlotool.layerparallel import MultigridResidual
from mlotool.problem.batches import Share
from mlotool.program import Problem, Program, Stream
from mlotool.runner.evaluation import Evaluator, check_unchanged
from mlotool.runner.plan import Objective
from mlotool.runner.random_state import random_state, restore_random_state
from mlotool.runner.values import check_start, related, unsound_path

RESERVED = ("loss", "step", "lr", "gradient_norm", "hypergradient_norm")
"""What is logged of a problem beside the metrics of its loss."""

_NOT_REPEATABLE = (
    "problems.{name}.stream: a sample was another one when it was read again with the same random numbers; expected "
    "one that depends on its index and on the global generators of torch, numpy and Python alone. After resume=, or "
    "with other num_workers, batches will be others. Seed a generator of the data set's own inside __getitem__, by "
    "np.random.default_rng(torch.initial_seed()), and keep nothing from one sample to the next."
)


def rehearse(
    program: Program,
    evaluator: Evaluator | None,
    splits: Iterable[str],
    objective: Objective,
    analyse: Callable[[], None],
) -> None:
    """Evaluate each loss on its first batch, and the metrics and analyses on a few samples of each split.

    Left out are losses with a part that can only be evaluated in a step: a sharded module, and one whose parameters get
    their shape in the first call.

    Args:
        program: that is about to run; its streams have not moved.
        evaluator: of the metrics.
        splits: those that it will evaluate.
        objective: has to be among what is evaluated.
        analyse: rehearses what is to be analysed at the end.

    Raises:
        ConfigError: one of them fails, or does not return what it should.

    Cost: a forward pass of each problem, and a small one a split; a sample of each stream is read twice.
    """
    problems = program.problems
    for name, problem in problems.items():
        program.start(name)
        if _can_rehearse(problem):
            check_start(name, problem)
    with user_code(ConfigError):
        batches = {
            name: None if problem.stream is None else problem.stream.peek() for name, problem in problems.items()
        }
        for name, problem in problems.items():
            if isinstance(problem.stream, Stream) and not problem.stream.is_repeatable():
                warnings.warn(_NOT_REPEATABLE.format(name=name), stacklevel=2)
        with _traceless(program):
            for name, batch in batches.items():
                players = {name, *(role.problem for role in problems[name].roles.values())}
                if all(_can_rehearse(problems[player]) for player in players):
                    _rehearse_loss(program, name, batch)
            if evaluator is not None and all(_can_rehearse(problem) for problem in problems.values()):
                for split in splits:
                    keys = evaluator.rehearse(split)
                    if (objective.key or "").startswith(f"{split}/"):
                        objective.check_logged(keys)
            if all(_can_rehearse(problem) for problem in problems.values()):
                analyse()


def _can_rehearse(problem: Problem) -> bool:
    return problem.shards is None and not any(map(is_lazy, problem.module.parameters()))


def _rehearse_loss(program: Program, name: str, shared: Any) -> None:
    batch, _ = Share.opened(shared)
    before = snapshot(batch)
    output = program.rehearse(name, shared)
    try:
        # A step may evaluate a loss many times, and other problems may read its batch.
        check_unchanged(before, batch, "its loss and a batch")
        _check_metrics(output)
        _check_gradient(program, name, output)
        _check_finite(program, name, output)
    # Metrics may be a function of the user's, which is called here.
    except Exception as error:
        note(error, lambda: program.call_of(name, batch))
        raise


def _check_metrics(output: LossOutput) -> None:
    for name in output.metrics:
        if not is_plain_name(name) or name in RESERVED:
            wanted = f"letters, digits, '-', '_' and '.', and none of {', '.join(RESERVED)}, which are logged too"
            raise WrongResultError(f"a metric with the name {name!r}", wanted, "Rename it.")


def _check_gradient(program: Program, name: str, output: LossOutput) -> None:
    if output.loss.requires_grad or program.solutions_read_by(name) or program.is_zeroth_order(name):
        return
    raise WrongResultError(
        "a tensor without a gradient",
        f"a loss that depends on the parameters of '{name}'",
        f"Give it a role that plays '{name}', or an edge through which '{name}' shapes what it reads; what went "
        "through detach(), no_grad, item(), numpy(), argmax or a comparison has no gradient.",
    )


def _check_finite(program: Program, name: str, output: LossOutput) -> None:
    """Refuse a loss that is not finite in the first step: no step has made it so."""
    if name not in program.graph.leaves(program.problems) or program.problems[name].settings.precision == "fp16":
        return
    if not math.isfinite(value := float(output.loss)):
        advice = (
            "Look for samples that are not finite, for log, sqrt or a division at zero, and at the initial parameters."
        )
        told = [unsound_path(program.problems[source]) for source in related(name, program.problems)]
        raise WrongResultError(
            f"{value} before the first step", "a finite number", " ".join([*filter(None, told), advice])
        )


@contextmanager
def _traceless(program: Program) -> Iterator[None]:
    """Draw random numbers again afterwards, give no warning twice, leave compiling and parallel solves to the run."""
    problems = list(program.problems.values())
    random, of_program = random_state(), program.random.state_dict()
    parts = (part for problem in problems for part in problem.module.modules())
    parallel = [(part, part.is_serial) for part in parts if isinstance(part, MultigridResidual)]
    compiled = [(problem, problem.compiled) for problem in problems]
    try:
        for problem in problems:
            problem.compiled = None
        for part, _ in parallel:
            part.serial()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Of the rehearsal itself.
            warnings.filterwarnings("default", message=r"problems\.\w+\.loss: the gradient of .* is exactly 0 at its f")
            # Said once, and known from then on.
            warnings.filterwarnings("default", message=r"problems\.\w+\.tasks: torch\.vmap cannot evaluate all tasks")
            yield
    finally:
        for problem, call in compiled:
            problem.compiled = call
        for part, flag in parallel:
            part.serial(flag)
        restore_random_state(random)
        program.random.load_state_dict(of_program)
