"""One program on several ranks: what each of them does differently, and what all of them must agree on."""

import hashlib
import inspect
import warnings
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from pytorch_lightning import seed_everything
from torch import nn

from mlotool.config import derived_seed
from mlotool.core.arguments import require
from mlotool.core.bound_module import Slots
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.private import BatchNorm
from mlotool.core.unchanged import RANKS
from mlotool.distributed.collectives import Ranks, row_of
from mlotool.hypergradient import KFAC, Implicit
from mlotool.problem.compatibility import Case, check
from mlotool.problem.settings import ProblemSettings
from mlotool.problem.shards import runs_in_part
from mlotool.program import Program


def distribute(program: Program, ranks: Ranks, seed: int) -> None:
    """Divide among ranks what each of them has built with their mean (`Program(reduce=ranks.reduce)`).

    Batches are divided, and with them the tasks of problems that have some; the random numbers of the losses (dropout)
    are other ones on each rank, as they are for other samples.

    Args:
        program: on its device.
        ranks: one rank changes nothing.
        seed: of the run.

    Raises:
        ConfigError: the program cannot be divided, or the ranks have built different ones.
    """
    if ranks.size == 1:
        for name, problem in program.problems.items():
            if problem.settings.shard:
                warnings.warn(
                    f"problems.{name}.shard: has no effect with a single process. Set runner.devices.",
                    stacklevel=2,
                )
            if problem.parallel is not None:
                problem.parallel.distribute(0, 1)
        return
    assert not program.internals.engine.rank_mean.is_alone, "made without the mean over ranks"
    for name, problem in program.problems.items():
        algorithm = problem.hypergradient if program.graph.readers(name) else None
        parts = runs_in_part(problem.module)
        case = Case(name, problem.settings, optimizer=problem.optimizer, stream=problem.stream, num_ranks=ranks.size)
        check(replace(case, runs_in_part=parts, algorithm=algorithm if problem.num_tasks else None))
        _check_tasks(program, name, ranks)
        if parts:
            check(Case(name, ProblemSettings(), algorithm=algorithm, runs_in_part=True))
    _check_same_start(program, ranks)
    for problem in program.problems.values():
        if problem.num_tasks is not None:
            problem.divide_tasks(ranks)
    whole = set()
    for name, problem in program.problems.items():
        share = (ranks.rank, ranks.size)
        if problem.parallel is not None:
            share = problem.parallel.distribute(*share)
            read = next(iter(program.internals.solutions_read_by(name)), "")
            check(Case(name, problem.settings, problem.parallel, stream=problem.stream, read=read))
        if problem.stream is not None:
            problem.stream.divide(*share)
        if share[1] == 1:
            whole.add(name)
        if problem.settings.shard:
            problem.divide(row_of(ranks, next(iter(problem.theta.values())).device))
    if ranks.is_first:
        for text in differences(program, whole):
            warnings.warn(text, stacklevel=2)
    else:
        seed_everything(derived_seed(seed, "rank", str(ranks.rank)) % 2**32, workers=True, verbose=False)
        program.random.restart()


def _check_tasks(program: Program, name: str, ranks: Ranks) -> None:
    """Refuse tasks that ranks cannot divide, and a solution of all ranks that depends on one rank's tasks."""
    problem = program.problems[name]
    num_tasks, key = problem.num_tasks, f"problems.{name}.tasks"
    expected, advice = f"a multiple of the {ranks.size} ranks", "Change tasks and stream.batch_size, or runner.devices."
    require(num_tasks is None or num_tasks % ranks.size == 0, key, num_tasks, expected, advice)
    for lower, inputs in program.internals.solutions_below(name):
        tasks = next((other for other in inputs if program.problems[other].num_tasks is not None), "")
        if program.problems[lower].num_tasks is None:
            check(Case(lower, ProblemSettings(), reader=name, shaped_by_tasks=tasks, num_ranks=ranks.size))


