"""Blocks that are solved by multigrid where they stand, while the module that calls them runs its own forward."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError
from mlotool.layerparallel.multigrid.call import CallArguments
from mlotool.layerparallel.multigrid.residual import MultigridResidual

# N: blocks, b: batch


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
        self._position = 0
        self._own: dict[nn.Module, Callable[..., Any]] = {}
        self._results: Sequence[Tensor] = ()
        self._handed: Tensor | None = None
        self._version = 0
        self._arguments: CallArguments | None = None
        self._mode: object = None
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
        self._position, self._is_called = 0, False
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
            self._results, self._handed, self._arguments = (), None, None
        if not self._is_called and not self._is_told:
            self._is_told = True
            warnings.warn(
                f"parallel.part: the module has called no block of {self.name}, so that nothing is solved by "
                "multigrid; expected blocks that its forward calls. Name others by part.",
                UserWarning,
                stacklevel=2,
            )

    def _call(self, block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if self.solver.is_evaluating:
            return self._own[block](*args, **kwargs)
        state, arguments = self._state_of(block, args, kwargs)
        # One block in all places is handed what it has returned itself; any other state begins a pass.
        if block is self.blocks[0] and (self._handed is None or state is not self._handed or self._is_over):
            self._is_called, self._mode = True, _mode(state)
            self._results, self._arguments, self._position = self._solve(state, arguments), arguments, 0
        else:
            self._check_follows(block, state, arguments)
        handed = self._results[self._position]
        self._handed, self._version = handed, handed._version
        self._position += 1
        return handed

    @property
    def _is_over(self) -> bool:
        return self._position == len(self.blocks)

    def _solve(self, state: Tensor, arguments: CallArguments) -> Sequence[Tensor]:
        """Return what each block returns."""
        states, last = self.solver.solve(state, arguments)
        if states is None:
            between = [_Unsolved.of(last, self.name)] * (len(self.blocks) - 1)
            return [*between, last]
        return _Results(states, last, len(self.blocks))

    def _state_of(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, CallArguments]:
        if args:
            return args[0], CallArguments(args[1:], kwargs)
        first = next(iter(inspect.signature(self._own[block]).parameters))
        rest = {key: value for key, value in kwargs.items() if key != first}
        return kwargs.get(first), CallArguments((), rest)

    def _check_follows(self, block: nn.Module, state: Any, arguments: CallArguments) -> None:
        position, kind = self._position, type(block).__name__
        if position >= len(self.blocks) or block is not self.blocks[position]:
            found = [place for place, each in enumerate(self.blocks) if each is block]
            what = f"block {found[0]} ({kind}) called as number {position}"
        elif self._handed is None or state is not self._handed or self._handed._version != self._version:
            what = f"block {position} ({kind}) called with something else than what the block before it has returned"
        elif self._arguments is None or not arguments.equals(self._arguments):
            what = f"block {position} ({kind}) called with other arguments beside the state than block 0"
        elif _mode(state) != self._mode:
            what = f"block {position} ({kind}) called with gradients or autocast switched otherwise than block 0"
        else:
            return
        raise ConfigError(
            f"parallel.part: {self.name} has {what}; expected blocks that follow each other directly, with the same "
            "masks for all (those with a gradient made once, before the first block), since multigrid solves them "
            "together. Name blocks that do, as in part: layers[2:8], or build them as one "
            "mlotool.layerparallel.MultigridResidual."
        )

    def _check_hooks(self) -> None:
        """Refuse hooks of the blocks themselves, which would see both a solve's evaluations and the module's call."""
        for number, block in enumerate(self.blocks):
            hooks = (
                block._forward_hooks,
                block._forward_pre_hooks,
                block._backward_hooks,
                block._backward_pre_hooks,
            )
            if any(hooks):
                raise ConfigError(
                    f"parallel.part: block {number} ({type(block).__name__}) of {self.name} has hooks; expected none, "
                    "since multigrid evaluates a block many times. Remove them, put them on a module around the "
                    "block, or name other blocks as the part."
                )


def _mode(state: Any) -> object:
    """Return what decides how a block is computed beside its arguments."""
    device = state.device.type if isinstance(state, Tensor) else "cpu"
    is_cast = torch.is_autocast_enabled(device)
    return torch.is_grad_enabled(), torch.get_autocast_dtype(device) if is_cast else None


class _Results(Sequence[Tensor]):
    """What each of N blocks returns: the states behind it, of which only those are made that are asked for."""

    def __init__(self, states: Tensor, last: Tensor, num_blocks: int) -> None:
        self._states, self._last, self._num_blocks = states, last, num_blocks

    def __len__(self) -> int:
        return self._num_blocks

    def __getitem__(self, position: Any) -> Any:
        # The last one has a node of its own: a loss that reads no other has no cotangents of all states.
        return self._last if position == self._num_blocks - 1 else self._states[position + 1]


class _Unsolved(Tensor):
    """Stands for the state between two blocks where another rank has it: it can be handed on, and has a shape."""

    _part: str

    @staticmethod
    def of(like: Tensor, part: str) -> "_Unsolved":
        """Return one of a shape."""
        made: _Unsolved = Tensor._make_subclass(_Unsolved, like.detach())
        made._part = part
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute."""
        if getattr(func, "__name__", "") in ("__get__", "dim", "size", "numel", "_make_subclass"):
            return super().__torch_function__(func, types, args, kwargs or {})
        found = [each for each in tree_leaves((args, kwargs)) if isinstance(each, _Unsolved)]
        name = found[0]._part if found else "the part"
        raise ConfigError(
            f"parallel.over_ranks: the module reads a state between two blocks of {name}; expected blocks that alone "
            "read what the one before has returned, since another rank may have that state. Set over_ranks=false, or "
            "name fewer blocks as the part."
        )
