"""The stages of one module at work, as many of them as this process has, and what each did when."""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.arguments import require
from mlotool.core.bound_module import Slots
from mlotool.layerparallel.auxiliary import variables as kinds
from mlotool.layerparallel.auxiliary.equations import local_loss, variable_slope, violations
from mlotool.layerparallel.auxiliary.variables import AuxiliarySettings, AuxNet, StageStep, num_rows
from mlotool.layerparallel.exchange import Transport
from mlotool.layerparallel.partition.chain import imbalance
from mlotool.layerparallel.partition.trace import Inputs, Stage, undisturbed
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup


class SpanRecorder:
    """What each stage did when: spans of time of the first batches, in seconds.

    Args:
        num_batches: how many batches are recorded; 0 records nothing and costs nothing.

    Attributes:
        spans: recorded so far: mappings with `rank`, `batch`, `what`, `begin` and `end`.

    Example:
        >>> recorder = SpanRecorder(num_batches=1)
        >>> recorder.begin(0, torch.device("cpu"))
        >>> with recorder.span(rank=0, what="forward"):
        ...     total = torch.ones(2).sum()
        >>> [(span["rank"], span["batch"], span["what"]) for span in recorder.spans]
        [(0, 0, 'forward')]
    """

    def __init__(self, num_batches: int) -> None:
        self.spans: list[dict[str, Any]] = []
        self._num_batches = num_batches
        self._batch = -1
        self._device = torch.device("cpu")

    def begin(self, batch: int, device: torch.device) -> None:
        """Begin a batch, counted from 0."""
        self._batch, self._device = batch, device

    @staticmethod
    def joined(processes: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Return the spans of several processes in order, in seconds since the first of them began."""
        spans = [span for process in processes for span in process]
        first = min((span["begin"] for span in spans), default=0.0)
        moved = [{**span, "begin": span["begin"] - first, "end": span["end"] - first} for span in spans]
        return sorted(moved, key=lambda span: (span["batch"], span["begin"]))

    @contextmanager
    def span(self, rank: int, what: str) -> Iterator[None]:
        """Record how long something takes.

        Args:
            rank: of the stage.
            what: forward, backward, communication or auxnet.
        """
        if not 0 <= self._batch < self._num_batches:
            yield
            return
        begin = self._now()
        yield
        self.spans.append({"rank": rank, "batch": self._batch, "what": what, "begin": begin, "end": self._now()})

    def _now(self) -> float:
        if self._device.type == "cuda":
            # Kernels are queued: without this a span would be the time to queue them.
            torch.cuda.synchronize(self._device)
        # Since the epoch: several processes have one clock.
        return time.time()


def forecast(cut: Sequence[str], timeline: Mapping[str, Any] | None) -> list[str]:
    """Return how well stages are balanced, and how much faster they are at most, in sentences.

    The first batch is left out where there are others, since it has work of its own.

    Args:
        cut: names of the layers that begin the stages 1 .. K-1.
        timeline: as of `Auxiliary.timeline`; None where nothing was recorded.

    Example:
        >>> spans = [{"rank": rank, "batch": 0, "what": what, "begin": 0.0, "end": seconds}
        ...          for rank, what, seconds in ((0, "forward", 1.0), (1, "forward", 2.0), (1, "auxnet", 0.3))]
        >>> for line in forecast(["blocks.3"], {"stages": 2, "spans": spans}):
        ...     print(line)
        2 stages begin at the input and at blocks.3; they take 1e+03 and 2e+03 ms, the longest 1.33 times the mean.
        With a process for each stage a batch is at most 1.30 times as fast as in one process, and 1.67 times with \
stages of equal length (equation 27 of Sun et al. 2021).
    """
    if timeline is None or timeline["stages"] == 1:
        return []
    spans = timeline["spans"]
    batches = {span["batch"] for span in spans}
    kept = batches - {min(batches)} or batches
    count = timeline["stages"]

    def mean(rank: int, kinds: Sequence[str]) -> float:
        some = [span for span in spans if span["rank"] == rank and span["what"] in kinds and span["batch"] in kept]
        return sum(span["end"] - span["begin"] for span in some) / len(kept)

    stages = [mean(rank, ("forward", "backward")) for rank in range(count)]
    method = max(mean(rank, ["auxnet"]) for rank in range(count))
    equal = predicted_speedup(BatchSeconds(forward=sum(stages), backward=0.0, penalty=method), count)
    places = " and at ".join(["the input", ", ".join(cut)])
    *times, last = (f"{1e3 * seconds:.3g}" for seconds in stages)
    return [
        f"{count} stages begin at {places}; they take {', '.join(times)} and {last} ms, the longest "
        f"{imbalance(stages):.2f} times the mean.",
        f"With a process for each stage a batch is at most {sum(stages) / (max(stages) + method):.2f} times as fast as "
        f"in one process, and {equal:.2f} times with stages of equal length (equation 27 of Sun et al. 2021).",
    ]


# s: samples of a batch, ...: the shape of a state

T = TypeVar("T")

# The norm of a state that has died; what is relative to it then says so by its size.
TINY = 1e-12

# Steps between two looks at the curvature.
EVERY = 20

# Of the power method in a look; each is a pass of the stage, forward and backward.
NUM_ITERATIONS = 3

# From one look to the next, of what has been seen: a steep batch keeps the rate small for a while.
DECAY = 0.9

# Of the finite differences, relative to the norm of a sample's variables.
RADIUS = 1e-2


class Worker:
    """Stage k at work. Its methods are the phases of a step; the workers of all stages go through them in one order.

    In one process the workers take each phase one after the other, the first stage first, but for `finish`, where the
    last one is first. No phase needs a message that another worker sends later in the same phase.

    Args:
        stage: the part of the module that it runs.
        variables: where the stage begins, and what its end is aimed at.
        recorder: records what takes how long.

    Attributes:
        violations: (2,), the violation at the interface before the stage in the last step, and the norm of the states
            there; None before the first step, and for the first stage.
        curvature: of the stage's loss in its variables, relative to the penalty's; 0 where no rate follows it.

    Example:
        >>> from mlotool.layerparallel.partition.chain import partition
        >>> net, settings = torch.nn.Linear(2, 1), AuxiliarySettings(stages=1)
        >>> [stage], variables = partition(net, 1), kinds.StoredVariables(0, settings, Transport(), seed=0)
        >>> worker = Worker(stage, variables, SpanRecorder(0))
        >>> step = StageStep(settings, 0, (torch.ones(4, 2),), [], torch.float32, torch.device("cpu"))
        >>> worker.prepare(step)
        >>> loss = worker.forward(step).sum()
        >>> worker.backward(loss, [net.weight])
        [tensor([[4., 4.]])]
    """

    def __init__(self, stage: Stage, variables: kinds.AbstractVariables, recorder: SpanRecorder) -> None:
        self.stage, self.variables, self.number = stage, variables, variables.number
        self.violations: Tensor | None = None
        self.curvature = 0.0
        self._transport, self._recorder = variables.transport, recorder
        self._places = Slots(stage.module)
        self._leaf: Tensor | None = None
        self._loss: Tensor | None = None
        self._onward: Tensor | None = None
        self._aim: tuple[Tensor, Tensor | None] | None = None
        self._precision: tuple[str, torch.dtype, bool] | None = None

    def pass_serially(self, step: StageStep) -> None:
        """Run the true state of the serial network through the stage.

        It gives samples that are seen for the first time their variables, and BatchNorm its running statistics.
        """
        number, state = self.number, None
        if not self.variables.is_first:
            self._transport.expect("serial", number - 1, number, step.blank(number))
            state = self._transport.receive("serial", number - 1, number)
            self.variables.start(step, state)
        collects = step.collects_statistics
        num_collected = step.number // (step.settings.recalibrate or 1)
        if self.variables.is_last and not collects:
            return
        with torch.no_grad(), self._buffers(are_moved=collects), self.stage.averaging(num_collected):
            state = self.stage(state, step.inputs)
        if not self.variables.is_last:
            self._transport.send("serial", number, number + 1, state.to(step.dtype).contiguous())

    def prepare(self, step: StageStep) -> None:
        """Find the auxiliary variables, and begin to receive where the stage before ends."""
        number = self.number
        with self._recorder.span(number, "communication"):
            self.variables.await_variable(step)
        with self._recorder.span(number, "auxnet"):
            self.variables.prepare(step)
        if not self.variables.is_first:
            self._transport.expect("state", number - 1, number, step.blank(number))

    def forward(self, step: StageStep) -> Any:
        """Run from lambda_k to the end of the stage; the last one returns what the module returns."""
        own = self.variables.own
        self._leaf = None if own is None else own.detach().requires_grad_()
        are_moved = not step.settings.recalibrate
        with self._recorder.span(self.number, "forward"), self._buffers(are_moved):
            end = self.stage(self._leaf, step.inputs)
        if self.variables.is_last:
            return end
        end = end.to(step.dtype)
        self._transport.send("state", self.number, self.number + 1, end.detach().contiguous())
        with self._recorder.span(self.number, "communication"):
            self._aim = self.variables.target()
        kind = end.device.type
        self._precision = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._loss = self._local_loss(step, end)
        return None

    def _local_loss(self, step: StageStep, state: Tensor) -> Tensor:
        assert self._aim is not None
        interface = self.number + 1
        return local_loss(state, *self._aim, step.beta(interface), step.weight(interface))

    def _gradient(self, step: StageStep, point: Tensor, loss_at: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Return the derivative of the stage's loss with respect to where it begins, at another point than lambda_k."""
        leaf = point.detach().requires_grad_()
        with torch.enable_grad(), self._buffers(are_moved=False):
            if self.variables.is_last:
                assert loss_at is not None
                loss = loss_at(leaf)
            else:
                assert self._precision is not None
                device, dtype, is_enabled = self._precision
                with torch.autocast(device, dtype=dtype, enabled=is_enabled):
                    end = self.stage(leaf, step.inputs)
                loss = self._local_loss(step, end.to(step.dtype))
        return torch.autograd.grad(loss, leaf, materialize_grads=True)[0]

    def backward(self, loss: Tensor | None, theta: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the derivatives of the stage's loss with respect to theta, None where it does not depend on it.

        Args:
            loss: the module's, for the last stage.
            theta: parameters of the module.
        """
        loss = loss if self.variables.is_last else self._loss
        assert loss is not None
        points = [*theta] if self._leaf is None else [*theta, self._leaf]
        slopes: list[Tensor | None] = [None] * len(points)
        with self._recorder.span(self.number, "backward"):
            if loss.requires_grad:
                slopes[:] = torch.autograd.grad(loss, points, allow_unused=True)
        self._loss = None
        if self._leaf is not None:
            onward = slopes.pop()
            self._onward = torch.zeros_like(self._leaf) if onward is None else onward
        return slopes

    def correct(self, step: StageStep, loss_at: Callable[[Tensor], Tensor] | None = None) -> None:
        """Move lambda_k and kappa_k towards where the stage before has ended.

        Args:
            step: the one at hand.
            loss_at: the module's loss, where its last stage begins at another point; of the last stage.
        """
        if self.variables.is_first:
            return
        number = self.number
        assert self._leaf is not None and self._onward is not None
        with self._recorder.span(number, "communication"):
            state = self._transport.receive("state", number - 1, number)
        point, onward = self._leaf.detach(), self._onward
        self.violations = violations(point, state)
        with self._recorder.span(number, "auxnet"):
            slope = self._slopes(step, state, point, onward, lambda other: self._gradient(step, other, loss_at))
            self.variables.correct(step, state, slope.contiguous())
        self._leaf = self._onward = self.variables.own = self._aim = None

    def _slopes(
        self, step: StageStep, state: Tensor, point: Tensor, onward: Tensor, gradient: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the sum of the slopes of lambda_k's steps, each times the rate."""
        number, multiplier = self.number, self.variables.multiplier()
        beta, weight = step.beta(number), step.weight(number)
        rate, unit = step.settings.rate(number), step.step_size(number)
        if rate is None:
            rate = self._safe_rate(step, point, onward, gradient)
        total = torch.zeros_like(point)
        for count in range(step.settings.lambda_steps):
            if count:
                onward = gradient(point)
            slope = rate / step.num_replicas * variable_slope(point, state, multiplier, beta, weight, onward)
            total, point = total + slope, point - unit * slope
        return total

    def _safe_rate(self, step: StageStep, point: Tensor, onward: Tensor, gradient: Callable[[Tensor], Tensor]) -> float:
        """Return `1 / (1 + curvature)`, half of the largest rate at which lambda_k's step is stable at that curvature.

        The penalty before the stage has the curvature 2 beta c; that of the stage's own loss is taken relative to it.
        With a penalty behind the stage it is the largest eigenvalue of J^T J, where J is the stage's Jacobian.
        """
        if step.number % EVERY == 0:
            bound = 2.0 * step.beta(self.number) * step.weight(self.number)
            # A part of the batch without samples of its own has no weight, and says nothing.
            curvature = float(_largest_curvature(gradient, point, onward)) / bound if bound else 0.0
            [largest] = self._transport.replicas.largest([curvature])
            self.curvature = max(largest, DECAY * self.curvature)
        return 1.0 / (1.0 + self.curvature)

    def finish(self, step: StageStep) -> None:
        """Do what can be done only after the next stage has corrected its variables."""
        with self._recorder.span(self.number, "communication"):
            self.variables.await_slope(step)
        with self._recorder.span(self.number, "auxnet"):
            self.variables.finish(step)

    @contextmanager
    def _buffers(self, are_moved: bool) -> Iterator[None]:
        """Let the stage's buffers move, or be copies that are thrown away."""
        with ExitStack() as stack:
            if not are_moved:
                copies = {name: buffer.clone() for name, buffer in self.stage.buffers().items()}
                stack.callback(self._places.fill({}, copies))
            yield


@dataclass(eq=False, repr=False)
class Team:
    """A module, the stages that it is cut into, and the workers of this process: one for each stage that it has.

    Args:
        key: of the setting, for messages.
        module: the whole module.
        stages: its parts, K of them.
        cut: names of the layers that begin the stages 1 .. K-1.
        inputs: a batch that the module is called with.
        settings: how the stages are trained.
        transport: between the stages; it says which of them are this process's.
        recorder: records what takes how long.
        seed: of the noise on auxiliary variables.

    Attributes:
        workers: by the stage's number.

    Raises:
        ConfigError: a network for auxiliary variables does not fit the stages, or, in `backward`, the loss of divided
            stages uses parameters outside of the module's call.

    Example:
        >>> from mlotool.layerparallel.partition.chain import partition
        >>> net, settings = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)), AuxiliarySettings(stages=2)
        >>> stages, inputs = partition(net, 2, ["2"]), (torch.zeros(1, 2),)
        >>> team = Team("parallel", net, stages, ["2"], inputs, settings, Transport(), SpanRecorder(0), seed=0)
        >>> sorted(team.workers), team.shapes((torch.zeros(8, 2),))
        ([0, 1], [torch.Size([4])])
    """

    key: str
    module: nn.Module
    stages: Sequence[Stage]
    cut: Sequence[str]
    inputs: Inputs
    settings: AuxiliarySettings
    transport: Transport
    recorder: SpanRecorder
    seed: int

    def __post_init__(self) -> None:
        self._shapes: dict[tuple[torch.Size, ...], list[torch.Size]] = {}
        parameter = next(self.module.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device
        num_stages, transport = len(self.stages), self.transport
        transport.has_lanes = self.settings.streams and self.device.type == "cuda" and not transport.is_divided
        # The last stage works on the current stream, where the loss is computed.
        numbers = range(num_stages - 1) if transport.has_lanes else ()
        self._lanes = {number: torch.cuda.Stream(self.device) for number in numbers}
        parts = [] if self.settings.is_stored or num_stages == 1 else self._parts()
        self.workers: dict[int, Worker] = {}
        for number in transport.own(num_stages):
            variables = self._variables(number, parts)
            variables.to(self.device)
            self.workers[number] = Worker(self.stages[number], variables, self.recorder)
        users = Counter(id(parameter) for stage in self.stages for parameter in stage.parameters.values())
        self._shared = {identity for identity, count in users.items() if count > 1}

    @property
    def has_last(self) -> bool:
        """Whether this process has the last stage."""
        return len(self.stages) - 1 in self.workers

    def sync(self) -> None:
        """Give all processes of this part of the batch the parameters and buffers of each stage."""
        of_stages = [[*stage.parameters.values(), *stage.buffers().values()] for stage in self.stages]
        self.transport.stages.broadcast(of_stages)

    def sync_optimizer(self, optimizer: Optimizer) -> None:
        """Give all processes of this part of the batch the optimizer's state of each stage."""
        [own], stages = self.workers, self.stages
        state = {name: optimizer.state.get(parameter, {}) for name, parameter in stages[own].parameters.items()}
        for number, of_stage in self.transport.gathered({str(own): state}).items():
            for name, parameter in stages[int(number)].parameters.items():
                if int(number) != own and of_stage[name]:
                    # A count of steps stays where torch keeps it.
                    optimizer.state[parameter] = {
                        key: value.to(parameter.device) if isinstance(value, Tensor) and value.ndim else value
                        for key, value in of_stage[name].items()
                    }

    def agree_on_buffers(self) -> None:
        """Average the buffers of each stage over the parts of the batch, and give them to all processes."""
        [own], stages = self.workers, self.stages
        buffers = [buffer for buffer in stages[own].buffers().values() if buffer.is_floating_point()]
        for buffer, mean in zip(buffers, self.transport.replicas.mean(buffers), strict=True):
            buffer.copy_(mean)
        self.transport.stages.broadcast([[*stage.buffers().values()] for stage in stages])

    def shapes(self, inputs: Inputs) -> list[torch.Size]:
        """Return the shapes of one sample's state at the interfaces 1 .. K - 1, for inputs of these shapes."""
        key = tuple(value.shape[1:] for value in inputs if isinstance(value, Tensor))
        if key not in self._shapes:
            shapes: list[torch.Size] = []
            state: Any = None
            with undisturbed(self.module), torch.no_grad():
                for stage, name in zip(self.stages, self.cut, strict=False):
                    state = stage(state, inputs)
                    is_right = num_rows(inputs) in (None, len(state) if state.ndim else 0)
                    expected = f"a row for each of {num_rows(inputs)} samples"
                    advice = f"Cut elsewhere than before {name}."
                    require(is_right, f"{self.key}.cut: the state", state, expected, advice)
                    shapes.append(state.shape[1:])
            self._shapes[key] = shapes
        return self._shapes[key]

    def forward(self, step: StageStep) -> Any:
        """Run this process's stages; return what the last stage returns where this process has it, and else None."""
        # Here, and not at the end of the last step: what was still leaving had all of the optimizer's step for it.
        self.transport.finish()
        # From here to the end of `backward` no other stream may change what the stages read.
        for lane in self._lanes.values():
            lane.wait_stream(torch.cuda.current_stream(self.device))
        if step.is_serial:
            self._each(lambda worker: worker.pass_serially(step))
        self._each(lambda worker: worker.prepare(step))
        return self._each(lambda worker: worker.forward(step))[-1]

    def backward(
        self, step: StageStep, loss: Tensor, theta: Sequence[Tensor], loss_at: Callable[[Tensor], Tensor] | None = None
    ) -> list[Tensor | None]:
        """Return the gradient of each stage's own loss, and correct all that is between the stages.

        Args:
            step: the one at hand.
            loss: of what the last stage has returned.
            theta: the module's parameters.
            loss_at: the loss where the last stage begins at another point; None: its variables move once.

        Returns:
            One tensor per parameter; None for those of other processes' stages.
        """
        by_stage = self._each(lambda worker: self._backward(worker, loss, theta))
        self._each(lambda worker: worker.correct(step, loss_at))
        self._each(lambda worker: worker.finish(step), is_last_first=True)
        for lane in self._lanes.values():
            torch.cuda.current_stream(self.device).wait_stream(lane)
        used = [[slope for slope in slopes if slope is not None] for slopes in zip(*by_stage, strict=True)]
        total = [functools.reduce(torch.add, slopes) if slopes else None for slopes in used]
        if self.transport.is_divided:
            means = iter(self.transport.replicas.mean([slope for slope in total if slope is not None]))
            return self._with_shared([None if slope is None else next(means) for slope in total], theta)
        return total

    def _each(self, phase: Callable[[Worker], T], *, is_last_first: bool = False) -> list[T]:
        """Let one worker after the other go through a phase, each on its stream."""
        results = []
        for number in sorted(self.workers, reverse=is_last_first):
            lane: AbstractContextManager[Any] = nullcontext()
            if number in self._lanes:
                lane = torch.cuda.stream(self._lanes[number])
            with lane:
                results.append(phase(self.workers[number]))
        return results

    def _backward(self, worker: Worker, loss: Tensor, theta: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the derivatives of a stage's loss."""
        slopes = worker.backward(loss, theta)
        if self.transport.is_divided:
            # The problem's loss may use any parameter beside the module's call: a decay, a proximal term.
            used = {id(point) for point, slope in zip(theta, slopes, strict=True) if slope is not None}
            foreign = used.difference(map(id, worker.stage.parameters.values()))
            names = [name for name, parameter in self.module.named_parameters() if id(parameter) in foreign]
            advice = f"Decay by the optimizer's weight_decay, or set {self.key}.processes=false."
            expected = f"a loss that uses no parameter beside the module's call, and not {', '.join(names)}"
            require(not names, f"{self.key}.processes", True, expected, advice)
        return slopes

    def violations(self) -> dict[str, list[float]]:
        """Return, by interface, the norms of the last step's violations, absolute and relative."""
        replicas, norms = self.transport.replicas, {}
        for number, worker in self.workers.items():
            if worker.violations is not None:
                [squares] = replicas.mean([worker.violations.square()])
                total, size = (squares * replicas.size).sqrt().tolist()
                norms[str(number)] = [total, total / max(size, TINY)]
        return self.transport.gathered(norms)

    def curvatures(self) -> dict[str, float]:
        """Return, by interface, the curvature that the rate follows, where it does."""
        own = {str(number): worker.curvature for number, worker in self.workers.items() if worker.curvature}
        return self.transport.gathered(own)

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
        return dict(sorted(self.transport.gathered(own).items()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        for number, worker in self.workers.items():
            worker.variables.load_state_dict(state[str(number)], self.device)
            worker.curvature = state[str(number)]["curvature"]

    def _with_shared(self, slopes: list[Tensor | None], theta: Sequence[Tensor]) -> list[Tensor | None]:
        """Add up the gradients of parameters that several stages use, in the order of the stages, as one process does.

        The sum is the same bit by bit in all processes, which then step alike.
        """
        [worker] = self.workers.values()
        used = set(map(id, worker.stage.parameters.values()))
        for place, parameter in enumerate(theta):
            if id(parameter) in self._shared:
                slope = slopes[place]
                gathered = self.transport.stages.gather_tensors(torch.zeros_like(parameter) if slope is None else slope)
                slopes[place] = functools.reduce(torch.add, gathered) if id(parameter) in used else slope
        return slopes

    def _parts(self) -> list[nn.Module]:
        """Return the networks of auxiliary variables: of a smaller module, or thinned copies of the stages."""
        auxnet, num_blocks = self.settings.auxnet, self.settings.auxnet_blocks
        if auxnet is not None:
            auxnet.to(self.device, self.dtype)
            return kinds.matching_parts(auxnet, self.shapes(self.inputs), self.inputs, f"{self.key}.auxnet")
        parts = kinds.thinned_parts(self.stages, self.inputs, num_blocks)
        for number, (part, stage) in enumerate(zip(parts, self.stages, strict=False)):
            is_right = bool([*part.parameters()]) or not stage.parameters
            expected = f"blocks of stage {number} that can learn"
            require(is_right, f"{self.key}.auxnet_blocks", num_blocks, expected, "Set auxnet_blocks=1, or give auxnet.")
        return parts

    def _variables(self, number: int, parts: Sequence[nn.Module]) -> kinds.AbstractVariables:
        how = number, self.settings, self.transport
        if self.settings.is_stored:
            return kinds.StoredVariables(*how, self.seed + number)
        if self.settings.variables == "auxnet":
            network = AuxNet(parts[number : number + 1], number == 0) if number < len(self.stages) - 1 else None
            # The noise at an interface is its own, whichever of its stages draws it.
            return kinds.ChainVariables(*how, self.seed + number + 1, network)
        network = AuxNet(parts[:number], is_first=True) if number else None
        return kinds.RecursiveVariables(*how, self.seed + number, network)


def _largest_curvature(gradient: Callable[[Tensor], Tensor], point: Tensor, slope: Tensor) -> Tensor:
    """Return the largest curvature of a loss over the samples of a batch, (), by a few iterations of the power method.

    The loss is a sum over samples, so its Hessian is a block for each; products are forward differences of the
    gradient. The method begins at the slope, along which the variables (s, ...) move, and where that is zero, as at the
    first visit, along the variables themselves.
    """
    direction = _unit(torch.where(_norms(slope) > 0, slope, point))
    size = torch.zeros(len(point), dtype=point.dtype, device=point.device)
    radius = RADIUS * _norms(point).clamp(min=RADIUS)
    for _ in range(NUM_ITERATIONS):
        product = (gradient(point + radius * direction) - slope) / radius
        size = _norms(product).flatten()
        direction = _unit(product)
    return size.max()


def _norms(tensor: Tensor) -> Tensor:
    """Return each sample's norm, (s, 1, ...)."""
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)


def _unit(tensor: Tensor) -> Tensor:
    norms = _norms(tensor)
    # A sample whose slope is zero stays where it is.
    return torch.where(norms > 0, tensor / norms.clamp(min=torch.finfo(tensor.dtype).tiny), torch.zeros_like(tensor))
