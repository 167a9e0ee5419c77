"""What runs share that train side by side in one process: equal batches are read once, equal frozen parts run once."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain, zip_longest
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mlotool.core.bound_module import lazy_copy
from mlotool.core.private import is_functorch_wrapped_tensor
from mlotool.core.tangents import any_has_tangent
from mlotool.core.tracing import is_tracing
from mlotool.core.unchanged import ANY_KERNELS
from mlotool.problem.problem import Problem
from mlotool.problem.streams.stream import BatchPlace, Stream
from mlotool.program import Program

Item = TypeVar("Item")


def copied(value: Any) -> Any:
    """Return a copy of a batch: its containers anew; large tensors on a CPU take memory once they are written to.

    Args:
        value: tensors without a graph in dicts, lists, tuples and dataclasses; anything else is copied as
            `copy.deepcopy` does.

    Example:
        >>> import torch
        >>> batch = {"input": torch.zeros(2), "name": "a"}
        >>> other = copied(batch)
        >>> other["input"].add_(1.0), batch["input"]
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    return copy.deepcopy(value, {id(tensor): lazy_copy(tensor) for tensor in tensors_in(value)})


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def grouped(items: Iterable[Item], is_like: Callable[[Item, Item], bool]) -> list[list[Item]]:
    """Return items that are alike together, each object once; groups of one are left out."""
    groups: list[list[Item]] = []
    for item in {id(item): item for item in items}.values():
        if group := next((group for group in groups if is_like(item, group[0])), None):
            group.append(item)
        else:
            groups.append([item])
    return [group for group in groups if len(group) > 1]


def num_bytes(value: Any) -> int:
    """Return the memory of the tensors of a batch."""
    return sum(tensor.nbytes for tensor in tensors_in(value))


# Of what is kept for those who have not asked yet; what finds no room is read or evaluated again.
MAX_BYTES = 2**28


class SharedReads:
    """The batches of streams that have the very same samples: read for the first that asks, kept for the others.

    Each stream gets a copy, so that a loss that changes its batch in place changes no other run's; on a CPU a copy
    takes memory once someone writes to it. A batch is kept until as many have asked for it as there are streams, or
    until later ones need its room: then whoever comes late reads it again.

    Args:
        num_streams: that give the same samples where they stand at the same place, as `Stream.loads_like` says.
        max_bytes: of the batches that are kept.
    """

    def __init__(self, num_streams: int, max_bytes: int = MAX_BYTES) -> None:
        self._num_streams, self._max_bytes = num_streams, max_bytes
        # By place the batch, its memory, and how many have not asked for it.
        self._kept: dict[BatchPlace, tuple[Any, int, int]] = {}

    def read(self, stream: Stream, place: BatchPlace, load: Callable[[], Any]) -> Any:
        """Return the batch at `place`.

        Args:
            stream: that asks.
            place: an epoch, and the number of the batch in it.
            load: reads it.
        """
        if place not in self._kept:
            batch = load()
            self._kept[place] = batch, num_bytes(batch), self._num_streams
            # The oldest go, but never the one that was read last.
            while len(self._kept) > 1 and sum(size for _, size, _ in self._kept.values()) > self._max_bytes:
                del self._kept[next(iter(self._kept))]
        batch, size, num_waiting = self._kept.pop(place)
        if num_waiting == 1:
            return batch
        self._kept[place] = batch, size, num_waiting - 1
        return copied(batch)


def share_reads(streams: Iterable[Stream]) -> list[SharedReads]:
    """Let streams that have the very same samples read each batch once; others stay as they are.

    It pays where the streams stand at the same places at about the same time.

    Args:
        streams: of several runs of this process that train side by side.

    Example:
        >>> import torch
        >>> images = torch.rand(4, 2)
        >>> streams = [Stream(images, 2, seed=1) for _ in range(2)]
        >>> reads = share_reads(streams)
        >>> torch.equal(streams[0].next(), streams[1].next()), len(reads)
        (True, 1)
    """
    shared = []
    for group in grouped(streams, Stream.loads_like):
        shared.append(SharedReads(len(group)))
        for stream in group:
            stream.read_through(shared[-1])
    return shared


