"""From a config to a program."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from mlotool.config import instantiate as nodes
from mlotool.config.instantiate import bind, instantiate, require_kind
from mlotool.config.recipes import package_dir
from mlotool.config.user_data import LimitedData, split_of
from mlotool.core.settings import parameters
from mlotool.folders.documents import read_document
from mlotool.problem.settings import ProblemSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mlotool.problem.parallel import AbstractParallel
    from mlotool.problem.rank_mean import Reduce
    from mlotool.program import Problem, Program, Stream
    from mlotool.spaces.decisions import Decide, Decision, Decisions

Values = Mapping[str, Any]
SETTINGS = tuple(name for name in parameters(ProblemSettings) if name not in ("optimizer_roles", "precision"))


@dataclass(frozen=True)
class Analysis:
    """A function over one whole split at the end of a run.

    Args:
        function: `f(batches, **roles) -> {name: Tensor}`, its settings bound.
        roles: a problem's name by keyword of the function.
        split: of the data.
        batch_size: samples per batch.
    """

    function: "Callable[..., Mapping[str, Tensor]]"
    roles: Mapping[str, Any]
    split: str
    batch_size: int


@dataclass(frozen=True)
class Built:
    """What a config describes.

    Args:
        program: problems and graph.
        data: the data object, cut down by `debug.limit_samples`.
        analyses: by name.
        metrics: functions of the user's that `evaluate.metrics` names, by the key where it does.
        decisions: that a problem's module has asked for, by the problem's name; those without any are left out.
        callbacks: Lightning's, of `runner.callbacks`.
        loggers: Lightning's, of `logger.loggers`.
    """

    program: "Program"
    data: Any
    analyses: Mapping[str, Analysis] = field(default_factory=dict)
    metrics: "Mapping[str, Callable[..., Any]]" = field(default_factory=dict)
    decisions: "Mapping[str, Sequence[Decision]]" = field(default_factory=dict)
    callbacks: Sequence[Any] = ()
    loggers: Sequence[Any] = ()


# Steps of a problem after which tracing its gradient, which takes about as long as so many small ones, is worth it.
TRACE_FROM = 2_000


def cut_down(values: Values, data: Any) -> Any:
    """Return a data object with as many samples a split as `debug.limit_samples` leaves."""
    limit = values["debug"]["limit_samples"]
    return data if limit is None else LimitedData(data, limit)


def assemble(values: Values, data: Any, reduce: "Reduce | None" = None) -> Built:
    """Build what a checked config describes on its data.

    Args:
        values: the config, as plain values.
        data: the data object, cut down.
        reduce: the mean over the ranks of a run; None in one process.

    Raises:
        ConfigError: a target does not accept its settings, or the parts do not fit each other.
    """
    from mlotool.problem.streams.stream import SameBatch
    from mlotool.program import Graph, Program
    from mlotool.program.program import check_saved
    from mlotool.spaces.decisions import deciding

    graph = Graph(**values["graph"])
    streams: dict[str, Any] = {
        name: _stream(name, node["stream"], values["seed"], data) for name, node in values["problems"].items()
    }
    for name, node in values["problems"].items():
        if node["same_batch_as"] is not None:
            streams[name] = SameBatch(streams[node["same_batch_as"]])
    held = held_problems(values)
    problems, decisions = [], {}
    with deciding(values["decisions"]) as asked:
        for name in values["problems"]:
            before = len(asked.made)
            # A control differentiates no solution.
            is_read = bool(graph.readers(name)) and not held
            problems.append(_problem(name, values, data, streams[name], is_read=is_read))
            decisions[name] = list(asked.made.values())[before:]
    analyses = {name: _analysis(f"analyses.{name}", node) for name, node in values["analyses"].items()}
    tracing = _tracing(values["runner"]["trace"], problems)
    program = Program(problems, graph, reduce, held=held, run_length=values["runner"]["max_ticks"], **tracing)
    if values["runner"]["checkpoint"]:
        check_saved(problems)
    asked_for = {name: made for name, made in decisions.items() if made}
    callbacks, loggers = (
        [instantiate(f"{root}.{name}[{index}]", node) for index, node in enumerate(values[root].get(name, ()))]
        for root, name in (("runner", "callbacks"), ("logger", "loggers"))
    )
    return Built(program, data, analyses, _metrics(values["evaluate"] or {}), asked_for, callbacks, loggers)


def hypergradient_options(config: Any) -> dict[str, Callable[[], Any]]:
    """Return what builds each option of conf/hypergradient/, by name, for a config that they may refer to."""
    options: dict[str, Callable[[], Any]] = {}
    for file in sorted((package_dir("conf") / "hypergradient").glob("*.yaml")):
        other = OmegaConf.merge(config, {"hypergradient": None}, {"hypergradient": read_document(file).data})
        resolved = OmegaConf.to_container(other.hypergradient, resolve=True)
        options[file.stem] = partial(instantiate, f"hypergradient={file.stem}", resolved)
    return options


def _tracing(trace: Any, problems: Iterable["Problem"]) -> dict[str, Any]:
    """Return the arguments of a program that `runner.trace` stands for."""
    if trace is False:
        return {}
    if trace != "auto":
        return {"trace": "eager" if trace is True else trace}
    from mlotool.program.guard import why_foreign

    # What a user's code keeps in Python would be fixed by a trace: that is for the user to allow.
    if any(map(why_foreign, problems)):
        return {}
    return {"trace": "eager", "trace_from": TRACE_FROM, "traces_users_code": False}


def held_problems(values: Values) -> list[str]:
    """Return the problems that a control holds: those that shape others; none where `baseline` is null.

    Example:
        >>> held_problems({"baseline": "fixed", "graph": {"upper_to_lower": {"weights": ["classifier"]}}})
        ['weights']
    """
    edges = values["graph"]["upper_to_lower"] if values["baseline"] == "fixed" else {}
    return [name for name, lowers in edges.items() if lowers]


def derived_seed(seed: int, *purpose: str) -> int:
    """Return a seed of its own for each purpose, the same in every process.

    Example:
        >>> derived_seed(0, "stream", "classifier") == derived_seed(0, "stream", "reweight")
        False
    """
    digest = hashlib.sha256("/".join((str(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _problem(name: str, values: Values, data: Any, stream: Any, *, is_read: bool) -> "Problem":
    from mlotool.problem.neutral import hold
    from mlotool.program import Problem

    node, key = values["problems"][name], f"problems.{name}"
    scheduler, settings = node["scheduler"], {setting: node[setting] for setting in SETTINGS}
    rates = nodes.optimizer_roles(node["optimizer"])
    for setting in ("warmup_steps", "unroll_steps"):
        limit = values["debug"][f"limit_{setting}"]
        if limit is not None:
            settings[setting] = min(settings[setting], limit)
    module = _module(name, node["module"], values["seed"], channels_last=node["channels_last"])
    if name in held_problems(values):
        hold(module, node["neutral"])
    if getattr(module, "names", ()) is None:
        # Of a module whose values belong to the parts of the data.
        module.__dict__["names"] = getattr(data, "domains", None)
    loss, optimizer = node["loss"], node["optimizer"] or {}
    optimizer = {setting: value for setting, value in optimizer.items() if setting not in rates}
    # A LightningModule may bring both along.
    return Problem(
        name,
        module,
        None if loss is None else bind(f"{key}.loss", loss, without=["roles"]),
        roles=None if loss is None else loss.get("roles") or {},
        stream=stream,
        optimizer=nodes.optimizer_factory(
            f"{key}.optimizer",
            optimizer,
            lambda: {id(tensor): path for path, tensor in module.named_parameters()},
        )
        if optimizer
        else None,
        optimizer_roles=rates,
        scheduler=None if scheduler is None else nodes.scheduler_factory(f"{key}.scheduler", scheduler),
        hypergradient=_hypergradient(f"{key}.hypergradient", node, values) if is_read else None,
        precision=node["precision"] or values["runner"]["precision"],
        parallel=_parallel(name, node["parallel"], values["seed"]),
        **settings,
    )


def build_module(config: Any, name: str) -> "nn.Module":
    """Build the module of a problem alone, on torch's current default device; the config is one that was checked."""
    from mlotool.problem.neutral import hold
    from mlotool.spaces.decisions import by_mapping

    # Other problems' decisions are none of this module's.
    module = decided_module(config, name, by_mapping(dict(config.decisions)))[0]
    if name in held_problems(config):
        hold(module, config.problems[name].neutral)
    return module


