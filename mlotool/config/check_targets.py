"""Every node with a `_target_`: is it trusted, is it of its kind, do its keys fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from itertools import pairwise
from types import NoneType
from typing import Annotated, Any, get_args

from annotated_types import Gt, Le, MinLen

from mlotool.config.check_values import unknown_name
from mlotool.config.instantiate import (
    GROUPS_KEY,
    SPECIAL,
    are_learned_alone,
    group_faults,
    optimizer_roles,
    settings_of,
)
from mlotool.config.recipes import option_names
from mlotool.config.resolve import is_known
from mlotool.config.schema import OPTION_GROUPS, is_node, members, node_kind, walk
from mlotool.config.security.safety import DANGEROUS
from mlotool.config.security.trusted import CONTAINERS, foreign_package, how_to_trust, is_of_user, resolve, trust_fault
from mlotool.config.sources import loaded_recipes
from mlotool.core import settings as ranges
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import Count, NonNegative, parameters, setting_fault, words
from mlotool.folders.documents import leaves

Values = Mapping[str, Any]
Signature = Mapping[str, Parameter]
# Of untrusted nodes that one line names.
MAX_PLACES = 8
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# What modules take over from the data.
_REFERRED = ("num_classes", "image_shape", "vocabulary_size", "length")
_COUNTS = ("step_size", "T_max", "T_0", "T_mult", "total_iters", "total_steps", "epochs", "steps_per_epoch")
# Ranges of settings that torch would take without a word, by the beginning of the target's name.
TORCH_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "torch.optim.lr_scheduler.": {
        **dict.fromkeys((*_COUNTS, "step_size_up", "step_size_down"), Count),
        **dict.fromkeys(("gamma", "base_lr", "max_lr", "div_factor", "final_div_factor", "factor"), ranges.Positive),
        **dict.fromkeys(("eta_min", "min_lr", "power", "threshold"), NonNegative),
        **dict.fromkeys(("patience", "cooldown"), ranges.Whole),
        **dict.fromkeys(("base_momentum", "max_momentum"), ranges.BelowOne),
        **dict.fromkeys(("end_factor", "pct_start"), ranges.Share),
        "milestones": Annotated[Sequence[Count], MinLen(1)],
        "start_factor": Annotated[float, Gt(0), Le(1)],
    },
    "torch.optim.": {
        **dict.fromkeys(("lr", "weight_decay", "eps", "alpha", "dampening", "lambd", "lr_decay"), NonNegative),
        "momentum": ranges.BelowOne,
        "betas": Sequence[ranges.BelowOne],
        "max_iter": Count,
        "history_size": Count,
    },
    "torch.nn.": {
        **dict.fromkeys(("num_layers", "num_encoder_layers", "num_decoder_layers"), ranges.Layers),
        **dict.fromkeys(("p", "dropout"), ranges.Share),
    },
}
# By kind of node, what mlotool itself reads of it beside the arguments of its target.
OURS: Mapping[str, Mapping[str, Any]] = {
    "loss": {"roles": Mapping[str, Any]},
    "analysis": {"roles": Mapping[str, Any], "split": str, "batch_size": Count},
    "optimizer": {GROUPS_KEY: list[Any]},
}

_GIVEN = {"optimizer": ("params",), "scheduler": ("optimizer",)}
# By kind of node, how many arguments are given by position: a batch, or a metric's module and batch.
_NUM_GIVEN = {"loss": 1, "analysis": 1, "metric": 2}
_HYDRA_KEYS = ("_partial_", "_convert_", "_recursive_")
# By kind of node, the kind of those inside it.
_INSIDE = dict.fromkeys(("module", "loss", "analysis", "parallel", "mutator"), "module")
_INSIDE |= {"scheduler": "scheduler", "hypergradient": "solver"}
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


def target_faults(values: Values) -> Iterator[str]:
    """Yield what is wrong with the targets of a config; imports them."""
    data = values["data"] if isinstance(values["data"], Mapping) else {}
    referred = {"seed": values["seed"], **{name: data[name] for name in _REFERRED if name in data}}
    yield from _unset_faults(values["problems"])
    untrusted = _untrusted_packages(values)
    for package, keys in untrusted.items():
        places = f"{', '.join(keys[:MAX_PLACES])}{', ...' * (len(keys) > MAX_PLACES)}"
        yield (
            f"found {len(keys)} targets of the package '{package}', which is not trusted ({places}); expected names of "
            f"mlotool and torch. {how_to_trust(package)}"
        )
    for path, node, annotation in walk(values):
        kind, others = node_kind(annotation), [member for member in members(annotation) if not node_kind(member)]
        # A metric's name is no node, and null is none where the schema allows it.
        is_other = (node is None and NoneType in others) or (others not in ([], [NoneType]) and not is_node(node))
        is_other = is_other or (kind == "optimizer" and are_learned_alone(node))
        if kind is not None and is_known(node) and not is_other:
            known = {"seed": values["seed"]} if kind == "data" else referred
            told = frozenset(untrusted)
            yield from _Node(".".join(path), node, kind, values["problems"], known, told=told).faults()


def _untrusted_packages(values: Values) -> dict[str, list[str]]:
    """Return the packages that are not trusted and of which several nodes are, with the keys of these."""
    keys: dict[str, list[str]] = {}
    for key, name in leaves(values):
        package = foreign_package(name) if key.endswith("._target_") else None
        if package is not None:
            keys.setdefault(package, []).append(key.removesuffix("._target_"))
    return {package: places for package, places in keys.items() if len(places) > 1}


def _unset_faults(problems: Values) -> Iterator[str]:
    """Yield which problems have no loss or optimizer, and no LightningModule that has its own."""
    for name, problem in problems.items():
        for setting in ("loss", "optimizer"):
            key, node, module = f"problems.{name}.{setting}", problem[setting], problem["module"]
            is_unset = node is None or (setting == "optimizer" and are_learned_alone(node))
            # Whose module is wrong has a fault of its own.
            if not is_unset or not is_node(module) or trust_fault("module", module["_target_"], "module"):
                continue
            has_own = _may_be_lightning(module["_target_"])
            if node is None and not has_own:
                hint = did_you_mean(name, [other for other in problems if other != name])
                hint += " Or correct the problem's name." if hint else ""
                yield f"{key}: nothing is set; expected a value. Write {key}: .. in the recipe.{hint}"
            elif not has_own:
                what = "a node with a _target_, whose settings these are"
                yield f"{key}: found no _target_; expected {what}. Write {key}: {{_target_: torch.optim.SGD, ..}}."


def _may_be_lightning(name: str) -> bool:
    """Say whether a module's target is a LightningModule, or a function, of which nobody knows before it is called."""
    # Imported here: it needs torch, as modules do.
    from mlotool.core.lightning_module import is_lightning_module

    try:
        target = resolve("module", name)
    except ConfigError:
        return True
    return not isinstance(target, type) or is_lightning_module(target)


