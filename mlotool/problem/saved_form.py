"""What a problem's saved state has to be: it may come from anybody's file, and torch's kernels look at no shape.

Everything is compared with what the problem has now, before anything of it is changed. What a step has made (momentum,
recorded steps) is compared with the parameters that it was made of.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import LBFGS, Adafactor, Optimizer

from mlotool.core.arguments import is_number, is_whole, require
from mlotool.core.errors import ConfigError
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
    check_tensors,
)
from mlotool.problem.arguments import check_module_state
from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.optimizers.rule import COUNTER

if TYPE_CHECKING:
    from mlotool.problem.problem import Problem

_LEARNED = ("module", "optimizer", "scheduler", "num_steps")


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
    # Shards are parts of what is saved, and torch compares them.
    if problem.shards is None:
        check_module_state(key, state["module"], problem.module)
    if (state["optimizer"] is None) != (problem.optimizer is None):
        raise ConfigError(
            f"{key}: found an optimizer in one alone of the state and the problem; expected what state_dict() of the "
            "same problems has returned."
        )
    if problem.optimizer is not None:
        _check_optimizer(f"{key}.optimizer", state["optimizer"], problem.optimizer)
    _check_scheduler(f"{key}.scheduler", state["scheduler"], problem.scheduler)
    if problem.loss_scale is not None:
        check_form(f"{key}.loss_scale", state.get("loss_scale"), problem.loss_scale.state_dict())
        require(state["loss_scale"]["value"] > 0, f"{key}.loss_scale.value", state["loss_scale"]["value"], "a factor")
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
    check_mapping(key, state, (*_LEARNED, "stream", "trajectory"))
    check_learned(key, state, problem)
    _check_position(f"{key}.stream", state["stream"], problem.stream)
    trajectory = state["trajectory"]
    check_mapping(f"{key}.trajectory", trajectory, ("num_taken", "steps"))
    check_count(f"{key}.trajectory.num_taken", trajectory["num_taken"])
    largest = trajectory.get("largest_norm", math.inf)
    require(is_number(largest) and largest >= 0, f"{key}.trajectory.largest_norm", largest, "a norm", ADVICE)
    _check_steps(f"{key}.trajectory.steps", trajectory["steps"], problem, others)


def _check_position(key: str, position: Any, stream: Any) -> None:
    if stream is not None:
        check_mapping(key, position)
        # A copy that goes there refuses what is no place; one that follows another stream has none.
        if position and hasattr(stream, "at"):
            stream.at(position)


def _check_optimizer(key: str, saved: Any, optimizer: Optimizer) -> None:
    own = optimizer.state_dict()
    check_mapping(key, saved, ("state", "param_groups"))
    check_list(f"{key}.param_groups", saved["param_groups"], len(own["param_groups"]))
    for number, (group, mine) in enumerate(zip(saved["param_groups"], own["param_groups"], strict=True)):
        place = f"{key}.param_groups.{number}"
        check_mapping(place, group, ("params",))
        numbers, expected = group["params"], f"the numbers of its parameters, {shown(mine['params'])}"
        require(isinstance(numbers, list) and numbers == mine["params"], f"{place}.params", numbers, expected, ADVICE)
        lacking = sorted(mine.keys() - group.keys() - {"initial_lr"})
        if lacking:
            raise ConfigError(
                f"{place}: found the state of another optimizer, without '{lacking[0]}'; expected that of "
                f"{type(optimizer).__name__}. Load it into a problem with the optimizer that it was saved by."
            )
        for name, value in mine.items():
            if name in group:
                check_form(f"{place}.{name}", group[name], value)
    check_mapping(f"{key}.state", saved["state"])
    groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in saved["state"].items():
        place = f"{key}.state.{number}"
        # Others than torch's may keep something under names.
        if _is_torchs(optimizer) or is_whole(number):
            is_right = is_whole(number, 0) and number < len(groups)
            require(is_right, place, number, f"the number of a parameter, below {len(groups)}", ADVICE)
            parameter, group = groups[number]
            check_kept(place, kept, parameter, group, optimizer)


def check_kept(key: str, kept: Any, parameter: Tensor, group: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse what an optimizer has kept of a parameter where it is not in its shape, or no single number.

    Optimizers of others than torch keep what they like, and no kernel of torch's takes it, unless they ask for the
    fused one; LBFGS and Adafactor keep what is not in a parameter's shape.

    Args:
        key: its place, for the message.
        kept: the saved state of one parameter.
        parameter: the parameter.
        group: the optimizer's, in which it is.
        optimizer: steps it.

    Raises:
        ConfigError: it is of another form.
    """
    check_mapping(key, kept)
    rule = RULES.get(type(optimizer))
    names = () if rule is None else rule.vectors
    # One that counts its steps keeps all or nothing.
    required = () if rule is None or COUNTER not in rule.state else rule.names(group)
    if not group.get("fused") and (not _is_torchs(optimizer) or isinstance(optimizer, LBFGS | Adafactor)):
        return
    for name, value in kept.items():
        place = f"{key}.{name}"
        is_single = is_number(value) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex())
        if name == COUNTER:
            is_right = is_single and 0 <= float(value) < MAX_COUNT
            require(is_right, place, value, "the count of its steps", ADVICE)
        elif name in names or (isinstance(value, Tensor) and value.dim() > 0):
            if value is not None or name in required:
                check_tensor(place, value, parameter)
        else:
            require(value is None or is_single, place, value, "a tensor or a number", ADVICE)
    if kept and required:
        check_mapping(key, kept, required)


