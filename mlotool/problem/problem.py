"""One optimization problem: a module, a loss, a data stream, an optimizer, settings."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from mlotool.core.arguments import require
from mlotool.core.bound_module import MOVING_BUFFERS, BoundModule, Slots, compile_module
from mlotool.core.errors import RunError
from mlotool.core.gradient import autocast
from mlotool.core.lightning_module import LightningEvaluation, collected_logs, is_lightning_module
from mlotool.core.loss_output import LossOutput
from mlotool.core.private import tree_map_only
from mlotool.core.unchanged import SameObjects, deep_copy
from mlotool.distributed.collectives import Ranks
from mlotool.losses.lightning import training_step
from mlotool.problem.arguments import check_module, check_problem, default_roles
from mlotool.problem.compatibility import Case, check
from mlotool.problem.interface import AbstractHypergradient
from mlotool.problem.lightning import StandInTrainer, check_lightning_module, configured
from mlotool.problem.optimizers.optimizer_step import Evaluate, OptimizerFactory, OptimizerStep
from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.optimizers.rule import Hyperparameters, State
from mlotool.problem.options import hypergradient_of, optimizer_of
from mlotool.problem.parallel import AbstractParallel
from mlotool.problem.remat import rematerialize
from mlotool.problem.settings import ProblemNode, ProblemSettings
from mlotool.problem.shards import PartShards, Shards, gathered
from mlotool.problem.streams.batches import mixed_seed
from mlotool.problem.streams.stream import Stream
from mlotool.problem.tasks import TaskShare, replace_trained, stack_parameters
from mlotool.problem.trajectory import Streams, Trajectory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LossFunction = Callable[..., Tensor | LossOutput]

_VALUES, _REQUIRES_GRAD = methodcaller("values"), attrgetter("requires_grad")
_CHANGED = (
    "problems.{problem}.module: its parameter '{key}' was replaced, added, removed or frozen after the problem was "
    "made; expected the same ones, which its optimizer steps. Change it before, or set the lr of its group to 0."
)


@dataclass(frozen=True)
class Role:
    """Which problem's module a role of a loss receives, and in which mode.

    Args:
        problem: the problem's name.
        training: true for train mode, false for eval mode; None keeps the module's mode.
    """

    problem: str
    training: bool | None = None


class Problem:
    """One optimization problem: a module, a loss that is minimized over its parameters, batches and an optimizer.

        min over theta of C(theta; U, L; D)

    theta are the module's trained parameters and C is the loss. U are the parameters of problems above, L the solutions
    of problems below, and D the batches.

    Args:
        name: the problem's name, in the graph, in roles and in logs.
        module: holds theta: the parameters that require a gradient when the problem is made. Frozen parameters are
            constants.
        loss: a pure function `f(batch, *, <roles>) -> Tensor | LossOutput`, whose tensor is 0-D. If the module is a
            LightningModule, the loss may be left out, which takes its `training_step`; without `optimizer`, its
            `configure_optimizers` gives the optimizer and the scheduler.
        roles: for each keyword of the loss, the name of the problem whose module it receives, or `{"problem": name,
            "mode": "train" | "eval"}`. None: each keyword-only argument without a default receives the problem of that
            name.
        stream: the source of the batches: a Stream, or a DataLoader, which is made into a Stream with a seed that
            follows from `name`. None: the loss is called with `batch=None`.
        optimizer: "sgd" (with momentum 0.9), "adam" or "adamw" (the options of conf/optimizer/), a class of
            `torch.optim`, an optimizer, or a function from parameters to an optimizer; None: the problem takes no
            steps.
        lr: the learning rate, if `optimizer` is a name or a class; None takes the default of that option or class.
        scheduler: a function from the optimizer to a learning-rate scheduler; None keeps the learning rate.
        hypergradient: how gradients pass through the problem's solution: an object such as `Implicit(Neumann())`, or
            the name of an option of conf/hypergradient/, such as "cg". Needed if a problem above both shapes and reads
            this one.
        parallel: how the training steps compute the layers of the module in parallel, such as
            `mlotool.layerparallel.Multigrid()`; None computes them one after the other. With `parallel`, the default of
            `hypergradient` is by finite differences.
        **settings: the fields of `mlotool.problem.settings.ProblemSettings`: `unroll_steps`, `tasks`, `precision`, ...

    Raises:
        ConfigError: a setting is unknown or out of range, settings do not go together (docs/compatibility.md), or the
            module has no parameter that requires a gradient.

    Example:
        >>> problem = Problem("line", nn.Linear(1, 1), lambda batch, *, model: model(batch).square().mean(),
        ...                   roles={"model": "line"}, optimizer="sgd", lr=0.1, unroll_steps=2)
        >>> list(problem.theta)
        ['weight', 'bias']
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        loss: LossFunction | None = None,
        *,
        roles: Mapping[str, str | Mapping[str, str]] | None = None,
        stream: "Stream | DataLoader[Any] | None" = None,
        optimizer: str | Optimizer | OptimizerFactory | None = None,
        lr: float | None = None,
        scheduler: Callable[[Optimizer], Any] | None = None,
        hypergradient: str | AbstractHypergradient | None = None,
        parallel: AbstractParallel | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(stream, DataLoader):
            # Problems with loaders of one data set draw orders of their own.
            stream = Stream(stream, seed=mixed_seed(name))
        if roles is None:
            roles = default_roles(loss)
        # Here these are the arguments, and nothing else.
        check_problem(locals())
        self.name, self.num_steps = name, 0
        self.settings = ProblemSettings.of(name, settings)
        check_module(name, module)
        takes_steps = loss is None
        if loss is None:
            check_lightning_module(name, module)
            loss, roles = training_step, {"model": name}
        check(Case(name, self.settings, parallel, module=module, takes_steps=takes_steps))
        self.module, self.parallel, self.loss, self.stream = module, parallel, loss, stream
        self.trainer = StandInTrainer(self) if is_lightning_module(module) else None
        if self.settings.tasks is not None:
            stack_parameters(name, module, self.settings.tasks)
        self.shards: Shards | None = None
        self.task_share: TaskShare | None = None
        self.compiled: Callable[..., Any] | None = compile_module(module) if self.settings.compile else None
        remat = self.settings.remat
        self.rematerialized = None if remat is None else rematerialize(name, module, remat)
        self.has_blocks = remat is not None
        self.roles = {role: _role(value) for role, value in (roles or {}).items()}
        self.theta = {key: tensor for key, tensor in module.named_parameters() if tensor.requires_grad}
        expected, advice = "a parameter that requires a gradient", "Unfreeze one, or use the module inside the loss."
        require(bool(self.theta), f"problems.{name}.module", module, expected, advice)
        if parallel is not None:
            parallel.attach(name, module)
            parallel.check_data(getattr(stream, "dataset", None))
        makes_optimizer = optimizer_of(name, optimizer, lr)
        if self.trainer is not None and makes_optimizer is None:
            makes_optimizer, own = configured(name, module, self.trainer, self.settings)
            scheduler = scheduler or (None if own is None else lambda _: own)
        self.optimizer_step = OptimizerStep(name, self.theta, makes_optimizer, scheduler, self.settings)
        check(Case(name, self.settings, parallel, self.optimizer, self.scheduler))
        self._bind()
        is_by_default = hypergradient is None and parallel is not None
        algorithm = parallel.default_hypergradient() if is_by_default and parallel else hypergradient
        self.hypergradient: AbstractHypergradient | None = hypergradient_of(name, algorithm)
        self.trajectory = Trajectory()
        is_reset = self.settings.reset_to == "initial"
        self.initial = tuple(tensor.clone() for tensor in self.constants().values()) if is_reset else ()

    def __repr__(self) -> str:
        # A program says more of each of its problems.
        return f"<Problem '{self.name}' of a {type(self.module).__name__}>"

    @property
    def optimizer(self) -> Optimizer | None:
        """The problem's optimizer; it may be replaced by another optimizer of the same parameters."""
        return self.optimizer_step.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self.optimizer_step.optimizer = optimizer

    @property
    def scheduler(self) -> Any:
        """The problem's learning-rate scheduler."""
        return self.optimizer_step.scheduler

    @property
    def node(self) -> ProblemNode:
        """The problems that this one uses, by role and by setting, for `Graph.validate`."""
        other_uses = {f"optimizer.{key}": name for key, name in self.settings.optimizer_roles.items()}
        if self.settings.starts_from is not None:
            other_uses["reset_to"] = self.settings.starts_from
        return ProblemNode({role: value.problem for role, value in self.roles.items()}, other_uses)

    def evaluated(self, batch: Any, roles: Mapping[str, BoundModule]) -> LossOutput:
        """Return the loss, computed in the problem's precision; what LightningModules log in it becomes metrics.

        Args:
            batch: the batch that the loss is called with.
            roles: by keyword of the loss, the module that it receives.
        """
        if not any(role.logs for role in roles.values()):
            return self._evaluated(batch, roles)
        with collected_logs() as logged:
            output = self._evaluated(batch, roles)
        values = {key: value.detach() for key, value in logged.items()}
        return LossOutput(output.loss, lambda: {**values, **output.metrics}) if values else output

    def _evaluated(self, batch: Any, roles: Mapping[str, BoundModule]) -> LossOutput:
        if self.settings.precision == "fp32":
            return LossOutput.of(self.loss(batch, **roles))
        with autocast(self.settings.precision, next(iter(self.theta.values())).device):
            return LossOutput.of(self.loss(batch, **roles))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices of the problem's parameters."""
        return tuple({tensor.device for tensor in self.theta.values() if tensor.is_cuda})

    @property
    def num_tasks(self) -> int | None:
        """Number of tasks, the length of the parameters' first axis (on this rank); None without tasks."""
        return None if self.settings.tasks is None else len(self.own[0])

    def current(self) -> tuple[Tensor, ...]:
        """Return the trained parameters, detached, in the order of `theta`; they share the parameters' memory."""
        return tuple([tensor.detach() for tensor in self.own])

    def constants(self) -> dict[str, Tensor]:
        """Return theta by parameter name, detached; the tensors share the parameters' memory."""
        return {key: tensor.detach() for key, tensor in self.theta.items()}

    def reading(self, training: bool | None = None) -> BoundModule:
        """Return the module with its current parameters, for calls without gradients.

        With `shard`, all ranks have to call this together, since it gathers the parameters.

        Args:
            training: train or eval mode; None leaves the module's.
        """
        if self.shards is None:
            return BoundModule(self.module, training=training)
        return self.shards.constant(training)

    def step(
        self,
        gradient: Sequence[Tensor | None],
        hyperparameters: Sequence[Hyperparameters] | None = None,
        evaluate: Evaluate | None = None,
    ) -> Tensor | None:
        """Take one optimizer step; in fp16 the step is skipped if the gradient has overflowed.

        Args:
            gradient: one tensor per parameter of theta (with `shard`, this rank's part of it); None for a parameter
                that the loss does not use.
            hyperparameters: the optimizer's hyperparameters for each parameter, where another problem learns some of
                them.
            evaluate: computes the loss and its gradient, for an optimizer that evaluates the loss itself, such as LBFGS
                with its line search. The first call is at the parameters of `gradient`.

        Returns:
            The norm of the gradient before clipping, 0-D (with tasks, its mean over tasks); None without clipping.
        """
        if self.parallel is not None:
            self.parallel.before_step()
        norm = self.optimizer_step(gradient, hyperparameters, evaluate)
        self.num_steps += 1
        return norm

    def look_at_module(self) -> None:
        """Take over submodules that were exchanged since the problem was made.

        Raises:
            RunError: the module's trained parameters are no longer those that the optimizer steps.
        """
        if self._same():
            return
        now = {key: tensor for key, tensor in self.module.named_parameters() if tensor.requires_grad}
        for key in {**self.theta, **now}:
            if now.get(key) is not self.theta.get(key):
                raise RunError(_CHANGED.format(problem=self.name, key=key))
        self._bind()

    def _parts(self) -> Sequence[Any]:
        """Return submodules, parameters, which of them are trained, and which buffers there are."""
        held, buffers = (chain.from_iterable(map(_VALUES, places)) for places in (self._holders, self._buffers))
        return [*held, *map(_REQUIRES_GRAD, self._parameters), *[value is None for value in buffers]]

    def advance(self) -> None:
        """Count a step that a traced program has taken, and advance the scheduler."""
        self.optimizer_step.advance()
        self.num_steps += 1

    def sync(self) -> None:
        """Give all ranks equal parameters, buffers and optimizer state, if each rank trains one stage of the module."""
        if self.parallel is not None:
            self.parallel.sync(self.optimizer)

    def optimizer_state(self) -> tuple[State, ...]:
        """Return a copy of the optimizer's state, one mapping per parameter of theta."""
        self.sync()
        return self.optimizer_step.state()

    def reset(self, theta: Sequence[Tensor] | None) -> None:
        """Set the parameters back, and clear the optimizer's state.

        Args:
            theta: the parameters to begin from; None takes the initial ones.
        """
        assert self.optimizer is not None
        start = self.initial if theta is None else theta
        with torch.no_grad():
            for parameter, value in zip(self.theta.values(), start, strict=True):
                parameter.copy_(value)
        self.optimizer.state.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of what a step changes: module, optimizer, scheduler, step count."""
        return deep_copy(self._learned_state())

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go back to what `snapshot` returned."""
        self._load_learned_state(deep_copy(snapshot))

    def state_dict(self) -> dict[str, Any]:
        """Return what a bit-identical resume needs; plain containers and tensors."""
        state = self._learned_state()
        state["stream"] = None if self.stream is None else self.stream.state_dict()
        state["trajectory"] = self.trajectory.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any], streams: Streams | None = None) -> None:
        """Go back to a saved state.

        Args:
            state: what `state_dict` returned; `mlotool.problem.saved_form` looks at it before.
            streams: by name, the streams of the problems that this one reads.
        """
        # The optimizer keeps what it loads: without a copy two problems would share their momentum.
        self._load_learned_state(copy.deepcopy(state))
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"])
        count = sum(len(step["random"]) for step in state["trajectory"]["steps"])
        batches = [None] * count if self.stream is None or not count else self.stream.recent(count)
        device = next(iter(self.theta.values())).device
        self.trajectory.load_state_dict(copy.deepcopy(state["trajectory"]), batches, streams or {}, device)

    def _bind(self) -> None:
        self.own = tuple(self.theta.values())
        self.slots = Slots(self.module, tuple(self.theta))
        self.submodules = tuple(self.module.modules())
        self._holders = [holder for part in self.submodules for holder in (part._parameters, part._modules)]
        self._buffers = [part._buffers for part in self.submodules]
        self._parameters = [*self.module.parameters()]
        self._same = SameObjects(self._parts)
        self.optimizer_step.bind(self.own, self.shards)
        # What runs in the module's place, and in its own training steps.
        others = (self.compiled, self.rematerialized)
        # Not by truth, which a module may define.
        self._call: Callable[..., Any] = next((other for other in others if other is not None), self.module)
        if self.trainer is not None:
            self._call = LightningEvaluation(self.module, self._call, self.trainer)
        self._step_call: Callable[..., Any] = self._call if self.parallel is None else self.parallel

    def pure(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the module as a function of its parameters, as losses receive it; calls do not change its buffers.

        Args:
            tensors: one per parameter of theta; None takes the current ones as constants. With `shard`, the loss
                receives whole parameters: with a gradient if `tensors` are this rank's own, and else as constants.
            training: train or eval mode; None leaves the module's.
        """
        if self.shards is not None:
            is_own = tensors is self.own
            return self.shards.own(training, updates_buffers=False) if is_own else self.shards.constant(training)
        return BoundModule.in_slots(self.slots, self.current() if tensors is None else tensors, training, self._call)

    def live(self, tensors: Sequence[Tensor] | None, training: bool | None) -> BoundModule:
        """Return the module as `pure` does, for the problem's own training step, which updates its buffers."""
        if self.shards is not None:
            return self.shards.own(training, updates_buffers=True)
        if tensors is None or tensors is self.own:
            return BoundModule.in_slots(self.slots, None, training, self._step_call)
        return BoundModule.in_slots(self.slots, tensors, training, self._call, MOVING_BUFFERS)

    def divide(self, mesh: "DeviceMesh") -> None:
        """Divide the parameters among ranks (`shard`); all ranks call it, with equal parameters.

        Args:
            mesh: of the ranks.
        """
        patterns, key, optimizer = self.settings.shard, f"problems.{self.name}.shard", self.optimizer
        before = dict(self.module.named_parameters())
        if isinstance(patterns, bool):
            shards = Shards(key, self.module, mesh)
        else:
            shards = PartShards(key, self.module, mesh, patterns)
        state = None if optimizer is None else optimizer.state_dict()
        self._take_module(self.module, before, shards)
        if optimizer is None or state is None:
            return
        optimizer.load_state_dict(shards.divided_optimizer(state, optimizer))
        steps_shards = any(rule.steps_shards for kind, rule in RULES.items() if isinstance(optimizer, kind))
        for group in optimizer.param_groups:
            if isinstance(shards, PartShards):
                # Kernels for several tensors take no shards and whole tensors together.
                group.update({key: False for key in ("fused", "foreach") if key in group})
            if group.get("fused") and not steps_shards:
                group.update(fused=False, foreach=True)

    def merge(self, *, is_kept: bool) -> None:
        """Put the shards together again, on the CPU; each rank calls it once.

        Args:
            is_kept: whether this rank goes on with the problem.
        """
        assert self.shards is not None
        before, optimizer = dict(self.module.named_parameters()), self.optimizer
        state = None if optimizer is None else gathered(optimizer.state_dict(), is_kept=is_kept)
        module = self.shards.merged(is_kept=is_kept)
        if module is None:
            return
        self._take_module(module, before, None)
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)

    def divide_tasks(self, ranks: Ranks) -> None:
        """Keep this rank's share of the tasks; all ranks call it, with equal parameters.

        Args:
            ranks: the processes that share the tasks; the number of tasks is a multiple of their number.
        """
        assert self.settings.tasks is not None
        self.task_share = TaskShare(self.settings.tasks, ranks)
        self._move_tasks(self.task_share.part)

    def merge_tasks(self) -> None:
        """Gather all tasks from the ranks again; each rank calls it once."""
        assert self.task_share is not None
        self._move_tasks(self.task_share.whole)
        self.task_share = None

    def _move_tasks(self, move: Callable[[Tensor], Tensor]) -> None:
        before, optimizer = dict(self.module.named_parameters()), self.optimizer
        shapes, state = {tensor.shape for tensor in self.own}, None if optimizer is None else optimizer.state_dict()
        replace_trained(self.module, move)
        self._take_module(self.module, before, None)
        self.initial = tuple(map(move, self.initial))
        # Steps of other tasks are none of these.
        self.trajectory.clear()
        if optimizer is not None and state is not None:
            kept = tree_map_only(Tensor, lambda x: move(x) if x.shape in shapes else x, state["state"])
            optimizer.load_state_dict({**state, "state": kept})

    def _take_module(self, module: nn.Module, before: Mapping[str, nn.Parameter], shards: Shards | None) -> None:
        """Go on with the parameters of another module, with an empty state of the optimizer."""
        now = dict(module.named_parameters())
        self.module, self.shards = module, shards
        self.theta = {key: now[key] for key in self.theta}
        self.optimizer_step.replace_parameters({id(parameter): now[key] for key, parameter in before.items()})
        self._bind()

    def _learned_state(self) -> dict[str, Any]:
        self.sync()
        return {
            "module": self.module.state_dict(),
            **self.optimizer_step.state_dict(),
            "num_steps": self.num_steps,
            "parallel": None if self.parallel is None else self.parallel.state_dict(),
        }

    def _load_learned_state(self, state: dict[str, Any]) -> None:
        if self.shards is not None:
            state = self.shards.divided(state, self.optimizer)
        self.module.load_state_dict(state["module"])
        self.optimizer_step.load_state_dict(state)
        self.num_steps = state["num_steps"]
        if self.parallel is not None:
            self.parallel.load_state_dict(state["parallel"])


def _role(value: str | Mapping[str, str]) -> Role:
    if isinstance(value, str):
        return Role(value)
    return Role(value["problem"], {"train": True, "eval": False, None: None}[value.get("mode")])
