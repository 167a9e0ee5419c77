"""A model's forward as a graph of layers, declared leaves and functions, each with an id that does not change."""

import inspect
import random
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mlotool.core.errors import ConfigError
from mlotool.spaces.node_calls import kept_attributes
from mlotool.spaces.patterns import matches

ID, OWNER, CALLS, BLOCKS = "id", "owner", "calls", "blocks"
"""What `node.meta` holds: the node's id, the path of the module whose forward it stands in, and the calls of modules
that it stands in (`block`, and `block@1` the second time); of a new node, the paths of the modules of whose forward it
is a part now."""

WHOLE = "."
"""The leaf that is the whole model."""

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
    """Traces what a model makes of its first inputs; other arguments of its forward have their defaults."""

    # A decision of Python's on a buffer's value would be fixed for ever otherwise.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Sequence[str], num_inputs: int | None) -> None:
        super().__init__()
        self._leaves, self._num_inputs = leaves, num_inputs
        self._contexts = _contexts()

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
        names = input_names(self.root, self._num_inputs)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]


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
    follows (`stages.0:relu#2`). A layer's `training`, which torch's functions take as a value, stays what it is at
    each call.

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
    try:
        graphs = []
        for mode in (True, False):
            base.train(mode)
            graphs.append(_traced(base, leaves, num_inputs))
    finally:
        for module, mode in modes.items():
            module.training = mode
    training, evaluating = graphs
    _join(base, training, evaluating)
    _name(training)
    return training


def _traced(base: nn.Module, leaves: Sequence[str], num_inputs: int | None) -> fx.Graph:
    tracer = _Tracer(leaves, num_inputs)
    before = {path: dict(vars(module)) for path, module in base.named_modules()}
    filled = {path: _contents(module) for path, module in base.named_modules()}
    random_states = _random_states()
    with kept_attributes(base):
        try:
            graph = tracer.trace(base)
        except ConfigError:
            raise
        except Exception as error:
            raise _untraceable(base, tracer, error) from error
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


def _join(base: nn.Module, training: fx.Graph, evaluating: fx.Graph) -> None:
    """Let values that are the mode of a layer follow that layer; refuse graphs that differ in anything else."""
    if len(training.nodes) != len(evaluating.nodes):
        raise _mode_decides(base, _first_difference(training, evaluating))
    for node, other in zip(list(training.nodes), evaluating.nodes, strict=True):
        mode = cache(partial(_mode_of, training, node))
        try:
            if (node.op, str(node.target)) != (other.op, str(other.target)):
                raise ValueError
            arguments = _joined((node.args, dict(node.kwargs)), (other.args, dict(other.kwargs)), mode)
        except ValueError:
            raise _mode_decides(base, node) from None
        node.args, node.kwargs = arguments


def _joined(first: Any, second: Any, mode: Callable[[], fx.Node]) -> Any:
    """Return what an argument is in both modes; a ValueError where it differs in more than in being the mode."""
    if isinstance(first, fx.Node) and isinstance(second, fx.Node) and first.name == second.name:
        return first
    if first is True and second is False:
        return mode()
    if type(first) is not type(second) or isinstance(first, fx.Node):
        raise ValueError
    if isinstance(first, slice):
        parts = [(first.start, second.start), (first.stop, second.stop), (first.step, second.step)]
        return slice(*(_joined(*part, mode) for part in parts))
    if isinstance(first, Mapping):
        if first.keys() != second.keys():
            raise ValueError
        return {key: _joined(value, second[key], mode) for key, value in first.items()}
    if isinstance(first, list | tuple):
        items = [_joined(*pair, mode) for pair in zip(first, second, strict=True)]
        return items if isinstance(first, list) else tuple(items)
    if first != second:
        raise ValueError
    return first


def _mode_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Return a node that is whether the module that a node stands in trains."""
    owner = node.meta[OWNER]
    with graph.inserting_before(node):
        mode = graph.create_node("get_attr", f"{owner}.training" if owner else "training")
    mode.meta[OWNER] = owner
    return mode


def _first_difference(one: fx.Graph, other: fx.Graph) -> fx.Node:
    pairs = zip(one.nodes, other.nodes, strict=False)
    return next((a for a, b in pairs if (a.op, str(a.target)) != (b.op, str(b.target))), list(one.nodes)[-1])


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


def _untraceable(base: nn.Module, tracer: fx.Tracer, error: Exception) -> ConfigError:
    stack = [path for path, _ in tracer.module_stack.values()]
    path = stack[-1] if stack else ""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OUTSIDE)]
    frames = [each for each in frames if each.line]
    where = f" at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
    return ConfigError(
        f"leaves: the forward of {_named(base, path)} cannot be followed{where} ({reason}); expected steps that depend "
        f"on no value and no shape of a tensor. {_leaf(path)}"
    )


def _mode_decides(base: nn.Module, node: fx.Node) -> ConfigError:
    path = node.meta[OWNER]
    return ConfigError(
        f"leaves: {_named(base, path)} takes other steps in training than in evaluation (near '{_plain_id(node)}'); "
        f"expected the same ones, but for a mode that torch's functions take. {_leaf(path)}"
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
