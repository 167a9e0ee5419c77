"""A run of residual layers whose forward and backward are multigrid solves.

States, adjoints and tangents are autograd functions, each with a backward that is made of the others. With `A` the
linearized system `(A v)^0 = v^0`, `(A v)^{n+1} = v^{n+1} - Phi_n' v^n`, and theta the parameters:

    states U(u0, theta)            dU = A^-1 (du0, dPhi/dtheta dtheta)
    adjoints w = A^-T g            dw = A^-T (dg + d(Phi'^T) w)
    tangents v = A^-1 g            dv = A^-1 (dg + d(Phi') v)

so that derivatives of any order are multigrid solves. They are exact where the solves have converged.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, field, replace
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlotool.core.arguments import require
from mlotool.core.bound_module import Slots
from mlotool.core.replay import RandomState
from mlotool.core.settings import NonNegative, Positive, Whole, checked
from mlotool.layerparallel.exchange import Exchange, exchanges
from mlotool.layerparallel.multigrid import guard
from mlotool.layerparallel.multigrid import layers as runs
from mlotool.layerparallel.multigrid.layers import CallArguments, Evaluate, batched
from mlotool.layerparallel.multigrid.solver import Coarsening, Cycles, Method, Propagation

# N: layers, L: layers of this rank, b: samples of this rank, B: of all ranks
# states, adjoints, tangents, cotangents: (N + 1, b, ...)

T = TypeVar("T")

# With respect to u0 and to each parameter.
Gradient = list[Tensor | None]

# Training steps from one comparison of `cycles: auto` to the next.
CHOICE_EVERY = 100


@checked
@dataclass(kw_only=True)
class MultigridSettings:
    """The settings that `Multigrid` and `MultigridResidual` share.

    Args:
        coarsening: the coarsening factor c, one for all levels or a list with one for each step to a coarser level; the
            last chunk of layers may be shorter. None: 4, or less for fewer than 8 layers; any with `cycles="auto"`.
        levels: the most levels, including the finest; None: as many as possible.
        relaxation: "F" or "FCF".
        cycles: the most cycles of the forward solve (m1). "auto" chooses the cheapest number of cycles and coarsening
            whose gradient has a bias of at most guard_threshold, with at most guard_max_cycles cycles, or serial passes
            if these are cheaper (see `Choice`).
        backward_cycles: the most cycles of the backward solve (m2); None: as `cycles`.
        tolerance: the forward cycles end at a residual of at most this times the first one; None takes all cycles.
        backward_tolerance: the same for the backward cycles.
        cycle: "V" or "F".
        nested: whether a solve starts from solutions on the coarser grids (nested iteration).
        warm_start: whether the solve of a sample starts from the states and adjoints of the sample's last solve.
        guard_every: compare every n-th gradient with the serial one, see `Guard`; 0: never. None: 0, or 100 with
            `cycles="auto"`.
        guard_threshold: the largest relative bias of the gradient before cycles are added, or chosen anew.
        guard_max_cycles: the most cycles that are added before training goes on serially.
        workers: for `cycles="auto"`, the number of chunks of layers that are evaluated at the same time. None: the
            number of ranks if `over_ranks` divides the layers among them; all chunks on a GPU; one on a CPU.
        over_ranks: whether the layers are divided among the processes (ranks) of the run. The samples of all ranks are
            then gathered, each rank solves its N/P layers for all of them, and gets the last states of its own samples.
            Its gradient is that of its layers for the losses of all ranks, and zero for the other layers, so that the
            mean over ranks is that of data-parallel training. Only first derivatives are then available. False: each
            rank solves all layers for its own samples.

    Raises:
        ConfigError: from `check`: a setting is out of range, or has no effect beside another one.

    Example:
        >>> settings = MultigridSettings(cycles=3, backward_cycles=1)
        >>> [method.cycles for method in settings.methods(num_layers=16)]
        [3, 1]
    """

    coarsening: Coarsening | None = None
    levels: Annotated[int, Ge(2)] | None = None
    relaxation: Literal["F", "FCF"] = "FCF"
    cycles: Cycles | Literal["auto"] = 2
    backward_cycles: Cycles | None = None
    tolerance: NonNegative | None = None
    backward_tolerance: NonNegative | None = None
    cycle: Literal["V", "F"] = "V"
    nested: bool = False
    warm_start: bool = False
    guard_every: Whole | None = None
    guard_threshold: Positive = 0.1
    guard_max_cycles: Cycles = 8
    workers: Annotated[int, Ge(1), Le(10_000)] | None = None
    over_ranks: bool = False

    def methods(self, num_layers: int) -> tuple[Method, Method]:
        """Return how the states and how the adjoints of so many layers are solved."""
        factor = max(2, min(4, num_layers // 2)) if self.coarsening is None else self.coarsening
        # Of `cycles: auto` the plans have their own.
        cycles = self.cycles if isinstance(self.cycles, int) else 0
        backward_cycles = cycles if self.backward_cycles is None else self.backward_cycles
        forward = Method(factor, self.levels, self.relaxation, cycles, None, self.tolerance, self.cycle, self.nested)
        return forward, replace(forward, cycles=backward_cycles, relative_tolerance=self.backward_tolerance)

    @property
    def is_chosen(self) -> bool:
        """Whether cycles and coarsening are chosen by the gradient's bias."""
        return self.cycles == "auto"

    def check(self) -> None:
        """Refuse settings that nothing would look at."""
        keys: tuple[str, ...] = ("workers",)
        if self.is_chosen:
            require(self.guard_every != 0, "guard_every", 0, "at least 1 with cycles=auto")
            # Both solves take the chosen cycles, all of them, each from a new start.
            keys = ("backward_cycles", "tolerance", "backward_tolerance", "warm_start")
        for key in keys:
            is_unset = getattr(self, key) in (None, False)
            require(is_unset, key, getattr(self, key), f"null with cycles={self.cycles}, which does not use it")


