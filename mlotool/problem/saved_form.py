"""What a problem's saved state has to be: it may come from anybody's file, and torch's kernels look at no shape.

What kernels read is compared with what the problem has now, before anything of it is changed: momentum and recorded
steps with the parameters that they were made of. Whatever else is wrong is an error of what takes it.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Adafactor, Optimizer

from mlotool.core import plain_state
from mlotool.core.arguments import is_number, is_whole, require
from mlotool.core.plain_state import ADVICE, check_form, check_list, check_mapping
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
    if type(problem.scheduler).__module__.startswith("torch."):
        # Functions of the user's may keep what grows.
        own = {name: value for name, value in problem.scheduler.state_dict().items() if name != "lr_lambdas"}
        check_form(f"{key}.scheduler", state["scheduler"], own)
    if problem.optimizer_step.loss_scale is not None:
        check_form(f"{key}.loss_scale", state["loss_scale"], problem.optimizer_step.loss_scale.state_dict())
    plain_state.check_count(f"{key}.num_steps", state["num_steps"])


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
    check_form(f"{key}.trajectory", state["trajectory"], {"num_taken": 0, "largest_norm": float("inf"), "steps": None})
    _check_steps(f"{key}.trajectory.steps", state["trajectory"]["steps"], problem, others)


def _check_optimizer(key: str, saved: Any, optimizer: Optimizer) -> None:
    check_mapping(key, saved, ("state", "param_groups"))
    own = optimizer.state_dict()["param_groups"]
    check_list(f"{key}.param_groups", saved["param_groups"], len(own))
    for number, (group, mine) in enumerate(zip(saved["param_groups"], own, strict=True)):
        place = f"{key}.param_groups.{number}"
        # A scheduler adds its own start.
        check_form(place, group, {name: value for name, value in mine.items() if name != "initial_lr"})
        require(group["params"] == mine["params"], f"{place}.params", group["params"], f"{mine['params']}", ADVICE)
    check_mapping(f"{key}.state", saved["state"])
    groups = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for number, kept in saved["state"].items():
        # Others than torch's may keep something under names.
        if _is_torchs(optimizer) or is_whole(number):
            is_right, place = is_whole(number, 0) and number < len(groups), f"{key}.state.{number}"
            require(is_right, place, number, f"the number of a parameter, below {len(groups)}", ADVICE)
            parameter, settings = groups[number]
            _check_kept(place, kept, parameter, settings, optimizer)


def _check_kept(key: str, kept: Any, parameter: Tensor, group: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Refuse what an optimizer has kept of a parameter where it is not in its shape, or no single number.

    Optimizers of others than torch keep what they like, and no kernel of torch's takes it, unless they ask for the
    fused one; LBFGS and Adafactor keep what is not in a parameter's shape.
    """
    rule = RULES.get(type(optimizer))
    # One that counts its steps keeps all or nothing.
    required = rule.names(group) if rule is not None and COUNTER in rule.state and kept else ()
    check_mapping(key, kept, required)
    if not group.get("fused") and (not _is_torchs(optimizer) or isinstance(optimizer, LBFGS | Adafactor)):
        return
    for name, value in kept.items():
        place = f"{key}.{name}"
        is_vector = (rule is not None and name in rule.vectors) or (isinstance(value, Tensor) and value.dim() > 0)
        if is_vector and name != COUNTER:
            if value is not None or name in required:
                check_form(place, value, parameter)
            continue
        is_single = is_number(value) or (isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex())
        is_right = is_single or (value is None and name != COUNTER)
        is_right = is_right and (name != COUNTER or 0 <= float(value) < plain_state.MAX_COUNT)
        require(is_right, place, value, "a number" if name != COUNTER else "the count of its steps", ADVICE)


def _check_steps(key: str, steps: Any, problem: "Problem", others: Mapping[str, "Problem"]) -> None:
    check_list(key, steps)
    own, optimizer, buffers = problem.own, problem.optimizer, dict(problem.module.named_buffers())
    groups = {} if optimizer is None else {id(x): group for group in optimizer.param_groups for x in group["params"]}
    for number, step in enumerate(steps):
        place = f"{key}.{number}"
        check_mapping(place, step, ("theta", "state", "settings", "random", "readings", "gradient", "buffers"))
        if problem.shards is None:
            check_form(f"{place}.theta", step["theta"], own if step["theta"] else None)
            # An unused parameter has no gradient.
            given = [*(step["gradient"] or ()), *own][: len(own)]
            present = [None if value is None else like for value, like in zip(given, own, strict=True)]
            check_form(f"{place}.gradient", step["gradient"], present if step["gradient"] else None)
            # Those of a step that is taken again have none.
            check_list(f"{place}.state", step["state"], len(own) if step["state"] else 0)
            for index, (kept, parameter) in enumerate(zip(step["state"], own, strict=False)):
                if optimizer is not None and id(parameter) in groups:
                    _check_kept(f"{place}.state.{index}", kept, parameter, groups[id(parameter)], optimizer)
        for index, state in enumerate(step["random"]):
            plain_state.check_random_state(f"{place}.random.{index}", state)
        for index, saved in enumerate(step["buffers"]):
            there = {name: buffers[name] for name in saved if saved[name] is not None}
            check_form(f"{place}.buffers.{index}", saved, there)
        for name, reading in step["readings"].items():
            place_of = f"{place}.readings.{name}"
            require(name in others, place_of, name, f"one of {', '.join(others)}", ADVICE)
            check_mapping(place_of, reading, ("theta", "position", "steps", "has_all"))
            if others[name].shards is None:
                check_form(f"{place_of}.theta", reading["theta"], others[name].own if reading["theta"] else None)
            _check_steps(f"{place_of}.steps", reading["steps"], others[name], others)


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
