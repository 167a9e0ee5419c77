"""A space of models as one module: a base model, mutators that change it, and the decisions that were made."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, new_class
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.core.private import pytree
from mlotool.core.settings import target
from mlotool.core.unchanged import is_unchanged
from mlotool.spaces import tracing
from mlotool.spaces.building import seed_at
from mlotool.spaces.decisions import Decision, Decisions, Value, by_mapping, deciding, decisions_of
from mlotool.spaces.model_graph import Change, ModelGraph, remove_unread, unread
from mlotool.spaces.mutators.mutator import AbstractMutator
from mlotool.spaces.shapes import Shapes
from mlotool.spaces.shared.shared_graph import SuperGraph
from mlotool.spaces.summary import NodeSummary, summaries
from mlotool.spaces.tracing import AS_LEAF, WHOLE, Whole

_PLAIN = bool | int | float | str | tuple


@target("module")
class Space(nn.Module):
    """One model of a space of models (a search space): the base model, changed as the decisions say.

    The base's forward is traced once (torch.fx), which gives a graph of its layers. Mutators change that graph, one
    after the other; each choice that they make is a decision. The result has the base's parameters under their own
    names, and new ones beside them. The initial values of new modules depend only on the seed, the place and the node.
    So two models that differ in one decision have equal initial values in everything else.

    Args:
        base: a function that makes a model, or a model, which is changed in place; in a recipe, a node with `_target_`.
        mutators: the mutators that change the graph, in this order.
        inputs: the shape of the model's input without the batch, such as [1, 8, 8]; or a list with one entry for each
            argument, such as [[64], {shape: [64], dtype: int64}].
        leaves: paths of modules that become single nodes and are not traced; `*` is any text within one name, and "."
            is the whole model. The base has to have these modules, unless it makes decisions itself.
        decisions: the values of decisions, by name; a missing one takes the first candidate. None: those of the block
            `deciding` around the call, which a run fills from the recipe's `decisions`.
        seed: seed of new modules; None: the number that torch was seeded with (`torch.initial_seed()`), in a recipe one
            per problem.
        place: the path of the space within a module, so that two spaces with one seed get different initial values; a
            recipe sets it.
        shared: whether the result holds all models at once, with shared weights: a `SharedSpace`.
        paths: for a `SharedSpace`; see there.
        statistics: for a `SharedSpace`; see there.

    Attributes:
        decisions: the decisions that this space has asked for, by name.
        changes: the changes that the mutators have made, in order.

    Raises:
        ConfigError: the base cannot be traced, or a mutator finds nothing to change.
        InfeasibleModelError: the decisions make no working model.

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
        inputs: Sequence[Any] = (),
        leaves: Sequence[str] = (),
        decisions: Mapping[str, Value] | None = None,
        seed: int | None = None,
        place: str = "",
        shared: bool = False,
        paths: Any = None,
        statistics: str = "shared",
    ) -> None:
        super().__init__()
        shapes = Shapes(inputs)
        with decisions_of(decisions) as asked:
            before = set(asked.made)
            root, anew = (base, None) if isinstance(base, nn.Module) else (base(), partial(_anew, base, asked))
            tracing.check_base(root)
            # A base that decides what it is made of may be without a part.
            if len(asked.made) == len(before):
                tracing.check_leaves(root, leaves)
            self._own_type = type(root)
            if WHOLE in leaves:
                root, graph = tracing.whole(root, len(shapes))
            else:
                self._check_names(root)
                graph = tracing.traced(root, leaves, len(shapes))
            self._arguments = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
            unread_before, used = unread(graph), _used(graph)
            with kept_buffers(root):
                modes = {module: module.training for module in root.modules()}
                start = seed_at(torch.initial_seed() if seed is None else seed, place)
                model = self._graph_kind(root, graph, shapes, start, anew)
                is_compared = not (isinstance(root, Whole) or shapes.is_without_values)
                own_result = OwnResult(root, shapes, modes) if is_compared else None
                if mutators:
                    model.without_in_place()
                if own_result is not None:
                    own_result.check(graph)
                for mutator in mutators:
                    with model.by(mutator.name):
                        mutator.mutate(model)
                remove_unread(graph, unread_before)
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
            _check_methods(type(root))
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
            _run=SuperGraph(graph),
        )
        if not model.is_rewired:
            self.__class__ = _joint(type(self), type(root))  # type: ignore[arg-type]

    def _check_names(self, base: nn.Module) -> None:
        """Refuse a base with an attribute that a space has for itself."""
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Space)]
        names = {name for kind in kinds for name in kind.__annotations__ if not hasattr(kind, name)}
        taken = sorted(name for name in names if hasattr(base, name))
        expected = "none of the names that a space uses itself"
        require(not taken, f"base: attributes of {type(base).__name__}", taken, expected, f"Rename it, or {AS_LEAF}.")

    def _decide(self, model: ModelGraph, paths: Any, statistics: str) -> None:
        """Make decisions that mutators have left open; a single model has none."""
        for key, value, default in (("statistics", statistics, "shared"), ("paths", paths, None)):
            advice = f"Write shared: true, or remove {key}."
            require(value == default, key, value, f"{default} without shared: true", advice)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for its inputs, which are given in their order or by the base's names."""
        return self._run(self, self._in_order(args, kwargs), {})

    def _in_order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return inputs in the order of the base's."""
        if not kwargs and len(args) == len(self._arguments):
            return args
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in self._arguments])
        return signature.bind(*args, **kwargs).args

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute as the base would; one that the graph may have as a fixed number is refused."""
        fixed = self.__dict__.get("_fixed", {})
        if name in fixed and value != fixed[name]:
            expected = f"{shown(fixed[name])}, its value when the base was traced"
            require(False, f"Space.{name}", value, expected, f"Make it a buffer, or {AS_LEAF}.")
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Say how to make it again: the class that it has together with its base has no name."""
        kinds = (type(self), None) if self._is_rewired else type(self).__bases__
        return _again, kinds, self.__getstate__()


