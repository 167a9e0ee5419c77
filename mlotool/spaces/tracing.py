"""A model's forward as a graph of layers, declared leaves and functions, each with an id that does not change."""

import copy
import inspect
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.core.private import MODULE_HOOKS, unset_fake_temporarily
from mlotool.core.random_stream import outside_torch

ID, OWNER, CALLS, BLOCKS = "id", "owner", "calls", "blocks"
"""Keys of `node.meta`: the node's id, the path of the module whose forward it stands in, and the calls of modules
that it stands in (`block`, and `block@1` the second time); of a new node, the paths of the modules of whose forward it
is a part now."""

# Key of `node.meta` of a node that stands for a mode: the path of the module whose mode it is.
MODE = "mode"

# The leaf that is the whole model.
WHOLE = "."

# The advice that helps where a forward cannot be followed.
AS_LEAF = f"write leaves: ['{WHOLE}'], which makes one node of the whole model"

_OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def matches(path: str, pattern: str) -> bool:
    """Say whether a path matches a pattern, name by name.

    Args:
        path: names with dots between them.
        pattern: the same, with `*` for any text within one name; `**` is any number of names.

    Example:
        >>> matches("blocks.0.norm", "blocks.*.norm"), matches("blocks.0.norm", "blocks.*"), matches("a.b.c", "**.c")
        (True, False, True)
    """
    names = path.split(".")
    # reached[i]: the patterns so far match the first i names.
    reached = [True] + [False] * len(names)
    for part in pattern.split("."):
        if part == "**":
            first = reached.index(True) if True in reached else len(reached)
            reached = [index >= first for index in range(len(reached))]
        else:
            reached = [False] + [reached[i] and fnmatchcase(name, part) for i, name in enumerate(names)]
    return reached[-1]


def node_id(node: fx.Node) -> str:
    """Return the id of a node."""
    name = node.meta[ID]
    assert isinstance(name, str)
    return name


def kind_of(node: fx.Node, module: nn.Module | None) -> str:
    """Return the name of a node's class, function or operation."""
    if module is not None:
        return type(module).__name__
    if node.op in ("placeholder", "output", "get_attr"):
        return node.op
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def forward_of(node: fx.Node) -> str:
    """Return the path of the module in whose forward a node stands."""
    owner = str(node.meta.get(OWNER, ""))
    # A layer is among its own calls.
    return owner.rpartition(".")[0] if node.op == "call_module" else owner


def nodes_in(arguments: Any) -> list[fx.Node]:
    """Return the nodes in what a node is called with, as often as they are there."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, nodes.append)
    return nodes


def carried_out(kind: str, target: Any, root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operation of a graph.

    Args:
        kind: as `op` of a node.
        target: as that of a node.
        root: the model.
        args: by position.
        kwargs: by name.
    """
    if kind == "output":
        return args[0]
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    called = target if kind == "call_function" else attrgetter(target)(root)
    return called if kind == "get_attr" else called(*args, **kwargs)


