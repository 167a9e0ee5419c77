"""What a user's code does beside the steps of a program: rows of a table, each of which lets a case do one thing."""

import copy
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.user_code.programs import Case

MODES = ("python", "auto", "fused", "resumed")
NOT_RESUMED = MODES[:3]
"""For what is in no checkpoint, and what the user's code would not do again."""
COUNTED = ("python", "fused")
"""For losses that count their calls."""

SetUp = Callable[[Case], Any]
Act = Callable[[Case, nn.Parameter], Any]
"""Does something to a case, or to a parameter of it that was drawn."""


@dataclass(frozen=True)
class Action:
    """One row.

    Args:
        set_up: lets a case do it.
        modes: in which it makes sense.
        levels: of programs in which it has one meaning.
        norm: a layer that the network needs for it.
    """

    set_up: SetUp
    modes: Sequence[str] = MODES
    levels: Sequence[int] = (1, 2)
    norm: str = ""

    def suits(self, mode: str, *, is_bilevel: bool) -> bool:
        return mode in self.modes and 1 + is_bilevel in self.levels


def once(act: Act) -> SetUp:
    """Do something at some tick."""

    def set_up(case: Case) -> None:
        parameter = case.parameter()
        case.once(lambda: act(case, parameter()))

    return set_up


def at_some(act: Act) -> SetUp:
    """Do something at some tick, and perhaps again and again from then on."""

    def set_up(case: Case) -> None:
        parameter, tick, every = case.parameter(), case.tick(), case.chance.choice((1, 7, 10_000))
        case.each(lambda now: act(case, parameter()) if now >= tick and (now - tick) % every == 0 else None)

    return set_up


def during(on: Act, off: Act) -> SetUp:
    """Do something at some tick, and perhaps undo it at a later one."""

    def set_up(case: Case) -> None:
        parameter = case.parameter()
        case.during(lambda: (on(case, parameter()), lambda: off(case, parameter()))[1])

    return set_up


def hooked(register: Act) -> SetUp:
    """Register a hook at some tick, and perhaps remove it at a later one."""

    def set_up(case: Case) -> None:
        parameter = case.parameter()
        case.during(lambda: register(case, parameter()).remove)

    return set_up


def set_to(value: Any, name: str) -> SetUp:
    """Set an attribute of the second layer at some tick, and perhaps back at a later one."""

    def set_up(case: Case) -> None:
        before = getattr(case.module[1], name)
        case.during(lambda: (setattr(case.module[1], name, value), lambda: setattr(case.module[1], name, before))[1])

    return set_up


def moved(case: Case, put: Callable[[float], Any]) -> None:
    """Let a number change at some tick, or rise a little at each, as by a counter."""
    if case.chance.random() < 0.5:
        case.during(lambda: (put(1.5), lambda: put(1.0))[1])
    else:
        case.each(lambda now: put(1 + 2e-4 * now), again=True)


