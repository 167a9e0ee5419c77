"""The solves behind a forward pass of a multigrid part, and states, adjoints and tangents as autograd functions.

Each function's backward is made of the others. With `A` the linearised system `(A v)^0 = v^0`,
`(A v)^{n+1} = v^{n+1} - Phi_n' v^n`, and theta the parameters:

    states U(u0, theta)            dU = A^-1 (du0, dPhi/dtheta dtheta)
    adjoints w = A^-T g            dw = A^-T (dg + d(Phi'^T) w)
    tangents v = A^-1 g            dv = A^-1 (dg + d(Phi') v)

so that derivatives of any order are multigrid solves. They are exact where the solves have converged.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlotool.core.bound_module import Slots
from mlotool.core.errors import ConfigError
from mlotool.core.replay import RandomState
from mlotool.layerparallel.exchange import Exchange
from mlotool.layerparallel.multigrid.grids import Grid
from mlotool.layerparallel.multigrid.guard import AbstractGuard, Methods, Norm, Solved
from mlotool.layerparallel.multigrid.layers import CallArguments
from mlotool.layerparallel.multigrid.propagation import solve_adjoints, solve_states, start_of
from mlotool.layerparallel.multigrid.settings import Method
from mlotool.layerparallel.multigrid.solver import solve
from mlotool.layerparallel.multigrid.steps import BatchedStep, Evaluate, Linearised, batched, layers_of, states_at

# N: layers, L: layers of this rank, b: samples of this rank, B: of all ranks
# states, adjoints, tangents, cotangents: (N + 1, b, ...)

Gradient = list[Tensor | None]
"""With respect to u0 and to each parameter."""


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
        if index is None:
            whole = self._values.get(f"{kind} of all")
            return whole if whole is not None and whole.shape == shape else None
        values, known = self._values.get(kind), self._values.get(f"{kind} known")
        if values is None or known is None or values.shape[1:] != (shape[0], *shape[2:]) or shape[1] != len(index):
            return None
        rows = index.to(values.device)
        is_known = int(rows.max()) < len(values) and bool(known[rows].all())
        return values[rows].transpose(0, 1) if is_known else None

    def remember(self, index: Tensor | None, kind: str, values: Tensor) -> None:
        """Keep the values (N + 1, b, ...) of a batch."""
        values = values.detach()
        if index is None or len(index) != values.shape[1]:
            self._values[f"{kind} of all"] = values
            return
        rows, by_sample = index.to(values.device), values.transpose(0, 1)
        size = int(rows.max()) + 1
        is_known = torch.ones(len(rows), dtype=torch.bool, device=values.device)
        for name, own in ((kind, by_sample), (f"{kind} known", is_known)):
            self._values[name] = _grown(self._values.get(name), size, own)
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


class _Part(Protocol):
    """What a `MultigridResidual` has for its solves."""

    layers: nn.Module
    places: Slots
    num_layers: int
    method: Method
    backward_method: Method
    guard: AbstractGuard
    warm_start: WarmStart | None
    residuals: dict[str, Tensor]

    def evaluating(self) -> AbstractContextManager[None]:
        """Say that layers are called by a solve."""


class BatchSystem:
    """The solves of a `MultigridResidual` for one batch: states, adjoints and tangents, with its settings.

    Args:
        part: the layers and how they are solved.
        names: of the layers' parameters, in the order in which the methods are given them as `theta`.
        state: u0 (b, ...), for its device and the autocast that it is under.
        index: (b,), the positions of the samples in their data set, for the warm start; None where they have none.
        arguments: what all layers are given beside the state; those with a gradient follow the parameters in `theta`.
        exchanges: of states and of adjoints, where ranks share the layers.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> (names, theta), u0 = zip(*part.layers.named_parameters()), torch.ones(2, 3)
        >>> system = BatchSystem(part, names, u0, index=None)
        >>> system.solve_states(u0, theta).shape
        torch.Size([17, 2, 3])
    """

    def __init__(
        self,
        part: _Part,
        names: tuple[str, ...],
        state: Tensor,
        index: Tensor | None,
        arguments: CallArguments | None = None,
        exchanges: tuple[Exchange, Exchange] | None = None,
    ) -> None:
        self.part, self.names, self.index = part, names, index
        self.arguments = arguments or CallArguments()
        self.forward, self.backward = exchanges or (Exchange(), Exchange())
        self.num_layers = part.num_layers
        self.h: float = part.layers.h  # type: ignore[assignment]
        self._device, device = state.device, state.device.type
        self.devices = (state.device,) if state.is_cuda else ()
        self.seeds: list[int] | None = None
        # A backward linearises the function that its forward has solved, whatever moves the buffers in between.
        self._buffers = part.places.copy_buffers()
        self._solve_by(part.guard.methods(part.method, part.backward_method))
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
            many = batched(BatchedStep(lambda states, which, h: layers.many(states, which, h, *args, **kwargs)))  # type: ignore[operator]
        device, dtype, is_enabled = self._precision

        def evaluate(states: Tensor, which: range, step_size: float) -> Tensor:
            own = {} if moves_buffers else {name: each.clone() for name, each in self._buffers.items()}
            restore = places.fill(parameters, own)
            try:
                with self.part.evaluating(), torch.autocast(device, dtype=dtype, enabled=is_enabled):
                    if self.seeds is None:
                        return many(states, which, step_size)
                    moved = []
                    for state, n in zip(states.split(1), which, strict=True):
                        with _drawing(self.seeds[n], self.devices):
                            moved.append(many(state, range(n, n + 1), step_size))
                    return torch.cat(moved)
            finally:
                restore()

        return evaluate

    def draw_seeds(self) -> None:
        """Draw a seed a layer, from which all evaluations of a layer for this batch draw the same random numbers."""
        seeds = torch.randint(2**62, (self.num_layers,)).to(self._device)
        self.seeds = self.forward.origin(seeds).tolist()

    def solve_states(self, u0: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the states (L + 1, b, ...) of u0 (b, ...), of all layers in a serial pass.

        The solve starts from a warm start where there is one.
        """
        initial = self._recall("states", u0.shape)
        exchange = Exchange() if self.is_serial else self.forward
        how = self.num_layers, self.h, self.methods[0], initial, exchange
        states, residuals = solve_states(self._constant(theta), u0, *how)
        self._keep("states", states, residuals)
        return states

    def solve_adjoints(
        self, states: Tensor, sources: Tensor | None, last: Tensor | None, theta: Sequence[Tensor], *, is_first: bool
    ) -> Tensor:
        """Return the adjoints `A^-T g`, as `solve_states` the states; those of a first derivative are a warm start.

        Args:
            states: (L + 1, b, ...), at which the layers are linearised.
            sources: g at all points, (N + 1, b, ...); None is zero.
            last: (b, ...), added to g at the last point; None is zero. One of the two is given.
            theta: the layers' parameters.
            is_first: whether this is a first derivative, as every training step has one.
        """
        initial = self._recall("adjoints", states.shape[1:]) if is_first else None
        exchange = Exchange() if self.is_serial else self.backward
        how = self.num_layers, self.h, self.methods[1], initial, exchange
        adjoints, residuals = solve_adjoints(self._constant(theta), states, (sources, last), *how)
        if is_first:
            self._keep("adjoints", adjoints, residuals)
        return adjoints

    def solve_tangents(self, states: Tensor, sources: Tensor, theta: Sequence[Tensor]) -> Tensor:
        """Return the tangents `A^-1 g`, (N + 1, b, ...).

        Args:
            states: (N + 1, b, ...), at which the layers are linearised.
            sources: g at all points, (N + 1, b, ...).
            theta: the layers' parameters.
        """
        jacobians = Linearised(self._constant(theta), partial(states_at, states))

        def advance(grid: Grid, values: Tensor, points: range) -> Tensor:
            return jacobians.plain(values, layers_of(grid, points), self.h * grid.stride)

        values = start_of(sources[0], self.num_layers, None)
        return solve(advance, sources[0].detach(), values, sources, self.methods[1])[0]

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

        def measure(methods: Methods | None) -> Solved:
            return Solved(*again(self._with_methods(methods)))

        norm: Norm = self.forward.norm
        return list(self.part.guard.compare(Solved(gradient, last), measure, norm).gradient)

    def _with_methods(self, methods: Methods | None) -> "BatchSystem":
        """Return a system of the same batch for a trial: it starts anew, and keeps nothing."""
        other = copy.copy(self)
        other._solve_by(methods)
        other.is_trial, other.is_due = True, False
        return other

    def _solve_by(self, methods: Methods | None) -> None:
        self.is_serial = methods is None
        # Without a coarse grid the layers are solved one after the other.
        serial = Method(coarsening=max(2, self.num_layers))
        self.methods = methods or (serial, serial)

    def _constant(self, theta: Sequence[Tensor]) -> Evaluate:
        return self.evaluate([tensor.detach() for tensor in theta])

    def _recall(self, kind: str, shape: Sequence[int]) -> Tensor | None:
        """Return a warm start of the "states" or "adjoints" of such a state, if there is one."""
        if self.is_trial or self.is_serial or self.part.warm_start is None:
            return None
        found = self.part.warm_start.recall(self.index, kind, (len(self.own_layers) + 1, *shape))
        # What a checkpoint has put back may lie elsewhere.
        return None if found is None else found.to(self._device)

    def _keep(self, kind: str, values: Tensor, residuals: Tensor) -> None:
        """Keep what a solve has found, for the next warm start and for the statistics."""
        if self.is_trial or self.is_serial:
            return
        self.part.residuals["forward" if kind == "states" else "backward"] = residuals
        if self.part.warm_start is not None:
            self.part.warm_start.remember(self.index, kind, values)


