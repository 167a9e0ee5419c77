"""What data, modules and the whole program refuse: they are built once as a run does, where that is cheap."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from mlotool.config.check_evaluation import class_faults
from mlotool.config.instantiate import instantiate, optimizer_factory, require_kind, scheduler_factory
from mlotool.config.parameter_groups import KEY, optimizer_roles
from mlotool.config.reading import leaves
from mlotool.config.run_config import finished_run, folder_of
from mlotool.config.trusted import is_of_user
from mlotool.config.user_data import built_data, split_of
from mlotool.core.errors import ConfigError
from mlotool.core.files import at_home

PLACES = ("root", "folder", "tokenizer", "parameters_file")
"""Keys of nodes that name files or folders which have to be there."""


def machine_faults(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what this machine lacks.

    Args:
        values: the config, as plain values.
    """
    if values["runner"]["accelerator"] == "gpu":
        import torch

        if not torch.cuda.is_available():
            yield (
                "runner.accelerator: found gpu, and torch sees no GPU here; expected a machine with one. Set "
                "runner.accelerator=auto, or see `mlotool doctor`."
            )
    if isinstance(values["inherit"], str):
        try:
            finished_run("inherit", folder_of(Path(values["inherit"])))
        except ConfigError as error:
            yield str(error)
    nodes = {"data": values["data"]}
    nodes |= {f"problems.{name}.module": problem["module"] for name, problem in values["problems"].items()}
    for place, node in nodes.items():
        if not isinstance(node, Mapping) or node.get("download") is True:
            continue
        for key, value in leaves(node, place):
            is_place = key.rpartition(".")[2] in PLACES and isinstance(value, str)
            if is_place and not at_home(value).exists():
                yield (
                    f"{key}: found '{value}', which is not there; expected a file or folder. Put the data there, or "
                    f"name another place: {key}=.."
                )


def construction_faults(
    values: Mapping[str, Any], hypergradients: Mapping[str, Any], known: Sequence[str]
) -> list[str]:
    """Return what optimizers, schedulers and hypergradients say of their settings.

    Args:
        values: the config.
        hypergradients: those that are used, by their keys.
        known: faults that were found already; a node that has one is not built.
    """
    faults: list[str] = []
    for name, problem in values["problems"].items():
        key, scheduler = f"problems.{name}", problem["scheduler"]
        optimizer = None
        if _is_ready(f"{key}.optimizer", problem["optimizer"], known):
            optimizer = noted(faults, partial(_optimizer, f"{key}.optimizer", problem["optimizer"]))
        if optimizer is not None and scheduler is not None and _is_ready(f"{key}.scheduler", scheduler, known):
            noted(faults, partial(scheduler_factory(f"{key}.scheduler", scheduler), optimizer))
    for key, node in hypergradients.items():
        if _is_ready(key, node, known):
            noted(faults, partial(instantiate, key, node))
    return faults


def is_sound(key: str, node: Any, known: Sequence[str]) -> bool:
    """Say whether a node may be built: it has no fault yet."""
    return isinstance(node, Mapping) and not any(fault.startswith((f"{key}.", f"{key}:", f"{key}[")) for fault in known)


def _is_ready(key: str, node: Any, known: Sequence[str]) -> bool:
    """Say whether a node may be built here: one of the user's classes may need what a run gives it."""
    return is_sound(key, node, known) and not is_of_user(node.get("_target_"))


def module_optimizer(key: str, node: Mapping[str, Any], module: Any) -> Any:
    """Build an optimizer of a module's own parameters, whose names its groups may match."""
    settings = {each: value for each, value in node.items() if each not in optimizer_roles(node)}
    names = {id(tensor): each for each, tensor in module.named_parameters()}
    return optimizer_factory(key, settings, lambda: names)(module.parameters())


def _optimizer(key: str, node: Mapping[str, Any]) -> Any:
    import torch

    settings = {each: value for each, value in node.items() if each not in (KEY, *optimizer_roles(node))}
    # Of two dimensions, as some optimizers take matrices alone.
    return optimizer_factory(key, settings)([torch.nn.Parameter(torch.zeros(2, 2))])


def noted(faults: list[str], build: Callable[[], Any]) -> Any:
    """Return what is built; None, with the fault noted, where it cannot be."""
    try:
        return build()
    except ConfigError as error:
        faults.append(" ".join(str(error).split()))
        return None


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
