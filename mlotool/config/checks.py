"""The whole config, checked before anything is built; and its parts, built once as a run does, where that is cheap."""

import os
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlotool.config import check_values
from mlotool.config.building import Built, assemble, cut_down
from mlotool.config.check_targets import target_faults
from mlotool.config.hydra_errors import config_errors
from mlotool.config.instantiate import instantiate, optimizer_factory, optimizer_roles, require_kind, scheduler_factory
from mlotool.config.resolve import resolve_config
from mlotool.config.run_config import decision_faults, finished_run
from mlotool.config.schema import is_node
from mlotool.config.security.trusted import is_of_user
from mlotool.config.unknown_keys import value_faults
from mlotool.config.user_data import built_data, split_of
from mlotool.core.errors import ConfigError
from mlotool.core.messages import fault_list
from mlotool.folders import hub
from mlotool.folders.documents import leaves
from mlotool.folders.files import at_home
from mlotool.folders.run_folder import RunFolder

if TYPE_CHECKING:
    from mlotool.config.user_data import SharedData
    from mlotool.problem.rank_mean import Reduce

Values = Mapping[str, Any]
# Keys of nodes that name files or folders which have to be there.
PLACES = ("root", "folder", *hub.KEYS, "parameters_file")

MAX_SAMPLES = 200_000
MAX_NUMBERS = 200_000_000
# What is larger is not built before the run: it takes seconds and memory.
MAX_PARAMETERS = 50_000_000
# Nor are losses of more evaluated: a batch of it takes seconds on a CPU.
MAX_REHEARSED = 5_000_000


def check(
    config: Any,
    targets: bool = False,
    machine: bool = False,
    *,
    parts: bool = False,
    rehearse: Callable[[Built], object] | None = None,
) -> list[str]:
    """Check a config as a whole; without `targets` nothing is built, and no target is called.

    Args:
        config: a composed config.
        targets: also compare third-party targets (torch's) with their signatures, which imports them, and build
            optimizers, schedulers and hypergradients once, on a parameter of no problem.
        machine: also ask whether this machine has the GPU, the folders and the files that the config names.
        parts: with `targets`: also build data, modules and the whole program once, as a run does, where they are small
            and their files are there; nothing is downloaded.
        rehearse: with `parts`: called with what was built, where its modules are small enough for that; a ConfigError
            that it raises is one of the faults.

    Returns:
        Warnings.

    Raises:
        ConfigError: with every fault found, one a line.
    """
    return checked(config, targets=targets, machine=machine, parts=parts, rehearse=rehearse)[1]


