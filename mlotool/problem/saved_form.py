"""What a problem's saved state has to be: it may come from anybody's file, and torch's kernels look at no shape.

What kernels read is compared with what the problem has now, before anything of it is changed: momentum and recorded
steps with the parameters that they were made of. Whatever else is wrong is an error of what takes it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Adafactor, Optimizer

from mlotool.core.arguments import is_number, is_whole, require
from mlotool.core.messages import shown
from mlotool.core.plain_state import (
    ADVICE,
    MAX_COUNT,
    check_count,
    check_form,
    check_list,
    check_mapping,
    check_random_state,
    check_tensor,
)
from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.optimizers.rule import COUNTER

if TYPE_CHECKING:
    from mlotool.problem.problem import Problem

_LEARNED = ("module", "optimizer", "scheduler", "loss_scale", "num_steps")


def check_learned(key: str, state: Any, problem: "Problem") -> None:
    """Refuse a saved state of what a problem's steps change.

    Args:
        key: of the state, for the message.
        state: what `Problem.snapshot` should have returned.
        problem: whose it should be.

    Raises:
        ConfigError: it is of another form.
    """
    check_mapping(key, state, _LEARNED)
    check_mapping(f"{key}.module", state["module"])
    # Shards are parts of what is saved, and torch compares them; a lazy parameter takes the shape of what it loads.
    if problem.shards is None:
        named = problem.module.state_dict().items()
        tensors = {name: value for name, value in named if isinstance(value, Tensor) and not is_lazy(value)}
        check_form(f"{key}.module", state["module"], tensors)
    if problem.optimizer is not None:
        _check_optimizer(f"{key}.optimizer", state["optimizer"], problem.optimizer)
    else:
        require(state["optimizer"] is None, f"{key}.optimizer", state["optimizer"], "null", ADVICE)
    if type(problem.scheduler).__module__.startswith("torch."):
        # Functions of the user's may keep what grows.
        own = {name: value for name, value in problem.scheduler.state_dict().items() if name != "lr_lambdas"}
        check_form(f"{key}.scheduler", state["scheduler"], own)
    if problem.loss_scale is not None:
        check_form(f"{key}.loss_scale", state["loss_scale"], problem.loss_scale.state_dict())
    check_count(f"{key}.num_steps", state["num_steps"])


def check_whole(key: str, state: Any, problem: "Problem", others: Mapping[str, "Problem"]) -> None:
    """Refuse a saved state of a problem: also of its stream and its recorded steps.

    Args:
        key: of the state, for the message.
        state: what `Problem.state_dict` should have returned.
        problem: whose it should be.
        others: the problems that it may have read, by name.

    Raises:
        ConfigError: it is of another form.
    """
    check_learned(key, state, problem)
    check_mapping(key, state, ("stream", "trajectory"))
    if problem.stream is not None and state["stream"]:
        # A copy that goes there refuses what is no place; one that follows another stream has none.
        problem.stream.at(state["stream"])
    check_form(f"{key}.trajectory", state["trajectory"], {"num_taken": 0, "largest_norm": math.inf, "steps": None})
    _check_steps(f"{key}.trajectory.steps", state["trajectory"]["steps"], problem, others)


def _check_optimizer(key: str, saved: Any, optimizer: Optimizer) -> None:
    check_mapping(key, saved, ("state", "param_groups"))
    own = optimizer.state_dict()["param_groups"]
    check_list(f"{key}.param_groups", saved["param_groups"], len(own))
    for number, (group, mine) in enumerate(zip(saved["param_groups"], own, strict=True)):
        place = f"{key}.param_groups.{number}"
        # A scheduler adds its own start.
        check_form(place, group, {name: value for name, value in mine.items() if name not in ("params", "initial_lr")})
        is_right, numbers = group.get("params") == mine["params"], f"its parameters' numbers, {shown(mine['params'])}"
        require(is_right, f"{place}.params", group.get("params"), numbers, ADVICE)
    check_mapping(f"{key}.state", saved["state"])
    groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in saved["state"].items():
        # Others than torch's may keep something under names.
        if _is_torchs(optimizer) or is_whole(number):
            is_right, place = is_whole(number, 0) and number < len(groups), f"{key}.state.{number}"
            require(is_right, place, number, f"the number of a parameter, below {len(groups)}", ADVICE)
            parameter, group = groups[number]
            _check_kept(place, kept, parameter, group, optimizer)


def _check_kept(key: str, kept: Any, parameter: Tensor, group: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse what an optimizer has kept of a parameter where it is not in its shape, or no single number.

    Optimizers of others than torch keep what they like, and no kernel of torch's takes it, unless they ask for the
    fused one; LBFGS and Adafactor keep what is not in a parameter's shape.
    """
    check_mapping(key, kept)
    if not group.get("fused") and (not _is_torchs(optimizer) or isinstance(optimizer, LBFGS | Adafactor)):
        return
    rule = RULES.get(type(optimizer))
    # One that counts its steps keeps all or nothing.
    required = () if rule is None or COUNTER not in rule.state else rule.names(group)
    if kept:
        check_mapping(key, kept, required)
    for name, value in kept.items():
        place = f"{key}.{name}"
        is_single = is_number(value) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex())
        if name == COUNTER:
            is_right = is_single and 0 <= float(value) < MAX_COUNT
            require(is_right, place, value, "the count of its steps", ADVICE)
        elif (rule is not None and name in rule.vectors) or (isinstance(value, Tensor) and value.dim() > 0):
            if value is not None or name in required:
                check_tensor(place, value, parameter)
        else:
            require(value is None or is_single, place, value, "a tensor or a number", ADVICE)


