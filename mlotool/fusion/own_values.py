"""Values of a member's own that a trace of another member would hold fixed: numbers of losses, frozen parameters."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlotool.fusion.errors import NotFusedError
from mlotool.program import Program


@dataclass(frozen=True)
class OwnValue:
    """A value that differs by member.

    Args:
        key: where it stands.
        values: (members, ...).
        puts: by member, what gives it another value in its place, and returns what takes that back.
    """

    key: str
    values: Tensor
    puts: Sequence[Callable[[Tensor], Callable[[], None]]]


def own_values(members: Sequence[Program | None], known: Collection[str] = ()) -> list[OwnValue]:
    """Return the numbers of losses, and the frozen parameters, in which members differ.

    Args:
        members: None has left, and counts as the first one that is there, which is traced.
        known: keys of those in which members differed that have left meanwhile: what is computed with an axis of
            members may have other last bits than what is computed without.

    Raises:
        NotFusedError: losses differ in more than numbers, modules in their structure, or frozen parameters in their
            shapes.
    """
    first = next(each for each in members if each is not None)
    programs = [each or first for each in members]
    found = []
    for number, problem in enumerate(first.engine.problems):
        others = [program.engine.problems[number] for program in programs]
        found += _numbers(problem.name, [each.loss for each in others], problem.own[0], known)
        modules = [each.module for each in others]
        _check_alike(problem.name, modules)
        found += _frozen(problem.name, modules, known)
    return found


@contextmanager
def given(found: Sequence[OwnValue], tensors: Sequence[Tensor], member: int) -> Iterator[None]:
    """Let a member compute with other values in these places.

    Args:
        found: the places.
        tensors: one a place, without the members' axis.
        member: its number.
    """
    undo = []
    try:
        for each, tensor in zip(found, tensors, strict=True):
            undo.append(each.puts[member](tensor))
        yield
    finally:
        for back in reversed(undo):
            back()


def _numbers(name: str, losses: Sequence[Any], like: Tensor, known: Collection[str]) -> list[OwnValue]:
    first = losses[0]
    if not isinstance(first, partial):
        # A loss that is an object may hold anything: what differs there shows in the comparison with its plan.
        return []
    if any(type(each) is not partial or each.func is not first.func for each in losses):
        raise NotFusedError(f"the losses of problems.{name} are different functions")
    if any(each.keywords.keys() != first.keywords.keys() for each in losses):
        raise NotFusedError(f"the losses of problems.{name} have different settings")
    found = []
    for key, value in first.keywords.items():
        values, place = [each.keywords[key] for each in losses], f"problems.{name}.loss.{key}"
        are_numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in values)
        if all(_equal(value, each) for each in values) and not (are_numbers and place in known):
            continue
        if not are_numbers:
            raise NotFusedError(f"the losses of problems.{name} differ in {key}, which is no number")
        stacked = torch.tensor(values, dtype=like.dtype, device=like.device)
        found.append(OwnValue(place, stacked, [partial(_swap, each.keywords, key) for each in losses]))
    return found


def _check_alike(name: str, modules: Sequence[nn.Module]) -> None:
    parts = [[(path, type(child)) for path, child in module.named_modules()] for module in modules]
    if any(each != parts[0] for each in parts):
        raise NotFusedError(f"the modules of problems.{name} are of different structures")


def _frozen(name: str, modules: Sequence[nn.Module], known: Collection[str]) -> list[OwnValue]:
    found = []
    for path, child in modules[0].named_modules():
        children = [module.get_submodule(path) for module in modules]
        for key, tensor in child._parameters.items():
            tensors = [each._parameters[key] for each in children]
            if tensor is None or tensor.requires_grad:
                continue
            others = [each for each in tensors if each is not None]
            if len(others) < len(tensors) or any(each.shape != tensor.shape for each in others):
                raise NotFusedError(f"a frozen parameter of problems.{name} ({path}.{key}) has different shapes")
            place = f"problems.{name}.module.{path}.{key}"
            if place in known or not all(torch.equal(tensor, each) for each in others):
                stacked = torch.stack([each.detach() for each in others])
                found.append(OwnValue(place, stacked, [partial(_swap, each._parameters, key) for each in children]))
    return found


def _swap(holder: dict[str, Any], key: str, value: Any) -> Callable[[], None]:
    kept, holder[key] = holder[key], value

    def back() -> None:
        holder[key] = kept

    return back


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    equality: Any = type(a).__eq__
    # Of objects that are equal to no other one the comparison of gradients knows more.
    return equality is object.__eq__ or bool(a == b)
