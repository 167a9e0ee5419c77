"""A space of models as one module: a base, what may be changed in it, and the decisions that were made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import new_class
from typing import Any, ClassVar

import torch
from torch import fx, nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.settings import target
from mlotool.spaces.bases import (
    LostMethodError,
    check_base,
    check_hooks,
    check_leaves,
    check_methods,
    check_own_names,
    refuse_hooks,
)
from mlotool.spaces.building import seed_at
from mlotool.spaces.compiled_graph import OwnResult, compiled, kept_buffers
from mlotool.spaces.decisions import Decision, Decisions, Value, by_mapping, deciding, decisions_of
from mlotool.spaces.model_graph import Change, ModelGraph, remove_unread, unread
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.summary import NodeSummary, summaries
from mlotool.spaces.tracing import AS_LEAF, WHOLE, Whole, traced, whole

_PLAIN = bool | int | float | str | tuple


@target("module")
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
        shared: whether it is all models at once, which share their weights: it is a `SharedSpace` then.
        paths: of a shared one; see there.
        statistics: of a shared one; see there.

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

    _graph_kind: ClassVar[type[ModelGraph]] = ModelGraph
    _shared_kind: ClassVar[type["Space"]]

    decisions: dict[str, Decision]
    changes: tuple[Change, ...]
    nodes: tuple[NodeSummary, ...]
    _own_type: type[nn.Module]
    _arguments: list[str]
    _is_rewired: bool
    _fixed: Mapping[str, Any]
    _run: Any

    def __init_subclass__(cls, *, is_shared: bool = False, **kwargs: Any) -> None:
        """Take the class of spaces whose models share their weights for `shared: true`."""
        super().__init_subclass__(**kwargs)
        if is_shared:
            Space._shared_kind = cls

    def __new__(cls, *args: Any, shared: bool = False, **kwargs: Any) -> "Space":
        """Make a space, or with `shared: true` one whose models share their weights."""
        return super().__new__(Space._shared_kind if shared and cls is Space else cls)

    def __init__(
        self,
        base: nn.Module | Callable[[], nn.Module],
        mutators: Sequence[AbstractMutator] = (),
        inputs: Sequence[Any] | None = None,
        leaves: Sequence[str] = (),
        decisions: Mapping[str, Value] | None = None,
        seed: int | None = None,
        place: str = "",
        shared: bool = False,
        paths: Any = None,
        statistics: str = "shared",
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
            check_base(root)
            # A base that decides what it is made of may be without a part.
            if len(asked.made) == len(before):
                check_leaves(root, leaves)
            self._own_type = type(root)
            if WHOLE in leaves:
                root, graph = whole(root, len(shapes))
            else:
                kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Space)]
                own_names = {name for kind in kinds for name in kind.__annotations__ if not hasattr(kind, name)}
                check_own_names(root, sorted(own_names))
                graph = traced(root, leaves, len(shapes))
                check_hooks(root, graph)
            self._arguments = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
            unread_before, used = unread(graph), _used(graph)
            with kept_buffers(root):
                modes = {module: module.training for module in root.modules()}
                start = seed_at(torch.initial_seed() if seed is None else seed, place)
                model = self._graph_kind(root, graph, shapes, start, anew)
                own_result = OwnResult(root, shapes, modes)
                if mutators:
                    model.without_in_place()
                own_result.check(graph)
                for mutator in mutators:
                    with model.by(mutator.name):
                        mutator.mutate(model)
                remove_unread(graph, unread_before)
                refuse_hooks(root, graph)
                self._decide(model, paths, statistics)
            own = {name: decision for name, decision in asked.made.items() if name not in before}
        model.modules.restore_modes()
        still_used = _used(graph)
        # A module holds what is below it, which is removed before.
        for path in sorted((used | model.modules.paths) - still_used, key=lambda path: (-path.count("."), path)):
            # A layer that is not called any more may hold a tensor that another node reads.
            if not any(other.startswith(f"{path}.") for other in still_used):
                _remove(root, path)
        if model.is_rewired and not isinstance(root, Whole):
            check_methods(type(root))
        settings = vars(root.base if model.is_rewired and isinstance(root, Whole) else root)
        # Parameters, buffers, children and attributes keep their names and their order.
        self.__dict__.update(
            vars(root),
            decisions=own,
            changes=tuple(model.changes),
            nodes=summaries(graph, root, model.changes),
            _is_rewired=model.is_rewired,
            _fixed={
                name: value
                for name, value in settings.items()
                if name[0] != "_" and name != "training" and isinstance(value, _PLAIN)
            },
            _run=self._function_of(graph),
        )
        if not model.is_rewired:
            self.__class__ = _joint(type(self), type(root))

    def _decide(self, model: ModelGraph, paths: Any, statistics: str) -> None:
        """Make decisions that mutators have left open; a single model has none."""
        for key, value, default in (("statistics", statistics, "shared"), ("paths", paths, None)):
            if value != default:
                raise ConfigError(
                    f"{key}: found {shown(value)} without shared: true; expected it where models share their weights. "
                    f"Write shared: true, or remove {key}."
                )

    def _function_of(self, graph: fx.Graph) -> Callable[..., Any]:
        return compiled(graph, self._own_type.__name__)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model makes of its inputs, which are given in their order or by the names of the base's."""
        if not kwargs and len(args) == len(self._arguments):
            return self._run(self, *args)
        return self._run(self, *self._in_order(args, kwargs))

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return inputs in the order of the base's."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in self._arguments])
        return signature.bind(*args, **kwargs).args

    def __getattr__(self, name: str) -> Any:
        """Say of what the base's class offers beside its forward why a changed graph does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            own_type = self.__dict__.get("_own_type")
            if name.startswith("__") or not hasattr(own_type, name) or not self.__dict__.get("_is_rewired"):
                raise
        raise self._lost(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as the base would; one that the graph may have as a fixed number is refused."""
        fixed = self.__dict__.get("_fixed", {})
        if name in fixed and value != fixed[name]:
            raise LostMethodError(
                f"Space.{name}: found the new value {shown(value)} of what is {shown(fixed[name])} in the base, whose "
                f"graph keeps what it has read; expected a buffer: self.register_buffer('{name}', ..). Make it one, "
                f"or {AS_LEAF}."
            )
        own_type = self.__dict__.get("_own_type")
        if isinstance(getattr(own_type, name, None), property) and self.__dict__.get("_is_rewired"):
            raise self._lost(name)
        super().__setattr__(name, value)

    def _lost(self, name: str) -> LostMethodError:
        return LostMethodError(
            f"{self._own_type.__name__}.{name}: mutators have changed what is connected to what, which '{name}' knows "
            "nothing of; expected mutators that put one module in the place of another, or a loss that calls the "
            "model alone. Take one of the two."
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Say how to make it again: the class that it has together with its base has no name."""
        kinds = (type(self), None) if self._is_rewired else type(self).__bases__
        return _again, kinds, self.__getstate__()


_every = inspect.signature(Space.__init__)
# Of `__new__` alone Python would show what it looks at.
Space.__signature__ = _every.replace(parameters=[*_every.parameters.values()][1:])  # type: ignore[attr-defined]


_joint_classes: dict[tuple[type, type], type] = {}


def _joint(kind: type[Space], own_type: type[nn.Module]) -> type:
    """Return the class of a space whose graph is that of its base's code: what the base's class offers, it offers."""
    if (kind, own_type) not in _joint_classes:
        name = {"__module__": kind.__module__}
        _joint_classes[kind, own_type] = new_class(
            kind.__name__, (kind, own_type), exec_body=lambda it: it.update(name)
        )
    return _joint_classes[kind, own_type]


def _again(kind: type[Space], own_type: type[nn.Module] | None) -> Any:
    return object.__new__(kind if own_type is None else _joint(kind, own_type))


def _anew(base: Callable[[], nn.Module], asked: Decisions) -> nn.Module:
    """Make a base again, whose own decisions have been made."""
    with deciding(by_mapping(asked.values)):
        return base()


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


def _check_settings(mutators: Any, inputs: Any, leaves: Any) -> None:
    for key, value, kind, expected in (
        ("mutators", mutators, AbstractMutator, "a list of mutators, such as mlotool.spaces.Operator"),
        ("leaves", leaves, str, "a list of paths, such as ['blocks.*']"),
        ("inputs", inputs, object, "the shape of what the model is called with, such as ${data.image_shape}"),
    ):
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not all(isinstance(entry, kind) for entry in value):
            raise ConfigError(f"{key}: found {shown(value)}; expected {expected}. Correct it.")