class KeptData:
    """A data object whose batches are kept once they were read, for runs that evaluate the same splits.

    Each caller gets a copy, which on a CPU takes memory once someone writes to it. Data sets without whole batches,
    and those that augment, are handed on as they are.

    Args:
        data: the whole; what else it has stays (`splits`, `num_classes`, ...).
        max_bytes: of the batches that are kept.

    Attributes:
        num_readers: runs that read it; nothing is kept for one alone.
    """

    def __init__(self, data: Any, max_bytes: int = MAX_BYTES) -> None:
        self._data = data
        self._num_left = max_bytes
        self._datasets: dict[str, Any] = {}
        self.num_readers = 0

    def __getattr__(self, name: str) -> Any:
        """Return what else the whole has."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def split(self, name: str) -> Any:
        """Return one split, whose batches are kept."""
        if name not in self._datasets:
            dataset = self._data.split(name)
            is_fixed = hasattr(dataset, "__getitems__") and not getattr(dataset, "seeded", False)
            self._datasets[name] = self._reading_once(dataset) if is_fixed else dataset
        return self._datasets[name]

    def _reading_once(self, dataset: Any) -> Any:
        """Return a twin of a data set of whole batches, each of which is read once."""
        twin, batches = copy.copy(dataset), dict[tuple[int, ...], Any]()

        def read(indices: Sequence[int] | Tensor) -> Any:
            key = tuple(indices.tolist() if isinstance(indices, Tensor) else indices)
            if key not in batches:
                batch = dataset.__getitems__(indices)
                size = num_bytes(batch)
                if self.num_readers < 2 or size > self._num_left:
                    return batch
                batches[key], self._num_left = batch, self._num_left - size
            return copied(batches[key])

        # Also where the class is frozen.
        vars(twin)["__getitems__"] = read
        return twin


_OF_TORCH = vars(nn.Module()).keys() - {"_parameters", "_buffers", "_modules"} | {"forward"}
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hook" in name and isinstance(value, Mapping))


def frozen_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the largest parts of a module that have parameters, none of which is trained, by name.

    Parts with hooks, which may change what goes in and out, are none of them.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
        >>> _ = model[0].requires_grad_(False)
        >>> list(frozen_parts(model))
        ['0']
    """
    frozen: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        parameters = list(part.parameters())
        is_frozen = bool(parameters) and not any(tensor.requires_grad or is_lazy(tensor) for tensor in parameters)
        has_hooks = any(vars(child).get(hooks) for child in part.modules() for hooks in _HOOKS)
        if name and is_frozen and not has_hooks and not any(name.startswith(f"{other}.") for other in frozen):
            frozen[name] = part
    return frozen


def are_same_function(part: Any, other: Any) -> bool:
    """Say whether two frozen parts are of the same classes with the same settings, parameters and buffers.

    Example:
        >>> are_same_function(nn.Softplus(2.0), nn.Softplus(2.0)), are_same_function(nn.Softplus(2.0), nn.Softplus(3.0))
        (True, False)
    """
    if part is other or type(part) is not type(other):
        return part is other
    if isinstance(part, Tensor):
        return have_same_bits(part, other)
    if isinstance(part, nn.Module):
        part, other = ({key: vars(side)[key] for key in vars(side) if key not in _OF_TORCH} for side in (part, other))
    if isinstance(part, Mapping):
        return [*part] == [*other] and all(are_same_function(part[key], other[key]) for key in part)
    if isinstance(part, Sequence) and not isinstance(part, str | bytes):
        return len(part) == len(other) and all(map(are_same_function, part, other))
    try:
        return bool(part == other)
    except Exception:
        # What cannot be compared may be anything.
        return False


def have_same_bits(tensor: Tensor, other: Tensor) -> bool:
    """Say whether two tensors are the same in every bit; entries that are NaN, and zeros of either sign, count too."""
    if (tensor.dtype, tensor.shape, tensor.device) != (other.dtype, other.shape, other.device):
        return False
    return torch.equal(*[side.detach().reshape(-1).view(torch.uint8) for side in (tensor, other)])


# Training steps of each member in a row for which nobody had the result: then the runs see different samples.
_NUM_TRIES = 32


