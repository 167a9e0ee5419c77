"""What data, modules and the whole program refuse: they are built once as a run does, where that is cheap."""

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from mlotool.config.check_evaluation import class_faults
from mlotool.config.check_machine import PLACES
from mlotool.config.dry_build import is_sound, module_optimizer, noted
from mlotool.config.instantiate import instantiate, require_kind
from mlotool.config.reading import leaves
from mlotool.config.trusted import is_of_user
from mlotool.config.user_data import built_data, split_of
from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home

Values = Mapping[str, Any]
MAX_SAMPLES = 200_000
MAX_NUMBERS = 200_000_000
MAX_PARAMETERS = 50_000_000
"""What is larger is not built before the run: it takes seconds and memory."""


def part_faults(values: Values, known: Sequence[str]) -> list[str]:
    """Return what data, modules, parallel settings and the program say of their settings.

    Args:
        values: the config.
        known: faults that were found already; a node that has one is not built.
    """
    faults: list[str] = []
    data, sizes = _data(values, known, faults), list[int | None]()
    for name, problem in values["problems"].items():
        key = f"problems.{name}"
        module = _module(f"{key}.module", problem["module"], values["decisions"], (known, faults))
        sizes.append(None if module is None else sum(each.numel() for each in module.parameters()))
        if module is not None and is_sound(f"{key}.optimizer", problem["optimizer"], [*known, *faults]):
            noted(faults, partial(module_optimizer, f"{key}.optimizer", problem["optimizer"], module))
        if module is not None and problem["remat"] is not None and is_sound(f"{key}.remat", {}, known):
            noted(faults, partial(_blocks, name, module, problem["remat"]))
        if is_sound(f"{key}.parallel", problem["parallel"], known):
            noted(faults, partial(instantiate, f"{key}.parallel", problem["parallel"]))
    is_small = all(size is not None and size <= MAX_PARAMETERS for size in sizes)
    if data is not None and is_small and not known and not faults:
        from mlotool.config.building import assemble, cut_down

        built = noted(faults, lambda: assemble(values, cut_down(values, data)))
        for name, size in zip(values["problems"], sizes, strict=True):
            num_tasks = values["problems"][name]["tasks"]
            # Whether tasks can share its module shows only where the loss is evaluated.
            if built is not None and num_tasks is not None and num_tasks * (size or 0) <= MAX_PARAMETERS:
                noted(faults, partial(_rehearsed, built.program, name))
    return faults


def _rehearsed(program: Any, problem: str) -> Any:
    from mlotool.core.user_code import user_code

    with user_code(ConfigError), warnings.catch_warnings():
        # The run gives them.
        warnings.simplefilter("ignore")
        program.start(problem)
        stream = program.problems[problem].stream
        return program.rehearse(problem, None if stream is None else stream.peek())


def _blocks(problem: str, module: Any, remat: Any) -> Any:
    from mlotool.problem.remat import blocks_of

    return blocks_of(problem, module, remat)


def _data(values: Values, known: Sequence[str], faults: list[str]) -> Any:
    node = values["data"]
    if not is_sound("data", node, known) or not (_is_small(node) and _is_here(node)):
        return None
    data = noted(faults, lambda: built_data(partial(_undisturbed, "data", node), values["seed"]))
    if data is not None:
        for key, split in _splits(values):
            if is_sound(key, {}, known):
                noted(faults, partial(split_of, key, data, split))
        evaluate = values["evaluate"]
        if is_sound("evaluate.metrics", {}, known) and isinstance(evaluate, Mapping):
            metrics = [each for each in evaluate["metrics"] if isinstance(each, str)]
            faults += class_faults(metrics, getattr(data, "num_classes", None))
    return data


def _is_small(node: Values) -> bool:
    sizes, shape = node.get("sizes"), node.get("image_shape")
    if is_of_user(node["_target_"]) or not isinstance(sizes, Mapping):
        return True
    num_samples = sum(sizes.values())
    times = (node.get("num_support") or 1) + (node.get("num_query") or 0)
    numbers = num_samples * times * prod(shape if isinstance(shape, list) else [1]) * (node.get("length") or 1)
    return bool(num_samples <= MAX_SAMPLES and numbers <= MAX_NUMBERS)


def _is_here(node: Values) -> bool:
    """Say whether all files that a node names are there: nothing is downloaded."""
    places = [value for key, value in leaves(node) if key.rpartition(".")[2] in PLACES and isinstance(value, str)]
    return node.get("download") is not True and all(at_home(place).exists() for place in places)


def _splits(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the splits that are named, by key; a reference that leads nowhere has its own fault."""
    evaluate = values["evaluate"]
    splits = evaluate.get("splits") if isinstance(evaluate, Mapping) else None
    nodes = {f"problems.{name}.stream": problem["stream"] for name, problem in values["problems"].items()}
    nodes |= {
        f"analyses.{name}": {"split": "train", **node} for name, node in values["analyses"].items() if _is_node(node)
    }
    named = {f"{key}.split": node["split"] for key, node in nodes.items() if _is_node(node)}
    named |= {f"evaluate.splits.{name}": name for name in (splits if isinstance(splits, Mapping) else ())}
    yield from ((key, split) for key, split in named.items() if isinstance(split, str))


def _is_node(node: Any) -> bool:
    return isinstance(node, Mapping)


def _module(key: str, node: Any, decisions: Values, found: tuple[Sequence[str], list[str]]) -> Any:
    """Return a module whose parameters take no memory, where it can be made so."""
    import torch

    known, faults = found
    if not is_sound(key, node, known) or not _is_here(node):
        return None
    module = None
    if not any(name.endswith("_target_") and is_of_user(value) for name, value in leaves(node)):
        with torch.device("meta"):
            # What asks a tensor for its numbers is built with numbers, below.
            module = noted([], lambda: _undisturbed(key, node, decisions))
    if module is None:
        module = noted(faults, lambda: _undisturbed(key, node, decisions))
    if module is None or noted(faults, partial(_checked_module, key, node, module)) is None:
        return None
    return module


def _checked_module(key: str, node: Values, module: Any) -> Any:
    import torch

    require_kind(key, node, module, torch.nn.Module)
    size = sum(each.numel() * each.element_size() for each in module.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
    if size > memory:
        raise ConfigError(
            f"{key}: its parameters take {size / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB of memory; "
            "expected a module that fits. Make it smaller."
        )
    return module


def _undisturbed(key: str, node: Values, decisions: Values | None = None) -> Any:
    """Build a node, with global random numbers as they were."""
    from mlotool.core.random_stream import own_random
    from mlotool.spaces.decisions import by_mapping, deciding

    with own_random(), deciding(by_mapping(decisions or {})):
        return instantiate(key, node)
