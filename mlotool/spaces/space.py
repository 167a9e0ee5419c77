"""A space of models as one module: a base, what may be changed in it, and the decisions that were made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx, nn

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.settings import target
from mlotool.spaces.bases import (
    LostMethodError,
    as_object_of,
    check_base,
    check_hooks,
    check_leaves,
    check_own_names,
    followed,
    offered,
    refuse_hooks,
)
from mlotool.spaces.building import seed_at
from mlotool.spaces.compiled_graph import OwnResult, compiled, kept_buffers
from mlotool.spaces.decisions import Decision, Decisions, Value, by_mapping, deciding, decisions_of
from mlotool.spaces.in_place import remove_unread, unread
from mlotool.spaces.model_graph import Change, ModelGraph
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.summary import NodeSummary, summaries
from mlotool.spaces.tracing import AS_LEAF, WHOLE, traced, whole

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
            if WHOLE not in leaves:
                check_own_names(root)
            self._own_type: type[nn.Module] = type(root)
            if WHOLE in leaves:
                root, graph = whole(root, len(shapes))
            else:
                graph = traced(root, leaves, len(shapes))
                check_hooks(root, graph)
            self._arguments = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
            unread_before = unread(graph)
            used, not_called = _used(graph), followed(graph)
            with kept_buffers(root):
                own_result = OwnResult(root, shapes)
                start = seed_at(torch.initial_seed() if seed is None else seed, place)
                model = self._graph_kind(root, graph, shapes, start, anew)
                if mutators:
                    model.without_in_place()
                own_result.check(root, graph)
                for mutator in mutators:
                    with model.by(mutator.name):
                        mutator.mutate(model)
                remove_unread(graph, root, unread_before)
                if mutators:
                    own_result.check_runs(root, graph)
                self._decide(model, paths, statistics)
            own = {name: each for name, each in asked.made.items() if name not in before}
        model.modules.restore_modes()
        still_used = _used(graph)
        refuse_hooks(root, not_called | followed(graph))
        # A module holds what is below it, which is removed before.
        for path in sorted((used | model.modules.paths) - still_used, key=lambda path: (-path.count("."), path)):
            # A layer that is not called any more may hold a tensor that another node reads.
            if not any(each.startswith(f"{path}.") for each in still_used):
                _remove(root, path)
        names = [name for name in vars(root) if name[0] != "_" and name != "training"]
        # Parameters, buffers, children and attributes keep their names and their order.
        self.__dict__.update(
            vars(root),
            decisions=own,
            changes=tuple(model.changes),
            nodes=summaries(graph, root, model.changes),
            _is_rewired=model.is_rewired,
            _fixed={name: vars(root)[name] for name in names if isinstance(vars(root)[name], _PLAIN)},
            _run=self._function_of(graph),
        )

    def _decide(self, model: ModelGraph, paths: Any, statistics: str) -> None:
        """Make decisions that mutators have left open; a single model has none."""
        for key, is_missing in (("statistics", statistics == "shared"), ("paths", paths is None)):
            if not is_missing:
                raise ConfigError(
                    f"{key}: found it without shared: true; expected it where models share their weights, as a single "
                    f"model has one path. Write shared: true, or remove {key}."
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
        given = dict(zip(self._arguments, args, strict=False))
        if len(args) + len(kwargs) != len(self._arguments) or given.keys() | kwargs.keys() != set(self._arguments):
            names = ", ".join([f"{len(args)} without a name", *sorted(kwargs)])
            raise ConfigError(
                f"inputs: the model was called with {len(args) + len(kwargs)} arguments ({names}); expected "
                f"{len(self._arguments)}: {', '.join(self._arguments)}, for which inputs has a shape. Write a shape "
                "for each argument."
            )
        return tuple({**given, **kwargs}[name] for name in self._arguments)

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
                f"{own_type.__name__}.{name}: mutators have changed what is connected to what, which '{name}' knows "
                "nothing of; expected mutators that put one module in the place of another, or a loss that calls the "
                "model alone. Take one of the two."
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
                f"whose graph keeps what it has read; expected a buffer: self.register_buffer('{name}', ..). Make it "
                f"one, or {AS_LEAF}."
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


_every = inspect.signature(Space.__init__)
# Of `__new__` alone Python would show what it looks at.
Space.__signature__ = _every.replace(parameters=[*_every.parameters.values()][1:])  # type: ignore[attr-defined]


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


def _check_settings(mutators: Sequence[AbstractMutator], inputs: Any, leaves: Any) -> None:
    """Refuse settings of another kind, and missing inputs."""
    for mutator in mutators if isinstance(mutators, Sequence) else [mutators]:
        if not isinstance(mutators, Sequence) or not isinstance(mutator, AbstractMutator):
            raise ConfigError(
                f"mutators: found {type(mutator).__name__}; expected a list of mutators, such as "
                "mlotool.spaces.Operator, or a subclass of mlotool.spaces.AbstractMutator. Correct the list."
            )
    if isinstance(leaves, str) or not all(isinstance(path, str) for path in leaves):
        example = shown([leaves] if isinstance(leaves, str) else ["blocks.*"])
        raise ConfigError(f"leaves: found {shown(leaves)}; expected a list of paths. Write leaves: {example}.")
    if not isinstance(inputs, Sequence) or isinstance(inputs, str):
        raise ConfigError(
            f"inputs: found {shown(inputs)}; expected the shape of what the model is called with, without the batch, "
            "as its graph is compared with it. Write inputs: ${data.image_shape}."
        )
