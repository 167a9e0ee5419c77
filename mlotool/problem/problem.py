"""One optimization problem: a module, a loss, a data stream, an optimizer, settings."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from mlotool.core.bound_module import BoundModule, compile_module
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.core.precision import autocast
from mlotool.core.slots import Slots
from mlotool.core.user_code import Call, note
from mlotool.problem.arguments import check_problem, check_scheduler, made
from mlotool.problem.fused_step import FusedStep, prefer_fused_kernels
from mlotool.problem.interface import AbstractHypergradient
from mlotool.problem.loss_scale import LossScale
from mlotool.problem.node import ProblemNode
from mlotool.problem.parallel import AbstractParallel
from mlotool.problem.player import Player, ShardedPlayer, WholePlayer
from mlotool.problem.shards import Shards, gathered
from mlotool.problem.stream import Stream
from mlotool.problem.tasks import stack_parameters
from mlotool.problem.trajectory import Streams, Trajectory, copied
from mlotool.problem.update import Settings, State, clipped, find_update
from mlotool.problem.usable import check_module, check_used, is_lazy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LossFunction = Callable[..., Tensor | LossOutput]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
Evaluate = Callable[[], tuple[Tensor, Sequence[Tensor | None]]]
"""Returns a step's loss and gradient, one tensor a parameter of theta, at the current parameters."""

_NO_CONTEXT = nullcontext()

_SCHEDULER_ADVICE = "Correct its settings (total_steps, T_max, ...), or let the run end before: runner.max_ticks."


@dataclass(frozen=True)
class Role:
    """Who plays a role of a loss.

    Args:
        problem: the problem's name.
        training: train or eval mode for this role; None leaves the module's mode.
    """

    problem: str
    training: bool | None = None


