"""A model's forward as a graph of layers, declared leaves and functions, each with an id that does not change."""

import inspect
import random
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mlotool.core.errors import ConfigError
from mlotool.spaces.modes import MODE, OtherStepsError, join
from mlotool.spaces.node_calls import kept_attributes
from mlotool.spaces.patterns import matches

ID, OWNER, CALLS, BLOCKS = "id", "owner", "calls", "blocks"
"""What `node.meta` holds: the node's id, the path of the module whose forward it stands in, and the calls of modules
that it stands in (`block`, and `block@1` the second time); of a new node, the paths of the modules of whose forward it
is a part now."""

WHOLE = "."
"""The leaf that is the whole model."""

_AS_MODE = "the mode of one module, as it is (training=self.training), or a condition of it"
"""How a forward may use modes."""

_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Whole(nn.Module):
    """A model as a single node: its own forward is called as it stands.

    Args:
        base: the model.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base


def whole(base: nn.Module, num_inputs: int | None) -> tuple[Whole, fx.Graph]:
    """Return a model as the only node of a graph, and the module that the graph is of."""
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in input_names(base, num_inputs)]
    graph.output(graph.call_module("base", tuple(given)))
    for node in graph.nodes:
        node.meta |= {ID: str(node.target), OWNER: ""}
    return Whole(base), graph


class _Tracer(fx.Tracer):
    """Traces what a model makes of its first inputs; other arguments of its forward have their defaults.

    Args:
        leaves: paths of modules that are not followed.
        num_inputs: how many arguments the forward is given.
        marks_modes: whether each module's `training` is a node, so that one sees what becomes of it. Where a forward
            asks for its value (`if self.training`), it is what it was.
    """

    # A decision of Python's on a buffer's value would be fixed for ever otherwise.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Sequence[str], num_inputs: int | None, *, marks_modes: bool) -> None:
        super().__init__()
        self._leaves, self._num_inputs, self._marks_modes = leaves, num_inputs, marks_modes
        self._contexts = _contexts()
        self._marks: dict[fx.Node, tuple[nn.Module, fx.Proxy, bool]] = {}

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse steps under `torch.no_grad()` and the like, which a graph does not keep."""
        if _contexts() != self._contexts:
            stack = [path for path, _ in self.module_stack.values()]
            # A layer is on the stack while its own node is made.
            path = (["", *stack[:-1]] if kind == "call_module" else ["", *stack])[-1]
            raise ConfigError(
                f"leaves: {_named(self.root, path)} takes steps under torch.no_grad(), enable_grad() or autocast, "
                f"which a graph does not keep; expected .detach(), or none of them. {_leaf(path)}"
            )
        return super().create_node(kind, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Torch's own layers are leaves, and what was declared to be one."""
        is_declared = any(matches(module_qualified_name, each) for each in self._leaves)
        return is_declared or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Make an input of each argument that is given."""
        if self._marks_modes:
            self._mark()
        names = input_names(self.root, self._num_inputs)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the value of a mode; no other is known."""
        return self._marks[obj.node][2] if obj.node in self._marks else super().to_bool(obj)

    def _mark(self) -> None:
        for path, module in self.root.named_modules():
            # One of TorchScript has its mode elsewhere.
            if "training" in vars(module):
                mark = self.create_proxy("get_attr", f"{path}.training" if path else "training", (), {})
                mark.node.meta[MODE] = path
                self._marks[mark.node] = (module, mark, module.training)
                vars(module)["training"] = mark

    def unmark(self) -> None:
        """Put back the modes of modules, but for those that the forward itself has set."""
        for module, mark, mode in self._marks.values():
            if vars(module)["training"] is mark:
                vars(module)["training"] = mode


def _contexts() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def input_names(base: nn.Module, num_inputs: int | None) -> list[str]:
    """Return the arguments of a model's forward that its graph takes.

    Args:
        base: the model.
        num_inputs: how many; None: those without a default.

    Raises:
        ConfigError: it takes less, or wants more.
    """
    every = inspect.signature(base.forward).parameters.values()
    positional = [each for each in every if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    wanted = [each.name for each in every if each.default is each.empty and each.kind is not each.VAR_POSITIONAL]
    wanted = [name for name in wanted if name not in {each.name for each in every if each.kind is each.VAR_KEYWORD}]
    count = len(wanted) if num_inputs is None else num_inputs
    names = [each.name for each in positional[:count]]
    if len(names) < count or not set(wanted) <= set(names):
        raise ConfigError(
            f"inputs: found {count}, while the forward of {type(base).__name__} takes "
            f"({', '.join(each.name for each in every)}); expected a shape for each argument that it is called with, "
            f"at least {', '.join(wanted) or 'none'}. Write one for each, in their order."
        )
    return names


def traced(base: nn.Module, leaves: Sequence[str], num_inputs: int | None = None) -> fx.Graph:
    """Return the graph of a model's forward, which is the same whether it trains or not.

    Nodes have ids in `node.meta["id"]`: the path of a layer, a parameter or a leaf (`stages.0.norm`); for a function
    the path of the module whose forward calls it, and its name (`stages.0:relu`). Where one occurs again, a number
    follows (`stages.0:relu#2`). A module's `training`, which functions take as a value, stays what it is at each
    call.

    Args:
        base: the model.
        leaves: paths of modules that are one node each, whatever their forward does; `*` is any text within one name.
        num_inputs: how many arguments it is called with; None: those of its forward that have no default.

    Raises:
        ConfigError: the forward cannot be followed; with the module, the line, and the leaf that would help.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [node.meta["id"] for node in traced(net, ()).nodes]
        ['input', '0', '1', 'output']
    """
    modes = {module: module.training for module in base.modules()}
    is_mixed = len(set(modes.values())) > 1
    graphs, marked = [], []
    try:
        for mode in (True, False):
            base.train(mode)
            is_mixed |= any(module.training is not mode for module in modes)
            graphs.append(_traced(base, leaves, num_inputs))
        if is_mixed or str(graphs[0]) != str(graphs[1]):
            for mode in (True, False):
                base.train(mode)
                marked.append(_traced(base, leaves, num_inputs, marks_modes=True))
        if is_mixed:
            # What two modes decide together shows in neither: `self.training and not self.norm.training`.
            _set_modes(modes)
            marked.append(_traced(base, leaves, num_inputs, marks_modes=True))
    finally:
        _set_modes(modes)
    try:
        join(graphs[0], graphs[1], marked)
    except OtherStepsError as error:
        raise _mode_decides(base, error.node) from None
    _name(graphs[0])
    return graphs[0]


def _set_modes(modes: Mapping[nn.Module, bool]) -> None:
    for module, mode in modes.items():
        module.training = mode


def _traced(base: nn.Module, leaves: Sequence[str], num_inputs: int | None, *, marks_modes: bool = False) -> fx.Graph:
    tracer = _Tracer(leaves, num_inputs, marks_modes=marks_modes)
    expected = _AS_MODE if marks_modes else "steps that depend on no value and no shape of a tensor"
    before = {path: dict(vars(module)) for path, module in base.named_modules()}
    filled = {path: _contents(module) for path, module in base.named_modules()}
    random_states = _random_states()
    with kept_attributes(base):
        try:
            graph = tracer.trace(base)
        except ConfigError:
            raise
        except Exception as error:
            raise _untraceable(base, tracer, error, expected) from error
        tracer.unmark()
        for path, module in base.named_modules():
            for name, value in vars(module).items():
                if _is_set(name, value, before[path]) or filled[path].get(name) != _ids(value):
                    raise ConfigError(
                        f"leaves: {_named(base, path)} sets its own attribute '{name}' in forward, which a graph does "
                        f"not do; expected a forward that returns what it computes. {_leaf(path)}"
                    )
    if _random_states() != random_states:
        raise ConfigError(
            f"leaves: the forward of {_named(base, '')} draws random numbers that a graph would draw once and for all; "
            "expected torch's functions of its tensors, such as F.dropout or torch.rand_like. Declare the module that "
            f"draws them as a leaf, or write leaves: ['{WHOLE}'], which makes one node of the whole model."
        )
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {"": ("", None)}
        node.meta |= {OWNER: list(stack.values())[-1][0], CALLS: tuple(stack)}
        if node.op == "get_attr" and node.target.startswith("_tensor_constant") and node.target not in before[""]:
            path = node.meta[OWNER]
            raise ConfigError(
                f"leaves: {_named(base, path)} makes a tensor of constants in forward, which a graph would have once "
                f"and for all, on one device; expected a buffer: self.register_buffer(..). {_leaf(path)}"
            )
    return graph


def _is_set(name: str, value: Any, before: Mapping[str, Any]) -> bool:
    """Say whether a forward has set an attribute, other than to what it was; new ones with `_` may be torch.fx's."""
    if name not in before:
        return isinstance(value, fx.Proxy) or not name.startswith("_")
    is_plain = isinstance(value, bool | int | float | str | None)
    return value is not before[name] and not (is_plain and type(value) is type(before[name]) and value == before[name])


def _contents(module: nn.Module) -> dict[str, list[int] | None]:
    return {name: _ids(value) for name, value in vars(module).items()}


def _ids(value: Any) -> list[int] | None:
    """Return what tells whether a list or the like has been filled; None for what is none."""
    if not isinstance(value, list | dict | set):
        return None
    return [id(each) for each in ([*value, *value.values()] if isinstance(value, dict) else value)]


def _random_states() -> tuple[Any, ...]:
    with unset_fake_temporarily():
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(np.random.get_state())


def _name(graph: fx.Graph) -> None:
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        name = _plain_id(node)
        counts[name] += 1
        node.meta[ID] = name if counts[name] == 1 else f"{name}#{counts[name]}"


def _plain_id(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr", "placeholder", "output"):
        return str(node.target)
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{node.meta[OWNER]}:{target}"


def _untraceable(base: nn.Module, tracer: fx.Tracer, error: Exception, expected: str) -> ConfigError:
    stack = [path for path, _ in tracer.module_stack.values()]
    path = stack[-1] if stack else ""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OUTSIDE)]
    frames = [each for each in frames if each.line]
    where = f" at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
    return ConfigError(
        f"leaves: the forward of {_named(base, path)} cannot be followed{where} ({reason}); expected {expected}. "
        f"{_leaf(path)}"
    )


def _mode_decides(base: nn.Module, node: fx.Node) -> ConfigError:
    # A layer is among its own calls.
    calls = node.meta[CALLS][: -1 if node.op == "call_module" else None]
    path = calls[-1].partition("@")[0] if calls else ""
    return ConfigError(
        f"leaves: {_named(base, path)} takes other steps in training than in evaluation (near '{_plain_id(node)}'); "
        "expected the same ones, but for what functions take as the mode of one module (training=self.training). "
        f"{_leaf(path)}"
    )


def _named(base: nn.Module, path: str) -> str:
    kind = type(base.get_submodule(path)).__name__
    return f"'{path}' ({kind})" if path else f"the model itself ({kind})"


def _leaf(path: str) -> str:
    if path:
        return f"Write leaves: ['{path}'], which makes one node of it, or its path with * for all of its kind."
    return (
        f"Put that step into a module of its own and declare it, or write leaves: ['{WHOLE}'], which makes one node of "
        "the whole model."
    )