_every = inspect.signature(Space.__init__)
# Of `__new__` alone Python would show what it looks at.
Space.__signature__ = _every.replace(parameters=[*_every.parameters.values()][1:])  # type: ignore[attr-defined]


@cache
def _joint(kind: type[Space], own_type: type[nn.Module]) -> type:
    """Return the class of a space whose graph is that of its base's code: what the base's class offers, it offers."""
    return new_class(kind.__name__, (kind, own_type), exec_body=lambda names: names.update(__module__=kind.__module__))


def _again(kind: type[Space], own_type: type[nn.Module] | None) -> Any:
    return object.__new__(kind if own_type is None else _joint(kind, own_type))  # type: ignore[arg-type]


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
    for part in above.split(".") if above else ():
        # A new module may lack what the one that it replaces had.
        parent = getattr(parent, part, None)
    for kept in (parent._modules, parent._parameters, parent._buffers) if isinstance(parent, nn.Module) else ():
        kept.pop(name, None)


def _check_methods(kind: type[nn.Module]) -> None:
    """Refuse a class with a `train`, a `state_dict` or the like of its own, which a changed graph would not have."""
    for name, method in inspect.getmembers(nn.Module, lambda value: isinstance(value, FunctionType)):
        is_public = name[0] != "_" or name in ("_apply", "__call__", "__setattr__")
        if is_public and name not in ("forward", "extra_repr") and getattr(kind, name) is not method:
            fault = f"base: found {kind.__name__}.{name}, which a changed graph has from torch.nn.Module"
            raise ConfigError(f"{fault}. Put it into a submodule, or {AS_LEAF}.")


@contextmanager
def kept_buffers(root: nn.Module) -> Iterator[None]:
    """Put back the values of buffers, which a forward may change in evaluation too."""
    kept = [(buffer, buffer.clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class OwnResult:
    """What a model's own forward returns on random inputs, training and not; a graph is compared with it.

    What a forward asks of its input beside the input's values, as its type, and whether it trains, was answered once,
    when the graph was made. Where that changes the result, it shows here.

    Args:
        root: the model.
        shapes: of its inputs.
        modes: whether each module trains, as the model stands.
    """

    def __init__(self, root: nn.Module, shapes: Shapes, modes: Mapping[nn.Module, bool]) -> None:
        self._root, self._kind = root, type(root).__name__
        modules = list(root.modules())
        self._modes = [modes, dict.fromkeys(modules, False), {module: i % 2 == 1 for i, module in enumerate(modules)}]
        self._device = next(root.parameters(), torch.zeros(())).device
        with self._kept_random_states():
            self._inputs = shapes.random(self._device)
        self._results = self._of(root.forward)

    def check(self, graph: fx.Graph) -> None:
        """Compare a graph with the forward that it was made from.

        Raises:
            ConfigError: the results differ.
        """
        results = self._of(lambda *inputs: SuperGraph(graph)(self._root, inputs, {}))
        if not is_unchanged(self._results, results):
            raise ConfigError(
                f"leaves: the forward of {self._kind} computes something else than its graph; expected the same steps "
                "in train and eval mode, except for training=self.training, and no state from call to call. Declare "
                f"the module that does otherwise as a leaf, or {AS_LEAF}."
            )

    def _of(self, forward: Callable[..., Any]) -> list[list[Tensor]]:
        """Return the tensors that a forward returns in different modes, and leave modules as they are."""
        results = []
        for modes in self._modes:
            with (
                tracing.kept_attributes(self._root),
                kept_buffers(self._root),
                self._kept_random_states(),
                torch.no_grad(),
            ):
                for module, is_training in modes.items():
                    module.training = is_training
                leaves = pytree.tree_leaves(forward(*(argument.clone() for argument in self._inputs)))
                results.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return results

    def _kept_random_states(self) -> Any:
        """Put back the random numbers of the devices that are used; none is seeded, as that would change others."""
        kind = self._device.type
        devices, device_type = ([], "cuda") if kind == "cpu" else ([self._device], kind)
        return torch.random.fork_rng(devices, device_type=device_type)