def _check_scheduler(key: str, saved: Any, scheduler: Any) -> None:
    if scheduler is None or not hasattr(scheduler, "state_dict"):
        return
    check_mapping(key, saved)
    for name in saved:
        # torch puts each value into the scheduler under its name.
        is_right = isinstance(name, str) and not callable(getattr(scheduler, name, None))
        require(is_right, key, saved, f"nothing by the name '{name}', which is one of its functions", ADVICE)
    if type(scheduler).__module__.startswith("torch."):
        # Functions of the user's may keep what grows.
        own = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
        check_form(key, saved, own)


def _check_steps(key: str, steps: Any, problem: "Problem", others: Mapping[str, "Problem"]) -> None:
    check_list(key, steps)
    own, optimizer = problem.own, problem.optimizer
    settings = () if optimizer is None else problem.optimizer_step.hyperparameters()
    buffers = dict(problem.module.named_buffers())
    groups = {} if optimizer is None else {id(x): group for group in optimizer.param_groups for x in group["params"]}
    for number, step in enumerate(steps):
        place = f"{key}.{number}"
        check_mapping(place, step, ("theta", "state", "settings", "random", "readings"))
        for name, length in (("theta", None), ("state", None), ("settings", len(settings))):
            check_list(f"{place}.{name}", step[name], length)
        if problem.shards is None:
            # Those of a step that is taken again have none.
            for name in ("theta", "gradient"):
                _check_vector(f"{place}.{name}", step.get(name), own)
            check_list(f"{place}.state", step["state"], len(own) if step["state"] else 0)
            for index, kept in enumerate(step["state"]):
                if optimizer is not None and id(own[index]) in groups:
                    check_kept(f"{place}.state.{index}", kept, own[index], groups[id(own[index])], optimizer)
        for index, (found, mine) in enumerate(zip(step["settings"], settings, strict=True)):
            check_mapping(f"{place}.settings.{index}", found, tuple(mine))
            # Another problem may give a tensor for a number.
            numbers = {name: value for name, value in mine.items() if not isinstance(found[name], Tensor)}
            check_form(f"{place}.settings.{index}", found, numbers)
        check_list(f"{place}.random", step["random"])
        for index, state in enumerate(step["random"]):
            check_random_state(f"{place}.random.{index}", state)
        saved = step.get("buffers", ())
        check_list(f"{place}.buffers", saved, len(step["random"]) if saved else 0)
        for index, found in enumerate(saved):
            check_mapping(f"{place}.buffers.{index}", found)
            for name, value in found.items():
                if value is not None:
                    require(name in buffers, f"{place}.buffers.{index}", name, "names of buffers", ADVICE)
                    check_tensor(f"{place}.buffers.{index}.{name}", value, buffers[name])
        check_mapping(f"{place}.readings", step["readings"])
        for name, reading in step["readings"].items():
            _check_reading(f"{place}.readings.{name}", name, reading, others)


def _check_reading(key: str, name: str, reading: Any, others: Mapping[str, "Problem"]) -> None:
    require(name in others, key, name, f"one of {', '.join(others)}", ADVICE)
    problem = others[name]
    check_mapping(key, reading, ("theta", "position", "steps", "has_all"))
    theta = reading["theta"]
    if problem.shards is None:
        # Older checkpoints have them by name.
        check_tensors(f"{key}.theta", list(theta.values()) if isinstance(theta, Mapping) else theta, problem.own)
    check_form(f"{key}.has_all", reading["has_all"], True)
    if reading["position"] is not None:
        require(problem.stream is not None, f"{key}.position", reading["position"], "null", ADVICE)
        check_mapping(f"{key}.position", reading["position"])
        problem.stream.at(reading["position"])  # type: ignore[union-attr]
    _check_steps(f"{key}.steps", reading["steps"], problem, others)


def _check_vector(key: str, found: Any, own: Sequence[Tensor]) -> None:
    """Refuse what is neither nothing nor a tensor a parameter, of which a gradient may lack some."""
    if found is None or found == []:
        return
    check_list(key, found, len(own))
    for number, (value, parameter) in enumerate(zip(found, own, strict=True)):
        if value is not None or key.endswith("theta"):
            check_tensor(f"{key}.{number}", value, parameter)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
