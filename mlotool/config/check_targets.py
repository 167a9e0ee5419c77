"""Every node with a `_target_`: is it trusted, is it of its kind, do its keys fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

from annotated_types import Gt, Le, MinLen

from mlotool.config.instantiate import SPECIAL
from mlotool.config.options import option_file, option_names, own_options
from mlotool.config.parameter_groups import KEY, group_faults, optimizer_roles, settings_of
from mlotool.config.reading import MAX_RECIPE_NODES, read_document
from mlotool.config.recipes import package_dir
from mlotool.config.resolve import is_known
from mlotool.config.safety import DANGEROUS
from mlotool.config.schema import OPTION_GROUPS
from mlotool.config.sources import loaded_recipes
from mlotool.config.trusted import CONTAINERS, is_of_user, resolve, trust_fault
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import (
    BelowOne,
    Count,
    Layers,
    NonNegative,
    Positive,
    Share,
    Whole,
    parameters,
    setting_fault,
    words,
)

GROUP_OF = {"module": "model"}
"""By kind of node, the group of its options, where it has another name."""


def leftover_advice(key: str, kind: str | None, target: str, keyword: str) -> str:
    """Return what to do about a keyword that its target does not know; names both sources where they are found.

    Args:
        key: of the node.
        kind: of the node.
        target: the value of its `_target_`.
        keyword: the unknown one.
    """
    path = f"{key}.{keyword}"
    setters = [each.path for each in reversed(loaded_recipes()) if _has(each.data, path)]
    options = _options_with(GROUP_OF.get(kind or "", kind or ""), target)
    if not setters:
        return ""
    where = f"It is set in {setters[-1]}"
    if options:
        where += f", while {target} comes from {' or '.join(options)}: a left-over of another choice"
    return f"{where}. Remove it there, drop it with ~{path}, or choose an option that takes it."


def _options_with(group: str, target: str) -> list[str]:
    if group not in OPTION_GROUPS:
        return []
    own = (option_file(group, name) for name in own_options(group))
    files = [*sorted((package_dir("conf") / group).glob("*.yaml")), *(each.absolute() for each in own if each)]
    return [f"{group}={file.stem}" for file in files if _load(file).get("_target_") == target]


@lru_cache(maxsize=256)
def _load(file: Path) -> Mapping[str, Any]:
    try:
        return read_document(file, is_fast=True, max_nodes=MAX_RECIPE_NODES).data
    except ConfigError:
        return {}


def _has(node: Any, path: str) -> bool:
    return any(True for _ in _walk(node, path.split(".")))


def _walk(node: Any, parts: list[str]) -> Iterator[Any]:
    for part in parts:
        if not isinstance(node, Mapping) or part not in node:
            return
        node = node[part]
    yield node


Values = Mapping[str, Any]
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# What modules take over from the data.
_REFERRED = ("num_classes", "image_shape", "vocabulary_size", "length")
TORCH_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "torch.optim.lr_scheduler.": {
        **dict.fromkeys(("step_size", "T_max", "T_0", "T_mult", "total_iters", "total_steps", "epochs"), Count),
        **dict.fromkeys(("steps_per_epoch", "step_size_up", "step_size_down"), Count),
        **dict.fromkeys(("gamma", "base_lr", "max_lr", "div_factor", "final_div_factor"), Positive),
        **dict.fromkeys(("eta_min", "min_lr", "power", "threshold"), NonNegative),
        **dict.fromkeys(("patience", "cooldown"), Whole),
        **dict.fromkeys(("base_momentum", "max_momentum"), BelowOne),
        "milestones": Annotated[Sequence[Count], MinLen(1)],
        "factor": Positive,
        "start_factor": Annotated[float, Gt(0), Le(1)],
        "end_factor": Share,
        "pct_start": Share,
    },
    "torch.optim.": {"lr": NonNegative, "weight_decay": NonNegative, "momentum": BelowOne, "eps": NonNegative}
    | dict.fromkeys(("alpha", "dampening", "lambd", "lr_decay"), NonNegative)
    | {"betas": Sequence[BelowOne], "max_iter": Count, "history_size": Count},
    "torch.nn.": dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers"), Layers)
    | {"p": Share, "dropout": Share},
}
"""Ranges of settings that torch would take without a word, by the beginning of the target's name."""
_OURS = {"loss": ("roles",), "analysis": ("roles", "split", "batch_size")}
_GIVEN = {"optimizer": ("params",), "scheduler": ("optimizer",)}
_HYDRA_KEYS = ("_partial_", "_convert_", "_recursive_")
# By kind of node, the kind of those inside it.
_INSIDE = {
    "module": "module",
    "loss": "module",
    "analysis": "module",
    "scheduler": "scheduler",
    "hypergradient": "solver",
    "parallel": "module",
    "mutator": "module",
}
# Where a node's kind follows from the setting that it stands under.
_INSIDE_AT = {
    ("hypergradient", "trajectory"): "trajectory",
    ("module", "mutators"): "mutator",
    ("mutator", "mutators"): "mutator",
    ("mutator", "at"): "predicate",
    ("mutator", "sources"): "predicate",
}


