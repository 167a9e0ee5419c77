"""A problem divided among ranks: each holds a part of its parameters, of their gradient and of the optimizer's state.

The problem's own training step runs PyTorch's FSDP2, which gathers a block's parameters for its forward and backward
pass and scatters the mean of its gradient. Whatever else needs the parameters (the losses of other problems, an
evaluation, a checkpoint) gathers them whole, and calls a twin of the module that has none of its own.

Source: Zhao et al. 2023, PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (arXiv 2304.11277);
Rajbhandari et al. 2020, ZeRO, stage 3 (arXiv 1910.02054).
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from mlotool.core.arguments import require
from mlotool.core.bound_module import BoundModule, Slots, slots_of
from mlotool.core.private import tree_map
from mlotool.distributed.collectives import Ranks
from mlotool.problem.rank_mean import RankMean

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def runs_in_part(module: nn.Module) -> bool:
    """Say whether a module, or one inside it, states by an attribute `runs_in_part` that a call runs a part of it.

    Over ranks, the gradient of each of its parameters is the mean over the ranks that have used it.

    Example:
        >>> runs_in_part(nn.Linear(2, 2))
        False
    """
    return any(getattr(value, "runs_in_part", False) is True for value in module.modules())


def part_of_call(module: nn.Module, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]] | None:
    """Return the part of a module that a call runs, where the module tells.

    It does by a method `part_of_call(arguments)`, which decides on the part (draws a path).

    Args:
        module: is going to be called.
        arguments: its keywords.

    Returns:
        The keywords with which the call runs that part, and the names of the parameters that it reads; None where the
        module has no such method, and may read all of them.

    Example:
        >>> part_of_call(nn.Linear(2, 2), {}) is None
        True
    """
    decide = getattr(module, "part_of_call", None) if getattr(module, "runs_in_part", False) is True else None
    return None if decide is None else decide(arguments)


# Parameters of a layer that travels by itself; smaller ones travel with the module around them.
MIN_BLOCK = 2**20


class Shards:
    """The parameters of one module on a mesh of ranks. What gathers or scatters is called by all of them, in one order.

    Args:
        key: of the setting, for messages.
        module: with the same parameters on all ranks; it has their shards from now on.
        mesh: of the ranks, 1-D.

    Raises:
        ConfigError: a parameter has no rows to divide.
    """

    def __init__(self, key: str, module: nn.Module, mesh: "DeviceMesh") -> None:
        self._module = module
        self._mesh = mesh
        self._ranks = Ranks.of(mesh.get_group())
        # What the loss at hand has read of the parameters themselves, beside what the module's own passes do.
        self._read: dict[str, Any] = {}
        self._twin = self._divide(key)
        self._slots = Slots(self._twin, [name for name, _ in self._twin.named_parameters()])

    def _divide(self, key: str) -> nn.Module:
        """Divide the parameters; return what is called with whole ones in their places."""
        # Imported here: only a run that divides anything has to wait for it.
        from torch.distributed.fsdp import fully_shard

        module, mesh = self._module, self._mesh
        check_rows(key, "true", module.named_parameters())
        twin = _twin(module)
        for block in _blocks(module):
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
        return twin

    def own(self, training: bool | None, *, updates_buffers: bool) -> BoundModule:
        """Return the module as the loss of its own problem sees it; `gradient` differentiates the loss.

        Args:
            training: as for `BoundModule`.
            updates_buffers: run the module itself, whose buffers the training step updates; else a copy of it.
        """
        return Live(self, self._module, training) if updates_buffers else self.bound(self.parameters(), training)

    def constant(self, training: bool | None = None) -> BoundModule:
        """Return the module as other problems see it: a function of whole parameters, which are constants."""
        return self.bound(self._gathered(self._named()), training)

    def parameters(self) -> dict[str, Tensor]:
        """Return the whole parameters by name; their gradient is the mean over ranks."""
        if not self._read:
            # Leaves of their own: FSDP2 writes into the parameters' gradients at a moment that it chooses.
            self._read = {key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in self._named()}
        whole = {key: tensor.full_tensor(grad_placements=[_of_torch().Partial()]) for key, tensor in self._read.items()}
        factor = 1.0 / self._mesh.size()
        for tensor in whole.values():
            if tensor.requires_grad:
                # The ranks' cotangents are added up on their way back.
                tensor.register_hook(lambda slope: slope * factor)
        return whole

    def gradient(self, loss: Tensor, theta: Mapping[str, Tensor], weight: float = 1.0) -> list[Tensor | None]:
        """Return this rank's part of the gradient of a loss, the mean over ranks; None where a parameter is unused.

        Args:
            loss: with its graph, which the module as `own` returned it is a part of.
            theta: its trainable parameters by name.
            weight: of this rank's batch (`Share.weight`), by which the loss was multiplied.
        """
        loss.backward()
        # Plain tensors from here on: arithmetic with DTensors may gather them.
        gradient = [_added(tensor.grad, self._read[key].grad if self._read else None) for key, tensor in theta.items()]
        for tensor in theta.values():
            tensor.grad = None
        self._read = {}
        return gradient

    def put_together(self, part: Tensor, like: Tensor) -> Tensor:
        """Return the tensor of which each rank has a part, divided as `like`."""
        form = {"run_check": False, "shape": like.shape, "stride": like.stride()}
        return _of_torch().DTensor.from_local(part, self._mesh, [_of_torch().Shard(0)], **form)

    def total(self, squares: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
        """Return the square of the norm of a vector that is divided.

        Args:
            squares: 0-D, of this rank's part of each tensor; None where there is none.
            like: the parameters of these tensors.
        """
        return self._ranks.total(torch.stack([value for value in squares if value is not None]).sum(0))

    def divided(self, state: Mapping[str, Any], optimizer: Optimizer | None) -> dict[str, Any]:
        """Return the state of a problem with this rank's shards of whole tensors.

        Args:
            state: as `Problem.state_dict` returns it; whole tensors are the same on all ranks, shards stay.
            optimizer: the problem's.
        """
        own = self._module.state_dict()
        module = {key: self._part(value, own.get(key)) for key, value in state["module"].items()}
        if optimizer is None:
            return {**state, "module": module}
        return {**state, "module": module, "optimizer": self.divided_optimizer(state["optimizer"], optimizer)}

    def divided_optimizer(self, state: Mapping[str, Any], optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state with this rank's shards; arguments as for `divided`."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shards = {
            number: {key: self._part(value, parameters[number]) for key, value in entry.items()}
            for number, entry in state["state"].items()
        }
        return {**state, "state": shards}

    def merged(self, *, is_kept: bool) -> nn.Module | None:
        """Return the module with whole parameters, on the CPU; the divided one is not to be used any more.

        Args:
            is_kept: whether this rank wants it; others have their part in it, and get None.
        """
        named = dict(self._named())
        whole = gathered({key: tensor.detach() for key, tensor in named.items()}, is_kept=is_kept)
        if not is_kept:
            return None
        twin = self._followed()
        for name, places in slots_of(twin, dict(twin.named_parameters()), "_parameters").items():
            parameter = nn.Parameter(whole[name].cpu(), named[name].requires_grad)
            for holder, attribute in places:
                holder[attribute] = parameter
        return twin

    def bound(self, parameters: Mapping[str, Tensor], training: bool | None = None) -> BoundModule:
        """Return the twin at whole parameters."""
        tensors = [parameters[name] for name in self._slots.names]
        return BoundModule.in_slots(self._slots, tensors, training, self._followed())

    def _followed(self) -> nn.Module:
        """Return the twin in the mode of the module."""
        for own, other in zip(self._module.modules(), self._twin.modules(), strict=True):
            other.training = own.training
        return self._twin

    def _named(self) -> Iterator[tuple[str, Any]]:
        # After a forward pass the outermost parameters are whole until the backward pass, which gathers them again.
        self._module.reshard()  # type: ignore[operator]
        return self._module.named_parameters()

    def _gathered(self, named: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
        """Return whole parameters by name, by one exchange a dtype."""
        kinds: dict[torch.dtype, dict[str, Any]] = {}
        for key, tensor in named:
            kinds.setdefault(tensor.dtype, {})[key] = tensor.detach()
        return {key: tensor for alike in kinds.values() for key, tensor in self._exchanged(alike).items()}

    def _exchanged(self, named: Mapping[str, Any]) -> dict[str, Tensor]:
        size = self._mesh.size()
        # All parts are as long as the longest: of 5 rows two ranks have 3 and 2.
        longest = {key: -(-len(value) // size) * (value.numel() // max(len(value), 1)) for key, value in named.items()}
        parts = [value.to_local().reshape(-1) for value in named.values()]
        mine = torch.cat([functional.pad(a, (0, n - len(a))) for a, n in zip(parts, longest.values(), strict=True)])
        columns = self._ranks.gather_flat(mine).split(list(longest.values()), dim=1)
        return {
            key: column.reshape(-1)[: value.numel()].view(value.shape)
            for (key, value), column in zip(named.items(), columns, strict=True)
        }

    def _part(self, value: Any, like: Any) -> Any:
        """Return this rank's shard of a value where `like` is a shard of that shape."""
        is_whole = isinstance(value, Tensor) and not _is_shard(value)
        if not (is_whole and _is_shard(like) and value.shape == like.shape):
            return value
        # A copy: the slice would keep all of the whole one alive.
        return _of_torch().distribute_tensor(value, self._mesh, like.placements, src_data_rank=None).clone()