def checked(
    config: Any,
    *,
    targets: bool,
    machine: bool = False,
    parts: bool = False,
    rehearse: Callable[[Built], object] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Check a config; return it as plain values, and the warnings."""
    with config_errors():
        values, faults = resolve_config(config)
    faults += [fault for _, fault in value_faults(values)]
    for faults_of in (*check_values.ALL, decision_faults, target_faults):
        faults += faults_of(values)
    faults += check_values.nan_faults(values, faults)
    if machine:
        faults += machine_faults(values)
    hypergradients = dict(_hypergradients(values))
    if targets:
        dry = _DryBuild(values, faults)
        dry.build_settings(hypergradients)
        if parts:
            dry.build_parts(rehearse)
    if faults:
        raise ConfigError(fault_list(list(dict.fromkeys(faults))))
    return values, list(check_values.warnings_of(values, hypergradients))


def _hypergradients(values: Values) -> Iterator[tuple[str, Any]]:
    """Yield the hypergradients that are used, with their keys."""
    for name in values["graph"]["lower_to_upper"]:
        node = values["problems"].get(name, {}).get("hypergradient")
        yield ("hypergradient", values["hypergradient"]) if node is None else (f"problems.{name}.hypergradient", node)


def build(config: Any, reduce: "Reduce | None" = None, shared: "SharedData | None" = None) -> Built:
    """Build what a config describes, after a check of all of it.

    Args:
        config: a composed config.
        reduce: the mean over the ranks of a run; None in one process.
        shared: the data of other runs of this process, which this one takes where its own would be equal.

    Raises:
        ConfigError: the config is wrong, or a target does not accept its settings.

    Example::

        built = build(compose("mwn"))
        built.program.gradient("reweight")
    """
    values, _ = checked(config, targets=True)

    def make() -> Any:
        return cut_down(values, built_data(partial(instantiate, "data", values["data"]), values["seed"]))

    if shared is None:
        return assemble(values, make(), reduce)
    data = shared.of(values["data"], values["debug"]["limit_samples"], make)
    return replace(assemble(values, data, reduce), data=shared.evaluated(data))


def machine_faults(values: Values) -> Iterator[str]:
    """Yield what this machine lacks."""
    if values["runner"]["accelerator"] == "gpu":
        import torch

        if not torch.cuda.is_available():
            yield "runner.accelerator: found gpu, and torch sees no GPU here. Set runner.accelerator=auto."
    if isinstance(values["inherit"], str):
        try:
            finished_run("inherit", RunFolder.of(Path(values["inherit"])).path)
        except ConfigError as error:
            yield str(error)
    nodes = {"data": values["data"]}
    nodes |= {f"problems.{name}.module": problem["module"] for name, problem in values["problems"].items()}
    for key, node in nodes.items():
        if not isinstance(node, Mapping) or node.get("download") is True:
            continue
        for place in _missing_places(key, node):
            yield f"{place}: found no such file or folder. Put the data there, or name another place: {place}=.."


def _missing_places(key: str, node: Values) -> list[str]:
    """Return the keys of a node that name a file or folder which is not there."""
    return [
        place
        for place, value in leaves(node, key)
        if place.rpartition(".")[2] in PLACES
        and isinstance(value, str)
        and not at_home(value).exists()
        and not (place.rpartition(".")[2] in hub.KEYS and hub.is_allowed() and hub.is_name(value))
    ]


class _DryBuild:
    """Builds what a config describes without a run, to find what it refuses.

    Args:
        values: the config.
        faults: found so far, to which it adds; a node that has one is not built.
    """

    def __init__(self, values: Values, faults: list[str]) -> None:
        self._values, self._faults = values, faults

    def build_settings(self, hypergradients: Values) -> None:
        """Build optimizers and schedulers, of a parameter of no problem, and hypergradients."""
        import torch

        for name, problem in self._values["problems"].items():
            key, node, scheduler = f"problems.{name}", problem["optimizer"], problem["scheduler"]
            # Of two dimensions, as some optimizers take matrices alone.
            parameters = [torch.nn.Parameter(torch.zeros(2, 2))]
            optimizer = None
            if is_node(node) and self._is_ready(f"{key}.optimizer", node):
                settings = _without(node, ("groups", *optimizer_roles(node)))
                optimizer = self._noted(partial(optimizer_factory(f"{key}.optimizer", settings), parameters))
            if optimizer is not None and self._is_ready(f"{key}.scheduler", scheduler):
                self._noted(partial(scheduler_factory(f"{key}.scheduler", scheduler), optimizer))
        for key, node in hypergradients.items():
            if self._is_ready(key, node):
                self._noted(partial(instantiate, key, node))

    def build_parts(self, rehearse: Callable[[Built], object] | None) -> None:
        """Build data, modules and parallel settings, and the program where nothing is wrong with them.

        Args:
            rehearse: called with the program and what else was built, where that is small.
        """
        values, data, sizes = self._values, self._data(), dict[str, int | None]()
        for name, problem in values["problems"].items():
            key, node = f"problems.{name}", problem["optimizer"]
            module = self._module(f"{key}.module", problem["module"])
            sizes[name] = None if module is None else sum(tensor.numel() for tensor in module.parameters())
            if module is not None and is_node(node) and self._is_sound(f"{key}.optimizer", node):
                names = {id(tensor): path for path, tensor in module.named_parameters()}
                make = optimizer_factory(f"{key}.optimizer", _without(node, optimizer_roles(node)), names.copy)
                self._noted(partial(make, list(module.parameters())))
            if module is not None and problem["remat"] is not None and self._is_sound(f"{key}.remat", {}):
                from mlotool.problem.remat import blocks_of

                self._noted(partial(blocks_of, name, module, problem["remat"]))
            if self._is_sound(f"{key}.parallel", problem["parallel"]):
                self._noted(partial(instantiate, f"{key}.parallel", problem["parallel"]))
        is_small = all(size is not None and size <= MAX_PARAMETERS for size in sizes.values())
        if data is None or not is_small or self._faults:
            return
        built = self._noted(lambda: assemble(values, cut_down(values, data)))
        if built is not None and rehearse is not None and sum(size or 0 for size in sizes.values()) <= MAX_REHEARSED:
            self._noted(partial(_silently, rehearse, built))
            return
        for name, size in sizes.items():
            num_tasks = values["problems"][name]["tasks"]
            # Whether tasks can share its module shows only where the loss is evaluated.
            if built is not None and num_tasks is not None and num_tasks * (size or 0) <= MAX_PARAMETERS:
                self._noted(partial(_rehearse, built.program, name))

    def _data(self) -> Any:
        values, node = self._values, self._values["data"]
        if not self._is_sound("data", node) or not _is_small(node) or _needs_files("data", node):
            return None
        data = self._noted(lambda: built_data(lambda: self._undisturbed("data", node), values["seed"]))
        if data is not None:
            for key, split in check_values.named_splits(values):
                if self._is_sound(key, {}):
                    self._noted(partial(split_of, key, data, split, is_streamed=key.startswith("problems.")))
            metrics = [metric for metric in (values["evaluate"] or {}).get("metrics", ()) if isinstance(metric, str)]
            if self._is_sound("evaluate.metrics", {}):
                # Where nobody tells, the evaluation counts logits.
                self._faults += check_values.class_faults(metrics, getattr(data, "num_classes", 2))
        return data

    def _module(self, key: str, node: Any) -> Any:
        """Return a module whose parameters take no memory, where it can be made so."""
        import torch

        if not self._is_sound(key, node) or _needs_files(key, node):
            return None
        module = None
        if not any(name.endswith("_target_") and is_of_user(value) for name, value in leaves(node)):
            # What asks a tensor for its numbers is built with numbers, below.
            with torch.device("meta"):
                module = self._noted(lambda: self._undisturbed(key, node), [])
        if module is None:
            module = self._noted(lambda: self._undisturbed(key, node))
        return None if module is None else self._noted(partial(_checked_module, key, node, module))

    def _undisturbed(self, key: str, node: Values) -> Any:
        """Build a node, with global random numbers as they were."""
        from mlotool.core.random_stream import own_random
        from mlotool.spaces.decisions import by_mapping, deciding

        with own_random(), deciding(by_mapping(self._values["decisions"])):
            return instantiate(key, node)

    def _is_sound(self, key: str, node: Any) -> bool:
        """Say whether a node may be built: it has no fault yet."""
        starts = (f"{key}.", f"{key}:", f"{key}[")
        return isinstance(node, Mapping) and not any(fault.startswith(starts) for fault in self._faults)

    def _is_ready(self, key: str, node: Any) -> bool:
        """Say whether a node may be built alone: one of the user's classes may need what a run gives it."""
        return self._is_sound(key, node) and not is_of_user(node.get("_target_"))

    def _noted(self, build: Callable[[], Any], faults: list[str] | None = None) -> Any:
        """Return what is built; None, with the fault noted, where it cannot be."""
        try:
            return build()
        except ConfigError as error:
            (self._faults if faults is None else faults).append(" ".join(str(error).split()))
            return None


def _without(node: Values, keys: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in keys}


def _silently(rehearse: Callable[[Built], object], built: Built) -> None:
    from mlotool.core.random_stream import own_random

    with own_random(), warnings.catch_warnings():
        # The run gives them.
        warnings.simplefilter("ignore")
        rehearse(built)


def _rehearse(program: Any, problem: str) -> Any:
    from mlotool.core.user_code import user_code

    with user_code(ConfigError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program.internals.start(problem)
        stream = program.problems[problem].stream
        return program.internals.rehearse(problem, None if stream is None else stream.peek())


def _is_small(node: Values) -> bool:
    sizes, shape = node.get("sizes"), node.get("image_shape")
    if is_of_user(node["_target_"]) or not isinstance(sizes, Mapping):
        return True
    num_samples = sum(sizes.values())
    times = (node.get("num_support") or 1) + (node.get("num_query") or 0)
    numbers = num_samples * times * prod(shape if isinstance(shape, list) else [1]) * (node.get("length") or 1)
    return bool(num_samples <= MAX_SAMPLES and numbers <= MAX_NUMBERS)


def _needs_files(key: str, node: Values) -> bool:
    """Say whether files that a node names are missing: nothing is downloaded."""
    return node.get("download") is True or bool(_missing_places(key, node))


def _checked_module(key: str, node: Values, module: Any) -> Any:
    import torch

    require_kind(key, node, module, torch.nn.Module)
    size = sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else size
    if size > memory:
        raise ConfigError(
            f"{key}: its parameters take {size / 1e9:,.1f} GB, and this machine has {memory / 1e9:,.1f} GB of memory. "
            "Make it smaller."
        )
    return module