def kind_inside(kind: str, setting: str) -> str:
    """Return of what kind a node is that stands under a setting of a node of a kind."""
    return _INSIDE_AT.get((kind, setting), _INSIDE.get(kind, "nothing"))


@dataclass(frozen=True)
class Place:
    """A node that is built from a target.

    Args:
        key: where it stands.
        node: what stands there.
        kind: what it has to be.
        given: parameters that come from the node around it.
        is_filled: whether what it lacks comes from where it is put: a candidate of a mutator.
    """

    key: str
    node: Any
    kind: str
    given: tuple[str, ...] = ()
    is_filled: bool = False


def target_faults(values: Values) -> Iterator[str]:
    """Yield what is wrong with the targets of a config; imports them."""
    data = values["data"] if isinstance(values["data"], Mapping) else {}
    referred = {name: data[name] for name in _REFERRED if name in data}
    for place in _places(values):
        if is_known(place.node):
            known = {"seed": values["seed"], **({} if place.kind == "data" else referred)}
            yield from _place_faults(place, values["problems"], known)


def _places(values: Values) -> Iterator[Place]:
    yield Place("data", values["data"], "data")
    yield Place("hypergradient", values["hypergradient"], "hypergradient")
    for name, problem in values["problems"].items():
        for kind in ("module", "loss", "optimizer", "scheduler", "hypergradient", "parallel"):
            node = problem.get(kind)
            if node is not None or kind in ("module", "loss", "optimizer"):
                yield Place(f"problems.{name}.{kind}", node, kind)
    for name, node in values["analyses"].items():
        yield Place(f"analyses.{name}", node, "analysis")
    for index, node in enumerate((values["evaluate"] or {}).get("metrics", ())):
        if isinstance(node, Mapping):
            yield Place(f"evaluate.metrics[{index}]", node, "metric")
    for root, names, kind in (("runner", "callbacks", "callback"), ("logger", "loggers", "logger")):
        for index, node in enumerate(values[root].get(names, ())):
            yield Place(f"{root}.{names}[{index}]", node, kind)


def _place_faults(place: Place, problems: Values, referred: Values) -> Iterator[str]:
    key, node = place.key, place.node
    if not isinstance(node, Mapping) or "_target_" not in node:
        found = "no _target_" if isinstance(node, Mapping) else repr(node)
        yield f"{key}: found {found}; expected a node that says what to build. {_written(place)}"
        return
    yield from _inner_faults(place, problems, referred)
    name = node["_target_"]
    fault = trust_fault(key, name, place.kind)
    if fault is not None:
        yield fault
        return
    faults = [*_special_faults(place), *(group_faults(key, node) if place.kind == "optimizer" else ())]
    yield from faults
    if faults:
        return
    try:
        signature = parameters(resolve(key, name))
    except ConfigError as error:
        yield str(error)
        return
    except (TypeError, ValueError):  # compiled code has no signature
        return
    roles = node.get("roles") if place.kind in _OURS else None
    if place.kind in _OURS:
        yield from _role_faults(place, problems, signature)
    if place.kind == "analysis":
        yield from _analysis_faults(key, node)
    ours = _OURS.get(place.kind, ())
    # What is given by position: a batch, or a metric's module and batch.
    num_given = 2 if place.kind == "metric" else len(ours[:1])
    first = [parameter.name for parameter in signature.values() if parameter.kind in _BY_POSITION][:num_given]
    given = [*first, *_GIVEN.get(place.kind, ()), *place.given, *(roles if isinstance(roles, Mapping) else ())]
    learned = (*optimizer_roles(node), KEY) if place.kind == "optimizer" else ()
    settings = {keyword: value for keyword, value in node.items() if keyword not in (*ours, *_HYDRA_KEYS, *learned)}
    call = Call(key, signature, tuple(given), takes_roles=bool(ours), is_filled=place.is_filled, referred=referred)
    yield from call.faults(settings, leftover=partial(leftover_advice, key, place.kind, name))
    for index, group in enumerate(node.get(KEY, ()) if place.kind == "optimizer" else ()):
        # torch takes any key of a group without a word.
        own = {"_target_": name, **settings_of(group)}
        yield from Call(f"{key}.{KEY}[{index}]", signature, tuple(given), is_filled=True).faults(own)
    if place.kind == "scheduler":
        yield from _milestone_faults(key, node)