class SharedPrefix:
    """Frozen parts that are the same function, one of each of several runs; each input is evaluated once for all.

    The forward of each part is replaced by one that first looks for an equal input among the latest. What it returns
    is a copy, so no run sees what another one writes into it; on a CPU a copy takes memory once someone does.

    An evaluation is left to the part itself where its result could differ or would have a derivative: a part in train
    mode, an input with a gradient or a tangent, tracing, `torch.vmap`. The first result that a part
    takes over, the second, the fourth and so on are evaluated as well and compared; a part that differs, or whose
    parameters were changed, stays alone from then on.

    Args:
        parts: frozen, and the same function; a module that several runs have in common is one of them.
        max_bytes: of what is kept.

    Attributes:
        num_shared: evaluations that were taken over.
    """

    def __init__(self, parts: Sequence[nn.Module], max_bytes: int = MAX_BYTES) -> None:
        self.num_shared = self._num_misses = 0
        self._max_bytes = max_bytes
        # By input: the arguments, the result, and their memory; the oldest first.
        self._kept: dict[Any, tuple[tuple[Tensor, ...], Any, int]] = {}
        self._members = {id(part): _Member(part, self) for part in parts}

    def close(self) -> None:
        """Give all parts their own forward back."""
        for member in [*self._members.values()]:
            self.leave(member.part)

    def leave(self, part: nn.Module) -> None:
        """Give a part its own forward back; the last one has nobody to share with."""
        if member := self._members.pop(id(part), None):
            member.restore()
        if len(self._members) < 2:
            self._kept.clear()
            self.close()

    def result(self, member: "_Member", arguments: tuple[Tensor, ...]) -> Any:
        """Return a part's result for an input that is a constant."""
        key = _key_of(arguments)
        kept, result, _ = self._kept.get(key, ((), None, 0))
        if not kept or not all(map(have_same_bits, kept, arguments)):
            return self._evaluated(member, key, arguments)
        self._num_misses = 0
        own = member.differing(arguments, result)
        if own is not None:
            self.leave(member.part)
            return own
        self.num_shared += 1
        return copied(result)

    def _evaluated(self, member: "_Member", key: Any, arguments: tuple[Tensor, ...]) -> Any:
        held = tuple(map(lazy_copy, arguments))
        result = member.forward(*arguments)
        # An evaluation of a whole split has many inputs that no other run has met yet.
        self._num_misses += torch.is_grad_enabled()
        if self._num_misses > _NUM_TRIES * len(self._members):
            self.close()
        elif _is_plain(result) and not any(tensor.requires_grad for tensor in tensors_in(result)):
            self._kept.pop(key, None)
            self._kept[key] = held, copied(result), num_bytes((held, result))
            while len(self._kept) > 1 and sum(size for *_, size in self._kept.values()) > self._max_bytes:
                del self._kept[next(iter(self._kept))]
        return result


