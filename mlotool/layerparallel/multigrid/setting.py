"""Multigrid as a setting of a problem: its training steps solve a part of its module across the layers."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.private import MODULE_HOOKS
from mlotool.core.settings import target
from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel.multigrid.guard import Choice
from mlotool.layerparallel.multigrid.layers import CallArguments, Layers, WholeLayers
from mlotool.layerparallel.multigrid.residual import MultigridResidual, MultigridSettings
from mlotool.problem.parallel import AbstractParallel


@target("parallel")
@dataclass(eq=False, repr=False)
class Multigrid(MultigridSettings, AbstractParallel):
    """Layer-parallel training steps: the residual layers are solved by multigrid, forward and backward (MGRIT).

    Write `Problem(..., parallel=Multigrid(cycles=2))`, or in a recipe `problems.classifier.parallel: {_target_:
    mlotool.layerparallel.Multigrid, cycles: 2}`. Evaluation and hypergradients run the layers one after the other. With
    `warm_start` and one or two cycles, training is one-shot: states, adjoints and parameters converge together (section
    4 of the paper).

    Args:
        part: the name of the layers in the problem's module, or a list of names. They are a module of `Layers`, such as
            `mlotool.models.ResidualLayers`, a `MultigridResidual`, an nn.Sequential or nn.ModuleList of blocks that
            keep the shape (a block includes its shortcut), or some of its blocks, as in "layer3[1:]". None looks for
            the first two kinds, then for a module that is called "residual", then for all sequences of equal blocks.
            The module's own forward does not change: it calls the blocks one after the other, with any further
            arguments (see `InPlace`).
        coarsening: this and all other arguments are the fields of `MultigridSettings`. With `warm_start`, samples are
            identified by the batch's `index`; without an `index`, all batches have to be the same.

    Raises:
        ConfigError: a setting is out of range; from `attach`, the module has no such layers; from a training step, a
            block changes the shape, or the module does something else between blocks.

    Cost: see `critical_path`. The residuals after each cycle are logged, as `forward_residual_0`, ...

    Source: Günther et al. 2020, arXiv 1812.04352.

    Example:
        >>> import torch
        >>> blocks = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(8)])
        >>> parallel = Multigrid(part="", cycles=3)
        >>> parallel.attach("classifier", blocks)
        >>> parallel(torch.ones(2, 3)).shape, sorted(parallel.statistics())[:2]
        (torch.Size([2, 3]), ['forward_residual_0', 'forward_residual_1'])
    """

    part: str | Annotated[Sequence[str], MinLen(1)] | None = field(default=None, kw_only=False)

    def __post_init__(self) -> None:
        self.solvers: dict[str, MultigridResidual] = {}
        self._places: list[InPlace] = []

    def attach(self, name: str, module: nn.Module) -> None:
        """Find the layers of the problem's module."""
        self.module = module
        settings: Any = {setting.name: getattr(self, setting.name) for setting in fields(MultigridSettings)}
        try:
            for path, part in find_parts(module, self.part).items():
                self.solvers[path] = MultigridResidual(part.layers, **settings)
                self._places.append(InPlace(path or type(module).__name__, part.blocks, self.solvers[path]))
        except ConfigError as error:
            raise ConfigError(f"problems.{name}.parallel.{error}") from error
        if all(len(solver.method.grids(solver.num_layers)) == 1 for solver in self.solvers.values()):
            counts = ", ".join(f"{path or 'the module'} has {part.num_layers}" for path, part in self.solvers.items())
            fault = f"problems.{name}.parallel: {counts} layers, too few for a coarse grid, so they run serially"
            warnings.warn(f"{fault}. Name a longer part, or set a smaller coarsening.", stacklevel=2)

    def default_hypergradient(self) -> Implicit:
        """Return finite differences with the identity: first-order passes through the serial network."""
        return Implicit(Identity(), product="finite_difference")

    def begin(self, batch: Any, weight: float) -> None:
        """Begin a step: note which samples the batch has, for the warm start."""
        index = batch.get("index") if isinstance(batch, Mapping) else None
        for solver in self.solvers.values():
            solver.begin(index if isinstance(index, Tensor) else None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its layers solved by multigrid."""
        with ExitStack() as stack:
            for solver in self.solvers.values():
                solver.training = self.module.training
            for place in self._places:
                stack.enter_context(place.solving())
            return self.module(*args, **kwargs)

    def forecast(self) -> list[str]:
        """Return sentences about the critical path of a training step and of a serial one."""
        named = {f"the part '{path}'" if path else "the module": solver for path, solver in self.solvers.items()}
        return [_forecast(name, solver) for name, solver in named.items()]

    def statistics(self) -> dict[str, float]:
        """Return the residuals after each cycle of the last step, and what the guard has seen."""
        is_alone = len(self.solvers) == 1
        return {
            key if is_alone else f"{path}.{key}": value
            for path, solver in self.solvers.items()
            for key, value in solver.statistics().items()
        }

    @property
    def differs_by_rank(self) -> bool:
        """Return True: a warm start is of a rank's own samples, or of its own layers."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the guards' counters and the warm starts."""
        return {
            path: {
                "guard": solver.guard.state_dict(),
                "warm_start": {} if solver.warm_start is None else solver.warm_start.state_dict(),
            }
            for path, solver in self.solvers.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned."""
        expected = f"{', '.join(state)}, the parts of the checkpoint"
        require(state.keys() == self.solvers.keys(), "parallel.part", list(self.solvers), expected)
        for path, solver in self.solvers.items():
            solver.guard.load_state_dict(state[path]["guard"])
            if solver.warm_start is not None:
                solver.warm_start.load_state_dict(state[path]["warm_start"])


def _forecast(name: str, solver: MultigridResidual) -> str:
    """Return the critical path of a training step beside that of a serial one; with `cycles: auto`, the chosen."""
    guard, num_layers = solver.guard, solver.num_layers
    methods, chosen = (solver.method, solver.backward_method), ""
    if isinstance(guard, Choice):
        if guard.plan is None:
            return f"{name} has {num_layers} layers, which run one after the other: cycles=auto found nothing faster."
        method = guard.plan.forward
        methods, chosen = (method, method), f" (cycles={method.cycles}, coarsening={method.coarsening} were chosen)"
    workers = max(method.grids(num_layers)[0].num_chunks for method in methods)
    one, all_chunks = (sum(method.path(num_layers, count).critical for method in methods) for count in (1, workers))
    return (
        f"{name} has {num_layers} layers. A serial step evaluates {2 * num_layers} layers one after the other (forward "
        f"and backward). Multigrid{chosen} evaluates {one} one after the other with one worker, and {all_chunks} with "
        f"{workers}. With {workers} it is at most {2 * num_layers / all_chunks:.2f} times as fast as a serial step, "
        "even if communication takes no time."
    )


_NAME = re.compile(r"(?P<path>[^\[\]]*)(\[(?P<begin>-?\d*):(?P<end>-?\d*)\])?")
_CONTAINERS = (nn.Sequential, nn.ModuleList)


@dataclass(frozen=True)
class ModulePart:
    """Layers of a module.

    Args:
        blocks: modules that are called one after the other; or one that is all layers.
        layers: the same as `Layers`, or as a `MultigridResidual` whose settings do not count.

    Example:
        >>> module = nn.Sequential(nn.Linear(2, 2), *[nn.Sequential(nn.Tanh()) for _ in range(6)])
        >>> [part] = find_parts(module, "[1:]").values()
        >>> len(part.blocks), part.layers.num_layers
        (6, 6)
    """

    blocks: Sequence[nn.Module]
    layers: nn.Module


def find_parts(module: nn.Module, names: str | Sequence[str] | None) -> dict[str, ModulePart]:
    """Return the parts of a module by name.

    Args:
        module: what the layers are in.
        names: of a module of `Layers`, of a `MultigridResidual`, of an nn.Sequential or nn.ModuleList of blocks, or of
            some of its blocks, as in "layer3[1:]"; or several of these. None looks for the first two kinds, then for
            one that is called "residual", then for runs of equal blocks.

    Raises:
        ConfigError: there is no such part, or two have a block in common.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(*[nn.Sequential(nn.Linear(3, 3)) for _ in range(5)]))
        >>> list(find_parts(model, None)), list(find_parts(model, ["1[:2]", "1[2:]"]))
        (['1'], ['1[:2]', '1[2:]'])
    """
    if names is not None:
        parts = {name: _named(module, name) for name in ([names] if isinstance(names, str) else names)}
        owners: dict[nn.Module, str] = {}
        for name, part in parts.items():
            for inner in {inner for block in part.blocks for inner in block.modules()}:
                is_new = owners.setdefault(inner, name) == name
                require(is_new, "part", [owners[inner], name], "parts that have no blocks in common")
        return parts
    modules = dict(module.named_modules())
    whole = {path: child for path, child in modules.items() if isinstance(child, MultigridResidual | Layers)}
    if whole:
        return {path: _whole(child) for path, child in whole.items() if not _is_inside(path, whole)}
    if isinstance(modules.get("residual"), _CONTAINERS):
        return {"residual": _named(module, "residual")}
    runs = {name: ModulePart(blocks, WholeLayers(blocks)) for name, blocks in equal_blocks(module).items()}
    if not runs:
        raise _no_part(module, f"no equal blocks that follow each other in {type(module).__name__}")
    return runs


def equal_blocks(module: nn.Module) -> dict[str, list[nn.Module]]:
    """Return runs of at least two equal blocks in the module's Sequentials and ModuleLists, by name, outermost first.

    Blocks are equal if they print the same and have parameters and buffers of the same shapes. Layers of one operation,
    such as nn.Linear, are no blocks.

    Args:
        module: what they are in.

    Example:
        >>> blocks = [nn.Sequential(nn.Linear(width, 3)) for width in (2, 3, 3)]
        >>> list(equal_blocks(nn.Sequential(*blocks)))
        ['[1:3]']
    """
    runs: dict[str, list[nn.Module]] = {}
    inside: set[str] = set()
    for path, container in module.named_modules():
        if not isinstance(container, _CONTAINERS) or path in inside or _is_inside(path, inside):
            continue
        names, begin = [name for name, _ in container.named_children()], 0
        for _, group in groupby(container, key=_kind):
            blocks = list(group)
            end = begin + len(blocks)
            if len(blocks) > 1 and len(list(blocks[0].children())) and len(list(blocks[0].parameters())):
                runs[path if len(blocks) == len(container) else f"{path}[{begin}:{end}]"] = blocks
                inside |= {f"{path}.{name}".lstrip(".") for name in names[begin:end]}
            begin = end
    return runs


def _kind(block: nn.Module) -> object:
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return type(block), repr(block), [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]


def _named(module: nn.Module, name: str) -> ModulePart:
    match = _NAME.fullmatch(name)
    path = None if match is None else match["path"]
    modules = dict(module.named_modules())
    if match is None or path not in modules:
        raise _no_part(module, f"{name!r}, which {type(module).__name__} has not", did_you_mean(name, modules))
    child = modules[path]
    is_whole = isinstance(child, MultigridResidual | Layers)
    if is_whole and name == path:
        return _whole(child)
    if is_whole or not isinstance(child, _CONTAINERS):
        raise _no_part(module, f"{type(child).__name__} at {name!r} in {type(module).__name__}")
    begin, end = (int(match[key]) if match[key] else None for key in ("begin", "end"))
    blocks = list(child)[begin:end]
    if not blocks:
        raise _no_part(module, f"no blocks at {name!r}, of {len(child)} there")
    return ModulePart(blocks, WholeLayers(blocks))


def _whole(layers: Any) -> ModulePart:
    # Its own settings are those of a module that is used by itself.
    return ModulePart([layers], layers.serial().layers if isinstance(layers, MultigridResidual) else layers)


def _is_inside(path: str, outer: Iterable[str]) -> bool:
    return any(path != other and path.startswith(f"{other}." if other else "") for other in outer)


def _no_part(module: nn.Module, fault: str, hint: str = "") -> ConfigError:
    runs = [f"{name} ({len(blocks)} equal blocks)" for name, blocks in equal_blocks(module).items()]
    advice = (
        f"Name one of {', '.join(runs[:8])}."
        if runs
        else ("Use parallel=auxnet, which needs no blocks of equal shape.")
    )
    expected = "blocks that keep the shape in an nn.Sequential or nn.ModuleList, as layer3[1:], or ResidualLayers"
    return ConfigError(f"part: found {fault}; expected {expected}.{hint} {advice}")


# N: blocks, b: batch


@dataclass
class _Pass:
    """A pass through the blocks: what was solved for it, for what, and which block was handed what last."""

    states: Tensor | None
    last: Tensor
    arguments: CallArguments
    mode: object
    position: int = 0
    handed: Any = None
    version: int = 0


class InPlace:
    """Consecutive blocks of a module: the call of the first one solves all, and each returns its state of the solution.

    The module's own forward may call the blocks in whatever way it likes, as long as each is given what the one before
    has returned, and all are given the same further arguments. What it reads between two blocks, and returns or adds to
    a loss, has the right value and the right gradient, as far as the cycles have converged.

    Args:
        name: of the blocks in the module, for messages.
        blocks: the N blocks; or one module that is all layers, such as `mlotool.models.ResidualLayers`.
        solver: of these layers.

    Raises:
        ConfigError: from a block's call, where the module does something else between the blocks, or a block has hooks.

    Example:
        >>> import torch
        >>> from mlotool.layerparallel.multigrid.layers import WholeLayers
        >>> model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(8)])
        >>> in_place = InPlace("model", list(model), MultigridResidual(WholeLayers(model), cycles=4))
        >>> with in_place.solving():
        ...     found = model(torch.ones(2, 3))
        >>> torch.testing.assert_close(found, model(torch.ones(2, 3)))
    """

    def __init__(self, name: str, blocks: Sequence[nn.Module], solver: MultigridResidual) -> None:
        self.name = name
        self.blocks = list(blocks)
        self.solver = solver
        self._own: dict[nn.Module, Callable[..., Any]] = {}
        self._pass: _Pass | None = None
        self._is_called = self._is_told = False

    @contextmanager
    def solving(self) -> Iterator[None]:
        """Let the first block solve all of them; a solver that is serial leaves the blocks as they are."""
        if self.solver.begin_step():
            yield
            return
        self._check_hooks()
        before = {block: block.__dict__.get("forward") for block in self.blocks}
        self._own = {block: block.forward for block in self.blocks}
        self._is_called = False
        for block in self.blocks:
            # The modules stay where they are: what their owner asks of them (`layers[0].norm_first`) is still theirs.
            block.__dict__["forward"] = partial(self._call, block)
        try:
            yield
        finally:
            for block, forward in before.items():
                del block.__dict__["forward"]
                if forward is not None:
                    block.__dict__["forward"] = forward
            # What a batch has left would live as long as the program.
            self._pass = None
        if not self._is_called and not self._is_told:
            self._is_told = True
            fault = f"parallel.part: the module has called no block of {self.name}, so nothing is solved by multigrid"
            warnings.warn(f"{fault}. Name others by part.", stacklevel=2)

    def _call(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self.solver.is_evaluating:
            return self._own[block](*args, **kwargs)
        state, arguments = self._state_of(block, args, kwargs)
        now = self._pass
        # One block in all places is handed what it has returned itself; any other state begins a pass.
        is_next = now is not None and state is now.handed and now.position < len(self.blocks)
        if block is self.blocks[0] and not is_next:
            self._is_called = True
            now = self._pass = _Pass(*self.solver.solve(state, arguments), arguments, _mode_of(state))
        else:
            self._check_follows(block, state, arguments)
        assert now is not None
        # The last one has a node of its own: a loss that reads no other has no cotangents of all states.
        if now.position == len(self.blocks) - 1:
            handed = now.last
        else:
            # Another rank may have it: what computes with a tensor without values is refused by torch.
            handed = now.last.detach().to("meta") if now.states is None else now.states[now.position + 1]
        now.handed, now.version, now.position = handed, handed._version, now.position + 1
        return handed

    def _state_of(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, CallArguments]:
        if args:
            return args[0], CallArguments(args[1:], kwargs)
        first = next(iter(inspect.signature(self._own[block]).parameters))
        rest = {key: value for key, value in kwargs.items() if key != first}
        return kwargs.get(first), CallArguments((), rest)

    def _check_follows(self, block: nn.Module, state: Any, arguments: CallArguments) -> None:
        now = self._pass
        position = 0 if now is None else now.position
        if position >= len(self.blocks) or block is not self.blocks[position]:
            fault, position = f"called as number {position}", self.blocks.index(block)
        elif now is None or state is not now.handed or now.handed._version != now.version:
            fault = "called with another input than the output of the block before"
        elif not arguments.equals(now.arguments):
            fault = "called with other arguments beside the state than block 0"
        elif _mode_of(now.last) != now.mode:
            fault = "called with gradients or autocast switched otherwise than block 0"
        else:
            return
        message = f"parallel.part: {self.name} has block {position} ({type(block).__name__}) {fault}"
        advice = "Name blocks that follow each other directly, as in part: layers[2:8], with one set of arguments."
        raise ConfigError(f"{message}. {advice}")

    def _check_hooks(self) -> None:
        """Refuse hooks of the blocks themselves, which would see both a solve's evaluations and the module's call."""
        blocks = enumerate(self.blocks)
        hooked = [number for number, block in blocks if any(getattr(block, kind) for kind in MODULE_HOOKS)]
        expected = f"no hooks of a block of {self.name}, since multigrid evaluates a block many times"
        require(not hooked, "parallel.part: blocks with hooks", hooked, expected, "Put them on a module around them.")


def _mode_of(state: Any) -> object:
    """Return what decides how a block is computed beside its arguments."""
    device = state.device.type if isinstance(state, Tensor) else "cpu"
    is_cast = torch.is_autocast_enabled(device)
    return torch.is_grad_enabled(), torch.get_autocast_dtype(device) if is_cast else None