class Live(BoundModule):
    """The divided module itself, as the loss of its own problem sees it in a training step."""

    __slots__ = ("_shards",)

    def __init__(self, shards: Shards, module: nn.Module, training: bool | None) -> None:
        super().__init__(module, training=training)
        self._shards = shards

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run another method of the module, which gathers and scatters as its forward does."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        if name not in vars(self._module):
            register_fsdp_forward_method(self._module, name)
        return super().method(name, *args, **kwargs)

    def at(self, parameters: Mapping[str, Tensor]) -> BoundModule:
        """Return the twin at other parameters."""
        return self._shards.bound({**self._shards.parameters(), **parameters}, self._training)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole parameters."""
        yield from self._shards.parameters().items()


def gathered(tree: Any, *, is_kept: bool) -> Any:
    """Return nested containers in which whole tensors on the CPU stand for shards.

    Args:
        tree: dicts, lists, tuples and leaves, the same on all ranks.
        is_kept: whether this rank wants them; others have their part in it, and get empty ones.
    """

    def whole(leaf: Any) -> Any:
        if not hasattr(leaf, "full_tensor"):
            return leaf
        tensor = leaf.detach().full_tensor()
        return tensor.cpu() if is_kept else tensor.new_empty(0, device="cpu")

    return tree_map(whole, tree)


def _added(*gradients: Any) -> Tensor | None:
    parts = [slope.to_local() for slope in gradients if slope is not None]
    return parts[0] + parts[1] if len(parts) == 2 else next(iter(parts), None)


def check_rows(key: str, setting: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse parameters that have no rows to divide.

    Args:
        key: of the setting.
        setting: its value, for the message.
        named: the parameters by name.

    Raises:
        ConfigError: one is a single number, or is not contiguous (channels_last).
    """
    for name, parameter in named:
        is_right = parameter.dim() > 0 and parameter.is_contiguous()
        expected = f"rows in the usual order, of which each rank takes some, unlike those of '{name}'"
        require(is_right, key, setting, expected, f"Change the module, or write {key}: false.")