def decided_module(config: Any, name: str, decide: "Decide") -> "tuple[nn.Module, Decisions]":
    """Build the module of a problem alone, as `build_module` does, with decisions by a function; return both."""
    from mlotool.spaces.decisions import deciding

    node: Values = OmegaConf.to_container(config.problems[name].module, resolve=True)  # type: ignore[assignment]
    with deciding(decide) as decisions:
        return _module(name, node, config.seed, channels_last=False), decisions


def build_modules(values: Values, decide: "Decide") -> "Decisions":
    """Build the modules of a checked config alone, with decisions of the caller's.

    Args:
        values: the config, as plain values.
        decide: makes each decision.

    Returns:
        Those that were made.

    Raises:
        ConfigError: a target does not accept its settings.
    """
    from mlotool.spaces.decisions import deciding

    with deciding(decide) as decisions:
        for name, node in values["problems"].items():
            _module(name, node["module"], values["seed"], channels_last=False)
    return decisions


def _module(name: str, node: Values, seed: int, *, channels_last: bool) -> "nn.Module":
    import torch

    from mlotool.spaces.decisions import refused_as_decided

    with refused_as_decided():
        module: nn.Module = _seeded(f"problems.{name}.module", node, seed)
    require_kind(f"problems.{name}.module", node, module, torch.nn.Module)
    return module.to(memory_format=torch.channels_last) if channels_last else module


