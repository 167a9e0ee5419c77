"""A space trained as one network: every candidate once, and a path through them for each mini-batch."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from torch import Tensor, fx

from mlotool.core.errors import ConfigError
from mlotool.core.messages import shown
from mlotool.spaces.decisions import Value, choose
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.shared.path_counts import COUNTS, PathCounts
from mlotool.spaces.shared.path_statistics import PathStatistics
from mlotool.spaces.shared.path_table import Path, SharedDecision, path_of
from mlotool.spaces.shared.shared_graph import SharedGraph
from mlotool.spaces.shared.super_graph import Mixture, SuperGraph
from mlotool.spaces.shared.unsound import Unsound
from mlotool.spaces.space import Space

PATH = "path"


class SharedSpace(Space):
    """All models of a space as one network that shares their weights.

    Each candidate of each place is there once, with the values that it has in a `Space`. A call runs one path through
    it, which is a model of the space, or a mixture of several candidates at some places.

    Args:
        base: as for `Space`.
        mutators: as for `Space`.
        inputs: as for `Space`.
        leaves: as for `Space`.
        decisions: as for `Space`.
        seed: as for `Space`.
        place: as for `Space`.
        paths: an `AbstractPaths`, which draws a path for each call; None: the one path that `decisions` makes.
        statistics: of layers that keep running ones (BatchNorm): "shared", those of a candidate, over all paths; or
            "path", for at most 256 paths: each path has its own, which are those of a model that is trained on the
            same mini-batches alone. A mixture is no path, and has a candidate's.

    Attributes:
        table: the decisions that its models ask for.
        counts: (candidates,), how many training steps have computed each; `path_counts` has them by name.
        runs_in_part: True: over ranks, a parameter's gradient is the mean over those whose path has used it.

    Raises:
        ConfigError: a candidate does not fit, a mutator decides in another way than by `graph.alternatives`, or one
            looks for places that only some models have.

    Source: Zhang et al. 2020, Retiarii, section 5 (weight sharing); Guo et al. 2020 (arXiv 1904.00420).

    Example:
        >>> from torch import nn
        >>> from mlotool.spaces import Operator
        >>> def base():
        ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
        >>> space = SharedSpace(base, [activation], inputs=[4])
        >>> space(torch.zeros(3, 4), path={"activation_0": "tanh"}).shape
        torch.Size([3, 2])
    """

    _graph_kind = SharedGraph
    runs_in_part = True

    table: tuple[SharedDecision, ...]
    _path: Path | None
    _origins: Mapping[str, str]
    _counting: PathCounts
    _statistics: PathStatistics | None
    _unsound: Unsound

    def _decide(self, model: ModelGraph, paths: Any, statistics: str) -> None:
        assert isinstance(model, SharedGraph)
        if PATH in self._arguments:
            raise ConfigError(
                f"base: found an input '{PATH}' of its forward, by which a shared space is given its path; expected "
                "another name. Rename it."
            )
        if statistics not in ("shared", "path"):
            raise ConfigError(f"statistics: found {shown(statistics)}; expected shared or path. Correct it.")
        if COUNTS in {**model.root._buffers, **model.root._parameters, **model.root._modules}:
            raise ConfigError(
                f"base: found its own '{COUNTS}', where a shared space counts what it trains; expected another name. "
                "Rename it."
            )
        model.is_rewired = True
        table = model.table.decisions
        path = None if paths is not None else path_of(table, lambda each: choose(each.name, each.candidates))
        if paths is not None:
            paths.begin(table)
            model.root.add_module("paths", paths)
        called = [str(each.target) for each in model.graph.nodes if each.op == "call_module"]
        origins = {each: model.modules.name_in_space(each) for each in called}
        own = PathStatistics(model.root, table) if statistics == "path" else None
        made = {"_counting": PathCounts(model.root, table), "_statistics": own, "_unsound": Unsound()}
        self.__dict__ |= {"table": table, "_path": path, "_origins": origins, **made}

    def _function_of(self, graph: fx.Graph) -> SuperGraph:
        return SuperGraph(graph)

    def forward(self, *args: Any, path: Mapping[str, Value | Mixture | Tensor] | None = None, **kwargs: Any) -> Any:
        """Return what a model of the space makes of its inputs.

        Args:
            args: inputs, in their order.
            path: by decision, the name of a candidate; a tensor with a weight for each candidate, whose results are
                added up; or a `Mixture` of some. None: what `paths` draws.
            kwargs: inputs, by their names.
        """
        if kwargs or len(args) != len(self._arguments):
            args = self._in_order(args, kwargs)
        choices = self._drawn(path)
        own = self._statistics
        if own is None or any(isinstance(each, Mixture) for each in choices.values()):
            result = self._run(self, args, choices)
        else:
            with own.of(self, choices):
                result = self._run(self, args, choices)
        if self.training:
            self._counting.add(self.counts, self._run.taken(choices))
            self._unsound.look(result, self._run, self, args, choices)
        return result

    def part_of_call(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
        """Return which path a call runs, drawn where it gives none, and what that reads.

        Args:
            arguments: the call's keywords.

        Returns:
            The keywords with which a call runs this path, and the names of the parameters that it reads.
        """
        choices = self._drawn(arguments.get(PATH))
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        read: set[str] = set()
        for kind, target in self._run.read(choices):
            if kind == "call_module":
                read.update(names[id(each)] for each in self.get_submodule(target).parameters())
            else:
                found = attrgetter(target)(self)
                read.update({names[id(found)]} if id(found) in names else ())
        return {**arguments, PATH: choices}, frozenset(read)

    @property
    def path_counts(self) -> Mapping[str, Mapping[Value, int]]:
        """How many training steps have computed each candidate, by decision; a mixture computes all of its own."""
        return self._counting.by_candidate(self.counts)

    def named_counts(self, counts: Tensor) -> Mapping[str, Mapping[Value, int]]:
        """Return counts like its own by decision and candidate."""
        return self._counting.by_candidate(counts)

    @property
    def has_path_statistics(self) -> bool:
        """Whether each path has running statistics of its own."""
        return self._statistics is not None

    @property
    def has_paths(self) -> bool:
        """Whether it draws a path for a call that gives none."""
        return self._path is None

    @property
    def draws(self) -> bool:
        """Whether it has `paths`, or was given several candidates of a decision, so that each is to be drawn."""
        return self.has_paths or any(
            sum(1 for count in each.values() if count) > 1 for each in self.path_counts.values()
        )

    @property
    def differing(self) -> frozenset[str]:
        """The decisions whose candidates compute something else."""
        return self._run.decisions

    @property
    def unsound(self) -> str | None:
        """In a whole sentence, on which path a result was first not finite, and of what; None where none was."""
        return self._unsound.found

    def state_of(self, path: Path) -> dict[str, Tensor]:
        """Return the state of one model, by the names that a `Space` with these decisions has.

        Args:
            path: a candidate for each decision that the model asks for.
        """
        found: dict[str, Tensor] = {}
        own = self.state_dict()
        for kind, target in self._run.read(path):
            if kind == "call_module":
                below = self.get_submodule(target).state_dict()
                found |= {f"{self._origins[target]}.{name}": each for name, each in below.items()}
            elif target in own:
                found[target] = own[target]
        return found if self._statistics is None else self._statistics.state(found, path)

    def _drawn(self, path: Mapping[str, Any] | None) -> dict[str, Value | Mixture]:
        if path is None:
            path = self._path if self._path is not None else self.paths(self.table)
        return self._choices(path)

    def _choices(self, path: Mapping[str, Any]) -> dict[str, Value | Mixture]:
        candidates = {each.name: each.candidates for each in self.table}
        found: dict[str, Value | Mixture] = {}
        for name, each in path.items():
            if name not in candidates:
                raise ConfigError(
                    f"path: found the decision {shown(name)}; expected one of {', '.join(candidates)}. Correct it."
                )
            if isinstance(each, Tensor):
                each = Mixture(candidates[name], each)
            if isinstance(each, Mixture) and each.weights.shape != (len(each.candidates),):
                raise ConfigError(
                    f"path: found weights of shape {tuple(each.weights.shape)} for the decision '{name}'; expected "
                    f"({len(each.candidates)},), one for each of {', '.join(map(str, each.candidates))}. Correct it."
                )
            is_one = isinstance(each, Mixture) and each.taken is not None and not each.weights.requires_grad
            found[name] = each.taken if is_one else each
        return found