class _Member:
    """Stands in the place of the forward of a frozen part.

    Args:
        part: the module.
        prefix: evaluates it for all.
    """

    def __init__(self, part: nn.Module, prefix: SharedPrefix) -> None:
        self.part = part
        self.forward: Callable[..., Any] = part.forward
        self._prefix = prefix
        self._own = vars(part).get("forward")
        self._modules = [*part.modules()]
        self._parameters = [
            (module._parameters, name, tensor, tensor._version)
            for module in self._modules
            for name, tensor in module._parameters.items()
            if tensor is not None
        ]
        # An evaluation may have copies of them in their places.
        self._buffers = [(tensor, tensor._version) for tensor in part.buffers()]
        self._num_taken_over = 0
        part.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or not self._is_constant(args):
            return self.forward(*args, **kwargs)
        if not self._is_intact():
            self._prefix.leave(self.part)
            return self.forward(*args)
        return self._prefix.result(self, args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module is alone.
        twin = memo[id(self.part)]
        return MethodType(type(twin).forward, twin)

    def restore(self) -> None:
        """Give the part its own forward back."""
        if self._own is None:
            del self.part.forward
        else:
            self.part.forward = self._own

    def differing(self, arguments: tuple[Tensor, ...], result: Any) -> Any:
        """Return the part's own result where it is looked at and is another one than `result`; else None."""
        self._num_taken_over += 1
        if self._num_taken_over & (self._num_taken_over - 1):
            return None
        own = self.forward(*arguments)
        pairs = [*zip_longest(tensors_in(own), tensors_in(result))]
        return None if all(None not in pair and _agree(*pair) for pair in pairs) else own

    def _is_constant(self, arguments: tuple[Any, ...]) -> bool:
        """Say whether the part is a function of these arguments alone now, and nothing asks for more than its value."""
        if not arguments or not all(map(_is_plain_tensor, arguments)) or any(child.training for child in self._modules):
            return False
        is_watched = is_tracing() or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        return not is_watched and not torch.is_inference_mode_enabled() and not any_has_tangent(arguments)

    def _is_intact(self) -> bool:
        """Say whether parameters and buffers are those that were compared with the other members'."""
        return all(
            holder.get(name) is tensor and tensor._version == version
            for holder, name, tensor, version in self._parameters
        ) and all(tensor._version == version for tensor, version in self._buffers)


def share_prefixes(problems: Iterable[Problem]) -> list[SharedPrefix]:
    """Evaluate frozen parts of problems' modules that are the same function once for all; others stay as they are.

    To be called once parameters are where the runs go on from. It pays where the runs have the same samples, and none
    of them is traced.

    Args:
        problems: of several runs of this process that train side by side.

    Returns:
        What is shared; `close()` ends it.
    """
    modules = [problem.module for problem in problems if _is_evaluated_whole(problem)]
    parts = chain.from_iterable(frozen_parts(module).values() for module in modules)
    return [SharedPrefix(group) for group in grouped(parts, are_same_function)]


def _is_evaluated_whole(problem: Problem) -> bool:
    """Say whether a problem's module is called as it is."""
    settings = problem.settings
    return not settings.compile and settings.tasks is None and problem.shards is None and problem.parallel is None


def _key_of(arguments: tuple[Tensor, ...]) -> Any:
    """Return what equal inputs have in common: with eight of their numbers as text, in which NaN equals itself."""
    kind = arguments[0].device.type
    kinds = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in arguments]
    numbers = [str(tensor.flatten()[:: max(tensor.numel() // 8, 1)].tolist()) for tensor in arguments]
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), *kinds, *numbers


def _agree(tensor: Tensor, other: Tensor) -> bool:
    # Kernels of other devices may add up in another order each time.
    return have_same_bits(tensor, other) if tensor.device.type == "cpu" else ANY_KERNELS.covers(tensor, other)


def _is_plain(result: Any) -> bool:
    """Say whether a result is made of tensors that can be copied."""
    if type(result) is dict:
        return all(map(_is_plain, result.values()))
    return all(map(_is_plain, result)) if type(result) in (list, tuple) else type(result) is Tensor


def _is_plain_tensor(value: Any) -> bool:
    is_plain = type(value) is Tensor and not value.requires_grad and value.layout == torch.strided
    return is_plain and not value.is_meta and not is_functorch_wrapped_tensor(value)


class SideBySide:
    """What programs share that take their ticks by themselves, one after the other in one process.

    The batches that several of them ask for are read once, and frozen parts that they have in common run once.
    """

    def __init__(self) -> None:
        self._programs: list[Program] = []
        self._prefixes: list[SharedPrefix] = []

    def take(self, programs: Sequence[Program]) -> None:
        """Let programs share from now on; nothing happens where they are the same ones as before."""
        if [*map(id, programs)] == [*map(id, self._programs)]:
            return
        for prefix in self._prefixes:
            prefix.close()
        for stream in _streams(self._programs):
            stream.read_through(None)
        self._programs, self._prefixes = [*programs], []
        if len(programs) > 1:
            self._prefixes = share_prefixes([problem for program in programs for problem in program.problems.values()])
            share_reads(_streams(programs))


def _streams(programs: Iterable[Program]) -> list[Stream]:
    streams = [problem.stream for program in programs for problem in program.problems.values()]
    return [stream for stream in streams if isinstance(stream, Stream)]