def _check_steps(key: str, steps: Any, problem: "Problem", others: Mapping[str, "Problem"]) -> None:
    check_list(key, steps)
    own, optimizer = problem.own, problem.optimizer
    buffers = dict(problem.module.named_buffers())
    groups = {} if optimizer is None else {id(x): group for group in optimizer.param_groups for x in group["params"]}
    for number, step in enumerate(steps):
        place = f"{key}.{number}"
        check_mapping(place, step, ("theta", "state", "settings", "random", "readings", "gradient", "buffers"))
        if problem.shards is None:
            for name in ("theta", "gradient"):
                _check_vector(f"{place}.{name}", step[name], own, may_lack=name == "gradient")
            # Those of a step that is taken again have none.
            check_list(f"{place}.state", step["state"], len(own) if step["state"] else 0)
            for index, kept in enumerate(step["state"]):
                if optimizer is not None and id(own[index]) in groups:
                    _check_kept(f"{place}.state.{index}", kept, own[index], groups[id(own[index])], optimizer)
        for index, state in enumerate(step["random"]):
            check_random_state(f"{place}.random.{index}", state)
        for index, found in enumerate(step["buffers"]):
            known = {name: buffers[name] for name, value in found.items() if value is not None}
            check_form(f"{place}.buffers.{index}", found, known)
        for name, reading in step["readings"].items():
            _check_reading(f"{place}.readings.{name}", name, reading, others)


def _check_reading(key: str, name: str, reading: Any, others: Mapping[str, "Problem"]) -> None:
    require(name in others, key, name, f"one of {', '.join(others)}", ADVICE)
    problem = others[name]
    check_mapping(key, reading, ("theta", "position", "steps", "has_all"))
    if problem.shards is None:
        _check_vector(f"{key}.theta", reading["theta"], problem.own, may_lack=False)
    _check_steps(f"{key}.steps", reading["steps"], problem, others)


def _check_vector(key: str, found: Any, own: Sequence[Tensor], *, may_lack: bool) -> None:
    """Refuse what is neither nothing nor a tensor a parameter; a gradient may lack some."""
    if found is None or found == []:
        return
    check_list(key, found, len(own))
    for number, (value, parameter) in enumerate(zip(found, own, strict=True)):
        if value is not None or not may_lack:
            check_tensor(f"{key}.{number}", value, parameter)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
