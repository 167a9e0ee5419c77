"""What a stage needs of a step and of its auxiliary variables, whether a table keeps them or networks give them.

One object per stage. Interface k lies between the stages k - 1 and k; lambda_k is where stage k begins.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from typing import Annotated, Any, Literal, Required, TypedDict

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.optim import SGD, Adam, Optimizer

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.settings import Count, Layers, NonNegative, Positive, Rounds, Whole, checked
from mlotool.layerparallel.auxiliary.equations import next_multiplier
from mlotool.layerparallel.exchange import Transport
from mlotool.layerparallel.partition.chain import Chain, Cut, chain_for
from mlotool.layerparallel.partition.trace import LAYERS, Inputs, Stage, undisturbed
from mlotool.problem.streams.batches import bounds

# Rate of stored variables of a stage that has a penalty before and behind it; of three stages on MNIST
# 0.05 ends 19 points of accuracy lower, 0.3 seven lower, 0.7 two higher; on digits 1 ends three lower
# (benchmarks/README.md).
BETWEEN_PENALTIES = 0.5


Endless = Annotated[float, Gt(0), Le(inf)]


class _Steps(TypedDict, total=False):
    """A `StepSchedule` in a recipe."""

    start: Required[Positive]
    factor: Positive
    every: Count
    maximum: Endless


Steps = Positive | _Steps


@checked
@dataclass(frozen=True)
class StepSchedule:
    """A number that changes from step to step: `min(start factor^(step // every), maximum)`.

    Args:
        start: its value at the first step.
        factor: by which it is multiplied.
        every: steps from one multiplication to the next.
        maximum: value at which it stays.

    Example:
        >>> beta = StepSchedule.of({"start": 1.0, "factor": 2.0, "every": 10, "maximum": 3.0})
        >>> beta.at(0), beta.at(10), beta.at(20)
        (1.0, 2.0, 3.0)
    """

    start: Positive
    factor: Positive = 1.0
    every: Count = 1
    maximum: Endless = inf

    @staticmethod
    def of(value: Any) -> "StepSchedule":
        """Return the schedule that a user has set; a number stays the same."""
        return StepSchedule(**value) if isinstance(value, Mapping) else StepSchedule(value)

    def at(self, step: int) -> float:
        """Return the value at a step, counted from 0."""
        try:
            return min(self.start * float(self.factor) ** (step // self.every), self.maximum)
        except OverflowError:
            return self.maximum


Rate = Positive | Literal["auto"] | None


@checked
@dataclass(eq=False, repr=False)
class AuxiliarySettings:
    """The settings of `Auxiliary`, which says what each means.

    Attributes:
        betas: the penalty coefficients of the interfaces 1 .. K - 1.
        auxnet_rate: of the networks, by step.

    Raises:
        ConfigError: a setting is out of range, or settings do not go together.

    Example:
        >>> settings = AuxiliarySettings(stages=2, beta=4.0)
        >>> settings.is_stored, settings.rate(interface=1)
        (True, 1.0)
    """

    stages: Annotated[int, Ge(1), Le(10_000)]
    cut: Cut = None
    method: Literal["penalty", "lagrangian"] = "penalty"
    variables: Literal["stored", "auxnet", "recursive"] = "stored"
    auxnet: nn.Module | None = None
    auxnet_blocks: Whole = 1
    auxnet_lr: Steps = 0.1
    auxnet_optimizer: Literal["sgd", "adam"] = "sgd"
    auxnet_gradient: Literal["local", "chain"] = "local"
    distillation_steps: Rounds = 1
    beta: Steps | Sequence[Steps] = 10.0
    reduction: Literal["mean", "sum"] = "mean"
    lambda_lr: Positive | None = None
    lambda_rate: Rate | Sequence[Rate] | None = None
    lambda_steps: Rounds = 1
    multiplier_rule: Literal["exact", "paper"] = "exact"
    noise: NonNegative = 0.0
    copies: Layers = 1
    recalibrate: Whole = 0
    table_device: str | None = None
    processes: bool = False
    streams: bool = False
    record: Whole = 0

    def __post_init__(self) -> None:
        if not self.is_stored:
            # Networks give no multipliers, and know no copies.
            for key, value in (("method", "penalty"), ("copies", 1)):
                expected = f"{value} with variables={self.variables}"
                advice = "Set parallel.variables=stored."
                require(getattr(self, key) == value, f"parallel.{key}", getattr(self, key), expected, advice)
        betas = _of_interfaces(self.beta, self.stages, "parallel.beta")
        self.betas = [StepSchedule.of(beta) for beta in betas]
        self.auxnet_rate = StepSchedule.of(self.auxnet_lr)
        rates = _of_interfaces(self.lambda_rate, self.stages, "parallel.lambda_rate")
        self._rates = [self._rate(rate, interface) for interface, rate in enumerate(rates, start=1)]

    @property
    def is_stored(self) -> bool:
        """Whether auxiliary variables are stored for each sample."""
        return self.variables == "stored"

    @property
    def is_chained(self) -> bool:
        """Whether networks learn from what those behind them make of their variables."""
        return self.auxnet_gradient == "chain" and self.variables == "auxnet"

    def rate(self, interface: int) -> float | None:
        """Return the rate of the auxiliary variables at an interface; None: it follows the curvature."""
        return 1.0 if self.lambda_lr is not None else self._rates[interface - 1]

    def _rate(self, rate: Any, interface: int) -> float | None:
        if rate is not None:
            return None if rate == "auto" else float(rate)
        # A stage with a penalty behind it pulls its variables as well, and whole steps overshoot.
        return BETWEEN_PENALTIES if self.is_stored and interface < self.stages - 1 else 1.0


def _of_interfaces(value: Any, num_stages: int, key: str) -> list[Any]:
    """Return a setting's value at each of K - 1 interfaces: a list has one for each, anything else is for all."""
    count = max(num_stages - 1, 1)
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * count
    require(len(value) == count, key, value, f"{count} values for {num_stages} stages, or one for all")
    return list(value)