def differences(program: Program, whole: Collection[str] = ()) -> Iterator[str]:
    """Yield why several ranks cannot give what one rank gives, a sentence for each cause.

    Args:
        program: the problems.
        whole: names of those whose batches are not divided.
    """
    for name, problem in program.problems.items():
        layers = {type(layer).__name__ for layer in problem.module.modules() if isinstance(layer, BatchNorm)}
        if layers - {"SyncBatchNorm"} and name not in whole:
            yield (
                f"problems.{name}.module: {', '.join(sorted(layers))} normalizes each rank's share of a batch by "
                "itself, so the run differs from one rank's. Use GroupNorm, or keep the share as large as a batch "
                "should be."
            )
        # The signature of a partial has the bound value as its default.
        setting = inspect.signature(problem.loss).parameters.get("normalize")
        if setting is not None and setting.default is True:
            yield (
                f"problems.{name}.loss: normalize=true divides by the sum of the weights in each rank's share of a "
                "batch, so the run differs from one rank's. Set normalize: false for the same result on every number "
                "of ranks."
            )
        solver = problem.hypergradient.solver if isinstance(problem.hypergradient, Implicit) else None
        if isinstance(solver, KFAC) and solver.kind != "ggn":
            yield (
                f"problems.{name}.hypergradient.solver: KFAC(kind={solver.kind!r}) averages inverses of each rank's "
                "own factors, so the run differs from one rank's. Set kind: ggn for the same result on every number "
                "of ranks."
            )


def agree_on_buffers(program: Program, ranks: Ranks) -> None:
    """Give all ranks the mean of the floating-point buffers, which each moves on its own samples."""
    if ranks.size == 1:
        return
    program.internals.sync()
    slots = []
    for problem in program.problems.values():
        if problem.parallel is not None and problem.parallel.is_divided:
            problem.parallel.agree_on_buffers()
        else:
            slots.append(Slots(problem.module, ()))
    buffers = [list(module.buffers()) for module in slots]
    means = iter(ranks.mean([buffer for members in buffers for buffer in members if buffer.is_floating_point()]))
    for module, members in zip(slots, buffers, strict=True):
        # New tensors: recorded steps, whose backward pass is still to come, have kept the old ones.
        module.put_buffers([next(means).clone() if buffer.is_floating_point() else buffer for buffer in members])


def merge_shards(program: Program, ranks: Ranks) -> None:
    """Put sharded problems together again on rank 0, on the CPU, and tasks: what comes after training is its own."""
    for problem in program.problems.values():
        if problem.shards is not None:
            problem.merge(is_kept=ranks.is_first)
        if problem.task_share is not None:
            problem.merge_tasks()


def check_agreement(program: Program, ranks: Ranks, tick: int) -> None:
    """Raise RunError where the parameters are no longer the same on all ranks.

    Args:
        program: the problems.
        ranks: all of them.
        tick: the last one done, for the message.

    Cost: a pass over the parameters, and a few bytes from each rank; for a round, not for a tick.
    """
    if ranks.size == 1:
        return
    program.internals.sync()
    norms = {
        name: float(torch.stack(torch._foreach_norm(list(problem.constants().values()))).double().norm())
        for name, problem in program.problems.items()
        # Of shards and tasks there are no copies that could differ.
        if problem.shards is None and problem.task_share is None
    }
    norms_by_rank = ranks.gather(norms)
    for name in norms:
        values = [on_rank[name] for on_rank in norms_by_rank]
        if max(values) - min(values) > RANKS * max(values):
            raise RunError(
                f"The parameters of problem '{name}' are no longer the same on all ranks after tick {tick}; expected "
                "equal ones. Look for code in its loss that changes parameters, or depends on the rank or the time."
            )


def _check_same_start(program: Program, ranks: Ranks) -> None:
    for name, problem in program.problems.items():
        if len(set(ranks.gather(_digest(problem.module)))) > 1:
            raise ConfigError(
                f"problems.{name}.module: the ranks have built it with different parameters. Give all ranks the same "
                "config; in a script, seed torch before modules and data are made: torch.manual_seed(0)."
            )


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for key, tensor in module.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