def bounded(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.data.clamp_(-0.3, 0.3)


def halved(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                each.grad.mul_(0.5)


def clipped(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def of(case: Case, hook: Callable[[Any], Any]) -> Callable[..., Any]:
    """Let a hook for all optimizers see that of a case alone."""
    return lambda optimizer, *_: hook(optimizer) if optimizer is case.optimizer else None


def first(case: Case, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Let a hook for all modules see the first layer of a case alone."""
    return lambda module, *given: hook(*given) if module is case.module[0] else None


def step_replaced(case: Case, parameter: nn.Parameter) -> None:
    optimizer, step = case.optimizer, case.optimizer.step

    def own(*given: Any, **named: Any) -> None:
        step(*given, **named)
        bounded(optimizer)

    optimizer.step = own


ACTIONS: dict[str, Action] = {
    "step_post_hook": Action(hooked(lambda case, p: case.optimizer.register_step_post_hook(bounded))),
    "global_step_pre_hook": Action(hooked(lambda case, p: register_optimizer_step_pre_hook(of(case, halved)))),
    "step_replaced": Action(during(step_replaced, lambda case, p: case.optimizer.__dict__.pop("step"))),
    "parameter_hook": Action(hooked(lambda case, p: p.register_hook(lambda slope: 0.5 * slope)), levels=(1,)),
    "post_accumulate_hook": Action(hooked(lambda case, p: p.register_post_accumulate_grad_hook(clipped)), levels=(1,)),
    "forward_hook": Action(hooked(lambda case, p: case.module[0].register_forward_hook(lambda m, x, y: 0.7 * y))),
    "pre_hook": Action(hooked(lambda case, p: case.module[1].register_forward_pre_hook(lambda m, x: (0.7 * x[0],)))),
    "backward_hook": Action(
        hooked(lambda case, p: case.module[1].register_full_backward_hook(lambda m, x, y: (0.5 * x[0],))), levels=(1,)
    ),
    "global_forward_hook": Action(
        hooked(lambda case, p: modules.register_module_forward_hook(first(case, lambda x, y: 0.7 * y)))
    ),
}


# Modules that keep something.


class Scaled(nn.Module):
    """A parametrization, or a layer, with a number that the user's code changes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, given: Tensor) -> Tensor:
        return self.factor * given


class Centered(nn.Module):
    """A layer that subtracts a running mean, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, given: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.99).add_(given.mean(0), alpha=0.01)
        return given - self.mean


def own_parametrization(case: Case) -> None:
    scaled = Scaled()
    parametrize.register_parametrization(case.module[0], "weight", scaled)
    moved(case, lambda value: setattr(scaled, "factor", value))


def layer_replaced(case: Case) -> None:
    place = 1 if case.norm == "none" else 2
    before, after = case.module[place], nn.Softsign()
    case.during(lambda: (case.module.__setitem__(place, after), lambda: case.module.__setitem__(place, before))[1])


ACTIONS |= {
    # torch's second derivative of a weight norm is wrong.
    "weight_norm": Action(lambda case: parametrizations.weight_norm(case.module[0]), levels=(1,)),
    "spectral_norm": Action(lambda case: parametrizations.spectral_norm(case.module[0])),
    "own_parametrization": Action(own_parametrization),
    "layer_with_a_buffer": Action(lambda case: case.module.append(Centered())),
    "statistics_replaced": Action(
        once(lambda case, p: setattr(case.module[1], "running_mean", 0.5 * case.module[1].running_mean)), norm="bn"
    ),
    "momentum_of_statistics": Action(set_to(0.01, "momentum"), norm="bn"),
    "constant_of_a_norm": Action(set_to(0.1, "eps"), norm="ln"),
    "eval": Action(during(lambda case, p: case.module.eval(), lambda case, p: case.module.train()), norm="bn"),
    "layer_replaced": Action(layer_replaced),
    "forward_replaced": Action(
        during(
            lambda case, p: setattr(case.module[1], "forward", torch.sin),
            lambda case, p: case.module[1].__dict__.pop("forward"),
        )
    ),
}


# The state and the groups of optimizers, and the parameters.


def of_state(act: Callable[[dict[str, Any], str], Any]) -> SetUp:
    """Do something to each vector that the optimizer keeps of a parameter."""

    def on(case: Case, parameter: nn.Parameter) -> None:
        state = case.optimizer.state[parameter]
        for key in [key for key, each in state.items() if isinstance(each, Tensor) and each.dim()]:
            act(state, key)

    return once(on)


def of_groups(act: Callable[[dict[str, Any]], Any]) -> SetUp:
    """Do something to some groups."""

    def on(case: Case, parameter: nn.Parameter) -> None:
        for group in case.optimizer.param_groups[:1] if case.number % 2 else case.optimizer.param_groups:
            act(group)

    return once(on)


def state_loaded(case: Case) -> None:
    kept: list[Any] = []
    begin = case.tick()
    end = case.tick(begin + 1)
    case.each(lambda now: kept.append(copy.deepcopy(case.optimizer.state_dict())) if now == begin else None)
    case.each(lambda now: case.optimizer.load_state_dict(kept[0]) if now == end else None)


def settings_changed(group: dict[str, Any]) -> None:
    values = {"weight_decay": 0.1, "momentum": 0.5, "betas": (0.5, 0.9)}
    group.update({key: value for key, value in values.items() if group.get(key)})


def momentum_switched(group: dict[str, Any]) -> None:
    if "nesterov" in group:
        group.update(momentum=0.0 if group["momentum"] else 0.7, nesterov=False)


def nesterov_switched(group: dict[str, Any]) -> None:
    if group.get("momentum"):
        group.update(nesterov=not group["nesterov"])


def regrouped(case: Case, parameter: nn.Parameter) -> None:
    own = next(each for each in case.optimizer.param_groups if any(one is parameter for one in each["params"]))
    left, others = [each for each in own["params"] if each is not parameter], case.optimizer.param_groups[1:]
    if case.number % 2:
        own["params"] = left
    else:
        own["params"][:] = left
    if others and others[0] is not own:
        others[0]["params"].append(parameter)
    else:
        case.optimizer.add_param_group({"params": [parameter], "lr": 0.2 * own["lr"]})


def unfrozen(case: Case, parameter: nn.Parameter) -> None:
    case.optimizer.add_param_group({"params": [case.module[0].bias.requires_grad_()]})


def frozen_at_first(set_up: SetUp) -> SetUp:
    return lambda case: (case.module[0].bias.requires_grad_(False), set_up(case))


def assigned(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clamp(-0.2, 0.2)


def restrided(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def replaced(case: Case, parameter: nn.Parameter) -> None:
    case.module[0].bias = nn.Parameter(case.module[0].bias.detach() + 0.1)


ACTIONS |= {
    "state_replaced": Action(of_state(lambda state, key: state.update({key: torch.zeros_like(state[key])}))),
    "state_restrided": Action(of_state(lambda state, key: state.update({key: restrided(state[key])}))),
    "state_popped": Action(once(lambda case, p: case.optimizer.state.pop(p, None))),
    "state_cleared": Action(once(lambda case, p: case.optimizer.state.clear())),
    "state_loaded": Action(state_loaded, NOT_RESUMED),
    "rate_changed": Action(of_groups(lambda group: group.update(lr=0.3 * group["lr"]))),
    "settings_changed": Action(of_groups(settings_changed)),
    "momentum_switched": Action(of_groups(momentum_switched)),
    "nesterov_switched": Action(of_groups(nesterov_switched)),
    "regrouped": Action(once(regrouped), NOT_RESUMED),
    "unfrozen_with_a_group": Action(frozen_at_first(once(unfrozen)), NOT_RESUMED),
    "frozen": Action(during(lambda case, p: p.requires_grad_(False), lambda case, p: p.requires_grad_())),
    "data_assigned": Action(at_some(lambda case, p: assigned(p))),
    "data_restrided": Action(
        once(lambda case, p: [setattr(x, "data", restrided(x.data)) for x in case.module.parameters()])
    ),
    "parameter_copied": Action(at_some(lambda case, p: p.data.copy_(0.9 * p.data))),
    "parameter_replaced": Action(once(replaced), NOT_RESUMED),
    "samples_changed": Action(once(lambda case, p: case.train.input[:, 1].mul_(2)), NOT_RESUMED),
}


# Numbers that the user's code keeps in Python.

GLOBALS: dict[str, float] = {}


def cached(key: str) -> Any:
    cell = [1.0]
    found: Any = functools.lru_cache(lambda: cell[0])
    found.put = lambda new: (cell.__setitem__(0, new), found.cache_clear())
    return found


KEPT: dict[str, tuple[Callable[[str], Any], Callable[[Any], Any], Callable[[Any, float], Any]]] = {
    "global": (lambda key: key, lambda key: GLOBALS.get(key, 1.0), lambda key, new: GLOBALS.update({key: new})),
    "list": (lambda key: [1.0], lambda kept: kept[0], lambda kept, new: kept.__setitem__(0, new)),
    "class": (
        lambda key: type("Own", (), {"x": 1.0}),
        lambda kept: kept().x,
        lambda kept, new: setattr(kept, "x", new),
    ),
    "numpy": (lambda key: numpy.ones(2), lambda kept: kept[1], lambda kept, new: kept.fill(new)),
    "tensor": (lambda key: torch.ones((), dtype=torch.float64), lambda kept: kept, lambda kept, new: kept.fill_(new)),
    "environment": (
        lambda key: key,
        lambda key: float(os.environ.get(key, "1")),
        lambda key, new: os.environ.update({key: repr(new)}),
    ),
    "cache": (cached, lambda kept: kept(), lambda kept, new: kept.put(new)),
}


def number_in(make: Callable[[str], Any], get: Callable[[Any], Any], put: Callable[[Any, float], Any]) -> SetUp:
    def set_up(case: Case) -> None:
        kept = make(f"FUZZED_{case.number}_{case.member}")
        case.transform(lambda logits: logits * get(kept))
        moved(case, lambda value: put(kept, value))

    return set_up


def number_in_a_closure(case: Case) -> None:
    factor = 1.0

    def put(value: float) -> None:
        nonlocal factor
        factor = value

    case.transform(lambda logits: logits * factor)
    moved(case, put)


def noise_of_each_tick(case: Case) -> None:
    noise = [0.0]
    case.transform(lambda logits: logits * (1 + noise[0]))
    case.each(lambda now: noise.__setitem__(0, 0.01 * numpy.random.RandomState(now).randn()), again=True)


def noise_of_each_call(case: Case) -> None:
    draws = numpy.random.RandomState(0)
    case.transform(lambda logits: logits * (1 + 0.01 * float(draws.randn())))


def counter_of_calls(case: Case) -> None:
    calls = [0]
    case.transform(lambda logits: (calls.__setitem__(0, calls[0] + 1), logits / (1 + 2e-4 * calls[0]))[1])


ACTIONS |= {f"number_in_{name}": Action(number_in(*row)) for name, row in KEPT.items()}
ACTIONS |= {
    "number_in_a_closure": Action(number_in_a_closure),
    "noise_of_each_tick": Action(noise_of_each_tick),
    "noise_of_each_call": Action(noise_of_each_call, COUNTED, (1,)),
    "counter_of_calls": Action(counter_of_calls, COUNTED, (1,)),
}


# Functions of the logits: values that leave torch, shapes that depend on values, hooks of tensors.


def hook_of_a_tensor(logits: Tensor) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(lambda slope: slope.clamp(-0.02, 0.02))
    return 1.0 * logits


LEAVING: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda logits: (logits.detach().numpy().max(1) < 0.7).mean(),
    "item": lambda logits: logits.detach().max().item() > 0.3,
    "if": lambda logits: 2 if logits[0, 0] > logits[0, 1] else 1,
    "unique": lambda logits: len(torch.unique((2 * logits.detach()).round())),
    "mask": lambda logits: len(logits[logits > 0.3]),
    "list": lambda logits: logits.detach().tolist()[0][0],
    "dlpack": lambda logits: numpy.from_dlpack(logits.detach()).min(),
    "memory": lambda logits: numpy.frombuffer(bytes(logits.detach().untyped_storage()), dtype=float)[0],
}
TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"value_by_{name}": lambda z, value=value: z * (1 + 0.1 * float(value(z))) for name, value in LEAVING.items()},
    "shape_by_mask": lambda logits: logits + 0.1 * logits[logits[:, 0] > 0].sum(),
    "shape_by_repeats": lambda z: z + 0.1 * torch.repeat_interleave(z, 1 + z.argmax(1), dim=0).mean(),
}


def transformed(function: Callable[[Tensor], Tensor]) -> SetUp:
    return lambda case: case.transform(function)


class Decays(StepLR):
    """A scheduler of a user's own, which changes more than rates."""

    def step(self, epoch: Any = None) -> None:
        super().step()
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * (1 + self.last_epoch % 3)


def scheduled(make: Callable[[Any], Any]) -> SetUp:
    return lambda case: setattr(case, "scheduler", make)


ACTIONS |= {name: Action(transformed(function)) for name, function in TRANSFORMS.items()}
ACTIONS |= {
    "hook_of_a_tensor": Action(transformed(hook_of_a_tensor), levels=(1,)),
    "scheduler_by_a_function": Action(
        scheduled(lambda optimizer: LambdaLR(optimizer, lambda now: 1 / (1 + 1e-3 * now)))
    ),
    "scheduler_of_a_user": Action(scheduled(lambda optimizer: Decays(optimizer, 300))),
}