@dataclass(frozen=True)
class _Node:
    """A node that is built from a target.

    Args:
        key: where it stands.
        node: what stands there.
        kind: what it has to be.
        problems: of the config, whom roles name.
        referred: values that nodes refer to by name (`num_classes: ${data.num_classes}`): a fault where they stand.
        given: parameters that come from the node around it.
        is_filled: whether what it lacks comes from where it is put: a candidate of a mutator.
        told: packages of which it has been said that they are not trusted.
    """

    key: str
    node: Any
    kind: str
    problems: Values
    referred: Values
    given: tuple[str, ...] = ()
    is_filled: bool = False
    told: frozenset[str] = frozenset()

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the node, and with those inside it."""
        key, node, kind = self.key, self.node, self.kind
        if not is_node(node):
            found = "no _target_" if isinstance(node, Mapping) else repr(node)
            yield f"{key}: found {found}; expected a node that says what to build. {self._what_to_write()}"
            return
        for inside in self._inside():
            yield from inside.faults()
        name, ours = node["_target_"], OURS.get(kind, {})
        if fault := trust_fault(key, name, kind):
            if foreign_package(name) not in self.told:
                yield fault
            return
        faults = [*self._special_faults(), *(group_faults(key, node) if kind == "optimizer" else ())]
        if faults:
            yield from faults
            return
        try:
            signature = parameters(resolve(key, name))
        except ConfigError as error:
            yield str(error)
            return
        except (TypeError, ValueError):  # compiled code has no signature
            return
        for setting in [setting for setting in ours if setting in node and setting != GROUPS_KEY]:
            if is_known(node[setting]) and (fault := setting_fault(f"{key}.{setting}", node[setting], ours[setting])):
                yield fault
        roles = node.get("roles") if "roles" in ours else None
        roles = roles if isinstance(roles, Mapping) else {}
        yield from self._role_faults(roles, signature)
        given = (*given_names(kind, signature), *self.given, *roles)
        learned = optimizer_roles(node) if kind == "optimizer" else {}
        settings = {keyword: node[keyword] for keyword in node if keyword not in (*ours, *learned)}
        yield from self._call_faults(key, settings, signature, given)
        for index, group in enumerate(node.get(GROUPS_KEY, ()) if kind == "optimizer" else ()):
            # torch takes any key of a group without a word.
            settings = {"_target_": name, **settings_of(group)}
            yield from self._call_faults(f"{key}.{GROUPS_KEY}[{index}]", settings, signature, given, is_filled=True)
        milestones = node.get("milestones")
        if kind == "scheduler" and isinstance(milestones, list) and any(a >= b for a, b in pairwise(milestones)):
            yield f"{key}.milestones: found {milestones}; expected steps in rising order. Sort them, each once."

    def _inside(self) -> Iterator["_Node"]:
        """Yield the nodes inside: a solver, schedulers in a list, layers."""
        given = ("optimizer",) if self.kind == "scheduler" or "optimizer" in self.given else ()
        # Roles only name problems.
        settings = {name: value for name, value in self.node.items() if name not in OURS.get(self.kind, ())}
        for key, node in _nodes_below(self.key, settings):
            setting = key.removeprefix(f"{self.key}.").partition(".")[0].partition("[")[0]
            kind = kind_inside(self.kind, setting)
            is_filled = self.is_filled or (self.kind == "mutator" and kind in ("module", "mutator"))
            yield _Node(key, node, kind, self.problems, self.referred, given, is_filled, self.told)

    def _what_to_write(self) -> str:
        """Return what to write in the place of what is no node."""
        group, key = "model" if self.kind == "module" else self.kind, self.key
        if not (isinstance(self.node, str) and group in OPTION_GROUPS and self.node in option_names(group)):
            return f"Write {key}: {{_target_: .., ..}}."
        address = f"override /{group}" if key == group else f"/{group}@{key}"
        return f"Write `- {address}: {self.node}` at the end of the recipe's defaults list."

    def _special_faults(self) -> Iterator[str]:
        key, node, name = self.key, self.node, self.node["_target_"]
        for keyword in _HYDRA_KEYS:
            if keyword in node:
                yield f"{key}.{keyword}: found {node[keyword]!r}; mlotool knows how to build each node. Remove it."
        if "_args_" in node and not (name in CONTAINERS and isinstance(node["_args_"], list)):
            # By position a setting would have no name that the checks know it by.
            wanted = f"keywords; only {', '.join(CONTAINERS)} takes a list of modules"
            yield f"{key}._args_: found {node['_args_']!r} for {name}; expected {wanted}. Write {key}.<name>: .."
        # `data.download` is the user's to set on the command line, and so is what the user's own package takes.
        for keyword, allowed in DANGEROUS.items() if self.kind != "data" and not is_of_user(name) else ():
            if keyword in node and not any(node[keyword] is value for value in allowed):
                wanted = "nothing that downloads, unpickles or chooses where files go"
                yield f"{key}.{keyword}: found {node[keyword]!r}; expected {wanted}. Remove it."

    def _role_faults(self, roles: Values, signature: Signature) -> Iterator[str]:
        known = role_names(signature)
        for role, player in roles.items():
            key = f"{self.key}.roles.{role}"
            if role not in known and not _is_open(signature):
                is_positional = role in signature and signature[role].kind in _BY_POSITION
                advice = f"Write a * before it: def f(batch, *, {role})." if is_positional else "Correct the role."
                yield (
                    f"{key}: unknown role '{role}' of {self.node['_target_']}; expected a keyword-only argument, one "
                    f"of {', '.join(known) or 'none'}.{did_you_mean(role, known)} {advice}"
                )
            name = player.get("problem") if isinstance(player, Mapping) else player
            has_mode = not isinstance(player, Mapping) or (
                player.keys() <= {"problem", "mode"} and player.get("mode") in (None, "train", "eval")
            )
            if is_known(name) and not (isinstance(name, str) and has_mode):
                yield f"{key}: found {player!r}; expected a problem's name, or {{problem: <name>, mode: train | eval}}."
            elif is_known(name) and self.kind == "analysis" and name not in self.problems:
                # A loss's unknown problem is the graph's to report.
                yield unknown_name(key, name, self.problems)

    def _call_faults(
        self, key: str, node: Values, signature: Signature, given: tuple[str, ...], *, is_filled: bool = False
    ) -> Iterator[str]:
        """Yield what is wrong with the keywords that a target is called with."""
        name, settings = node["_target_"], {keyword: node[keyword] for keyword in node if keyword not in SPECIAL}
        by_position = [parameter.name for parameter in signature.values() if parameter.kind in _BY_POSITION]
        filled = {*given, *by_position[: len(node.get("_args_", ()))]}
        named = [parameter for parameter in signature.values() if parameter.kind not in _VARIADIC]
        known = [parameter.name for parameter in named if parameter.name not in filled]
        for keyword, value in settings.items():
            if keyword in given:
                yield f"{key}.{keyword}: found {value!r}; mlotool fills '{keyword}' in itself. Remove it."
            elif keyword in known:
                yield from self._setting_faults(f"{key}.{keyword}", name, signature[keyword], value)
            elif not _is_open(signature):
                yield (
                    f"{key}.{keyword}: unknown keyword '{keyword}' of {name}; expected one of "
                    f"{', '.join(known) or 'none'}.{did_you_mean(keyword, known)} {_correction(f'{key}.{keyword}')}"
                )
        for parameter in () if is_filled or self.is_filled else named:
            if parameter.default is Parameter.empty and parameter.name not in (*settings, *filled):
                role, where = f"{key}.roles.{parameter.name}", f"{key}.{parameter.name}"
                if is_role(parameter):
                    where = role
                elif parameter.annotation is not Parameter.empty:
                    where += f", {words(parameter.annotation)}"
                elif parameter.kind is Parameter.KEYWORD_ONLY and "roles" in OURS.get(self.kind, ()):
                    where = f"{role}: <problem> if it is a module, or {where} if it is a setting"
                yield f"{key}.{parameter.name}: missing; {name} expects it. Write {where}."

    def _setting_faults(self, place: str, target: str, parameter: Parameter, value: Any) -> Iterator[str]:
        name = parameter.name
        if is_role(parameter):
            yield f"{place}: found {value!r}; expected this role under roles. Write {self.key}.roles: {{{name}: ..}}."
        elif is_known(value) and not (name in self.referred and self.referred[name] == value):
            annotations = setting_annotations(target, parameter)
            faults = (setting_fault(place, value, annotation, nodes=True) for annotation in annotations)
            yield from [fault for fault in faults if fault][:1]


def is_role(parameter: Parameter) -> bool:
    """Say whether a parameter is annotated as a BoundModule, which a problem plays."""
    annotation = parameter.annotation
    return any(getattr(kind, "__name__", "") == "BoundModule" for kind in (annotation, *get_args(annotation)))


def role_names(signature: Signature) -> list[str]:
    """Return the arguments that may be roles: those that are annotated as one, else all that are keyword-only."""
    keywords = [parameter for parameter in signature.values() if parameter.kind is Parameter.KEYWORD_ONLY]
    return [parameter.name for parameter in keywords if is_role(parameter)] or [name.name for name in keywords]


def given_names(kind: str, signature: Signature) -> tuple[str, ...]:
    """Return the arguments that a node of a kind is given by mlotool: a batch, an optimizer."""
    first = [parameter.name for parameter in signature.values() if parameter.kind in _BY_POSITION]
    return (*first[: _NUM_GIVEN.get(kind, 0)], *_GIVEN.get(kind, ()))


def setting_annotations(target: str, parameter: Parameter) -> list[Any]:
    """Return all that an argument of a target has to fit: its annotation, and of torch's the range that it lacks."""
    name = parameter.name
    ranges_of_torch = [
        kinds[name] for home, kinds in TORCH_SETTINGS.items() if target.startswith(home) and name in kinds
    ]
    return [*([] if parameter.annotation is Parameter.empty else [parameter.annotation]), *ranges_of_torch]


def _is_open(signature: Signature) -> bool:
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.values())


def _nodes_below(key: str, node: Any) -> Iterator[tuple[str, Any]]:
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        place = f"{key}[{name}]" if isinstance(node, list) else f"{key}.{name}"
        if is_node(value):
            yield place, value
        else:
            yield from _nodes_below(place, value)


def _correction(path: str) -> str:
    """Return what to do about a keyword that its target does not know; it names the recipe that sets it."""
    for recipe in loaded_recipes():
        if any(key == path or key.startswith((f"{path}.", f"{path}[")) for key, _ in leaves(recipe.data)):
            return f"It is set in {recipe.path}: remove it there, or drop it with ~{path}."
    return "Correct it, or remove it."