def _parallel(name: str, node: Values | None, seed: int) -> "AbstractParallel | None":
    from mlotool.problem.parallel import AbstractParallel

    if node is None:
        return None
    key = f"problems.{name}.parallel"
    parallel: AbstractParallel = _seeded(key, node, seed)
    require_kind(key, node, parallel, AbstractParallel)
    # A seed of the recipe's for each problem; the program's, which is for scripts, is one for all its problems.
    parallel.seed(derived_seed(seed, "parallel", name))
    return parallel


def _seeded(key: str, node: Values, seed: int) -> Any:
    import torch

    from mlotool.core.random_stream import own_random

    # A seed of its own, so that another module beside it does not change this one's start.
    with own_random() as seeded:
        _, name, kind = key.split(".")
        number = derived_seed(seed, kind, name)
        torch.manual_seed(number)
        seeded(number)
        return instantiate(key, node)


def _stream(name: str, node: Values | None, seed: int, data: Any) -> "Stream | None":
    from mlotool.program import Stream

    if node is None:
        return None
    settings = {key: value for key, value in node.items() if key != "split"}
    dataset = split_of(f"problems.{name}.stream.split", data, node["split"], is_streamed=True)
    return Stream(dataset, seed=derived_seed(seed, "stream", name), **settings)


def _hypergradient(key: str, node: Values, values: Values) -> Any:
    from mlotool.program import AbstractHypergradient

    chosen = node["hypergradient"]
    if chosen is None:
        key, chosen = "hypergradient", values["hypergradient"]
    algorithm = instantiate(key, chosen)
    require_kind(key, chosen, algorithm, AbstractHypergradient)
    return algorithm


def _metrics(evaluate: Values) -> dict[str, Callable[..., Any]]:
    nodes = {f"evaluate.metrics[{index}]": node for index, node in enumerate(evaluate.get("metrics", ()))}
    return {key: bind(key, node, without=[]) for key, node in nodes.items() if isinstance(node, Mapping)}


def _analysis(key: str, node: Values) -> Analysis:
    function = bind(key, node, without=["roles", "split", "batch_size"])
    return Analysis(function, node.get("roles", {}), node.get("split", "train"), node.get("batch_size", 500))