class AuxNet(nn.Module):
    """A small network that gives auxiliary variables: parts that run one after the other.

    Args:
        parts: each is called with (state, *inputs), the first part of the first stage with the inputs alone; they are
            copied.
        is_first: whether the first part starts from the inputs.

    Example:
        >>> class Halved(nn.Module):
        ...     def forward(self, state, x):
        ...         return state / 2
        >>> AuxNet([Halved(), Halved()], is_first=False)(torch.ones(1, 2), (torch.zeros(1, 2),))
        tensor([[0.2500, 0.2500]])
    """

    def __init__(self, parts: Sequence[nn.Module], is_first: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(copy.deepcopy(part) for part in parts)
        self.is_first = is_first
        self.train()

    def forward(self, state: Tensor | None, inputs: Inputs) -> Tensor:
        """Return the state (s, ...) at the end of the last part.

        Args:
            state: (s, ...), where the first part begins; None where that starts from the inputs.
            inputs: of the whole module.
        """
        for number, part in enumerate(self.parts):
            state = part(*inputs) if number == 0 and self.is_first else part(state, *inputs)
        assert state is not None
        return state


def thinned_parts(stages: Sequence[Stage], inputs: Inputs, num_blocks: int) -> list[nn.Module]:
    """Return a thinned copy of each stage but the last one: most of the blocks that keep the shape are left out.

    Args:
        stages: all stages of a module.
        inputs: a batch.
        num_blocks: how many blocks that keep the shape each copy has at most; the first ones remain.

    Returns:
        K - 1 modules with the inputs and the output of the stages, and their parameters.

    Example:
        >>> from mlotool.layerparallel.partition.chain import partition
        >>> net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(6)])
        >>> parts = thinned_parts(partition(net, 2, ["4"]), (torch.zeros(1, 3),), num_blocks=1)
        >>> [len(list(part.parameters())) for part in parts]  # of one linear layer of four
        [2]
    """
    parts: list[nn.Module] = []
    state = None
    with undisturbed(stages[0].module), torch.no_grad():
        for stage in stages[:-1]:
            whole = fx.GraphModule(stage.module, stage.graph)
            state = ShapeProp(whole).propagate(*(inputs if stage.is_first else (state, *inputs)))
            parts.append(fx.GraphModule(stage.module, _thinned(whole, num_blocks)))
    return parts


def matching_parts(auxnet: nn.Module, shapes: Sequence[torch.Size], inputs: Inputs, key: str) -> list[nn.Module]:
    """Return parts of a smaller module, cut where its states have the shapes at the interfaces.

    Of several such places the one is taken whose share of the whole cost, in counted operations, is nearest to
    k / K at interface k of K stages.

    Args:
        auxnet: a module that takes the same inputs as the whole one.
        shapes: (...), of the states of one sample at the interfaces 1 .. K - 1.
        inputs: a batch.
        key: of the setting, for messages.

    Returns:
        K - 1 modules, from one interface to the next; the first starts from the inputs.

    Raises:
        ConfigError: the smaller module has no such states in this order.

    Example:
        >>> small = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 1))
        >>> [part] = matching_parts(small, [torch.Size([4])], (torch.zeros(1, 2),), "parallel.auxnet")
        >>> part(torch.zeros(5, 2)).shape
        torch.Size([5, 4])
    """
    chain = chain_for(auxnet, key, inputs, cut=None)
    costs, offered = chain.costs(chain.names), _shapes(chain, auxnet, inputs)
    before = dict(zip(chain.names, accumulate(costs), strict=False))
    cut: list[str] = []
    for number, shape in enumerate(shapes, start=1):
        begin = chain.names.index(cut[-1]) + 1 if cut else 0
        ends = [end for end in range(begin, len(offered)) if _follow(shapes[number:], offered[end + 1 :])]
        fitting = [chain.names[end] for end in ends if offered[end] == shape]
        if not fitting:
            places = "; ".join(f"{name}: {list(size)}" for name, size in zip(chain.names, offered, strict=True))
            fault = f"has no place for interface {number} of {len(shapes)} (a state of shape {list(shape)})"
            advice = "Give a smaller network of the same widths, or set auxnet to null for thinned stages."
            raise ConfigError(f"{key}: {type(auxnet).__name__} {fault}; it has {places or 'none'}. {advice}")
        wanted = sum(costs) * number / (len(shapes) + 1)
        cut.append(min(fitting, key=lambda name: abs(before[name] - wanted)))
    return [fx.GraphModule(stage.module, stage.graph) for stage in chain.stages(cut)[:-1]]


def _follow(shapes: Sequence[torch.Size], offered: Sequence[torch.Size]) -> bool:
    """Say whether shapes are among those that are offered, in this order."""
    rest = iter(offered)
    return all(shape in rest for shape in shapes)


def _shapes(chain: Chain, module: nn.Module, inputs: Inputs) -> list[torch.Size]:
    """Return the shape of a sample's state at each possible cut."""
    state, shapes = None, []
    with undisturbed(module), torch.no_grad():
        for stage in chain.stages(chain.names)[:-1]:
            state = stage(state, inputs)
            shapes.append(state.shape[1:])
    return shapes


def _thinned(module: fx.GraphModule, num_blocks: int) -> fx.Graph:
    """Return a copy with the first so many of the blocks; what another is given goes on in place of its result."""
    copies: dict[fx.Node, fx.Node] = {}
    thinned = fx.Graph()
    thinned.output(thinned.graph_copy(module.graph, copies))
    for block in filter(partial(_is_block, module), module.graph.nodes):
        copy, layers = copies[block], block.kwargs.get(LAYERS)
        if isinstance(layers, range) and num_blocks:
            copy.kwargs = {LAYERS: layers[:num_blocks]}
        elif num_blocks <= 0:
            # Of the copy: what it is given may itself stand in for a block that has gone.
            copy.replace_all_uses_with(copy.all_input_nodes[0])
            thinned.erase_node(copy)
        num_blocks = max(0, num_blocks - (len(layers) if isinstance(layers, range) else 1))
    return thinned


def _is_block(module: fx.GraphModule, node: fx.Node) -> bool:
    """Say whether a node is a layer with a matrix that keeps the shape of what it is given."""
    if node.op != "call_module" or not node.all_input_nodes:
        return False
    before, after = (getattr(side.meta.get("tensor_meta"), "shape", None) for side in (node.all_input_nodes[0], node))
    has_matrix = any(parameter.ndim > 1 for parameter in module.get_submodule(str(node.target)).parameters())
    return before is not None and before == after and has_matrix


# s: samples of a batch, ...: the shape of a state

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class StageStep:
    """What all stages have to know of one training step: its inputs, the shapes between stages, and its weights.

    Args:
        settings: how the stages are trained.
        number: of the step, from 0.
        inputs: of the whole module.
        shapes: of one sample's state at the interfaces 1 .. K - 1; interface k lies between the stages k - 1 and k.
        dtype: of the states.
        device: of the states.
        share: weight of this process's part of the batch: its share of the samples times `num_replicas`, 1 where all
            parts are equal.
        num_replicas: how many parts the batch has.
        slots: (s,) on the CPU, where the samples' variables are stored; None where none are stored.
        unseen: (s,), which of the samples have no stored variables yet; None where none are stored.

    Example:
        >>> settings, inputs, shapes = AuxiliarySettings(stages=2), (torch.zeros(4, 2),), [torch.Size([5])]
        >>> step = StageStep(settings, 0, inputs, shapes, torch.float32, torch.device("cpu"))
        >>> step.blank(interface=1).shape, step.weight(interface=1)
        (torch.Size([4, 5]), 0.05)
    """

    settings: AuxiliarySettings
    number: int
    inputs: Inputs
    shapes: Sequence[torch.Size]
    dtype: torch.dtype
    device: torch.device
    share: float = 1.0
    num_replicas: int = 1
    slots: Tensor | None = None
    unseen: Tensor | None = None

    @property
    def size(self) -> int:
        """s, the number of samples in the inputs."""
        size = num_rows(self.inputs)
        return 1 if size is None else size

    @property
    def collects_statistics(self) -> bool:
        """Whether a serial pass collects BatchNorm's running statistics in this step."""
        every = self.settings.recalibrate
        return bool(every) and self.number % every == 0

    @property
    def is_serial(self) -> bool:
        """Whether the batch has to pass through all stages one after the other before they run at the same time."""
        return self.collects_statistics or (self.unseen is not None and bool(self.unseen.any()))

    def beta(self, interface: int) -> float:
        """Return the penalty coefficient of an interface."""
        return self.settings.betas[interface - 1].at(self.number)

    def weight(self, interface: int) -> float:
        """Return c of an interface in the stages' losses, whose gradients are averaged over the replicas afterwards."""
        if self.settings.reduction == "sum":
            return float(self.num_replicas) if self.share else 0.0
        return self.share / (self.size * self.shapes[interface - 1].numel())

    def step_size(self, interface: int) -> float:
        """Return the step size of the variables of an interface, at the rate 1; 0 for a part without samples.

        It is `lambda_lr` where that is set, and else `1 / (2 beta c)`, the step at which lambda is stationary for the
        slope at hand (Sun et al. 2021, eq. 17).
        """
        if not self.share:
            return 0.0
        if self.settings.lambda_lr is not None:
            return self.settings.lambda_lr
        # Each variable belongs to one replica, so they are not averaged.
        return 1.0 / (2.0 * self.beta(interface) * (self.weight(interface) / self.num_replicas))

    def rows(self, replica: int) -> tuple[int, int]:
        """Return the row of the whole batch at which a replica's part begins, and how many rows the batch has."""
        if not self.share:
            return 0, self.size
        size = round(self.size * self.num_replicas / self.share)
        return bounds(size, replica, self.num_replicas)[0], size

    def blank(self, interface: int) -> Tensor:
        """Return an uninitialized state at an interface, (s, ...)."""
        return torch.empty((self.size, *self.shapes[interface - 1]), dtype=self.dtype, device=self.device)


def num_rows(inputs: Inputs) -> int | None:
    """Return the number of samples in a module's inputs; None where no tensor has rows.

    Example:
        >>> num_rows((None, torch.ones(4, 2)))
        4
    """
    return next((len(value) for value in inputs if isinstance(value, Tensor) and value.ndim), None)


class Samples:
    """Numbers the samples of a data set and the augmented copies of each, and remembers which have been seen.

    Args:
        num_copies: augmented copies of each sample; copy c of sample n has the number `n num_copies + c`.

    Example:
        >>> samples = Samples(num_copies=2)
        >>> slots = samples.slots({"index": torch.tensor([3, 0]), "copy": torch.tensor([1, 0])}, "parallel")
        >>> slots, samples.meet(slots, slots), samples.meet(slots, slots)
        (tensor([7, 0]), tensor([True, True]), tensor([False, False]))
    """

    def __init__(self, num_copies: int) -> None:
        self._num_copies = num_copies
        self.seen = torch.zeros(0, dtype=torch.bool)

    def slots(self, batch: Any, key: str) -> Tensor:
        """Return the numbers of a batch's samples, (s,), on the CPU.

        Args:
            batch: has an `index`, and a `copy` where there are several.
            key: of the setting, for messages.

        Raises:
            ConfigError: it has not.
        """
        for name in ("index",) if self._num_copies == 1 else ("index", "copy"):
            value = batch.get(name) if isinstance(batch, Mapping) else None
            is_right = isinstance(value, Tensor) and value.ndim == 1 and value.dtype in _WHOLE and int(value.min()) >= 0
            expected = "a whole number of at least 0 a sample, as variables=stored needs"
            advice = f"Return 'index': index from __getitem__, or set {key}.variables=auxnet."
            require(is_right, f"{key}: the batch's '{name}'", value, expected, advice)
        slots: Tensor = batch["index"].cpu()
        if "copy" not in batch:
            return slots
        copy = batch["copy"].cpu()
        largest, advice = int(copy.max()), f"Set {key}.copies to data.augment."
        expected = f"more than {largest}, the number of a copy in the batch"
        require(largest < self._num_copies, f"{key}.copies", self._num_copies, expected, advice)
        return slots * self._num_copies + copy

    def meet(self, own: Tensor, everybody: Tensor) -> Tensor:
        """Return which samples are seen for the first time, (s,), and remember all.

        Args:
            own: numbers of this part of the batch, (s,).
            everybody: numbers of all parts.
        """
        missing = max(int(everybody.max()) + 1 - len(self.seen), 0)
        self.seen = torch.cat([self.seen, torch.zeros(missing, dtype=torch.bool)])
        unseen = ~self.seen[own]
        self.seen[everybody] = True
        return unseen


class AbstractVariables(ABC):
    """The auxiliary variables of stage k: lambda_k, where it begins, and lambda_{k+1}, at which its end is aimed.

    In a step `Worker` calls `start` (where a serial pass is needed), `await_variable`, `prepare`, `target`, `correct`,
    `await_slope` and `finish`, in this order.

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbors.
        seed: of the noise on auxiliary variables.

    Attributes:
        own: lambda_k (s, ...) of the step at hand; None for the first stage, and between steps.
        is_first: whether there is no interface before the stage.
        is_last: whether there is no interface behind the stage.

    Example:
        >>> last: AbstractVariables = StoredVariables(1, AuxiliarySettings(stages=2), Transport(), seed=0)
        >>> last.is_first, last.is_last, last.multiplier()
        (False, True, None)
    """

    def __init__(self, number: int, settings: AuxiliarySettings, transport: Transport, seed: int) -> None:
        self.number, self.settings, self.transport = number, settings, transport
        self.is_first, self.is_last = number == 0, number == settings.stages - 1
        self.own: Tensor | None = None
        self._seed = seed
        self._generator: torch.Generator | None = None

    def start(self, step: StageStep, state: Tensor) -> None:
        """Take the state (s, ...) with which a serial pass enters the stage."""

    @abstractmethod
    def prepare(self, step: StageStep) -> None:
        """Find lambda_k and keep it as `own`; send the neighbors what they need."""

    @abstractmethod
    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return lambda_{k+1} and kappa_{k+1}, (s, ...) each; None for kappa is zero. The last stage has none."""

    def multiplier(self) -> Tensor | None:
        """Return kappa_k, (s, ...); None is zero."""
        return None

    @abstractmethod
    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Move lambda_k and kappa_k.

        Args:
            step: the one at hand.
            state: X^{k-1}, (s, ...), where the stage before has ended.
            slope: (s, ...), the derivative of the augmented Lagrangian with respect to lambda_k, times the rate; the
                sum of these, where lambda_k moves several times.
        """

    def await_variable(self, step: StageStep) -> None:
        """Wait for what `prepare` needs of other stages; a method of its own, so that waiting is timed apart."""

    def await_slope(self, step: StageStep) -> None:
        """Wait for what `finish` needs of other stages."""

    def finish(self, step: StageStep) -> None:
        """Do what can be done only after the next stage has corrected its variables."""

    def to(self, device: torch.device) -> None:
        """Move what is kept from step to step to a device."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step."""
        return {"noise": None if self._generator is None else self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` has returned."""
        self._generator = None
        if state["noise"] is not None:
            self._generator = torch.Generator(device)
            self._generator.set_state(state["noise"].cpu())

    def _perturbed(self, step: StageStep, clean: Tensor) -> Tensor:
        if not self.settings.noise:
            return clean
        if self._generator is None:
            self._generator = torch.Generator(clean.device).manual_seed(self._seed)
        # For the whole batch, of which this is a part: the noise does not depend on the number of parts.
        begin, size = step.rows(self.transport.replicas.rank)
        shape = size, *clean.shape[1:]
        drawn = torch.randn(shape, dtype=clean.dtype, device=clean.device, generator=self._generator)
        return clean + self.settings.noise * drawn[begin : begin + len(clean)]


class Table:
    """A tensor for each sample of a data set; it grows to the largest sample number that it meets.

    Args:
        device: where the tensors are kept; None is where the first values are.

    Example:
        >>> table = Table()
        >>> table.put(torch.tensor([2]), torch.ones(1, 3))
        >>> table.get(torch.tensor([2, 0]), like=torch.zeros(2, 3))
        tensor([[1., 1., 1.],
                [0., 0., 0.]])
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._values: Tensor | None = None
        self._size = 0

    def get(self, slots: Tensor, like: Tensor) -> Tensor:
        """Return the values of samples, (s, ...); zeros where none have been put.

        Args:
            slots: numbers of the samples, (s,).
            like: a tensor (s, ...) of the shape, dtype and device to return.
        """
        table = self._grown(slots, like)
        return table[slots.to(table.device)].to(like.device, non_blocking=True)

    def put(self, slots: Tensor, values: Tensor) -> None:
        """Keep the values of samples.

        Args:
            slots: numbers of the samples, (s,).
            values: (s, ...), of the same shape behind s in every call.
        """
        table = self._grown(slots, values)
        table[slots.to(table.device)] = values.to(table.device)

    def to(self, device: torch.device) -> None:
        """Move the values to a device, unless the table was given a device of its own."""
        if self._values is not None and self._device is None:
            self._values = self._values.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the values."""
        return {"values": None if self._values is None else self._values[: self._size].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the values back."""
        values = state["values"]
        device = self._device if self._device is not None or self._values is None else self._values.device
        self._values = None if values is None else values.to(device, copy=True)
        self._size = 0 if values is None else len(values)

    def _grown(self, slots: Tensor, like: Tensor) -> Tensor:
        room = 0 if self._values is None else len(self._values)
        needed = int(slots.max()) + 1 if len(slots) else 0
        self._size = max(self._size, needed)
        device = self._device or like.device
        if self._values is None or self._values.device != device or needed > room:
            # By a quarter more: the first epoch meets ever larger numbers.
            grown = torch.zeros(max(needed + needed // 4, room), *like.shape[1:], dtype=like.dtype, device=device)
            if self._values is not None:
                grown[:room] = self._values.to(device)
            self._values = grown
        return self._values


class StoredVariables(AbstractVariables):
    """lambda_k and kappa_k of every sample, kept in tables from one visit of the sample to the next.

        lambda_k <- lambda_k - eta slope,    kappa_k <- kappa_k - rate (lambda_k - X^{k-1})

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbors.
        seed: of the noise on auxiliary variables.

    Source: Sun et al. 2021, arXiv 2112.05387, eq. 23, 24.

    Example:
        A sample that is seen for the first time begins where a serial pass enters the stage, here with the state 1:

        >>> settings = AuxiliarySettings(stages=2, reduction="sum")
        >>> last = StoredVariables(1, settings, Transport(), seed=0)
        >>> sample = {"slots": torch.tensor([5]), "unseen": torch.tensor([True])}
        >>> step = StageStep(settings, 0, (), [torch.Size([3])], torch.float32, torch.device("cpu"), **sample)
        >>> last.start(step, torch.ones(1, 3))
        >>> last.prepare(step)
        >>> last.own
        tensor([[1., 1., 1.]])
    """

    def __init__(self, number: int, settings: AuxiliarySettings, transport: Transport, seed: int) -> None:
        super().__init__(number, settings, transport, seed)
        device = None if settings.table_device is None else torch.device(settings.table_device)
        self._tables = {"variables": Table(device), "multipliers": Table(device)}
        self._kinds = ["variable", "multiplier"] if settings.method == "lagrangian" else ["variable"]
        # Of the samples at hand: lambda_k without noise, and kappa_k where there is one.
        self._values: list[Tensor] = []

    def start(self, step: StageStep, state: Tensor) -> None:
        """Store where a serial pass enters the stage, (s, ...), for the samples that are seen for the first time."""
        if not self.is_first and step.unseen is not None and step.slots is not None:
            self._tables["variables"].put(step.slots[step.unseen], state[step.unseen.to(state.device)])

    def prepare(self, step: StageStep) -> None:
        """Look up lambda_k and kappa_k of the batch's samples, and send them to the stage before."""
        number = self.number
        if not self.is_first:
            assert step.slots is not None
            self._values = [self._tables[f"{kind}s"].get(step.slots, step.blank(number)) for kind in self._kinds]
            self.own = self._perturbed(step, self._values[0])
            for kind, values in zip(self._kinds, (self.own, *self._values[1:]), strict=True):
                self.transport.send(kind, number, number - 1, values)
        for kind in () if self.is_last else self._kinds:
            self.transport.expect(kind, number + 1, number, step.blank(number + 1))

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return the lambda_{k+1} and kappa_{k+1} that the next stage has looked up."""
        variable, *rest = (self.transport.receive(kind, self.number + 1, self.number) for kind in self._kinds)
        return variable, rest[0] if rest else None

    def multiplier(self) -> Tensor | None:
        """Return the kappa_k (s, ...) that was looked up; None is zero."""
        return self._values[1] if len(self._values) > 1 else None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """lambda <- lambda - eta slope, then kappa <- kappa - rate (lambda - X)."""
        assert step.slots is not None
        variable, *multipliers = self._values
        step_size = step.step_size(self.number)
        moved = [variable - step_size * slope]
        for multiplier in multipliers:
            # Of the paper: eta / (2 beta), as it is printed.
            eta, double = step_size * (self.settings.rate(self.number) or 1.0), 2.0 * step.beta(self.number)
            rate = double if self.settings.multiplier_rule == "exact" else eta / double
            moved.append(next_multiplier(multiplier, moved[0], state, rate))
        # A part without samples of its own stands in with another part's.
        slots = step.slots if step.share else step.slots[:0]
        slots, *moved = self.transport.replicas.gather_rows([slots, *(values[: len(slots)] for values in moved)])
        for table, values in zip(self._tables.values(), moved, strict=False):
            table.put(slots, values)
        self._values = []

    def to(self, device: torch.device) -> None:
        """Move the tables to a device, unless the settings give them a place of their own."""
        for table in self._tables.values():
            table.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the tables and the state of the noise."""
        return {**super().state_dict(), **{name: table.state_dict() for name, table in self._tables.items()}}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` has returned."""
        super().load_state_dict(state, device)
        for name, table in self._tables.items():
            table.load_state_dict(state[name])
        self.to(device)


class _AbstractNetworkVariables(AbstractVariables):
    """Variables that a network of this stage gives; it learns to give the corrected ones.

        xi <- optimizer step on c norm(lambda' - net(given; xi))^2,    lambda' = lambda - eta slope

    One such step of gradient descent at rate eta_aux is eq. 29 at rate 2 c eta_aux eta. Noise moves the point at which
    the slope is taken, not what is learned from it.

    Args:
        network: this stage's; None where it has none.
    """

    def __init__(
        self, number: int, settings: AuxiliarySettings, transport: Transport, seed: int, network: AuxNet | None
    ) -> None:
        super().__init__(number, settings, transport, seed)
        self.network = network
        self._optimizer: Optimizer | None = None
        if network is not None:
            kind = SGD if settings.auxnet_optimizer == "sgd" else Adam
            self._optimizer = kind(network.parameters(), lr=settings.auxnet_rate.start)
        # Of the step at hand: the state that the network was given, and what it has made of it.
        self._given: Tensor | None = None
        self._proposed: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the network and its optimizer."""
        state = super().state_dict()
        if self.network is not None and self._optimizer is not None:
            network = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
            state |= {"network": network, "optimizer": self._optimizer.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take them back."""
        super().load_state_dict(state, device)
        if self.network is not None and self._optimizer is not None:
            self.network.load_state_dict(state["network"])
            self._optimizer.load_state_dict(state["optimizer"])

    def to(self, device: torch.device) -> None:
        """Move the network; its optimizer's state follows with the next load."""
        if self.network is not None:
            self.network.to(device)

    def _propose(self, step: StageStep, given: Tensor | None) -> Tensor:
        """Return what the network gives from a state, perturbed; its graph is kept for the first distillation step."""
        if given is not None and self.settings.is_chained:
            given = given.detach().requires_grad_()
        self._given, self._proposed = given, self._run(step, given)
        return self._perturbed(step, self._proposed.detach().contiguous())

    def _run(self, step: StageStep, given: Tensor | None) -> Tensor:
        assert self.network is not None
        variables: Tensor = self.network(given, step.inputs)
        return variables.to(step.dtype)

    def _distill(
        self, step: StageStep, interface: int, slope: Tensor, give_back: Callable[[Tensor], None] | None = None
    ) -> None:
        """Let the network learn the variables of an interface after their correction along `-slope`.

        Args:
            step: the one at hand.
            interface: whose variables the network gives.
            slope: (s, ...), of these variables.
            give_back: takes J^T slope, (s, ...), with the Jacobian J of the network in what it has been given, as soon
                as it is known; None: nobody wants it.
        """
        assert self.network is not None and self._optimizer is not None and self._proposed is not None
        proposed, weight, size = self._proposed, step.weight(interface), step.step_size(interface)
        target = proposed.detach() - size * slope
        parameters = list(self.network.parameters())
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.auxnet_rate.at(step.number)
        for number in range(self.settings.distillation_steps):
            if number:
                proposed = self._run(step, self._given)
            if give_back is not None and number == 0:
                assert self._given is not None
                *slopes, onward = _slopes(proposed, [*parameters, self._given], slope)
                give_back(onward)
                # That of the loss below, where it begins.
                slopes = [2.0 * weight * size * slope for slope in slopes]
            else:
                slopes = _slopes(weight * (target - proposed).square().sum(), parameters)
            for parameter, gradient in zip(parameters, self.transport.replicas.mean(slopes), strict=True):
                parameter.grad = gradient
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._given = self._proposed = None


class ChainVariables(_AbstractNetworkVariables):
    """A chain of networks gives the variables: lambda_{k+1} = AuxNet_k(lambda_k), with lambda_0 the inputs.

    Stage k has AuxNet_k. Stage k + 1 sends it the derivative with respect to lambda_{k+1}, from which AuxNet_k learns.
    With `auxnet_gradient=chain` that is the total one: lambda_{k+2} depends on lambda_{k+1} by AuxNet_{k+1}.

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbors.
        seed: of the noise on auxiliary variables.
        network: AuxNet_k; None for the last stage.

    Source: Sun et al. 2021, arXiv 2112.05387, eq. 25, 26 and algorithm 1.

    Example:
        >>> settings = AuxiliarySettings(stages=2, variables="auxnet")
        >>> network = AuxNet([torch.nn.PReLU()], is_first=True)
        >>> first = ChainVariables(0, settings, Transport(), seed=0, network=network)
        >>> inputs, shapes = (torch.ones(1, 3),), [torch.Size([3])]
        >>> first.prepare(StageStep(settings, 0, inputs, shapes, torch.float32, torch.device("cpu")))
        >>> first.target()  # lambda_1 and kappa_1, which is zero
        (tensor([[1., 1., 1.]]), None)
    """

    def await_variable(self, step: StageStep) -> None:
        """Receive lambda_k from the stage before."""
        number = self.number
        if not self.is_first:
            self.transport.expect("variable", number - 1, number, step.blank(number))
            self.own = self.transport.receive("variable", number - 1, number)

    def prepare(self, step: StageStep) -> None:
        """Compute lambda_{k+1} by AuxNet_k, and send it to the next stage."""
        if not self.is_last:
            self._target = self._propose(step, self.own)
            self.transport.send("variable", self.number, self.number + 1, self._target)

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return the lambda_{k+1} that AuxNet_k has given."""
        return self._target, None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Send the derivative with respect to lambda_k to the stage before, whose network learns from it.

        Where the next network has been given lambda_k, `finish` does that, once that network's part is known.
        """
        if self.settings.is_chained and not self.is_last:
            self._local_slope = slope
        else:
            self.transport.send("slope", self.number, self.number - 1, slope)

    def await_slope(self, step: StageStep) -> None:
        """Receive the derivative with respect to lambda_{k+1} from the next stage."""
        number = self.number
        if not self.is_last:
            self.transport.expect("slope", number + 1, number, step.blank(number + 1))
            self._slope = self.transport.receive("slope", number + 1, number)

    def finish(self, step: StageStep) -> None:
        """Let AuxNet_k learn from that derivative."""
        if self.is_last:
            return
        is_asked = self.settings.is_chained and not self.is_first
        self._distill(step, self.number + 1, self._slope, self._give_back if is_asked else None)

    def _give_back(self, onward: Tensor) -> None:
        """Send the stage before the total derivative with respect to lambda_k, of which `onward` is the network's."""
        self.transport.send("slope", self.number, self.number - 1, (self._local_slope + onward).contiguous())


class RecursiveVariables(_AbstractNetworkVariables):
    """A network for each stage gives its variables from the inputs of the module: lambda_k = ReAuxNet_k(X_0).

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbors.
        seed: of the noise on auxiliary variables.
        network: ReAuxNet_k; None for the first stage.

    Source: Sun et al. 2021, arXiv 2112.05387, eq. 28, 29.

    Example:
        >>> settings = AuxiliarySettings(stages=2, variables="recursive")
        >>> network = AuxNet([torch.nn.PReLU()], is_first=True)
        >>> last = RecursiveVariables(1, settings, Transport(), seed=0, network=network)
        >>> inputs, shapes = (torch.ones(1, 3),), [torch.Size([3])]
        >>> last.prepare(StageStep(settings, 0, inputs, shapes, torch.float32, torch.device("cpu")))
        >>> last.own
        tensor([[1., 1., 1.]])
    """

    def prepare(self, step: StageStep) -> None:
        """Compute lambda_k from the inputs, and send it to the stage before."""
        number = self.number
        if not self.is_first:
            self.own = self._propose(step, None)
            self.transport.send("variable", number, number - 1, self.own)
        if not self.is_last:
            self.transport.expect("variable", number + 1, number, step.blank(number + 1))

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return the lambda_{k+1} that the next stage's network has given."""
        return self.transport.receive("variable", self.number + 1, self.number), None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Let this stage's network learn from the derivative with respect to lambda_k."""
        self._distill(step, self.number, slope)


def _slopes(value: Tensor, points: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
    slopes = torch.autograd.grad(value, points, weights, allow_unused=True, materialize_grads=True)
    return [slope.contiguous() for slope in slopes]