def _twin(module: nn.Module) -> nn.Module:
    """Return a copy with the same buffers, and parameters without storage."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo.update((id(buffer), buffer) for buffer in module.buffers())
    twin = copy.deepcopy(module, memo)
    for own, other in zip(module.modules(), twin.modules(), strict=True):
        # One dictionary: a module may assign a new tensor to a buffer.
        other._buffers = own._buffers
    return twin


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers of lists and sequences that travel by themselves, the inner ones first."""
    places = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    blocks: list[nn.Module] = []
    taken: set[int] = set()
    for holder in reversed(list(module.modules())):
        layers = list(holder.children()) if isinstance(holder, nn.ModuleList | nn.Sequential) else []
        for layer in layers:
            own = {id(parameter): parameter.numel() for parameter in layer.parameters() if id(parameter) not in taken}
            # A tied tensor belongs to what is around all of its places; a list is never called itself.
            is_tied = any(places[value] > 1 for value in own)
            if sum(own.values()) >= MIN_BLOCK and not is_tied and not isinstance(layer, nn.ModuleList | nn.ModuleDict):
                blocks.append(layer)
                taken.update(own)
    return blocks


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
        return self.bound(whole | self._gathered((name, whole[name]) for name in self._names), training)

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
        with self._whole(names):
            return self._module(*args, **kwargs)

    def method(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the module, for which all parameters are gathered."""
        with self._whole(self._names):
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
        gradient: list[Tensor | None] = [None] * len(whole)
        if loss.requires_grad:
            gradient = list(torch.autograd.grad(loss, whole, allow_unused=True))
        self._read = {}
        is_part, ranks = self._runs_in_part, self._mean
        mean = ranks.gradient_of_users(gradient, whole, weight) if is_part else ranks.gradient(gradient, whole)
        pairs = zip(mean, theta.values(), strict=True)
        return [None if value is None else self._own_rows(value, like) for value, like in pairs]

    def put_together(self, part: Tensor, like: Tensor) -> Tensor:
        """Return the tensor of which each rank has a part where `like` is divided; else the tensor itself."""
        return super().put_together(part, like) if _is_shard(like) else part

    def total(self, squares: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
        """Return the square of the norm of a vector, of which some tensors are divided."""
        size = self._mesh.size()
        # What each rank has whole counts once.
        pairs = zip(squares, like, strict=True)
        return super().total([x if x is None or _is_shard(tensor) else x / size for x, tensor in pairs], like)

    def _divide(self, key: str) -> nn.Module:
        named = dict(self._module.named_parameters())
        divided = {name: named[name] for name in self._names}
        check_rows(key, "patterns", divided.items())
        for name, places in slots_of(self._module, divided, "_parameters").items():
            tensor = divided[name]
            # A copy: the slice would keep all of the whole one alive.
            whole, rows = tensor.detach(), [_of_torch().Shard(0)]
            part = _of_torch().distribute_tensor(whole, self._mesh, rows, src_data_rank=None).clone()
            parameter = nn.Parameter(part, tensor.requires_grad)
            for holder, attribute in places:
                holder[attribute] = parameter
        return self._module

    def _named(self) -> Iterator[tuple[str, Any]]:
        return self._module.named_parameters()

    def _gather(self, names: Sequence[str]) -> None:
        """Gather what is not whole yet: leaves, which the loss at hand is differentiated by."""
        missing = {name: tensor for name, tensor in self._named() if name in names and name not in self._read}
        for name, tensor in self._gathered(missing.items()).items():
            self._read[name] = tensor.requires_grad_(missing[name].requires_grad)

    def _whole(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Gather what has these names; return a context in which all that is gathered takes its shards' places."""
        self._gather(names)
        named = dict(self._named())
        return self._places.filled([self._read.get(name, named[name]) for name in self._names])

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
        is_right = any(fnmatchcase(name, pattern) for name in names)
        require(is_right, key, pattern, f"a pattern for some of the parameters {', '.join(names)}")
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _of_torch() -> Any:
    # Only a run that divides anything has to wait for it.
    return import_module("torch.distributed.tensor")
