"""A run of layer-parallel training: the stages, once they are built, and what is kept from step to step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.bound_module import Slots
from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.layerparallel.auxiliary.divergence import Divergence
from mlotool.layerparallel.auxiliary.report import Report
from mlotool.layerparallel.auxiliary.samples import Samples
from mlotool.layerparallel.auxiliary.settings import Settings
from mlotool.layerparallel.auxiliary.step import BufferMoves, StageStep
from mlotool.layerparallel.auxiliary.team import StagePlan, Team
from mlotool.layerparallel.auxiliary.timeline import Timeline
from mlotool.layerparallel.auxiliary.transport import AbstractTransport, LocalTransport, ProcessTransport
from mlotool.layerparallel.partition.chain import Chain, bound
from mlotool.layerparallel.partition.choice import MEASURED, Cut, balanced_cut, resolved
from mlotool.layerparallel.partition.depth import chain_for, may_be_finer
from mlotool.layerparallel.partition.stage import Inputs
from mlotool.layerparallel.partition.trace import UntraceableError


class _LastStageElsewhere(BaseException):
    """Leaves a loss whose rest belongs to the process of the last stage.

    It passes through the user's loss, which may handle every `Exception`, and never leaves `evaluate`.
    """


class StageRun:
    """The stages of one module at work, and what is kept from step to step. `Auxiliary` is the setting that has one.

    A step is `begin`, the loss, in which the run is called in place of the module, and `gradient`. The stages are built
    at the first step, when the shapes of the inputs are known.

    Args:
        settings: how the stages are trained.
        timeline: records what takes how long.

    Attributes:
        transport: between the stages.
        num_steps: taken so far.

    Raises:
        ConfigError: `__call__`: the loss calls the module twice; `gradient`: it has not called it.
        RunError: the stages have parted so far that training goes nowhere.

    Example:
        >>> from mlotool.layerparallel import Auxiliary
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> run = StageRun(Auxiliary(stages=2).settings, Timeline(0))
        >>> run.seed(0)
        >>> run.attach("problems.net.parallel", net, cut=["1"])
        >>> run.begin({"index": torch.arange(3)}, weight=1.0)
        >>> loss = run(torch.ones(3, 4)).square().mean()
        >>> [tuple(each.shape) for each in run.gradient(loss, list(net.parameters()))]
        [(4, 4), (4,), (4, 4), (4,)]
        >>> sorted(run.statistics())
        ['beta', 'relative_violation_1', 'violation_1']
    """

    def __init__(self, settings: Settings, timeline: Timeline) -> None:
        self.settings = settings
        self.transport: AbstractTransport = LocalTransport()
        self.num_steps = 0
        self._timeline = timeline
        self._seed: int | None = None
        self._team: Team | None = None
        self._pending: Mapping[str, Any] | None = None
        self._samples = Samples(settings.copies)
        self._slots: Tensor | None = None
        self._share = 1.0
        self._step: StageStep | None = None
        self._is_open = False
        self._loss: Callable[[], LossOutput] | None = None
        self._point: Tensor | None = None
        self._report: Report | None = None
        self._is_moved = self._is_optimizer_moved = False

    @property
    def cut(self) -> Sequence[str]:
        """Names of the layers that begin the stages 1 .. K-1; empty before the first step."""
        return () if self._team is None else self._team.cut

    def seed(self, seed: int) -> None:
        """Take the seed of the noise on auxiliary variables, the first time, unless a checkpoint has one."""
        if self._seed is None:
            self._seed = seed % 2**62

    def attach(self, key: str, module: nn.Module, cut: Cut) -> None:
        """Take the module.

        Args:
            key: of the setting, for messages.
            module: of the problem.
            cut: as of `Auxiliary`.

        Raises:
            ConfigError: the module has fewer places to cut than needed, or no such layers.
        """
        self.key, self._module, self._cut = key, module, cut
        # What decides by values is cut at the first step.
        with suppress(UntraceableError):
            chain = Chain(module, key)
            if not may_be_finer(chain):
                resolved(chain, self.settings.num_stages, cut)
        self._places = Slots(module)
        self._divergence = Divergence(key, self.settings.betas)

    def join(self, transport: AbstractTransport) -> None:
        """Set how stages hand tensors to each other, and so which stages this process has; before the first step."""
        self.transport = transport
        self._report = Report(transport) if isinstance(transport, ProcessTransport) else None

    def to(self, device: torch.device) -> None:
        """Move the networks and tables of auxiliary variables to a device."""
        if self.settings.auxnet is not None:
            self.settings.auxnet.to(device)
        if self._team is not None:
            self._team.to(device)

    def before_step(self) -> None:
        """Note that this stage's parameters are about to move: the other processes have old ones until `sync`."""
        self._is_moved = self._is_optimizer_moved = True

    def sync(self, optimizer: Optimizer | None) -> None:
        """Give each process the parameters, buffers and optimizer state of the stages that other processes move."""
        if self._team is None or not isinstance(self.transport, ProcessTransport):
            return
        if self._is_moved:
            self._team.sync(self.transport)
            self._is_moved = False
        if self._is_optimizer_moved and optimizer is not None:
            self._team.sync_optimizer(self.transport, optimizer)
            self._is_optimizer_moved = False

    def agree_on_buffers(self) -> None:
        """Average the buffers of each stage over the parts of the batch, and give them to all processes."""
        if self._team is not None and isinstance(self.transport, ProcessTransport):
            self._team.agree_on_buffers(self.transport)

    def begin(self, batch: Any, weight: float) -> None:
        """Begin a step.

        Args:
            batch: says by its `index`, where variables are stored, which samples it has.
            weight: of this process's part of the batch, as `share` of `StageStep`.
        """
        if self._team is not None and self._team.device.type == "cuda":
            # Of the last step: by now it is done, so looking at it makes nothing wait.
            self._check_finite()
        self._share, self._is_open, self._step = weight, True, None
        is_stored = self.settings.is_stored and self.settings.num_stages > 1
        self._slots = self._samples.slots(batch, self.key) if is_stored else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages from their variables; what the last one returns goes on into the loss."""
        if self._point is not None:
            assert self._team is not None and self._step is not None
            return self._team.last_stage(self._point, self._step.inputs)
        if not self._is_open:
            raise ConfigError(
                f"{self.key}: the loss calls its module a second time in one step; expected once, since the stages "
                "are trained by what the call leaves behind. Join the inputs into one call, or remove parallel."
            )
        self._is_open = False
        inputs = bound(self._module, args, kwargs)
        team = self._team or self._build(inputs)
        self._step = step = self._describe(team, inputs)
        self._timeline.begin(self.num_steps, step.device)
        found = team.forward(step)
        if not team.has_last:
            raise _LastStageElsewhere
        return found

    def evaluate(self, loss: Callable[[], LossOutput]) -> LossOutput:
        """Return the loss, which the process of the last stage has; others receive it while their own stages go on."""
        self._loss = loss
        try:
            output = loss()
        except _LastStageElsewhere:
            assert self._report is not None and self._team is not None
            return self._report.expect(self._team.dtype, self._team.device)
        if self._report is not None and self._team is not None:
            self._report.send(output, self._team.dtype, self._team.device)
        return output

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of the stages' own losses; then correct variables, multipliers and networks."""
        if self._step is None or self._team is None:
            raise ConfigError(
                f"{self.key}: the loss has not called its module; expected model(..) once in each step, and no "
                "model.method(..). Call the module itself, or remove parallel."
            )
        found = self._team.backward(self._step, loss, theta, self._loss_at)
        if self._report is not None and not self._team.has_last:
            self._report.receive()
        self.num_steps += 1
        if self._team.device.type != "cuda":
            self._check_finite()
        self._step = self._loss = None
        return found

    def _loss_at(self, point: Tensor) -> Tensor:
        """Return the loss of the batch at hand where the last stage begins at another point than its variables."""
        assert self._loss is not None
        self._point = point
        try:
            return self._loss().loss
        finally:
            self._point = None

    def statistics(self) -> Mapping[str, float]:
        """Return the constraint violations at each interface, absolute and relative, and beta."""
        if self._team is None or self.settings.num_stages == 1:
            return {}
        if self._team.device.type == "cuda":
            self._check_finite()
        found = self._betas(max(self.num_steps - 1, 0))
        for number, (violation, relative) in sorted(self._team.violations().items()):
            found |= {f"violation_{number}": violation, f"relative_violation_{number}": relative}
        return found | {f"curvature_{number}": each for number, each in self._team.curvatures().items()}

    def _betas(self, step: int) -> dict[str, float]:
        found = [beta.at(step) for beta in self.settings.betas]
        if len(set(found)) == 1:
            return {"beta": found[0]}
        return {f"beta_{number}": each for number, each in enumerate(found, start=1)}

    def timeline(self) -> dict[str, Any] | None:
        """Return the recorded spans of all stages, and the last violations."""
        [first, *_] = self.transport.own(self.settings.num_stages)
        spans = Timeline.joined(list(self.transport.gathered({str(first): self._timeline.state()}).values()))
        if not spans:
            return None
        return {
            "stages": self.settings.num_stages,
            "processes": self.settings.num_stages if self.transport.is_divided else 1,
            "spans": spans,
            "violation": {key: value for key, value in self.statistics().items() if key.startswith("violation")},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the variables, multipliers, networks, and counters."""
        if self._team is None:
            return dict(self._pending or {"is_built": False})
        return {
            "is_built": True,
            "num_steps": self.num_steps,
            "seed": self._seed,
            "samples": self._samples.state_dict(),
            "cut": list(self._team.cut),
            "stages": self._team.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned; before the first step it is kept until the stages are built."""
        if not state["is_built"]:
            self._team, self._pending, self.num_steps = None, None, 0
            self._samples.forget()
            return
        self.num_steps, self._seed = state["num_steps"], state["seed"]
        self._samples.load_state_dict(state["samples"])
        if self._team is None:
            self._pending = state
        else:
            self._team.load_state_dict(state["stages"])

    def _build(self, inputs: Inputs) -> Team:
        cut = self._cut
        kept = None if self._pending is None else list(self._pending["cut"])
        if kept is not None and (cut is None or cut == MEASURED):
            # A run that goes on has the stages of its checkpoint.
            cut = kept
        names = None if isinstance(cut, str) else cut
        chain = chain_for(self._module, self.key, inputs, names, self.settings.num_stages)
        cut = self.transport.agreed(lambda: balanced_cut(chain, self.settings.num_stages, cut, inputs, self.key))
        if kept is not None and kept != cut:
            raise ConfigError(
                f"{self.key}: the checkpoint has the cuts {kept}, this run {cut}; expected the same. Set "
                f"{self.key}.cut to those of the checkpoint."
            )
        assert self._seed is not None, "A program has a seed for it."
        plan = StagePlan(self.key, self._module, chain.stages(cut), cut, inputs, self._places)
        self._team = Team(plan, self.settings, self.transport, self._timeline, self._seed)
        if self._pending is not None:
            self._team.load_state_dict(self._pending["stages"])
            self._pending = None
        return self._team

    def _describe(self, team: Team, inputs: Inputs) -> StageStep:
        size = next((len(each) for each in inputs if isinstance(each, Tensor) and each.ndim), 1)
        unseen = None
        if self._slots is not None:
            [everybody] = self.transport.replicas.gather_rows([self._slots])
            unseen = self._samples.meet(self._slots, everybody)
        every = self.settings.recalibrate
        return StageStep(
            inputs,
            size,
            team.shapes(inputs),
            team.dtype,
            team.device,
            [beta.at(self.num_steps) for beta in self.settings.betas],
            self.settings.reduction,
            self._share,
            self.transport.replicas.size,
            self._slots,
            unseen,
            BufferMoves.of(every, self.num_steps),
            self.num_steps,
        )

    def _check_finite(self) -> None:
        assert self._team is not None
        self._divergence.check(self._team.workers, self.num_steps)