def last_of(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node:
    """Return the one of some nodes that is computed last."""
    wanted = set(nodes)
    return next(node for node in reversed(graph.nodes) if node in wanted)


class Whole(nn.Module):
    """A model as a single node: its own forward is called as it stands. It has the attributes of the model.

    Args:
        base: the model.
    """

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def __getattr__(self, name: str) -> Any:
        """Return what the model has."""
        if name in self._modules or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(self.base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the model has in the model."""
        base = self.__dict__.get("_modules", {}).get("base")
        if base is not None and name not in self.__dict__ and hasattr(base, name):
            setattr(base, name, value)
        else:
            super().__setattr__(name, value)


def whole(base: nn.Module, num_inputs: int | None) -> tuple[Whole, fx.Graph]:
    """Return a model as the only node of a graph, and the module that the graph is of."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in input_names(base, num_inputs)]
    graph.output(graph.call_module("base", tuple(inputs)))
    for node in graph.nodes:
        node.meta |= {ID: str(node.target), OWNER: ""}
    return Whole(base), graph


def check_base(base: nn.Module) -> None:
    """Refuse what is no module, and modules whose parameters have no shape yet."""
    require(isinstance(base, nn.Module), "base", base, "a module, or a function that makes one")
    for path, module in base.named_modules():
        is_known = not any(map(is_lazy, module.parameters(recurse=False)))
        advice = f"Write {type(module).__name__.removeprefix('Lazy')} with its sizes."
        require(is_known, f"base: '{path}'", module, "parameters whose shape is known", advice)


def check_leaves(base: nn.Module, leaves: Sequence[str]) -> None:
    """Refuse leaves that are none of a base's modules; a part that a base is without (None, an empty list) is one."""
    paths = [path for path, _ in base.named_modules() if path]
    for pattern in leaves:
        names = list(takewhile(lambda name: not set(name) & set("*?["), pattern.split(".")))
        present: Any = base if names or any(matches(path, pattern) for path in paths) else pattern
        for name in names if pattern != WHOLE else ():
            present = getattr(present, name, pattern)
        some = ", ".join(paths[:8]) + (", .." if len(paths) > 8 else "")
        expected = f"paths of modules of {type(base).__name__}, such as {some or WHOLE}"
        advice = f"{did_you_mean(pattern, paths)} Correct the path, or remove it.".strip()
        require(present is None or isinstance(present, nn.Module), "leaves", pattern, expected, advice)


def input_names(base: nn.Module, num_inputs: int | None) -> list[str]:
    """Return the arguments of a model's forward that its graph takes.

    Args:
        base: the model.
        num_inputs: how many; None: those without a default.

    Raises:
        ConfigError: it takes less, or wants more.
    """
    signature = inspect.signature(base.forward)
    arguments = signature.parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = [formal.name for formal in arguments if formal.default is formal.empty and formal.kind not in variable]
    count = len(wanted) if num_inputs is None else num_inputs
    try:
        names = list(signature.bind(*[None] * count).arguments)
    except TypeError:
        names = []
    is_right, advice = len(names) == count and set(wanted) <= set(names), "Write a shape for each argument in order."
    expected = f"those of the forward of {type(base).__name__}, ({', '.join(signature.parameters)})"
    require(is_right, "inputs", count, expected, advice)
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
        ConfigError: the forward cannot be followed; with the module, the line, and the leaf that would help. Or a
            module whose forward is followed has hooks, which would not be called.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> [node.meta["id"] for node in traced(net, ()).nodes]
        ['input', '0', '1', 'output']
    """
    modes = {module: module.training for module in base.modules()}
    try:
        graph = _traced(base.train(), leaves, num_inputs)
    finally:
        for module, mode in modes.items():
            module.training = mode
    _check_hooks(base, graph)
    _put_modes(graph)
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        name = _plain_id(node)
        counts[name] += 1
        node.meta[ID] = name if counts[name] == 1 else f"{name}#{counts[name]}"
    return graph


@contextmanager
def kept_attributes(root: nn.Module) -> Iterator[None]:
    """Put back what is set on modules, and the contents of their lists and dicts: tables that a first call makes."""
    kept: dict[int, tuple[Any, Any]] = {}
    for module in root.modules():
        _gather(vars(module), kept)
    try:
        yield
    finally:
        for container, contents in kept.values():
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(contents)


def _gather(value: Any, kept: dict[int, tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list | set | deque) and id(value) not in kept:
        kept[id(value)] = (value, copy.copy(value))
    elif not isinstance(value, tuple):
        return
    for entry in list(value.values() if isinstance(value, dict) else value):
        _gather(entry, kept)


class _ModeTracer(fx.Tracer):
    """Traces what a model makes of its first inputs; other arguments of its forward have their defaults.

    Each module's `training` is a node, so that one sees what becomes of it. Where a forward asks for its value
    (`if self.training`), it is what it was.

    Args:
        leaves: paths of modules that are not followed.
        num_inputs: how many arguments the forward is given.
    """

    # A decision of Python's on a buffer's value would be fixed for ever otherwise.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Sequence[str], num_inputs: int | None) -> None:
        super().__init__()
        self._leaves, self._num_inputs = leaves, num_inputs
        self._contexts = _contexts()
        self.modes: dict[fx.Node, bool] = {}

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Refuse steps under `torch.no_grad()` and the like, which a graph does not keep."""
        if _contexts() != self._contexts:
            stack = [path for path, _ in self.module_stack.values()]
            # A layer is on the stack while its own node is made.
            path = (["", *stack[:-1]] if kind == "call_module" else ["", *stack])[-1]
            raise _lost(self.root, path, "takes steps under torch.no_grad(), enable_grad() or autocast", ".detach()")
        return super().create_node(kind, *args, **kwargs)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Torch's own layers are leaves, and what was declared to be one."""
        is_declared = any(matches(module_qualified_name, leaf) for leaf in self._leaves)
        return is_declared or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Make an input of each argument that is given, and a node of each mode."""
        for path, module in self.root.named_modules():
            # One of TorchScript has its mode elsewhere.
            if "training" in vars(module):
                mode = self.create_proxy("get_attr", f"{path}.training" if path else "training", (), {})
                mode.node.meta[MODE] = path
                self.modes[mode.node] = module.training
                vars(module)["training"] = mode
        names = input_names(self.root, self._num_inputs)
        return root_fn, [self.root, *(self.create_proxy("placeholder", name, (), {}) for name in names)]

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return the value of a mode; no other is known."""
        return self.modes[obj.node] if obj.node in self.modes else super().to_bool(obj)


def _contexts() -> tuple[bool, ...]:
    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


def _traced(base: nn.Module, leaves: Sequence[str], num_inputs: int | None) -> fx.Graph:
    tracer, random_states = _ModeTracer(leaves, num_inputs), _random_states()
    before = {path: _contents(vars(module)) for path, module in base.named_modules()}
    with kept_attributes(base):
        try:
            graph = tracer.trace(base)
        except ConfigError:
            raise
        except Exception as error:
            raise _untraceable(base, tracer, error) from error
        for path, module in base.named_modules():
            for name, value in _contents(vars(module)).items():
                # New names with `_` may be torch.fx's.
                if value not in (before[path].get(name, value if name[0] == "_" else None), f"mode of {path}"):
                    raise _lost(base, path, f"sets its own attribute '{name}' in forward", "returning what it computes")
    if _random_states() != random_states:
        fault = (
            f"leaves: the forward of {_named(base, '')} draws random numbers, which its graph would keep as constants"
        )
        advice = "Draw them by functions of its tensors, such as torch.rand_like, declare the module as a leaf"
        raise ConfigError(f"{fault}. {advice}, or {AS_LEAF}.")
    own_names = vars(base)
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {"": ("", None)}
        node.meta |= {OWNER: list(stack.values())[-1][0], CALLS: tuple(stack)}
        if node.op == "get_attr" and node.target.startswith("_tensor_constant") and node.target not in own_names:
            raise _lost(base, node.meta[OWNER], "makes a tensor of constants in forward", "self.register_buffer(..)")
    return graph


def _contents(value: Any) -> Any:
    """Return what tells whether a value is another one, or holds other entries; of a dict, by its keys."""
    if isinstance(value, dict):
        return {key: _contents(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | deque):
        return [_contents(entry) for entry in value]
    if isinstance(value, fx.Proxy) and MODE in value.node.meta:
        return f"mode of {value.node.meta[MODE]}"
    return (type(value), value) if isinstance(value, bool | int | float | str | None) else id(value)


def _random_states() -> tuple[Any, ...]:
    with unset_fake_temporarily():
        return torch.get_rng_state().numpy().tobytes(), outside_torch()


def _check_hooks(base: nn.Module, graph: fx.Graph) -> None:
    """Refuse hooks of modules whose forward a graph has followed; those of the model itself a space takes over."""
    called = tuple(f"{node.target}." for node in graph.nodes if node.op == "call_module")
    for path, module in base.named_modules():
        if path and not f"{path}.".startswith(called) and any(getattr(module, name) for name in MODULE_HOOKS):
            fault = f"leaves: found hooks of '{path}', whose forward is followed, so that they would not be called"
            raise ConfigError(f"{fault}. Write leaves: ['{path}'].")


def _put_modes(graph: fx.Graph) -> None:
    """Put the mode of a module in front of each node that reads it."""
    for mark in [node for node in graph.nodes if MODE in node.meta]:
        for reader in list(mark.users):
            with graph.inserting_before(reader):
                mode = graph.create_node("get_attr", str(mark.target))
            mode.meta.update(reader.meta)
            reader.replace_input_with(mark, mode)
        graph.erase_node(mark)


def _plain_id(node: fx.Node) -> str:
    if node.op in ("call_module", "get_attr", "placeholder", "output"):
        return str(node.target)
    return f"{node.meta[OWNER]}:{kind_of(node, None)}"


def _untraceable(base: nn.Module, tracer: fx.Tracer, error: Exception) -> ConfigError:
    stack = [path for path, _ in tracer.module_stack.values()]
    path = stack[-1] if stack else ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OUTSIDE)]
    frames = [frame for frame in frames if frame.line]
    where = f" at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""
    reason = (str(error).splitlines() or [type(error).__name__])[0].split(". ")[0]
    expected = "steps that depend on no value and no shape of a tensor, and on modes only as training=self.training"
    fault = f"leaves: the forward of {_named(base, path)} cannot be followed{where} ({reason})"
    return ConfigError(f"{fault}; expected {expected}. {_leaf(path)}")


def _lost(base: Any, path: str, what: str, expected: str) -> ConfigError:
    fault = f"leaves: {_named(base, path)} {what}, which a graph does not keep"
    return ConfigError(f"{fault}; expected {expected}. {_leaf(path)}")


def _named(base: nn.Module, path: str) -> str:
    kind = type(base.get_submodule(path)).__name__
    return f"'{path}' ({kind})" if path else f"the model itself ({kind})"


def _leaf(path: str) -> str:
    if path:
        return f"Write leaves: ['{path}'], which makes one node of it, or its path with * for all of its kind."
    return f"Put that step into a module of its own and declare it, or {AS_LEAF}."
