"""A problem of which some parameters are divided among ranks, while the others stay whole on each.

It is for modules with a few large parameters, and for shared spaces, whose ranks run different paths: FSDP2, which
`problem/shards.py` divides all parameters with, waits in each layer for all ranks. Here the ranks first agree on what
any of them is going to read, and gather that in one order.

Source: Rajbhandari et al. 2020, ZeRO, stage 3 (arXiv 1910.02054); Zhang et al. 2020, Retiarii, section 5 (a large
candidate in parts beside replicated ones).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mlotool.core.bound_module import BoundModule, Slots, slots_of
from mlotool.core.errors import ConfigError
from mlotool.problem.rank_mean import RankMean
from mlotool.problem.shards import Live, Shards, check_rows, part_of_call, runs_in_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class PartShards(Shards):
    """Some parameters of one module on a mesh of ranks; the others are the same on all of them.

    What is gathered for a loss stays whole until its gradient is there. All ranks call the module as often.

    Args:
        key: of the setting, for messages.
        module: with the same parameters on all ranks; it has shards in the places of some from now on.
        mesh: of the ranks, 1-D.
        patterns: of the names of those that are divided.

    Raises:
        ConfigError: a pattern matches nothing, or a parameter has no rows to divide.
    """

    def __init__(self, key: str, module: nn.Module, mesh: "DeviceMesh", patterns: Sequence[str]) -> None:
        self._names = matched_names(key, module, patterns)
        self._runs_in_part = runs_in_part(module)
        super().__init__(key, module, mesh)
        self._mean = RankMean(self._ranks.mean)
        self._places = Slots(module, self._names)
        self._buffers_only = Slots(module, ())

    def own(self, training: bool | None, *, updates_buffers: bool) -> BoundModule:
        """Return the module as the loss of its own problem sees it."""
        # A loss that was evaluated without a gradient has left what it has read.
        self._read = {}
        return LiveParts(self, self._module, training, None if updates_buffers else self._buffers_only)

    def constant(self, training: bool | None = None) -> BoundModule:
        """Return the module as other problems see it: a function of whole parameters, which are constants."""
        whole = {name: tensor.detach() for name, tensor in self._named()}
        return self.bound(whole | self._gathered(self._shards_of(self._names)), training)

    def parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters by name, as the loss at hand sees them."""
        self._gather(self._names)
        return {name: self._read.get(name, tensor) for name, tensor in self._named()}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, for which what any rank reads is gathered."""
        part = part_of_call(self._module, kwargs)
        if part is None:
            names: Sequence[str] = self._names
        else:
            kwargs, read = part
            flags = self._ranks.largest([float(name in read) for name in self._names])
            names = [name for name, flag in zip(self._names, flags, strict=True) if flag]
        self._gather(names)
        with self._whole():
            return self._module(*args, **kwargs)

    def method(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module, for which all parameters are gathered."""
        self._gather(self._names)
        with self._whole():
            return call(*args, **kwargs)

    def gradient(self, loss: Tensor, theta: Mapping[str, Tensor], weight: float = 1.0) -> list[Tensor | None]:
        """Return the gradient of a loss, the mean over ranks: this rank's part of it where the parameter is divided.

        Args:
            loss: with its graph, which the module as `own` returned it is a part of.
            theta: its trainable parameters by name.
            weight: of this rank's batch; a module that runs in part has the mean over the ranks that have used a
                parameter.
        """
        if not self._runs_in_part:
            self._gather(self._names)
        whole = [self._read.get(name, tensor) for name, tensor in theta.items()]
        found: list[Tensor | None] = [None] * len(whole)
        if loss.requires_grad:
            found = list(torch.autograd.grad(loss, whole, allow_unused=True))
        self._read = {}
        if self._runs_in_part:
            mean = self._mean.gradient_of_users(found, whole, weight)
        else:
            mean = self._mean.gradient(found, whole)
        return [
            None if each is None else self._own_rows(each, like)
            for each, like in zip(mean, theta.values(), strict=True)
        ]

    def put_together(self, part: Tensor, like: Tensor) -> Tensor:
        """Return the tensor of which each rank has a part where `like` is divided; else the tensor itself."""
        return super().put_together(part, like) if _is_shard(like) else part

    def total(self, squares: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
        """Return the square of the norm of a vector, of which some tensors are divided."""
        size = self._mesh.size()
        # What each rank has whole counts once.
        parts = [
            each if each is None or _is_shard(parameter) else each / size
            for each, parameter in zip(squares, like, strict=True)
        ]
        return super().total(parts, like)

    def _divide(self, key: str) -> nn.Module:
        from torch.distributed.tensor import Shard, distribute_tensor

        named = dict(self._module.named_parameters())
        found = {name: named[name] for name in self._names}
        check_rows(key, "patterns", found.items())
        for name, places in slots_of(self._module, found, "_parameters").items():
            tensor = found[name]
            # A copy: the slice would keep all of the whole one alive.
            part = distribute_tensor(tensor.detach(), self._mesh, [Shard(0)], src_data_rank=None).clone()
            parameter = nn.Parameter(part, tensor.requires_grad)
            for holder, attribute in places:
                holder[attribute] = parameter
        return self._module

    def _named(self) -> Iterator[tuple[str, Any]]:
        return self._module.named_parameters()

    def _shards_of(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        named = dict(self._named())
        return [(name, named[name].detach()) for name in names]

    def _gather(self, names: Sequence[str]) -> None:
        """Gather what is not whole yet: leaves, which the loss at hand is differentiated by."""
        missing = [name for name in names if name not in self._read]
        if missing:
            named = dict(self._named())
            for name, tensor in self._gathered(self._shards_of(missing)).items():
                self._read[name] = tensor.requires_grad_(named[name].requires_grad)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Have what is gathered in the places of its shards."""
        named = dict(self._named())
        own = self._places.put([self._read.get(name, named[name]) for name in self._names])
        try:
            yield
        finally:
            self._places.put_back(own)

    def _own_rows(self, whole: Tensor, like: Any) -> Tensor:
        return self._part(whole, like).to_local() if _is_shard(like) else whole


class LiveParts(Live):
    """A module with some divided parameters, as the loss of its own problem sees it.

    Args:
        shards: its parameters.
        module: the problem's.
        training: as for `BoundModule`.
        buffers: the module's slots, of whose buffers a throw-away copy is used; None: the module's own move.
    """

    __slots__ = ()

    def __init__(self, shards: PartShards, module: nn.Module, training: bool | None, buffers: Slots | None) -> None:
        super().__init__(shards, module, training)
        self._call = shards.call
        if buffers is not None:
            self._slots, self._tensors = buffers, ()

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module, `name`."""
        assert isinstance(self._shards, PartShards)
        return self._run(self._shards.method, (getattr(self._module, name), *args), kwargs)


def matched_names(key: str, module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the parameters that patterns match.

    Args:
        key: of the setting.
        module: has the parameters.
        patterns: with `*` for any text.

    Raises:
        ConfigError: a pattern matches none.

    Example:
        >>> matched_names("shard", nn.Linear(2, 2), ["w*"])
        ('weight',)
    """
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{key}: found the pattern '{pattern}', which no parameter has; expected a pattern for some of "
                f"{', '.join(names)}. Correct the pattern."
            )
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _is_shard(tensor: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)