class WarmStart:
    """Keeps the last states and adjoints of each sample, whatever batches it comes in.

    Attributes:
        index: (b,), the positions of the samples that follow in their data set; None: there is one batch only.

    Example:
        >>> warm_start = WarmStart()
        >>> warm_start.remember(torch.tensor([4, 2]), "states", torch.ones(3, 2, 1))
        >>> warm_start.recall(torch.tensor([2]), "states", (3, 1, 1)).flatten()
        tensor([1., 1., 1.])
        >>> warm_start.recall(torch.tensor([3]), "states", (3, 1, 1)) is None
        True
    """

    def __init__(self) -> None:
        self.index: Tensor | None = None
        self._values: dict[str, Tensor] = {}

    def recall(self, index: Tensor | None, kind: str, shape: tuple[int, ...]) -> Tensor | None:
        """Return the values (N + 1, b, ...) of earlier solves; None unless all samples of the batch have some.

        Args:
            index: (b,), positions of the samples in their data set; None: the only batch there is.
            kind: "states" or "adjoints".
            shape: (N + 1, b, ...), that the values must have.
        """
        rows = torch.arange(shape[1]) if index is None else index
        values, known = self._values.get(kind), self._values.get(f"{kind} known")
        if values is None or known is None or values.shape[1:] != (shape[0], *shape[2:]) or shape[1] != len(rows):
            return None
        rows = rows.to(values.device)
        is_known = int(rows.max()) < len(values) and bool(known[rows].all())
        return values[rows].transpose(0, 1) if is_known else None

    def remember(self, index: Tensor | None, kind: str, values: Tensor) -> None:
        """Keep the values (N + 1, b, ...) of a batch."""
        by_sample = values.detach().transpose(0, 1)
        has_rows = index is not None and len(index) == len(by_sample)
        rows = (index if has_rows else torch.arange(len(by_sample))).to(values.device)  # type: ignore[union-attr]
        is_known = torch.ones(len(rows), dtype=torch.bool, device=values.device)
        for name, own in ((kind, by_sample), (f"{kind} known", is_known)):
            self._values[name] = _grown(self._values.get(name), int(rows.max()) + 1, own)
            self._values[name][rows] = own

    def state_dict(self) -> dict[str, Any]:
        """Return all values, in plain containers."""
        return dict(self._values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        self._values = {kind: tensor.clone() for kind, tensor in state.items()}


def _grown(table: Tensor | None, size: int, like: Tensor) -> Tensor:
    """Return a table with at least so many rows in the shape of those of `like`; new ones are zero."""
    if table is None or table.shape[1:] != like.shape[1:] or table.dtype != like.dtype:
        return like.new_zeros(size, *like.shape[1:])
    table, missing = table.to(like.device), size - len(table)
    return table if missing <= 0 else torch.cat([table, table.new_zeros(missing, *table.shape[1:])])


class MultigridResidual(nn.Module):
    """N residual layers `u^{n+1} = u^n + h F(u^n, theta^n)`, forward and backward by multigrid across the layers.

    Forward is `mgrit`, backward `mgrit_adjoint` with the loss's cotangents as its right-hand side, and the gradient of
    all layers' parameters, `sum over the batch of (dPhi/dtheta)^T ubar^{n+1}`, is one product over all layers where
    they are stacked. The backward is differentiable to any order, by further multigrid solves (see `functions`): its
    derivatives are exact where the cycles have converged, and as inexact as the gradient where they have not.

    Args:
        blocks: what the layers are: a module of `Layers` (`mlotool.models.ResidualLayers`, `StackedLayers`), with its
            own number of layers and step; or N blocks F; or what makes one.
        num_layers: N, where `blocks` makes one; else None.
        h: the step, where `blocks` has none; None is 1.
        settings: the fields of `MultigridSettings`: coarsening=None (4), levels=None, relaxation="FCF", cycles=2 (or
            "auto"), backward_cycles=None, tolerance=None, backward_tolerance=None, cycle="V", nested=False,
            warm_start=False, guard_every=None, guard_threshold=0.1, guard_max_cycles=8, workers=None,
            over_ranks=False. With `warm_start` (`begin` says which samples follow) each sample starts from its states
            and adjoints of its last solve.

    Attributes:
        residuals: of the last forward and backward solve: tensors (cycles + 1,), empty before the first.
        guard: what compares gradients with the serial one, and what it has seen.

    Raises:
        ConfigError: a setting is out of range, or a block changes the shape.

    Layers may draw random numbers: for each batch a layer has a seed of its own, from which all its evaluations draw.

    Cost: `critical_path` counts the layers. The memory is that of backpropagation through 1 + 1/(c - 1) times the
    layers.

    Source: Günther et al. 2020, arXiv 1812.04352, sections 3.1 and 3.2.

    Example:
        >>> part = MultigridResidual(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 16, h=0.1, cycles=4)
        >>> loss = part(torch.ones(2, 3)).sum()
        >>> loss.backward()
        >>> len(part.residuals["forward"]), len(part.residuals["backward"])
        (5, 5)
        >>> torch.testing.assert_close(part.serial()(torch.ones(2, 3)).sum(), loss)
    """

    def __init__(
        self,
        blocks: nn.Module | Iterable[nn.Module] | Callable[[], nn.Module],
        num_layers: int | None = None,
        h: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.settings = MultigridSettings(**settings)
        self.settings.check()
        self.layers = _layers(blocks, num_layers, h)
        self._has_buffers = any(True for _ in self.layers.buffers())
        is_right = not (self.settings.over_ranks and self._has_buffers)
        require(
            is_right,
            "over_ranks",
            True,
            "layers without running statistics, since each rank would have only a part of them",
        )
        self.num_layers: int = self.layers.num_layers  # type: ignore[assignment]
        self.method, self.backward_method = self.settings.methods(self.num_layers)
        self.method.grids(self.num_layers)
        every, threshold = self.settings.guard_every, self.settings.guard_threshold
        self.guard: guard.AbstractGuard = guard.Guard(self._plans, every or 0, threshold)
        if self.settings.is_chosen:
            self.guard = guard.Choice(self._plans, every or CHOICE_EVERY, threshold)
        self.warm_start = WarmStart() if self.settings.warm_start else None
        self.residuals: dict[str, Tensor] = {}
        self.is_serial = self.is_evaluating = self.draws = self._is_checked = False
        self.places = Slots(self.layers)

    def serial(self, is_serial: bool = True) -> Self:
        """Run the layers one after the other from now on, in plain autograd; with False, by multigrid again."""
        self.is_serial = is_serial
        return self

    def begin(self, index: Tensor | None) -> None:
        """Say which samples follow, for the warm start: each begins where its last solve ended.

        Args:
            index: (b,), their positions in their data set; None: there is one batch only.
        """
        if self.warm_start is not None:
            self.warm_start.index = index

    def begin_step(self) -> bool:
        """Count one more forward of a training step; return whether it is a plain pass through the layers."""
        return self.is_serial or not self.training or self.guard.begin()

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return u^N (b, ...) of u^0; in eval mode by a pass through the layers, which no warm start sees.

        Args:
            state: u^0 (b, ...).
            args: further arguments of all blocks, such as a mask, where the layers are `WholeLayers`.
            kwargs: the same by name.
        """
        if self.begin_step():
            result: Tensor = self.layers(state, *args, **kwargs)
            return result
        return self.solve(state, CallArguments(args, kwargs))[1]

    def states(self, state: Tensor) -> Tensor:
        """Return the states (N + 1, b, ...) of all points, by multigrid; differentiable."""
        states, _ = self._solve(state, CallArguments(), None)
        assert states is not None
        return states

    def solve(self, state: Tensor, arguments: CallArguments) -> tuple[Tensor | None, Tensor]:
        """Return the states (N + 1, b, ...) and the last one (b, ...); over ranks None and the last one.

        Args:
            state: u^0 (b, ...).
            arguments: what all layers are given beside the state.
        """
        return self._solve(state, arguments, exchanges() if self.settings.over_ranks else None)

    def _solve(
        self, state: Tensor, arguments: CallArguments, shared: tuple[Exchange, Exchange] | None
    ) -> tuple[Tensor | None, Tensor]:
        advice = "Call the module with a state first."
        require(isinstance(state, Tensor), "MultigridResidual.state", state, "a tensor (b, ...)", advice)
        parameters = dict(self.layers.named_parameters())
        theta = [*parameters.values(), *arguments.tensors]
        system = BatchSystem(self, tuple(parameters), state, arguments, shared)
        if shared is not None:
            # Of the states that another rank has there are none here; the first one is as good.
            self._check(system, theta, state.expand(self.num_layers + 1, *state.shape))
            whole = _Joined.apply(system, state)
            _, last = self._repeatable(system, lambda: States.apply(system, whole, *theta))
            return None, last[system.are_own]
        states, last = self._repeatable(system, lambda: States.apply(system, state, *theta))
        self._check(system, theta, states)
        if self._has_buffers and self.training:
            # Running statistics move once, on the states that were found.
            with torch.no_grad():
                system.evaluate(theta, moves_buffers=True)(states[:-1], range(self.num_layers), system.h)
        return states, last

    def _check(self, system: "BatchSystem", theta: Sequence[Tensor], states: Tensor) -> None:
        """Evaluate all layers once more, at the first step, to see that the gradient is all there is."""
        if not self._is_checked and torch.is_grad_enabled():
            runs.check_pure(self.layers, system.evaluate, theta, states)
            self._is_checked = True

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Say that layers are called by a solve, not by the module that they are a part of."""
        before, self.is_evaluating = self.is_evaluating, True
        try:
            yield
        finally:
            self.is_evaluating = before

    def _repeatable(self, system: "BatchSystem", solve: Callable[[], T]) -> T:
        """Solve; where layers draw random numbers, with a seed per layer, as a solve evaluates each many times."""
        if not self.draws:
            before = RandomState(system.devices)
            solution = solve()
            if before.equals(RandomState(system.devices)):
                return solution
            before.restore()
            self.draws = True
        system.draw_seeds()
        return solve()

    def _plans(self) -> Sequence[guard.Plan]:
        """Return the ways to solve the layers: with more and more cycles, or with `cycles: auto` all that are cheap."""
        settings, backward = self.settings, self.backward_method
        if not settings.is_chosen:
            return [
                guard.Plan(
                    replace(self.method, cycles=self.method.cycles + extra),
                    replace(backward, cycles=backward.cycles + extra),
                )
                for extra in range(settings.guard_max_cycles + 1)
            ]
        shared = exchanges() if settings.over_ranks else None
        num_ranks = 1 if shared is None else shared[0].num_parts
        is_on_gpu = any(parameter.is_cuda for parameter in self.layers.parameters())
        workers = settings.workers or (num_ranks if num_ranks > 1 else self.num_layers if is_on_gpu else 1)
        factors = guard.COARSENINGS if settings.coarsening is None else [settings.coarsening]
        counts = settings.guard_max_cycles, workers
        return guard.make_plans(self.num_layers, self.method, *counts, factors=factors, num_parts=num_ranks)

    def statistics(self) -> dict[str, float]:
        """Return the residuals of the last solves, by cycle, and what the guard has seen."""
        residuals = {
            f"{name}_residual_{number}": value
            for name, history in self.residuals.items()
            for number, value in enumerate(history.tolist())
        }
        return residuals | self.guard.statistics()

    def extra_repr(self) -> str:
        """Return what `print` shows."""
        method = self.method
        return f"coarsening={method.coarsening}, relaxation={method.relaxation}, cycles={method.cycles}"


def _layers(blocks: Any, num_layers: int | None, h: float | None) -> nn.Module:
    if isinstance(blocks, nn.Module) and isinstance(blocks, runs.Layers):
        for key, value in (("num_layers", num_layers), ("h", h)):
            own = getattr(blocks, key)
            require(value in (None, own), key, value, f"null, since {type(blocks).__name__} has {own!r} itself")
        return blocks
    if callable(blocks) and not isinstance(blocks, nn.Module) and num_layers is not None:
        blocks = [blocks() for _ in range(num_layers)]
    is_list = isinstance(blocks, Iterable) and all(isinstance(block, nn.Module) for block in blocks)
    expected = "Layers, a list of N modules, or a function that makes one, with num_layers=N"
    require(is_list, "blocks", blocks, expected, "Give [Block(), Block()].")
    layers = runs.BlockLayers(blocks, 1.0 if h is None else h)
    require(num_layers in (None, layers.num_layers), "num_layers", num_layers, f"null for {layers.num_layers} blocks")
    return layers


@dataclass(eq=False)
class BatchSystem:
    """The solves of a `MultigridResidual` for one batch: states, adjoints and tangents, with its settings.

    Args:
        part: the layers and how they are solved.
        names: of the layers' parameters, in the order in which the methods are given them as `theta`.
        state: u0 (b, ...), for its device and the autocast that it is under.
        arguments: what all layers are given beside the state; those with a gradient follow the parameters in `theta`.
        shared: the exchanges of states and of adjoints, where ranks share the layers.

    Example:
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> (names, theta), u0 = zip(*part.layers.named_parameters()), torch.ones(2, 3)
        >>> system = BatchSystem(part, names, u0)
        >>> system.solve_states(u0, theta).shape
        torch.Size([17, 2, 3])
    """

    part: MultigridResidual
    names: tuple[str, ...]
    state: InitVar[Tensor]
    arguments: CallArguments = field(default_factory=CallArguments)
    shared: InitVar[tuple[Exchange, Exchange] | None] = None

    def __post_init__(self, state: Tensor, shared: tuple[Exchange, Exchange] | None) -> None:
        part, self.is_shared = self.part, shared is not None
        self.forward, self.backward = shared or (Exchange(), Exchange())
        # Which of the samples are this rank's.
        self.are_own: Tensor | None = None
        self.index = None if part.warm_start is None else part.warm_start.index
        if shared is not None:
            _check_equal_on_ranks(self.forward, self.arguments)
            self.index = None if self.index is None else self.forward.join(self.index)[0]
        self.num_layers = part.num_layers
        self.h: float = part.layers.h  # type: ignore[assignment]
        self._device, device = state.device, state.device.type
        self.devices = (state.device,) if state.is_cuda else ()
        self.seeds: list[int] | None = None
        # A backward linearizes the function that its forward has solved, whatever moves the buffers in between.
        self._buffers = part.places.copy_buffers()
        self._solve_by(part.guard.plan)
        self.is_due = part.guard.take_due()
        self.is_trial = False
        # A backward runs without the autocast of its forward, and the adjoint is that of the same function.
        self._precision = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    @property
    def own_layers(self) -> range:
        """The numbers of this rank's layers."""
        count = self.num_layers // self.forward.num_parts
        return range(self.forward.part * count, (self.forward.part + 1) * count)

    def evaluate(self, theta: Sequence[Tensor], *, moves_buffers: bool = False) -> Evaluate:
        """Return what evaluates the layers with these parameters.

        Args:
            theta: the parameters, and the arguments with a gradient.
            moves_buffers: whether an evaluation changes the layers' buffers, as a training step does once.
        """
        layers, places, count = self.part.layers, self.part.places, len(self.names)
        parameters = dict(zip(self.names, theta[:count], strict=True))
        args, kwargs = self.arguments.filled(theta[count:])
        many = batched(layers)
        if self.arguments:
            many = batched(runs.BatchedStep(lambda states, which, h: layers.many(states, which, h, *args, **kwargs)))  # type: ignore[operator]
        device, dtype, is_enabled = self._precision

        def evaluate(states: Tensor, which: range, step_size: float) -> Tensor:
            buffers = {} if moves_buffers else {name: buffer.clone() for name, buffer in self._buffers.items()}
            with ExitStack() as stack, self.part.evaluating(), torch.autocast(device, dtype=dtype, enabled=is_enabled):
                stack.callback(places.fill(parameters, buffers))
                if self.seeds is None:
                    return many(states, which, step_size)
                # `torch.manual_seed` takes a millisecond for devices that are not there.
                seeded, moved = torch.manual_seed if self.devices else torch.default_generator.manual_seed, []
                for state, n in zip(states.split(1), which, strict=True):
                    with torch.random.fork_rng([device.index or 0 for device in self.devices]):
                        seeded(self.seeds[n])
                        moved.append(many(state, range(n, n + 1), step_size))
                return torch.cat(moved)

        return evaluate

    def draw_seeds(self) -> None:
        """Draw a seed per layer, from which all evaluations of a layer for this batch draw the same random numbers."""
        seeds = torch.randint(2**62, (self.num_layers,)).to(self._device)
        self.seeds = self.forward.origin(seeds).tolist()

    def solve_states(self, u0: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the states (L + 1, b, ...) of u0 (b, ...), of all layers in a serial pass.

        The solve starts from a warm start where there is one.
        """
        states, residuals = self._propagation(theta, 0).states(u0, self._recall("states", u0.shape))
        self._keep("states", states, residuals)
        return states

    def solve_adjoints(
        self, states: Tensor, sources: Tensor | None, last: Tensor | None, theta: Sequence[Tensor], *, is_first: bool
    ) -> Tensor:
        """Return the adjoints `A^-T g`, as `solve_states` the states; those of a first derivative are a warm start.

        Args:
            states: (L + 1, b, ...), at which the layers are linearized.
            sources: g at all points, (N + 1, b, ...); None is zero.
            last: (b, ...), added to g at the last point; None is zero. One of the two is given.
            theta: the layers' parameters.
            is_first: whether this is a first derivative, as every training step has one.
        """
        initial = self._recall("adjoints", states.shape[1:]) if is_first else None
        adjoints, residuals = self._propagation(theta, 1).adjoints(states, sources, last, initial)
        if is_first:
            self._keep("adjoints", adjoints, residuals)
        return adjoints

    def solve_tangents(self, states: Tensor, sources: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the tangents `A^-1 g`, (N + 1, b, ...).

        Args:
            states: (N + 1, b, ...), at which the layers are linearized.
            sources: g at all points, (N + 1, b, ...).
            theta: the layers' parameters.
        """
        return self._propagation(theta, 1).tangents(states, sources)

    def _propagation(self, theta: Sequence[Tensor], number: int) -> Propagation:
        """Return the solves at constant parameters, forward (0) or backward (1)."""
        evaluate = self.evaluate([tensor.detach() for tensor in theta])
        exchange = Exchange() if self.is_serial else (self.forward, self.backward)[number]
        return Propagation(evaluate, self.num_layers, self.h, self.methods[number], exchange)

    def inspect(
        self, gradient: Gradient, last: Tensor, again: Callable[["BatchSystem"], tuple[Gradient, Tensor]]
    ) -> Gradient:
        """Return the gradient to hand on: the serial one where the guard compares the two, else the given one.

        Args:
            gradient: with respect to u0 and each of theta; None where it is not needed.
            last: (b, ...), the last state that was found.
            again: finds both with another system.
        """
        if not self.is_due:
            return gradient
        self.is_due = False

        def measure(plan: guard.Plan | None) -> guard.Solved:
            """Solve the same batch by a system for a trial: it starts anew, and keeps nothing."""
            trial = copy.copy(self)
            trial._solve_by(plan)
            trial.is_trial = True
            return guard.Solved(*again(trial))

        return list(self.part.guard.compare(guard.Solved(gradient, last), measure, self.forward.norm).gradient)

    def _solve_by(self, plan: guard.Plan | None) -> None:
        self.is_serial = plan is None
        # Without a coarse grid the layers are solved one after the other.
        serial = Method(coarsening=max(2, self.num_layers))
        self.methods = (serial, serial) if plan is None else (plan.forward, plan.backward)

    def _recall(self, kind: str, shape: Sequence[int]) -> Tensor | None:
        """Return a warm start of the "states" or "adjoints" of such a state, if there is one."""
        if self.is_trial or self.is_serial or self.part.warm_start is None:
            return None
        values = self.part.warm_start.recall(self.index, kind, (len(self.own_layers) + 1, *shape))
        # What a checkpoint has put back may lie elsewhere.
        return None if values is None else values.to(self._device)

    def _keep(self, kind: str, values: Tensor, residuals: Tensor) -> None:
        """Keep what a solve has found, for the next warm start and for the statistics."""
        if self.is_trial or self.is_serial:
            return
        self.part.residuals["forward" if kind == "states" else "backward"] = residuals
        if self.part.warm_start is not None:
            self.part.warm_start.remember(self.index, kind, values)


def _check_equal_on_ranks(exchange: Exchange, arguments: CallArguments) -> None:
    """Refuse arguments of the layers that belong to a rank's own samples: its layers are evaluated for those of all."""

    def is_equal(tensor: Tensor) -> bool:
        first, *others = exchange.gather(tensor[None])
        return all(torch.equal(first, other) for other in others)

    is_right = not arguments.tensors and all(map(is_equal, arguments.constants))
    expected = "arguments of the layers beside the state that have no gradient, and are equal on all ranks"
    require(is_right, "over_ranks", True, expected, "Set over_ranks=false.")


class States(torch.autograd.Function):
    """Autograd function of the states U of u0 and theta.

        U^0 = u0,    U^{n+1} = Phi_n(U^n)

    Its arguments are the system of the solves (`BatchSystem`), u0 (b, ...) and the parameters, of any shapes. It
    returns the states (N + 1, b, ...) and the last of them (b, ...), which is all that most losses read. The backward
    is one adjoint solve and one product with the layers' derivatives; it is differentiable again.

    Where ranks share the layers, u0 are the samples of all, and the states those of this rank's points. A rank's
    gradient of theta is that of its own layers, for all ranks' losses together, and zero for the other layers: the sum
    over ranks is that of data-parallel training, and so is its mean. It is differentiable once.

    Source: Günther et al. 2020, arXiv 1812.04352, sections 3.1 and 3.2.

    Example:
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> names, theta = zip(*part.layers.named_parameters())
        >>> u0 = torch.ones(2, 3, requires_grad=True)
        >>> states, last = States.apply(BatchSystem(part, names, u0), u0, *theta)
        >>> states.shape, last.shape
        (torch.Size([17, 2, 3]), torch.Size([2, 3]))
        >>> torch.autograd.grad(last.sum(), u0)[0].shape
        torch.Size([2, 3])
    """

    @staticmethod
    def forward(ctx: Any, system: BatchSystem, u0: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states and the last of them, by one solve; over ranks, of this rank's points and of all."""
        states, last = _solved_states(system, u0, theta)
        last = last.clone()
        ctx.system = system
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(u0, states, last, *theta)
        return states, last

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return `w^0` and `sum_n (dPhi_n/dtheta)^T w^{n+1}`, all layers of this process in one product."""
        return (_gradient_once if ctx.system.is_shared else _gradient)(ctx, *cotangents)


def _gradient(ctx: Any, sources: Tensor | None, last: Tensor | None) -> Any:
    system, (u0, states, last_state, *theta) = ctx.system, ctx.saved_tensors
    if sources is None and last is None:
        return None, None, *(None for _ in theta)
    if system.is_shared:
        assert last is not None
        last = system.forward.join(last[system.are_own])[0]

    def gradient_at(system: BatchSystem, states: Tensor) -> Gradient:
        # Over ranks a serial pass is a comparison, once in many steps: each rank computes all of it.
        at = system.solve_states(u0, theta) if system.is_shared and system.is_serial else states
        adjoints: Tensor = _Adjoints.apply(system, True, at, sources, last, *theta)
        first = adjoints[0]
        if system.is_shared:
            first = first if system.is_serial else system.forward.origin(first)
            adjoints = _own(system, adjoints) if system.is_serial else adjoints
            # The samples of the other ranks are theirs, and counted there.
            mine = torch.zeros_like(first)
            mine[system.are_own] = first[system.are_own]
            first = mine
        return [first, *_weight_gradient(system, states, adjoints, theta, ctx.needs_input_grad[2:])]

    def again(trial: BatchSystem) -> tuple[Gradient, Tensor]:
        solved, solved_last = _solved_states(trial, u0, theta)
        return gradient_at(trial, solved), solved_last

    gradient = gradient_at(system, states)
    with torch.no_grad():
        detached = [None if slope is None else slope.detach() for slope in gradient]
        inspected = system.inspect(detached, last_state, again)
    # A gradient that will be differentiated again stays what its graph says.
    return None, *(gradient if torch.is_grad_enabled() else inspected)


# Over ranks: states and adjoints of the others are constants here.
_gradient_once = once_differentiable(_gradient)


def _solved_states(system: BatchSystem, u0: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the states of this process's points, and the last one of all."""
    states = system.solve_states(u0, theta)
    if system.is_serial:
        return _own(system, states), states[-1]
    return states, system.backward.origin(states[-1])


def _own(system: BatchSystem, values: Tensor) -> Tensor:
    return values[system.own_layers.start : system.own_layers.stop + 1]


class _Joined(torch.autograd.Function):
    """The samples (B, ...) of all ranks, from those of this one (b, ...), which alone get their gradient."""

    @staticmethod
    def forward(ctx: Any, system: BatchSystem, own: Tensor) -> Tensor:
        """Gather them."""
        ctx.system = system
        whole, system.are_own = system.forward.join(own)
        return whole

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the part of this rank's samples."""
        return None, cotangent[ctx.system.are_own]


class _Adjoints(torch.autograd.Function):
    """`w = A^-T g` of the states, g and theta; g is given at all points, or at the last one, or as the sum of both."""

    @staticmethod
    def forward(ctx: Any, system: BatchSystem, is_first: bool, *tensors: Any) -> Tensor:
        """Solve, for the states, g at all points, g at the last one, and theta."""
        states, sources, last, *theta = tensors
        adjoints = system.solve_adjoints(states, sources, last, theta, is_first=is_first)
        ctx.system = system
        ctx.is_given = sources is not None, last is not None
        ctx.save_for_backward(states, adjoints, *theta)
        return adjoints

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Return the derivatives with respect to the states, g and theta."""
        states, adjoints, *theta = ctx.saved_tensors
        tangents: Tensor = _Tangents.apply(ctx.system, states, cotangents[0], *theta)
        along_states, along_theta = _curvature(ctx.system, states, adjoints, tangents, theta)
        has_sources, has_last = ctx.is_given
        along_g = tangents if has_sources else None, tangents[-1] if has_last else None
        return None, None, along_states, *along_g, *along_theta


class _Tangents(torch.autograd.Function):
    """`v = A^-1 g` of the states, g and theta."""

    @staticmethod
    def forward(ctx: Any, system: BatchSystem, states: Tensor, sources: Tensor, *theta: Tensor) -> Tensor:
        """Solve."""
        tangents = system.solve_tangents(states, sources, theta)
        ctx.system = system
        ctx.save_for_backward(states, tangents, *theta)
        return tangents

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        """Return the derivatives with respect to the states, g and theta."""
        states, tangents, *theta = ctx.saved_tensors
        adjoints: Tensor = _Adjoints.apply(ctx.system, False, states, cotangents[0], None, *theta)
        along_states, along_theta = _curvature(ctx.system, states, adjoints, tangents, theta)
        return None, along_states, adjoints, *along_theta


def _weight_gradient(
    system: BatchSystem, states: Tensor, adjoints: Tensor, theta: Sequence[Tensor], is_needed: Sequence[bool]
) -> Gradient:
    keeps_graph = torch.is_grad_enabled()
    _, aliases, moved = _layers_at(system, states, theta)
    wanted = [alias for alias, needed in zip(aliases, is_needed, strict=True) if needed]
    if not wanted:
        return [None] * len(theta)
    # Over ranks zeros, where a parameter is another rank's: all ranks then have the same list of gradients.
    how = {"create_graph": keeps_graph, "allow_unused": True, "materialize_grads": system.is_shared}
    slopes = iter(torch.autograd.grad(moved, wanted, adjoints[1:], **how))
    return [next(slopes) if needed else None for needed in is_needed]


def _curvature(
    system: BatchSystem, states: Tensor, adjoints: Tensor, tangents: Tensor, theta: Sequence[Tensor]
) -> tuple[Tensor, Gradient]:
    """Return the derivatives of `sum_n <w^{n+1}, Phi_n' v^n>` with respect to the states and theta, w and v fixed."""
    keeps_graph = torch.is_grad_enabled()
    at, aliases, moved = _layers_at(system, states, theta)
    with torch.enable_grad():
        pulled = torch.autograd.grad(moved, at, adjoints[1:], create_graph=True)[0]
        if not pulled.requires_grad:
            # Layers that are linear in their state and have no parameters.
            return torch.zeros_like(states), [None] * len(theta)
        value = (pulled * tangents).sum()
        wanted = [at, *(alias for alias in aliases if alias.requires_grad)]
        along_states, *along_theta = torch.autograd.grad(value, wanted, create_graph=keeps_graph, allow_unused=True)
    slopes = iter(along_theta)
    along_states = torch.zeros_like(states) if along_states is None else along_states
    return along_states, [next(slopes) if alias.requires_grad else None for alias in aliases]


def _layers_at(system: BatchSystem, states: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return aliases of the states and theta, and all layers evaluated at them.

    Derivatives are taken at aliases: the states depend on theta too, and that path is the adjoints'.
    """
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        at, *aliases = (_alias(tensor, keeps_graph) for tensor in (states, *theta))
        return at, aliases, system.evaluate(aliases)(at[:-1], system.own_layers, system.h)


def _alias(tensor: Tensor, keeps_graph: bool) -> Tensor:
    if not keeps_graph:
        return tensor.detach().requires_grad_()
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
