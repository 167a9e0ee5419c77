"""The stages of one module at work, as many of them as this process has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.bound_module import Slots
from mlotool.core.errors import ConfigError
from mlotool.layerparallel.auxiliary.auxnet import AuxNet, matching_parts, thinned_parts
from mlotool.layerparallel.auxiliary.checks import check_networks, check_rows
from mlotool.layerparallel.auxiliary.cuda_streams import CudaStreams
from mlotool.layerparallel.auxiliary.network_variables import ChainVariables, RecursiveVariables
from mlotool.layerparallel.auxiliary.settings import Settings
from mlotool.layerparallel.auxiliary.shared import SharedParameters
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.stored_variables import StoredVariables
from mlotool.layerparallel.auxiliary.timeline import Timeline
from mlotool.layerparallel.auxiliary.transport import AbstractTransport, LocalTransport, ProcessTransport
from mlotool.layerparallel.auxiliary.variables import AbstractVariables
from mlotool.layerparallel.auxiliary.worker import Worker
from mlotool.layerparallel.partition.stage import Inputs, Stage, undisturbed

T = TypeVar("T")

TINY = 1e-12
"""The norm of a state that has died; what is relative to it then says so by its size."""


@dataclass(frozen=True)
class StagePlan:
    """A module and the stages that it is cut into.

    Args:
        key: of the setting, for messages.
        module: the whole module.
        stages: its parts, K of them.
        cut: names of the layers that begin the stages 1 .. K-1.
        inputs: a batch that the module is called with.
        places: the places of the module's parameters and buffers.

    Example:
        >>> from mlotool.layerparallel.partition.cut import partition
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> plan = StagePlan("parallel", net, partition(net, 2, ["2"]), ["2"], (torch.zeros(1, 2),), Slots(net))
        >>> len(plan.stages)
        2
    """

    key: str
    module: nn.Module
    stages: Sequence[Stage]
    cut: Sequence[str]
    inputs: Inputs
    places: Slots


class Team:
    """The workers of this process: one for each stage that it has.

    Args:
        plan: the module and its stages.
        settings: how the stages are trained.
        transport: between the stages; it says which of them are this process's.
        timeline: records what takes how long.
        seed: of the noise on auxiliary variables.

    Attributes:
        workers: by the stage's number.
        cut: names of the layers that begin the stages 1 .. K-1.

    Raises:
        ConfigError: a network for auxiliary variables does not fit the stages, or, in `backward`, the loss of divided
            stages uses parameters outside of the module's call.

    Example:
        >>> from mlotool.layerparallel import Auxiliary
        >>> from mlotool.layerparallel.partition.cut import partition
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> plan = StagePlan("parallel", net, partition(net, 2, ["2"]), ["2"], (torch.zeros(1, 2),), Slots(net))
        >>> team = Team(plan, Auxiliary(stages=2).settings, LocalTransport(), Timeline(0), seed=0)
        >>> sorted(team.workers), team.shapes((torch.zeros(8, 2),))
        ([0, 1], [torch.Size([4])])
    """

    def __init__(
        self,
        plan: StagePlan,
        settings: Settings,
        transport: AbstractTransport,
        timeline: Timeline,
        seed: int,
    ) -> None:
        self.cut = plan.cut
        self._plan = plan
        self._transport = transport
        self._shared: SharedParameters | None = None
        self._shapes: dict[tuple[torch.Size, ...], list[torch.Size]] = {}
        parameter = next(plan.module.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        num_stages = len(plan.stages)
        parts = [] if settings.is_stored or num_stages == 1 else self._parts(settings)
        has_lanes = settings.streams and self.device.type == "cuda" and isinstance(transport, LocalTransport)
        if isinstance(transport, LocalTransport):
            transport.has_lanes = has_lanes
        self._lanes = CudaStreams(range(num_stages - 1) if has_lanes else (), self.device)
        self.workers: dict[int, Worker] = {}
        for number in transport.own(num_stages):
            variables = _variables(number, num_stages, settings, transport, seed + number, parts)
            variables.to(self.device)
            self.workers[number] = Worker(plan.stages[number], variables, transport, timeline, plan.places)

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage."""
        return len(self._plan.stages) - 1 in self.workers

    def sync(self, transport: ProcessTransport) -> None:
        """Give all processes of this part of the batch the parameters and buffers of each stage."""
        stages = self._plan.stages
        transport.stages.broadcast([[*stage.parameters.values(), *stage.buffers().values()] for stage in stages])

    def sync_optimizer(self, transport: ProcessTransport, optimizer: Optimizer) -> None:
        """Give all processes of this part of the batch the optimizer's state of each stage."""
        [own], stages = self.workers, self._plan.stages
        state = {name: optimizer.state.get(each, {}) for name, each in stages[own].parameters.items()}
        for number, found in transport.gathered({str(own): state}).items():
            for name, each in stages[int(number)].parameters.items():
                if int(number) != own and found[name]:
                    optimizer.state[each] = _on_device(found[name], each.device)

    def agree_on_buffers(self, transport: ProcessTransport) -> None:
        """Average the buffers of each stage over the parts of the batch, and give them to all processes."""
        [own] = self.workers
        buffers = [each for each in self._plan.stages[own].buffers().values() if each.is_floating_point()]
        for buffer, mean in zip(buffers, transport.replicas.mean(buffers), strict=True):
            buffer.copy_(mean)
        transport.stages.broadcast([[*stage.buffers().values()] for stage in self._plan.stages])

    def shapes(self, inputs: Inputs) -> list[torch.Size]:
        """Return the shapes of one sample's state at the interfaces 1 .. K - 1, for inputs of these shapes."""
        key = tuple(each.shape[1:] for each in inputs if isinstance(each, Tensor))
        if key not in self._shapes:
            found: list[torch.Size] = []
            state: Any = None
            with undisturbed(self._plan.module), torch.no_grad():
                for stage in self._plan.stages[:-1]:
                    state = stage(state, inputs)
                    check_rows(self._plan.key, self._plan.cut[len(found)], state, inputs)
                    found.append(state.shape[1:])
            self._shapes[key] = found
        return self._shapes[key]

    def forward(self, step: StageStep) -> Any:
        """Run this process's stages; return what the last stage returns where this process has it, and else None."""
        # Here, and not at the end of the last step: what was still leaving had all of the optimizer's step for it.
        self._transport.finish()
        self._lanes.fork()
        if step.is_serial:
            self._each(lambda worker: worker.pass_serially(step))
        self._each(lambda worker: worker.prepare(step))
        return self._each(lambda worker: worker.forward(step))[-1]

    def last_stage(self, state: Tensor, inputs: Inputs) -> Any:
        """Run the last stage from a state; its buffers move, unless they are replaced."""
        return self._plan.stages[-1](state, inputs)

    def backward(
        self,
        step: StageStep,
        loss: Tensor,
        theta: Sequence[Tensor],
        loss_at: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Tensor | None]:
        """Return the gradient of each stage's own loss, and correct all that is between the stages.

        Args:
            step: the one at hand.
            loss: of what the last stage has returned.
            theta: the module's parameters.
            loss_at: the loss where the last stage begins at another point; None: its variables move once.

        Returns:
            One tensor a parameter; None for those of other processes' stages.
        """
        parts = self._each(lambda worker: self._backward(worker, loss, theta))
        self._each(lambda worker: worker.correct(step, loss_at))
        self._each(lambda worker: worker.finish(step), is_last_first=True)
        self._lanes.join()
        found: list[Tensor | None] = [None] * len(theta)
        for places, slopes in parts:
            for place, slope in zip(places, slopes, strict=True):
                found[place] = _sum(found[place], slope)
        if self._transport.is_divided:
            return self._joined(self._averaged(found), theta)
        return found

    def _each(self, phase: Callable[[Worker], T], *, is_last_first: bool = False) -> list[T]:
        """Let one worker after the other go through a phase, each on its stream."""
        found = []
        for number in sorted(self.workers, reverse=is_last_first):
            with self._lanes.at(number):
                found.append(phase(self.workers[number]))
        return found

    def _backward(
        self, worker: Worker, loss: Tensor, theta: Sequence[Tensor]
    ) -> tuple[list[int], Sequence[Tensor | None]]:
        """Return which of theta a stage's loss may depend on, and its derivatives with respect to them."""
        own = {id(each) for each in worker.stage.parameters.values()}
        # The problem's loss may use any parameter beside the module's call: a decay, a proximal term.
        places = [place for place, each in enumerate(theta) if worker.is_last or id(each) in own]
        points = [theta[place] for place in places]
        slopes = worker.backward(loss, points)
        if self._transport.is_divided:
            self._check_own(own, points, slopes)
        return places, slopes

    def violations(self) -> dict[str, list[float]]:
        """Return, by interface, the norms of the last step's violations, absolute and relative."""
        found = {}
        for number, worker in self.workers.items():
            if worker.violations is not None:
                [squares] = self._transport.replicas.mean([worker.violations.square()])
                total, size = (squares * self._transport.replicas.size).sqrt().tolist()
                found[str(number)] = [total, total / max(size, TINY)]
        return self._transport.gathered(found)

    def curvatures(self) -> dict[str, float]:
        """Return, by interface, the curvature that the rate follows, where it does."""
        own = {str(number): worker.curvature for number, worker in self.workers.items() if worker.curvature}
        return self._transport.gathered(own)

    def to(self, device: torch.device) -> None:
        """Move the networks and tables of auxiliary variables to a device."""
        self.device = device
        for worker in self.workers.values():
            worker.variables.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return what all stages keep from step to step, by the stage's number; every process must call it."""
        own = {
            str(number): {**worker.variables.state_dict(), "curvature": worker.curvature}
            for number, worker in self.workers.items()
        }
        return dict(sorted(self._transport.gathered(own).items()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        for number, worker in self.workers.items():
            worker.variables.load_state_dict(state[str(number)], self.device)
            worker.curvature = state[str(number)]["curvature"]

    def _check_own(self, own: set[int], theta: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> None:
        """Refuse a loss that depends on other stages' parameters, whose processes do not evaluate it."""
        others = [each for each, slope in zip(theta, slopes, strict=True) if slope is not None and id(each) not in own]
        if others:
            [name] = [name for name, each in self._plan.module.named_parameters() if each is others[0]]
            raise ConfigError(
                f"{self._plan.key}.processes: found true, but the loss uses the parameter '{name}' beside the module's "
                "call; expected that it uses the call alone, since one process evaluates it, which has one stage. "
                f"Decay by the optimizer's weight_decay, or set {self._plan.key}.processes=false."
            )

    def _averaged(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Return the means over the processes of the same stage."""
        means = iter(self._transport.replicas.mean([each for each in found if each is not None]))
        return [None if each is None else next(means) for each in found]

    def _joined(self, found: list[Tensor | None], theta: Sequence[Tensor]) -> list[Tensor | None]:
        """Return gradients in which those of parameters that other stages use as well are added up."""
        [(number, worker)] = self.workers.items()
        places = {id(each): place for place, each in enumerate(theta)}
        own = {name: places[id(each)] for name, each in worker.stage.parameters.items() if id(each) in places}
        slopes = {name: found[place] for name, place in own.items()}
        if self._shared is None:
            self._shared = SharedParameters(self._plan.stages, number)
        for name, total in self._shared.totals(slopes, self._transport).items():
            if name in own:
                found[own[name]] = total
        return found

    def _parts(self, settings: Settings) -> list[nn.Module]:
        plan, auxnet = self._plan, settings.auxnet
        if auxnet is None:
            parts = thinned_parts(plan.stages, plan.inputs, settings.auxnet_blocks)
            check_networks(plan.key, parts, plan.stages, settings.auxnet_blocks)
            return parts
        auxnet.to(self.device, self.dtype)
        return matching_parts(auxnet, self.shapes(plan.inputs), plan.inputs, f"{plan.key}.auxnet")


def _variables(
    number: int,
    num_stages: int,
    settings: Settings,
    transport: AbstractTransport,
    seed: int,
    parts: Sequence[nn.Module],
) -> AbstractVariables:
    if settings.is_stored:
        return StoredVariables(number, num_stages, settings, transport, seed)
    if settings.variables == "auxnet":
        network = AuxNet(parts[number : number + 1], number == 0) if number < num_stages - 1 else None
        # The noise at an interface is its own, whichever of its stages draws it.
        return ChainVariables(number, num_stages, settings, transport, seed + 1, network)
    network = AuxNet(parts[:number], is_first=True) if number else None
    return RecursiveVariables(number, num_stages, settings, transport, seed, network)


def _on_device(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return an optimizer's state of one parameter on its device; a count of steps stays where torch keeps it."""
    return {
        key: value.to(device) if isinstance(value, Tensor) and value.ndim else value for key, value in state.items()
    }


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b
