"""A problem's parameters divided among ranks, and put together again."""

from typing import TYPE_CHECKING

from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.part_shards import PartShards
from mlotool.problem.problem import Problem
from mlotool.problem.shards import Shards, gathered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def divide(problem: Problem, mesh: "DeviceMesh") -> None:
    """Divide the parameters of a problem among ranks, which have the same ones; all of them call it.

    Args:
        problem: the problem.
        mesh: of the ranks.
    """
    before = dict(problem.module.named_parameters())
    patterns, key = problem.settings.shard, f"problems.{problem.name}.shard"
    if isinstance(patterns, bool):
        shards = Shards(key, problem.module, mesh)
    else:
        shards = PartShards(key, problem.module, mesh, patterns)
    state = {} if problem.optimizer is None else problem.optimizer.state_dict()
    problem.take_module(problem.module, before, shards)
    if problem.optimizer is None:
        return
    problem.optimizer.load_state_dict(shards.divided_optimizer(state, problem.optimizer))
    rules = [rule for kind, rule in RULES.items() if isinstance(problem.optimizer, kind)]
    steps_shards = any(rule.steps_shards for rule in rules)
    for group in problem.optimizer.param_groups:
        if isinstance(shards, PartShards):
            # Kernels for several tensors take no shards and whole tensors together.
            group.update({key: False for key in ("fused", "foreach") if key in group})
        if group.get("fused") and not steps_shards:
            group.update(fused=False, foreach=True)


def merge(problem: Problem, *, is_kept: bool) -> None:
    """Put the shards of a problem together again, on the CPU; all ranks call it, once.

    Args:
        problem: the problem.
        is_kept: whether this rank goes on with it.
    """
    assert problem.shards is not None
    before = dict(problem.module.named_parameters())
    state = {} if problem.optimizer is None else gathered(problem.optimizer.state_dict(), is_kept=is_kept)
    module = problem.shards.merged(is_kept=is_kept)
    if module is None:
        return
    problem.take_module(module, before, None)
    if problem.optimizer is not None:
        problem.optimizer.load_state_dict(state)