class Problem:
    """`min over theta of C(theta; U, L; D)`.

    Args:
        name: its name in the graph.
        module: holds theta: the parameters that require a gradient now. Frozen ones go along as constants.
        loss: `f(batch, *, <roles>) -> Tensor | LossOutput`, pure.
        roles: by keyword of the loss, a problem's name, or `{"problem": name, "mode": "train" | "eval"}`.
        stream: where its batches come from; None calls the loss with `batch=None`.
        optimizer: a torch optimizer, or a callable from parameters to one; None if it is never stepped.
        scheduler: a callable from the optimizer to a learning-rate scheduler.
        scheduler_interval: "step" advances the scheduler after each optimizer step; "evaluation" leaves it to the
            runner.
        hypergradient: how gradients pass through its solution; needed if a problem above both shapes and reads it.
        unroll_steps: optimizer steps it takes before the problems that read it step.
        warmup_steps: its first steps, which do not count for the problems above.
        roll_back: its steps are a look-ahead: after the upper step it returns to where it was, and takes one step.
        gradient_clip_norm: largest 2-norm of its gradient; of each task's.
        accumulate_batches: batches over which one gradient is averaged.
        optimizer_roles: by hyperparameter of the optimizer (`lr`, `weight_decay`, ...), the problem whose module gives
            it, called without arguments: one value, one a parameter (1-D), or a mapping by parameter name.
        reset_to: where each unroll begins: "initial", or the parameters of a problem with the same ones; the
            optimizer then starts afresh. None goes on.
        tasks: gives the parameters a leading axis of that many tasks. Its loss, and the losses that read it, are
            evaluated for each task by itself (`torch.vmap`) on the task's part of the batch, along its first axis.
        precision: "fp32", or autocast around its loss: "bf16", or "fp16" with a loss scale of its own. Finite
            differences and penalties are taken in fp32 all the same; parameters and solvers stay in it.
        compile: run its module through `torch.compile`. It has no second derivatives then.
        parallel: how its training steps evaluate its module, layer-parallel; None is one serial pass. Its hypergradient
            is by finite differences then, if none is set.
        shard: on several ranks each holds a part of its parameters, of their gradient and of the optimizer's state
            (FSDP2). Gradients are of first order then.

    Raises:
        ConfigError: a setting is out of range, or the module has no parameter that requires a gradient.

    Example:
        >>> from functools import partial
        >>> problem = Problem("line", nn.Linear(1, 1), lambda batch, *, model: model(batch).square().mean(),
        ...                   roles={"model": "line"}, optimizer=partial(torch.optim.SGD, lr=0.1))
        >>> list(problem.theta)
        ['weight', 'bias']
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        loss: LossFunction,
        *,
        roles: Mapping[str, str | Mapping[str, str]] | None = None,
        stream: Stream | None = None,
        optimizer: Optimizer | OptimizerFactory | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        scheduler_interval: str = "step",
        hypergradient: AbstractHypergradient | None = None,
        unroll_steps: int = 1,
        warmup_steps: int = 0,
        roll_back: bool = False,
        gradient_clip_norm: float | None = None,
        accumulate_batches: int = 1,
        optimizer_roles: Mapping[str, str] | None = None,
        reset_to: str | None = None,
        tasks: int | None = None,
        precision: str = "fp32",
        compile: bool = False,
        parallel: AbstractParallel | None = None,
        shard: bool = False,
    ) -> None:
        # Here these are the arguments, and nothing else.
        check_problem(locals())
        check_module(name, module)
        self.name = name
        self.module = module
        self.parallel = parallel
        self.tasks = tasks
        self.precision = precision
        self.loss_scale = LossScale() if precision == "fp16" else None
        if tasks is not None:
            _require(not compile, f"problems.{name}.compile", compile, "false, since tasks run through torch.vmap")
            stack_parameters(name, module, tasks)
        self.is_sharded = shard
        self.shards: Shards | None = None
        if shard:
            key = f"problems.{name}.shard"
            _require(tasks is None, key, shard, "false, since tasks divide the batch by themselves")
            _require(not compile, key, shard, "false with compile: true, as torch.compile cannot trace what gathers")
            _require(precision != "fp16", key, shard, "false with precision: fp16; bf16 needs no loss scale")
            _require(reset_to is None, key, shard, f"false with reset_to: {reset_to}, which copies whole parameters")
            _require(not optimizer_roles, key, shard, "false, since other problems give its optimizer's settings")
            _require(parallel is None, key, shard, "false, since its training is layer-parallel")
        self.compiled: Callable[..., Any] | None = compile_module(module) if compile else None
        self.loss = loss
        self.roles = {role: _role(value) for role, value in (roles or {}).items()}
        self.stream = stream
        self.theta = {key: tensor for key, tensor in module.named_parameters() if tensor.requires_grad}
        if not self.theta:
            raise ConfigError(
                f"problems.{name}.module: {type(module).__name__} has no parameter that requires a gradient; expected "
                "at least one. Unfreeze a parameter, or remove the problem and use the module inside the loss."
            )
        has_both = scheduler is None or optimizer is not None
        _require(has_both, f"problems.{name}.optimizer", optimizer, "an optimizer, since a scheduler is set")
        self._bind()
        if parallel is not None:
            key = f"problems.{name}"
            _require(tasks is None, f"{key}.tasks", tasks, "null, since its training is layer-parallel")
            _require(not compile, f"{key}.compile", compile, "false, since its training is layer-parallel")
            _require(precision != "fp16", f"{key}.precision", precision, "fp32 or bf16 beside layer-parallel training")
            parallel.attach(name, module)
            parallel.check_data(getattr(stream, "dataset", None))
        built = optimizer
        if built is not None and not isinstance(built, Optimizer):
            key = f"problems.{name}.optimizer"
            built = made(key, built, self.theta.values(), lambda each: isinstance(each, Optimizer), "a torch optimizer")
        _check_parameters(name, built, self.theta)
        self.optimizer: Optimizer | None = built
        self._bind_optimizer()
        self.scheduler: Any = None
        if scheduler is not None:
            key = f"problems.{name}.scheduler"
            self.scheduler = made(
                key, scheduler, built, lambda each: each is None or hasattr(each, "step"), "a scheduler"
            )
        check_scheduler(name, self.scheduler, built, scheduler_interval)
        self.scheduler_interval = scheduler_interval
        self.evaluates_again = built is not None and _needs_closure(built)
        if self.evaluates_again:
            _require(precision != "fp16", f"problems.{name}.precision", precision, "fp32 or bf16 beside a line search")
            _require(not shard, f"problems.{name}.shard", shard, "false beside a line search")
            is_repeatable = parallel is None or parallel.is_repeatable
            kinds = type(built).__name__, "an optimizer that steps along one gradient, which moves auxiliary variables"
            _require(is_repeatable, f"problems.{name}.optimizer", *kinds)
        self.hypergradient = hypergradient
        if hypergradient is None and parallel is not None:
            self.hypergradient = parallel.default_hypergradient()
        self.unroll_steps = unroll_steps
        self.warmup_steps = warmup_steps
        self.roll_back = roll_back
        self.gradient_clip_norm = gradient_clip_norm
        self.accumulate_batches = accumulate_batches
        self.optimizer_roles = dict(optimizer_roles or {})
        self.reset_to = reset_to
        self.num_steps = 0
        self.trajectory = Trajectory()
        self._check_start_and_rates()
        is_reset = reset_to == "initial"
        self.initial = tuple(tensor.clone() for tensor in self.constants().values()) if is_reset else ()

    @property
    def node(self) -> ProblemNode:
        """What the graph's validation needs to know."""
        other_uses = {f"optimizer.{key}": name for key, name in self.optimizer_roles.items()}
        if self.reset_to not in (None, "initial"):
            other_uses["reset_to"] = str(self.reset_to)
        return ProblemNode({role: value.problem for role, value in self.roles.items()}, other_uses)

    @property
    def loss_context(self) -> AbstractContextManager[Any]:
        """A context for one evaluation of its loss: autocast, where its precision asks for it."""
        if self.precision == "fp32":
            return _NO_CONTEXT
        return autocast(self.precision, next(iter(self.theta.values())).device)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices of its parameters."""
        return tuple({tensor.device for tensor in self.theta.values() if tensor.is_cuda})

    def current(self) -> tuple[Tensor, ...]:
        """Return the trained parameters, detached, in the order of `theta`; they share the parameters' memory."""
        return tuple([tensor.detach() for tensor in self.own])

    def sync_parallel(self) -> None:
        """Give all ranks the same parameters and buffers, where stages of the module are theirs."""
        assert self.parallel is not None
        self.parallel.sync(None)

    def constants(self) -> dict[str, Tensor]:
        """Return theta, detached; the tensors share the parameters' memory."""
        return {key: tensor.detach() for key, tensor in self.theta.items()}

    def reading(self, training: bool | None = None) -> BoundModule:
        """Return the module as it is now, to be called without gradients; of shards all ranks gather it.

        Args:
            training: train or eval mode; None leaves the module's.
        """
        if self.shards is None:
            return BoundModule(self.module, training=training)
        return self.shards.constant(training)

    def _takes_fused(self, gradient: Sequence[Tensor | None]) -> bool:
        if self._fused.optimizer is not self.optimizer:
            self._bind_optimizer()
        return self._fused(gradient)

    def _bind_optimizer(self) -> None:
        if self.optimizer is not None:
            if self.shards is None:
                prefer_fused_kernels(self.optimizer)
            self._fused = FusedStep(self.optimizer, self.own)

    def _bind(self) -> None:
        self.own = tuple(self.theta.values())
        self.slots = Slots(self.module, tuple(self.theta))
        self.submodules = tuple(self.module.modules())
        self.player: Player
        if self.shards is None:
            self.player = WholePlayer(self.module, self.own, self.slots, self.compiled, self.parallel)
        else:
            self.player = ShardedPlayer(self.shards, self.own)

    def divide(self, mesh: "DeviceMesh") -> None:
        """Divide its parameters among ranks, which have the same ones; all of them call it.

        Args:
            mesh: of the ranks.
        """
        before = dict(self.module.named_parameters())
        self.shards = Shards(f"problems.{self.name}.shard", self.module, mesh)
        state = {} if self.optimizer is None else self.optimizer.state_dict()
        self._take_module(self.module, before)
        if self.optimizer is None:
            return
        self.optimizer.load_state_dict(self.shards.divided_optimizer(state, self.optimizer))
        for group in self.optimizer.param_groups:
            # Of the fused kernels those of Adam alone know shards.
            if group.get("fused") and not isinstance(self.optimizer, Adam):
                group.update(fused=False, foreach=True)

    def merge(self, *, is_kept: bool) -> None:
        """Put its shards together again, on the CPU; all ranks call it, once.

        Args:
            is_kept: whether this rank goes on with the problem.
        """
        assert self.shards is not None
        before = dict(self.module.named_parameters())
        state = {} if self.optimizer is None else gathered(self.optimizer.state_dict(), is_kept=is_kept)
        module = self.shards.merged(is_kept=is_kept)
        if module is None:
            return
        self.shards = None
        self._take_module(module, before)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state)

    def step(
        self,
        gradient: Sequence[Tensor | None],
        settings: Sequence[Settings] | None = None,
        evaluate: Evaluate | None = None,
    ) -> Tensor | None:
        """Take one optimizer step; in fp16 none, if the gradient has overflown.

        Args:
            gradient: one tensor a parameter of theta, of a shard this rank's part; None where it is unused.
            settings: hyperparameters of each parameter, where another problem gives some of them.
            evaluate: for an optimizer that evaluates the loss itself (`evaluates_again`), such as LBFGS with its
                line search; its first call is at the parameters of `gradient`.

        Returns:
            The gradient's norm before clipping, 0-D, if it is clipped (the mean over tasks); else None.
        """
        assert self.optimizer is not None
        if self.parallel is not None:
            self.parallel.before_step()
        if self.loss_scale is not None and not self.loss_scale.accepts(gradient):
            # An overflow: the factor is smaller from now on.
            self.num_steps += 1
            return None
        gradient, norm = self.clip(gradient)
        if settings is None:
            if self.evaluates_again:
                assert evaluate is not None
                self.optimizer.step(partial(self._evaluate_again, evaluate))
                for parameter in self.own:
                    parameter.grad = None
            elif not self._takes_fused(gradient):
                self._set_gradient(gradient)
                self.optimizer.step()
                for parameter in self.own:
                    parameter.grad = None
        else:
            self._step_with(gradient, settings)
        if self.scheduler is not None and self.scheduler_interval == "step":
            self.step_scheduler()
        self.num_steps += 1
        return norm

    def step_scheduler(self, *objective: float) -> None:
        """Advance the scheduler.

        Args:
            objective: its value, for ReduceLROnPlateau.
        """
        assert self.scheduler is not None
        try:
            self.scheduler.step(*objective)
        except Exception as error:
            note(error, lambda: Call(f"problems.{self.name}.scheduler", self.scheduler, advice=_SCHEDULER_ADVICE))
            raise

    def as_parameter(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Return a part of a gradient as a tensor that is divided like its parameter, where that is."""
        return value if self.shards is None else self.shards.put_together(value, parameter)

    def clip(self, gradient: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """Return the gradient within `gradient_clip_norm`, and its norm before (mean over tasks) if that is set."""
        if self.gradient_clip_norm is None:
            return gradient, None
        if self.shards is None:
            found, norm = clipped(gradient, self.gradient_clip_norm, self.tasks)
        else:
            found, norm = clipped(gradient, self.gradient_clip_norm, total=self.shards.total)
        return found, norm.mean()

    def pure_step(
        self,
        theta: Sequence[Tensor],
        gradient: Sequence[Tensor | None],
        state: Sequence[State],
        settings: Sequence[Settings],
    ) -> tuple[list[Tensor], list[State]]:
        """Return parameters and optimizer state after a step; differentiable, and nothing is changed.

        Args:
            theta: the parameters, one tensor each.
            gradient: before clipping.
            state: of the optimizer, one a parameter.
            settings: the hyperparameters, one mapping a parameter.

        Raises:
            ConfigError: the optimizer has no pure form.
        """
        update = find_update(self.name, self.optimizer)
        new_theta, new_state = [], []
        for point, slope, old, each in zip(theta, self.clip(gradient)[0], state, settings, strict=True):
            moved, kept = (point, old) if slope is None else update(point, slope, old, each)
            new_theta.append(moved)
            new_state.append(kept)
        return new_theta, new_state

    def settings(self) -> tuple[Settings, ...]:
        """Return a copy of the optimizer's current hyperparameters, one mapping a parameter of theta."""
        assert self.optimizer is not None
        found: dict[int, Settings] = {}
        for group in self.optimizer.param_groups:
            # A scheduler fills a rate that is a tensor in place.
            settings = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            found.update((id(parameter), settings) for parameter in group["params"])
        return tuple(found[id(parameter)] for parameter in self.theta.values())

    def next_settings(self, count: int) -> list[tuple[Settings, ...]]:
        """Return the hyperparameters of the next `count` steps, as its scheduler will set them; nothing is changed."""
        if self.scheduler is None or self.scheduler_interval != "step":
            return [self.settings()] * count
        # Both in one copy, so that the copied scheduler sets the copied optimizer.
        twin = copy.copy(self)
        parameters = list(self.theta.values())
        memo: dict[int, Any] = {id(parameter): parameter for parameter in parameters}
        twin.optimizer, twin.scheduler = copy.deepcopy((self.optimizer, self.scheduler), memo)
        found: list[tuple[Settings, ...]] = []
        with warnings.catch_warnings():
            # torch warns of a scheduler that steps without its optimizer.
            warnings.simplefilter("ignore")
            for _ in range(count):
                found.append(tuple(dict(each) for each in twin.settings()))
                twin.scheduler.step()
        return found

    def sync(self) -> None:
        """Give all ranks the same parameters, buffers and optimizer state, where stages of the module are theirs."""
        if self.parallel is not None:
            self.parallel.sync(self.optimizer)

    def optimizer_state(self) -> tuple[State, ...]:
        """Return a copy of the optimizer's state, one mapping a parameter of theta."""
        assert self.optimizer is not None
        self.sync()
        return tuple(copied(self.optimizer.state.get(parameter, {})) for parameter in self.theta.values())

    def reset(self, theta: Sequence[Tensor] | None) -> None:
        """Go back to a start, and let the optimizer begin afresh.

        Args:
            theta: the start; None is the initial one.
        """
        assert self.optimizer is not None
        start = self.initial if theta is None else theta
        with torch.no_grad():
            for parameter, value in zip(self.theta.values(), start, strict=True):
                parameter.copy_(value)
        self.optimizer.state.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what a step changes: module, optimizer, scheduler, step count."""
        return copy.deepcopy(self._learned_state())

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take a snapshot back."""
        self._load_learned_state(copy.deepcopy(snapshot))

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-identical resume needs; plain containers and tensors."""
        state = self._learned_state()
        state["stream"] = None if self.stream is None else self.stream.state_dict()
        state["trajectory"] = self.trajectory.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], streams: Streams | None = None) -> None:
        """Take the state back.

        Args:
            state: what `state_dict` returned.
            streams: those of the problems that it reads.
        """
        # The optimizer keeps what it loads: without a copy two problems would share their momentum.
        self._load_learned_state(copy.deepcopy(state))
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"])
        count = sum(len(each["random"]) for each in state["trajectory"]["steps"])
        batches = [None] * count if self.stream is None or not count else self.stream.recent(count)
        device = next(iter(self.theta.values())).device
        self.trajectory.load_state_dict(copy.deepcopy(state["trajectory"]), batches, streams or {}, device)

    def _set_gradient(self, gradient: Sequence[Tensor | None]) -> None:
        for parameter, value in zip(self.theta.values(), gradient, strict=True):
            if value is None and is_lazy(parameter):
                check_used(self.name, self.module)
            if value is not None:
                value = self.as_parameter(value, parameter)
            # torch's fused kernels read a gradient in the parameter's order, whatever its own strides are.
            if value is not None and not value.is_sparse and value.stride() != parameter.stride():
                value = torch.empty_like(parameter).copy_(value)
            parameter.grad = value

    def _evaluate_again(self, evaluate: Evaluate) -> float:
        loss, gradient = evaluate()
        self._set_gradient(self.clip(gradient)[0])
        return float(loss)

    def _take_module(self, module: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
        """Go on with other tensors in the place of the parameters.

        Args:
            module: holds them.
            before: the parameters until now, by name.
        """
        now = dict(module.named_parameters())
        self.module = module
        self.theta = {key: now[key] for key in self.theta}
        self._bind()
        self._bind_optimizer()
        if self.optimizer is None:
            return
        twins = {id(parameter): now[key] for key, parameter in before.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [twins.get(id(parameter), parameter) for parameter in group["params"]]
        self.optimizer.state.clear()

    def _step_with(self, gradient: Sequence[Tensor | None], settings: Sequence[Settings]) -> None:
        assert self.optimizer is not None
        update = find_update(self.name, self.optimizer)
        with torch.no_grad():
            for parameter, slope, each in zip(self.theta.values(), gradient, settings, strict=True):
                if slope is not None:
                    moved, state = update(parameter, slope, copied(self.optimizer.state.get(parameter, {})), each)
                    parameter.copy_(moved)
                    self.optimizer.state[parameter] = dict(state)

    def _check_start_and_rates(self) -> None:
        key = f"problems.{self.name}"
        has_optimizer = self.optimizer is not None
        if self.reset_to is not None:
            _require(has_optimizer, f"{key}.optimizer", self.optimizer, "an optimizer, since reset_to is set")
            _require(not self.roll_back, f"{key}.roll_back", True, "false, since reset_to begins each unroll anew")
            _require(self.warmup_steps == 0, f"{key}.warmup_steps", self.warmup_steps, "0, since reset_to undoes them")
        if self.optimizer_roles:
            find_update(self.name, self.optimizer)
            _require(self.scheduler is None, f"{key}.scheduler", "one", "null, since a problem sets hyperparameters")
            numbers = {name: value for name, value in self.settings()[0].items() if not isinstance(value, bool)}
            known = [name for name, value in numbers.items() if isinstance(value, int | float)]
            for name in self.optimizer_roles:
                _require(name in known, f"{key}.optimizer.{name}", "a problem", f"one of {', '.join(known)}")

    def _learned_state(self) -> dict[str, Any]:
        self.sync()
        return {
            "module": self.module.state_dict(),
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "num_steps": self.num_steps,
            "loss_scale": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "parallel": None if self.parallel is None else self.parallel.state_dict(),
        }

    def _load_learned_state(self, state: dict[str, Any]) -> None:
        if self.shards is not None:
            state = self.shards.divided(state, self.optimizer)
        self.module.load_state_dict(state["module"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
            self._bind_optimizer()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.num_steps = state["num_steps"]
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["loss_scale"])
        if self.parallel is not None:
            self.parallel.load_state_dict(state["parallel"])


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _role(value: str | Mapping[str, str]) -> Role:
    if isinstance(value, str):
        return Role(value)
    return Role(value["problem"], {"train": True, "eval": False, None: None}[value.get("mode")])


def _check_parameters(name: str, optimizer: Optimizer | None, theta: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that was built on other parameters: it would step them, or nothing."""
    if optimizer is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [key for key, tensor in theta.items() if id(tensor) not in held]
    if missing:
        raise ConfigError(
            f"problems.{name}.optimizer: it does not hold the parameter '{missing[0]}' of the module; expected all of "
            "them (tasks replace them). Pass a callable: optimizer=functools.partial(torch.optim.SGD, lr=0.1)."
        )


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: found {value!r}; expected {expected}. Correct {key}.")
