"""A space of models as one module: a base, what may be changed in it, and the decisions that were made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from mlotool.core.errors import ConfigError
from mlotool.core.faults import shown
from mlotool.core.suggest import did_you_mean
from mlotool.spaces.building import seed_at
from mlotool.spaces.changes import Change
from mlotool.spaces.compiled_graph import compiled
from mlotool.spaces.decisions import Decision, Decisions, Value, by_mapping, deciding, decisions_of
from mlotool.spaces.followed import followed, refuse_hooks
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.own_behaviour import LostMethodError, as_object_of, call_hooks, offered, own_methods
from mlotool.spaces.patterns import matches
from mlotool.spaces.same_result import OwnResult, kept_buffers
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.summary import NodeSummary, summaries
from mlotool.spaces.tracing import WHOLE, traced, whole
from mlotool.spaces.unread import remove_unread, unread

_OWN_NAMES = {"decisions", "changes", "nodes", "_own_type", "_arguments", "_is_rewired", "_fixed", "_run"}
_PLAIN = bool | int | float | str | tuple

MAX_PATHS = 8
"""Of a base's modules, those that a message names."""


class Space(nn.Module):
    """A model of a space of models: the base, changed as decisions say.

    The base's forward is followed once (torch.fx), which makes a graph of its layers. Mutators change that graph, one
    after the other; what they may choose between are decisions. The result has the base's parameters under their own
    names, and new ones beside them. Modules that are new start from random numbers of their own, which depend on the
    seed, the place and the node alone: two models that differ in one decision start alike in all else.

    Args:
        base: a function that makes a model, or a model, which is changed itself; in a recipe, a node with `_target_`.
        mutators: change its graph, in this order.
        inputs: the shape, without the batch, of what the model is called with: [1, 8, 8], or a list with one for each
            argument, as [[64], {shape: [64], dtype: int64}].
        leaves: paths of modules that are one node each, and are not followed; `*` is any text within one name, and "."
            is the whole model. Each is one of the base's, if that does not choose itself what it is made of.
        decisions: by name; the first candidate is taken where one is missing. None: those of `deciding`, which a run
            makes from the recipe's `decisions`.
        seed: of new modules; None: the number that torch was seeded with (`torch.initial_seed()`), in a recipe one for
            each problem.
        place: where it stands in a module, so that two spaces of one seed start with other values; a recipe knows it.

    Attributes:
        decisions: those that this space has asked for, by name.
        changes: what mutators have done, in order.

    Raises:
        ConfigError: the base cannot be followed, or a mutator finds nothing to change.
        InfeasibleModelError: decisions make no model.

    Source: Zhang et al. 2020, Retiarii: A Deep Learning Exploratory-Training Framework, section 3.

    Example:
        >>> from functools import partial
        >>> def base():
        ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
        >>> Space(base, [activation], inputs=[4], decisions={"activation_0": "tanh"})
        Space(
          (0): Linear(in_features=4, out_features=8, bias=True)
          (1): Tanh()
          (2): Linear(in_features=8, out_features=2, bias=True)
        )
    """

    factories: ClassVar[tuple[str, ...]] = ("base",)
    """Settings that are handed over as functions: what they describe is built here."""
    takes_place: ClassVar[bool] = True
    """A recipe's place of it is handed over as `place`."""

    decisions: dict[str, Decision]
    changes: tuple[Change, ...]
    nodes: tuple[NodeSummary, ...]

    def __init__(
        self,
        base: nn.Module | Callable[[], nn.Module],
        mutators: Sequence[AbstractMutator] = (),
        inputs: Sequence[Any] | None = None,
        leaves: Sequence[str] = (),
        decisions: Mapping[str, Value] | None = None,
        seed: int | None = None,
        place: str = "",
    ) -> None:
        super().__init__()
        _check_settings(mutators, inputs, leaves)
        if not callable(base):
            raise ConfigError(f"base: found {shown(base)}; expected what makes a module. Write base: {{_target_: ..}}.")
        assert inputs is not None
        shapes = Shapes(inputs)
        with decisions_of(decisions) as asked:
            before = set(asked.made)
            root, anew = (base, None) if isinstance(base, nn.Module) else (base(), partial(_anew, base, asked))
            _check_base(root)
            # A base that decides what it is made of may be without a part.
            if len(asked.made) == len(before):
                _check_leaves(root, leaves)
            if WHOLE not in leaves:
                _check_own_names(root)
            self._own_type: type[nn.Module] = type(root)
            root, graph = _graph(root, leaves, shapes)
            self._arguments = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
            unread_before = unread(graph)
            used, not_called = _used(graph), followed(graph)
            with kept_buffers(root):
                own_result = OwnResult(root, shapes)
                start = seed_at(torch.initial_seed() if seed is None else seed, place)
                model = ModelGraph(root, graph, shapes, start, anew)
                if mutators:
                    model.without_in_place()
                own_result.check(root, graph)
                for mutator in mutators:
                    with model.by(mutator.name):
                        mutator.mutate(model)
                remove_unread(graph, root, unread_before)
                if mutators:
                    own_result.check_runs(root, graph)
            own = {name: each for name, each in asked.made.items() if name not in before}
        model.restore_modes()
        still_used = _used(graph)
        refuse_hooks(root, not_called | followed(graph))
        # A module holds what is below it, which is removed before.
        for path in sorted(used - still_used, key=lambda each: (-each.count("."), each)):
            # A layer that is not called any more may hold a tensor that another node reads.
            if not any(each.startswith(f"{path}.") for each in still_used):
                _remove(root, path)
        fixed = {name: each for name, each in vars(root).items() if name[0] != "_" and isinstance(each, _PLAIN)}
        # Parameters, buffers, children and attributes keep their names and their order.
        self.__dict__.update(
            vars(root),
            decisions=own,
            changes=tuple(model.changes),
            nodes=summaries(graph, root, model.changes),
            _is_rewired=model.is_rewired,
            _fixed={name: each for name, each in fixed.items() if name != "training"},
            _run=compiled(graph, self._own_type.__name__),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model makes of its inputs, which are given in their order or by the names of the base's."""
        if not kwargs and len(args) == len(self._arguments):
            return self._run(self, *args)
        given = dict(zip(self._arguments, args, strict=False))
        if len(args) + len(kwargs) != len(self._arguments) or given.keys() | kwargs.keys() != set(self._arguments):
            names = f" ({', '.join([f'{len(args)} without a name', *sorted(kwargs)])})" if kwargs else ""
            raise ConfigError(
                f"inputs: the model was called with {len(args) + len(kwargs)} arguments{names}; expected "
                f"{len(self._arguments)}, as its space was made for ({', '.join(self._arguments)}): those for which "
                "inputs has a shape. Write a shape for each argument."
            )
        return self._run(self, *({**given, **kwargs}[name] for name in self._arguments))

    def __getattr__(self, name: str) -> Any:
        """Return what the base's class offers beside its forward, where the graph is still that of its code."""
        own_type = self.__dict__.get("_own_type")
        if (
            own_type is None
            or name in self._modules
            or name in self._parameters
            or name in self._buffers
            or name.startswith("__")
        ):
            return super().__getattr__(name)
        whole_base = self._whole_base()
        if not hasattr(own_type if whole_base is None else whole_base, name):
            return super().__getattr__(name)
        if self._is_rewired:
            raise LostMethodError(
                f"{own_type.__name__}.{name}: mutators have changed what is connected to what in forward, which "
                f"'{name}' knows nothing of; expected mutators that put one module in the place of another, or a loss "
                "that calls the model alone. Take one of the two."
            )
        return offered(own_type, name, self) if whole_base is None else getattr(whole_base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as the base would; one that the graph may have as a fixed number is refused."""
        own_type = self.__dict__.get("_own_type")
        whole_base = self._whole_base()
        if whole_base is not None and hasattr(whole_base, name) and name not in self.__dict__:
            setattr(whole_base, name, value)
        elif own_type is not None and isinstance(inspect.getattr_static(own_type, name, None), property):
            inspect.getattr_static(own_type, name).__set__(self, value)
        elif name in self.__dict__.get("_fixed", {}) and value != self._fixed[name]:
            raise LostMethodError(
                f"Space.{name}: found the new value {shown(value)} of what is {shown(self._fixed[name])} in the base, "
                "whose graph keeps what its forward has read; expected a buffer "
                f"(self.register_buffer('{name}', ..)), which may change. Make it one, or write leaves: ['.'], which "
                "makes one node of the whole model."
            )
        else:
            super().__setattr__(name, value)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save the state as the base's class does; mnasnet of torchvision has a way of its own."""
        kind = nn.Module if self._whole_base() is not None else self._own_type
        kind._save_to_state_dict(as_object_of(kind, self), *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load it in the same way."""
        kind = nn.Module if self._whole_base() is not None else self._own_type
        kind._load_from_state_dict(as_object_of(kind, self), *args, **kwargs)

    def _whole_base(self) -> nn.Module | None:
        """Return the base where it is one node of the graph, as it was made."""
        own_type, base = self.__dict__.get("_own_type"), self.__dict__.get("_modules", {}).get("base")
        return base if own_type is not None and isinstance(base, own_type) else None


def _anew(base: Callable[[], nn.Module], asked: Decisions) -> nn.Module:
    """Make a base again, whose own decisions have been made."""
    with deciding(by_mapping(asked.values)):
        return base()


def _check_settings(mutators: Sequence[AbstractMutator], inputs: Sequence[Any] | None, leaves: Sequence[str]) -> None:
    if not isinstance(mutators, Sequence):
        raise ConfigError(f"mutators: found {type(mutators).__name__}; expected a list. Write mutators: [..].")
    for mutator in mutators:
        if not isinstance(mutator, AbstractMutator):
            raise ConfigError(
                f"mutators: found {type(mutator).__name__}; expected mutators, such as mlotool.spaces.Operator, or a "
                "subclass of mlotool.spaces.AbstractMutator. Correct the list."
            )
    if isinstance(leaves, str) or not all(isinstance(each, str) for each in leaves):
        example = shown([leaves] if isinstance(leaves, str) else ["blocks.*"])
        raise ConfigError(f"leaves: found {shown(leaves)}; expected a list of paths. Write leaves: {example}.")
    if not isinstance(inputs, Sequence | None) or isinstance(inputs, str):
        raise ConfigError(
            f"inputs: found {shown(inputs)}; expected a shape without the batch. Write inputs: [1, 8, 8]."
        )
    if inputs is None:
        raise ConfigError(
            "inputs: missing; expected the shape of what the model is called with, without the batch, as its graph is "
            "compared with it. Write inputs: ${data.image_shape}."
        )


def _check_leaves(base: nn.Module, leaves: Sequence[str]) -> None:
    """Refuse a leaf that is none of the base's modules."""
    paths = [path for path, _ in base.named_modules() if path]
    # A base may be without a part by its own settings: `down` is None, `blocks` of `blocks.*.norm` an empty list.
    none = [f"{path}.{name}".lstrip(".") for path, module in base.named_modules() for name in _absent(module)]
    lists = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    empty = [path for path, module in base.named_modules() if isinstance(module, lists) and not len(module)]
    for pattern in () if WHOLE in leaves else leaves:
        names = pattern.split(".")
        above = [".".join(names[:count]) for count in range(1, len(names)) if "*" in names[count]]
        is_absent = any(matches(path, each) for path in empty for each in above)
        if not is_absent and not any(matches(path, pattern) for path in paths + none):
            some = ", ".join(paths[:MAX_PATHS]) + (", .." if len(paths) > MAX_PATHS else "")
            raise ConfigError(
                f"leaves: found {shown(pattern)}, which is no module of {type(base).__name__}; expected paths such as "
                f"{some or WHOLE}.{did_you_mean(pattern, paths)} Correct the path, or remove it."
            )


def _absent(module: nn.Module) -> list[str]:
    every = {**module._modules, **vars(module)}
    return [name for name, value in every.items() if value is None and name[0] != "_"]


def _check_base(base: nn.Module) -> None:
    if not isinstance(base, nn.Module):
        raise ConfigError(
            f"base: found {type(base).__name__}; expected a module, or a function that makes one. Correct it."
        )
    for path, module in base.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ConfigError(
                f"base: found the lazy module '{path}', whose parameters have no shape yet; expected shapes that are "
                f"known. Write {type(module).__name__.removeprefix('Lazy')} with its sizes."
            )


def _check_own_names(base: nn.Module) -> None:
    """Refuse a base of which a space would lose something without a word."""
    changed = own_methods(base)
    if changed:
        raise ConfigError(
            f"base: found {type(base).__name__}.{changed[0]}, which a space has from torch.nn.Module; expected a model "
            "that leaves it as it is, or does so in a module inside it. Write leaves: ['.'], which makes one node of "
            "the whole model, or a model without it."
        )
    kept = {*vars(base), *base._modules, *base._parameters, *base._buffers}
    taken = sorted(kept & _OWN_NAMES)
    if taken:
        raise ConfigError(
            f"base: found {type(base).__name__} with an attribute '{taken[0]}', which a space has for itself; expected "
            "another name. Rename it, or write leaves: ['.'], which makes one node of the whole model."
        )


def _graph(base: nn.Module, leaves: Sequence[str], shapes: Shapes) -> tuple[nn.Module, fx.Graph]:
    if WHOLE in leaves:
        return whole(base, len(shapes))
    graph = traced(base, leaves, len(shapes))
    nodes = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for path, module in base.named_modules():
        is_inside = any(path == each or path.startswith(f"{each}.") for each in nodes)
        # A space takes over those of the model itself.
        if path and not is_inside and call_hooks(module):
            raise ConfigError(
                f"leaves: found hooks of '{path}', whose forward is followed, so that they would not be called; "
                f"expected them on a layer or a leaf. Write leaves: ['{path}']."
            )
    return base, graph


def _used(graph: fx.Graph) -> set[str]:
    """Return the paths of modules and tensors that a graph uses."""
    return {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}


def _remove(root: nn.Module, path: str) -> None:
    above, _, name = path.rpartition(".")
    parent: Any = root
    for each in above.split(".") if above else ():
        # A new module may lack what the one that it replaces had.
        parent = getattr(parent, each, None)
    for kept in (parent._modules, parent._parameters, parent._buffers) if isinstance(parent, nn.Module) else ():
        kept.pop(name, None)