def _milestone_faults(key: str, node: Values) -> Iterator[str]:
    milestones = node.get("milestones")
    if isinstance(milestones, list) and any(a >= b for a, b in pairwise(milestones)):
        yield f"{key}.milestones: found {milestones}; expected steps in rising order. Sort them, each once."


@dataclass(frozen=True)
class Call:
    """A call of a target with the settings of a node.

    Args:
        key: where the node stands.
        signature: the target's parameters by name.
        given: parameters that mlotool fills in: the batch, the parameters, the roles.
        takes_roles: whether its keywords may be roles.
        is_filled: whether what is missing comes from elsewhere.
        referred: values that nodes refer to by name (`num_classes: ${data.num_classes}`): a fault where they stand.
    """

    key: str
    signature: Mapping[str, Parameter]
    given: tuple[str, ...] = ()
    takes_roles: bool = False
    is_filled: bool = False
    referred: Values = field(default_factory=dict)

    def faults(self, node: Values, leftover: Callable[[str], str] = lambda keyword: "") -> Iterator[str]:
        """Yield what is wrong with the keywords of a node; `leftover` says where an unknown one comes from."""
        key, name = self.key, node["_target_"]
        settings = {keyword: value for keyword, value in node.items() if keyword not in SPECIAL}
        by_position = [parameter.name for parameter in self.signature.values() if parameter.kind in _BY_POSITION]
        filled = {*self.given, *by_position[: len(node.get("_args_", ()))]}
        named = [parameter for parameter in self.signature.values() if parameter.kind not in _VARIADIC]
        known = [parameter.name for parameter in named if parameter.name not in filled]
        is_open = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self.signature.values())
        for keyword, value in settings.items():
            if keyword in self.given:
                yield f"{key}.{keyword}: found {value!r}; mlotool fills '{keyword}' in itself. Remove it."
            elif keyword in known:
                yield from self._value_faults(name, self.signature[keyword], value)
            elif not is_open:
                yield (
                    f"{key}.{keyword}: unknown keyword '{keyword}' of {name}; expected one of "
                    f"{', '.join(known) or 'none'}.{did_you_mean(keyword, known)} "
                    f"{leftover(keyword) or 'Correct it, or remove it.'}"
                )
        for parameter in () if self.is_filled else named:
            if parameter.default is Parameter.empty and parameter.name not in (*settings, *filled):
                has_words = parameter.annotation is not Parameter.empty and not is_role(parameter)
                wanted = f" ({words(parameter.annotation)})" if has_words else ""
                yield f"{key}.{parameter.name}: missing; {name} expects it{wanted}. {self._where_to_write(parameter)}"

    def _where_to_write(self, parameter: Parameter) -> str:
        key, name = self.key, parameter.name
        if is_role(parameter):
            return f"Write {key}.roles.{name}."
        if self.takes_roles and parameter.kind is Parameter.KEYWORD_ONLY and parameter.annotation is Parameter.empty:
            return f"Write {key}.roles.{name}: <problem> if it is a module, or {key}.{name} if it is a setting."
        return f"Write {key}.{name}."

    def _value_faults(self, target: str, parameter: Parameter, value: Any) -> Iterator[str]:
        name, place = parameter.name, f"{self.key}.{parameter.name}"
        if is_role(parameter):
            yield f"{place}: found {value!r}; expected this role under roles. Write {self.key}.roles: {{{name}: ..}}."
        elif is_known(value) and not (name in self.referred and self.referred[name] == value):
            ranges = [
                kinds[name] for home, kinds in TORCH_SETTINGS.items() if target.startswith(home) and name in kinds
            ]
            annotations = [parameter.annotation] if parameter.annotation is not Parameter.empty else []
            faults = (setting_fault(place, value, annotation, nodes=True) for annotation in [*annotations, *ranges])
            yield from [fault for fault in faults if fault][:1]


def is_role(parameter: Parameter) -> bool:
    """Say whether a parameter is annotated as a BoundModule, which a problem plays."""
    annotation = parameter.annotation
    return any(getattr(kind, "__name__", "") == "BoundModule" for kind in (annotation, *get_args(annotation)))


def _written(place: Place) -> str:
    """Return what to write in the place of what is no node."""
    group = GROUP_OF.get(place.kind, place.kind)
    if isinstance(place.node, str) and group in OPTION_GROUPS and place.node in option_names(group):
        if place.key == group:
            return (
                f"Write {group}={place.node} on the command line, or `- override /{group}: {place.node}` at the end of "
                "the recipe's defaults list."
            )
        return (
            f"Write +{group}@{place.key}={place.node} on the command line, without the + where the recipe has chosen "
            f"one, or `- /{group}@{place.key}: {place.node}` in its defaults list."
        )
    return f"Write {place.key}: {{_target_: .., ..}}."