@contextmanager
def _drawing(seed: int, devices: Sequence[torch.device]) -> Iterator[None]:
    """Draw random numbers that a seed alone decides; afterwards torch's generators are as they were."""
    before = RandomState(tuple(devices))
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        before.restore()


class States(torch.autograd.Function):
    """Autograd function of the states U of u0 and theta.

        U^0 = u0,    U^{n+1} = Phi_n(U^n)

    Its arguments are the system of the solves (`BatchSystem`), u0 (b, ...) and the parameters, of any shapes. It
    returns the states (N + 1, b, ...) and the last of them (b, ...), which is all that most losses read. The backward
    is one adjoint solve and one product with the layers' derivatives; it is differentiable again.

    Source: Günther et al. 2020, arXiv 1812.04352, sections 3.1 and 3.2.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> names, theta = zip(*part.layers.named_parameters())
        >>> u0 = torch.ones(2, 3, requires_grad=True)
        >>> states, last = States.apply(BatchSystem(part, names, u0, index=None), u0, *theta)
        >>> states.shape, last.shape
        (torch.Size([17, 2, 3]), torch.Size([2, 3]))
        >>> torch.autograd.grad(last.sum(), u0)[0].shape
        torch.Size([2, 3])
    """

    @staticmethod
    def forward(ctx: Any, system: BatchSystem, u0: Tensor, *theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states and the last of them, by one solve."""
        states = system.solve_states(u0, theta)
        ctx.system = system
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, *theta)
        return states, states[-1].clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Return `w^0` and `sum_n (dPhi_n/dtheta)^T w^{n+1}`, all layers in one product."""
        states, *theta = ctx.saved_tensors
        sources, last = cotangents
        if sources is None and last is None:
            return None, None, *(None for _ in theta)

        def gradient_at(system: BatchSystem, states: Tensor) -> Gradient:
            adjoints: Tensor = _Adjoints.apply(system, True, states, sources, last, *theta)
            return [adjoints[0], *_weight_gradient(system, states, adjoints, theta, ctx.needs_input_grad[2:])]

        def again(other: BatchSystem) -> tuple[Gradient, Tensor]:
            found = other.solve_states(states[0], theta)
            return gradient_at(other, found), found[-1]

        gradient = gradient_at(ctx.system, states)
        with torch.no_grad():
            detached = [None if each is None else each.detach() for each in gradient]
            inspected = ctx.system.inspect(detached, states[-1], again)
        # A gradient that will be differentiated again stays what its graph says.
        return None, *(gradient if torch.is_grad_enabled() else inspected)


class _Adjoints(torch.autograd.Function):
    """`w = A^-T g` of the states, g and theta; g is given at all points, or at the last one, or as the sum of both."""

    @staticmethod
    def forward(
        ctx: Any,
        system: BatchSystem,
        is_first: bool,
        states: Tensor,
        sources: Tensor | None,
        last: Tensor | None,
        *theta: Tensor,
    ) -> Tensor:
        """Solve."""
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
    found = iter(torch.autograd.grad(moved, wanted, adjoints[1:], create_graph=keeps_graph, allow_unused=True))
    return [next(found) if needed else None for needed in is_needed]


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
        found = torch.autograd.grad(value, wanted, create_graph=keeps_graph, allow_unused=True)
    slopes = iter(found[1:])
    along_states = torch.zeros_like(states) if found[0] is None else found[0]
    return along_states, [next(slopes) if alias.requires_grad else None for alias in aliases]


def _layers_at(system: BatchSystem, states: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return aliases of the states and theta, and all layers evaluated at them.

    Derivatives are taken at aliases: the states depend on theta too, and that path is the adjoints'.
    """
    keeps_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        at, *aliases = (_alias(tensor, keeps_graph) for tensor in (states, *theta))
        return at, aliases, system.evaluate(aliases)(at[:-1], range(system.num_layers), system.h)


def _alias(tensor: Tensor, keeps_graph: bool) -> Tensor:
    if not keeps_graph:
        return tensor.detach().requires_grad_()
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


class LastStates(torch.autograd.Function):
    """Autograd function of u^N of u0 and theta, where each rank has samples of its own and a part of the layers.

    The samples of all ranks are gathered, their layers solved together, and each rank gets its samples' last states. In
    the backward a rank's gradient of theta is that of its own layers, for all ranks' losses together, and zero for the
    other layers: the sum over ranks is that of data-parallel training, and so is its mean. It is differentiable once.

    Its arguments are the system of the solves (`BatchSystem`), u0 (b, ...) of this rank's b samples, and the parameters
    of all layers. It returns u^N (b, ...) of these samples.

    Raises:
        ConfigError: the layers cannot be divided among the ranks.

    Example:
        >>> from mlotool.layerparallel.multigrid import MultigridResidual
        >>> part = MultigridResidual(lambda: torch.nn.Linear(3, 3), num_layers=16, h=0.1)
        >>> (names, theta), u0 = zip(*part.layers.named_parameters()), torch.ones(2, 3)
        >>> LastStates.apply(BatchSystem(part, names, u0, index=None), u0, *theta).shape
        torch.Size([2, 3])
    """

    @staticmethod
    def forward(ctx: Any, system: BatchSystem, u0: Tensor, *theta: Tensor) -> Tensor:
        """Return the last states of this rank's samples, by one solve that all ranks share."""
        ctx.sizes = _sizes(system.forward, u0)
        whole = _joined(system.forward, u0, ctx.sizes)
        states, last = _shared_states(system, whole, theta)
        ctx.system = system
        ctx.save_for_backward(whole, states, last, *theta)
        return _own(system.forward, last, ctx.sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        """Return the gradients of this rank's samples and layers, by one adjoint solve that all ranks share."""
        whole, states, last, *theta = ctx.saved_tensors
        whole_cotangent = _joined(ctx.system.forward, cotangent, ctx.sizes)

        def gradient_at(system: BatchSystem, states: Tensor) -> Gradient:
            adjoints, first = _shared_adjoints(system, whole, states, whole_cotangent, theta)
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in theta]
                moved = system.evaluate(leaves)(states[:-1], system.own_layers, system.h)
            # Zeros, not None, where a parameter is another rank's: all ranks then have the same list of gradients.
            slopes: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves]
            if moved.requires_grad:
                slopes = torch.autograd.grad(moved, leaves, adjoints[1:], materialize_grads=True)
            return [_own(system.forward, first, ctx.sizes), *slopes]

        def again(other: BatchSystem) -> tuple[Gradient, Tensor]:
            found, found_last = _shared_states(other, whole, theta)
            return gradient_at(other, found), found_last

        return None, *ctx.system.inspect(gradient_at(ctx.system, states), last, again)


def _shared_states(system: BatchSystem, whole: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the states of this rank's points, and the last one of all."""
    states = system.solve_states(whole, theta)
    if system.is_serial:
        return states[system.own_layers.start : system.own_layers.stop + 1], states[-1]
    return states, system.backward.origin(states[-1])


def _shared_adjoints(
    system: BatchSystem, whole: Tensor, states: Tensor, cotangent: Tensor, theta: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the adjoints of this rank's points, and the first one of all."""
    if system.is_serial:
        # Each rank computes all of it: this is a comparison, once in many steps.
        states = system.solve_states(whole, theta)
    adjoints = system.solve_adjoints(states, None, cotangent, theta, is_first=True)
    if system.is_serial:
        return adjoints[system.own_layers.start : system.own_layers.stop + 1], adjoints[0]
    return adjoints, system.forward.origin(adjoints[0])


def _sizes(exchange: Exchange, values: Tensor) -> list[int]:
    """Return how many samples each part has."""
    sizes: list[int] = exchange.gather(torch.tensor([len(values)], device=values.device)).tolist()
    return sizes


def _joined(exchange: Exchange, own: Tensor, sizes: list[int]) -> Tensor:
    """Return the samples of all parts (B, ...), from each one's (b, ...): padded, since all exchange the same shape."""
    longest = max(sizes)
    padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
    parts = exchange.gather(padded.detach()).split(longest)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _own(exchange: Exchange, whole: Tensor, sizes: list[int]) -> Tensor:
    """Return this part's samples."""
    return whole.split(sizes)[exchange.part].clone()


def joined_index(exchange: Exchange, index: Tensor) -> Tensor:
    """Return the positions (B,) of the samples of all ranks, one rank's after the other.

    Args:
        exchange: between the ranks.
        index: (b,), the positions of this rank's samples in their data set.

    Example:
        >>> joined_index(Exchange(), torch.tensor([3, 1]))
        tensor([3, 1])
    """
    return _joined(exchange, index, _sizes(exchange, index))


def check_equal_on_ranks(exchange: Exchange, arguments: CallArguments) -> None:
    """Refuse arguments of the layers that belong to a rank's own samples: its layers are evaluated for those of all.

    Args:
        exchange: between the ranks.
        arguments: what the layers are given beside the state.

    Raises:
        ConfigError: a tensor has a gradient, or is another one on another rank.

    Example:
        >>> check_equal_on_ranks(Exchange(), CallArguments((torch.ones(2, 2),)))
    """
    found = "a tensor with a gradient" if arguments.tensors else None
    for tensor in () if found else arguments.constants():
        first, *others = exchange.gather(tensor[None])
        if not all(torch.equal(first, each) for each in others):
            found = f"a tensor of shape {tuple(tensor.shape)} that differs from rank to rank"
    if found:
        raise ConfigError(
            f"over_ranks: found {found} among the arguments of the layers; expected the state and what is equal on all "
            "ranks, since each evaluates its layers for the samples of all. Set over_ranks=false."
        )