def _inner_faults(place: Place, problems: Values, referred: Values) -> Iterator[str]:
    """Check the targets inside a node: a solver, schedulers in a list, layers."""
    given = ("optimizer",) if place.kind == "scheduler" or "optimizer" in place.given else ()
    # Where roles are ours they only name problems; elsewhere they are built like anything else.
    ours = _OURS.get(place.kind, ())
    for key, node in _inner(place.key, {k: v for k, v in place.node.items() if k not in ours}):
        setting = key.removeprefix(f"{place.key}.").partition(".")[0].partition("[")[0]
        kind = kind_inside(place.kind, setting)
        is_filled = place.is_filled or (place.kind == "mutator" and kind in ("module", "mutator"))
        yield from _place_faults(Place(key, node, kind, given, is_filled), problems, referred)


def _inner(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        place = f"{key}[{name}]" if isinstance(node, list) else f"{key}.{name}"
        if isinstance(value, Mapping) and "_target_" in value:
            yield place, value
        else:
            yield from _inner(place, value)


def _special_faults(place: Place) -> Iterator[str]:
    for keyword in _HYDRA_KEYS:
        if keyword in place.node:
            yield (
                f"{place.key}.{keyword}: found {place.node[keyword]!r}; expected no {keyword}, as mlotool knows how to "
                "build each node. Remove it."
            )
    name = place.node["_target_"]
    if "_args_" in place.node and not (name in CONTAINERS and isinstance(place.node["_args_"], list)):
        # By position a setting would have no name that the checks know it by.
        wanted = "a list of modules" if name in CONTAINERS else f"keywords; only {', '.join(CONTAINERS)} takes a list"
        yield (
            f"{place.key}._args_: found {place.node['_args_']!r} for {name}; expected {wanted}. "
            f"Write each value under its name: {place.key}.<name>: .."
        )
    # `data.download` is the user's to set on the command line, and so is what the user's own package takes.
    if place.kind == "data" or is_of_user(name):
        return
    for keyword, allowed in DANGEROUS.items():
        value = place.node.get(keyword)
        if keyword in place.node and not any(value is each for each in allowed):
            yield (
                f"{place.key}.{keyword}: found {value!r}; expected nothing that downloads, unpickles or chooses where "
                "files go. Remove it."
            )


def _role_faults(place: Place, problems: Values, signature: Mapping[str, Parameter]) -> Iterator[str]:
    roles = place.node.get("roles", {})
    if not isinstance(roles, Mapping):
        yield f"{place.key}.roles: found {roles!r}; expected problems by role. Write {place.key}.roles: {{model: ..}}."
        return
    keywords = [parameter for parameter in signature.values() if parameter.kind is Parameter.KEYWORD_ONLY]
    known = [parameter.name for parameter in keywords if is_role(parameter)] or [each.name for each in keywords]
    is_open = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.values())
    for role, value in roles.items():
        key = f"{place.key}.roles.{role}"
        if role not in known and not is_open:
            by_position = [name for name, parameter in signature.items() if parameter.kind in _BY_POSITION][1:]
            advice = f"Write a * before it: def f(batch, *, {role})." if role in by_position else "Correct the role."
            yield (
                f"{key}: unknown role '{role}' of {place.node['_target_']}; expected a keyword-only argument, one "
                f"of {', '.join(known) or 'none'}.{did_you_mean(role, known)} {advice}"
            )
        yield from _player_faults(key, value, problems, is_analysis=place.kind == "analysis")


def _analysis_faults(key: str, node: Values) -> Iterator[str]:
    split, size = node.get("split", "train"), node.get("batch_size", 500)
    if is_known(split) and not isinstance(split, str):
        yield f"{key}.split: found {split!r}; expected a split of the data. Write {key}.split: train."
    if is_known(size) and not (isinstance(size, int) and not isinstance(size, bool) and size >= 1):
        yield f"{key}.batch_size: found {size!r}; expected a whole number of at least 1. Write {key}.batch_size: 500."


def _player_faults(key: str, value: Any, problems: Values, *, is_analysis: bool) -> Iterator[str]:
    name = value.get("problem") if isinstance(value, Mapping) else value
    surplus = set(value) - {"problem", "mode"} if isinstance(value, Mapping) else set()
    mode = value.get("mode") if isinstance(value, Mapping) else None
    if not is_known(name):
        return
    if not isinstance(name, str) or surplus or mode not in (None, "train", "eval"):
        yield (
            f"{key}: found {value!r}; expected a problem's name, or {{problem: <name>, mode: train | eval}}. "
            "Correct it."
        )
    elif is_analysis and name not in problems:
        # A loss's unknown problem is the graph's to report.
        yield (
            f"{key}: found '{name}'; expected one of {', '.join(problems)}.{did_you_mean(name, problems)} "
            "Correct the problem's name."
        )
