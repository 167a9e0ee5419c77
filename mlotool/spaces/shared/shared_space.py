"""A space that is trained as one network with shared weights (one-shot), and the distributions over its candidates."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlotool.core.arguments import require
from mlotool.core.private import NormBase as _NormBase
from mlotool.core.settings import target
from mlotool.spaces.decisions import Value, choose, deciding
from mlotool.spaces.model_graph import ModelGraph
from mlotool.spaces.shared import shared_graph
from mlotool.spaces.shared.shared_graph import AbstractPaths, Mixture, Path, SharedDecision, path_of
from mlotool.spaces.space import Space

# Of a space whose paths have statistics of their own, at most.
MAX_PATHS = 256

# Begins the name of a buffer that has a row for each path.
MARK = "path_"

NAMES = ("running_mean", "running_var", "num_batches_tracked")


class PathStatistics:
    """Puts a path's running statistics into the places of the layers', for a call.

    Beside a layer's own buffers there are such of shape (paths, ..); a call moves the row of its path. A mixture is no
    path: it has the layers' own buffers, which only mixtures move.

    Args:
        root: the space, with all layers that keep running statistics.
        decisions: of the space.

    Raises:
        ConfigError: it has more than `MAX_PATHS` paths.

    Cost: the memory of the statistics of each layer, once for each path.
    """

    def __init__(self, root: nn.Module, decisions: Sequence[SharedDecision]) -> None:
        self._decisions = tuple(decisions)
        paths = paths_of(decisions)
        self._rows = {tuple(path.items()): number for number, path in enumerate(paths)}
        for layer in layers_of(root):
            for name in NAMES:
                own = layer._buffers[name]
                if own is not None:
                    layer.register_buffer(MARK + name, own.expand(len(paths), *own.shape).clone())

    def row(self, path: Mapping[str, object]) -> int:
        """Return the number of a path."""
        asked = path_of(self._decisions, lambda decision: path[decision.name])  # type: ignore[arg-type,return-value]
        return self._rows[tuple(asked.items())]

    @contextmanager
    def of(self, root: nn.Module, path: Mapping[str, object]) -> Iterator[None]:
        """Let the layers have the statistics of a path, which their calls move."""
        row = self.row(path)
        # What is in a buffer's place now: an evaluation may have put a copy there.
        holders = [layer._buffers for layer in layers_of(root)]
        own = [{name: holder[name] for name in NAMES} for holder in holders]
        try:
            for holder in holders:
                rows = {name: holder.get(MARK + name) for name in NAMES}
                holder.update({name: value[row] for name, value in rows.items() if value is not None})
            yield
        finally:
            for holder, before in zip(holders, own, strict=True):
                holder.update(before)

    def state(self, state: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
        """Return a state with the statistics of one path, under the names that a layer of one model has."""
        row, of_path = self.row(path), dict(state)
        for name, rows in state.items():
            above, mark, last = name.rpartition(MARK)
            if mark and last in NAMES and above[-1:] in ("", "."):
                del of_path[name]
                of_path[f"{above}{last}"] = rows[row]
        return of_path


def layers_of(root: nn.Module) -> list[_NormBase]:
    """Return the layers that keep running statistics, as BatchNorm does."""
    return [module for module in root.modules() if isinstance(module, _NormBase) and module.running_mean is not None]


def paths_of(decisions: Sequence[SharedDecision]) -> list[dict[str, Value]]:
    """Return all paths.

    Raises:
        ConfigError: there are more than `MAX_PATHS`.

    Example:
        >>> paths_of([SharedDecision("kernel", ("k3", "k5"))])
        [{'kernel': 'k3'}, {'kernel': 'k5'}]
    """
    paths: list[dict[str, Value]] = [{}]
    for decision in decisions:
        paths = [
            longer
            for path in paths
            for longer in (
                [{**path, decision.name: value} for value in decision.candidates] if decision.is_asked(path) else [path]
            )
        ]
        expected = f"shared in a space of more than {MAX_PATHS} paths, as each has its own"
        advice = "Write statistics: shared, and take them anew before an evaluation: evaluate.recalibrate."
        require(len(paths) <= MAX_PATHS, "statistics", "path", expected, advice)
    return paths


# The buffer of a space that counts what training steps compute.
# It moves in live training steps alone: all other evaluations of a program have copies of the buffers.
COUNTS = "counts"

PATH = "path"


class SharedSpace(Space, is_shared=True):
    """All models of a space as one network with shared weights (a supernet).

    Each candidate of each place exists once, with the initial values that it has in a `Space`. A call computes one path
    through the network, which is one model of the space, or a mixture of several candidates at some places.

    Args:
        base: as for `Space`.
        mutators: as for `Space`.
        inputs: as for `Space`.
        leaves: as for `Space`.
        decisions: as for `Space`.
        seed: as for `Space`.
        place: as for `Space`.
        paths: an `AbstractPaths`, which draws a path for each call; None: the one path that `decisions` makes.
        statistics: running statistics of BatchNorm and similar layers. "shared": each candidate has one set, over all
            paths. "path": each path has its own set, as a model has that is trained alone on the path's mini-batches;
            for at most 256 paths. Mixtures always use those of the candidates.

    Attributes:
        table: the decisions that the models of the space ask for.
        counts: (candidates,), the number of training steps that have computed each candidate; `path_counts` has them by
            name.
        unsound: a sentence about the first path in training whose result was not finite; None if there is none.
        runs_in_part: always True: over ranks, the gradient of a parameter is the mean over the ranks whose path has
            used it.

    Raises:
        ConfigError: a candidate does not fit, a mutator does not decide by `graph.alternatives`, or it looks for places
            that only some models have.

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

    _graph_kind = shared_graph.SharedGraph
    runs_in_part = True

    table: tuple[SharedDecision, ...]
    counts: Tensor
    paths: AbstractPaths
    unsound: str | None
    _path: Path | None
    _origins: Mapping[str, str]
    _statistics: PathStatistics | None

    def _decide(self, model: ModelGraph, paths: Any, statistics: str) -> None:
        assert isinstance(model, shared_graph.SharedGraph)
        require(statistics in ("shared", "path"), "statistics", statistics, "shared or path")
        expected = f"no argument '{PATH}', which a shared space uses itself"
        require(PATH not in self._arguments, "base: inputs", self._arguments, expected, "Rename it.")
        model.is_rewired = True
        table = model.table.decisions
        path = None
        if paths is None:
            path = path_of(table, lambda decision: choose(decision.name, decision.candidates))
        else:
            paths.begin(table)
            model.root.add_module("paths", paths)
        called = [str(node.target) for node in model.graph.nodes if node.op == "call_module"]
        origins = {path: model.modules.name_in_space(path) for path in called}
        own = PathStatistics(model.root, table) if statistics == "path" else None
        num_candidates = sum(len(decision.candidates) for decision in table)
        model.root.register_buffer(COUNTS, torch.zeros(num_candidates, dtype=torch.int64))
        self.__dict__ |= {"table": table, "unsound": None, "_path": path, "_origins": origins, "_statistics": own}

    def forward(self, *args: Any, path: Mapping[str, Value | Mixture | Tensor] | None = None, **kwargs: Any) -> Any:
        """Return the output of a model of the space.

        Args:
            args: inputs, in their order.
            path: for each decision, the name of a candidate; or a tensor with one weight per candidate, for the
                weighted sum of all candidates; or a `Mixture` of some candidates. None: a path that `paths` draws.
            kwargs: inputs, by their names.
        """
        args, choices = self._in_order(args, kwargs), self._drawn(path)
        own = self._statistics
        if own is None or any(isinstance(chosen, Mixture) for chosen in choices.values()):
            result = self._run(self, args, choices)
        else:
            with own.of(self, choices):
                result = self._run(self, args, choices)
        if self.training:
            taken = self._run.taken(choices)
            is_taken = [value in taken.get(name, ()) for name, value in self._candidates()]
            self.counts.add_(torch.tensor(is_taken, dtype=torch.int64, device=self.counts.device))
            if self.unsound is None and (bad := shared_graph.path_of_bad(result, choices)) is not None:
                self.unsound = f"On the path {bad} the result was the first that is not finite."
        return result

    def _candidates(self) -> Iterator[tuple[str, Value]]:
        """Yield the candidates of all decisions, in the order of `counts`."""
        return ((decision.name, value) for decision in self.table for value in decision.candidates)

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
        for _, name in self._run.read(choices):
            value = attrgetter(name)(self)
            tensors = value.parameters() if isinstance(value, nn.Module) else [value]
            read.update(names[id(tensor)] for tensor in tensors if id(tensor) in names)
        return {**arguments, PATH: choices}, frozenset(read)

    @property
    def path_counts(self) -> Mapping[str, Mapping[Value, int]]:
        """How many training steps have computed each candidate, by decision; a mixture computes all of its own."""
        return self.named_counts(self.counts)

    def named_counts(self, counts: Tensor) -> Mapping[str, Mapping[Value, int]]:
        """Return counts like its own by decision and candidate."""
        named: dict[str, dict[Value, int]] = {decision.name: {} for decision in self.table}
        for (name, value), count in zip(self._candidates(), counts.tolist(), strict=True):
            named[name][value] = int(count)
        return named

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
            sum(1 for count in counts.values() if count) > 1 for counts in self.path_counts.values()
        )

    @property
    def differing(self) -> frozenset[str]:
        """The decisions whose candidates compute something else."""
        return self._run.decisions

    def state_of(self, path: Path) -> dict[str, Tensor]:
        """Return the state of one model, by the names that a `Space` with these decisions has.

        Args:
            path: a candidate for each decision that the model asks for.
        """
        state: dict[str, Tensor] = {}
        own = self.state_dict()
        for kind, read in self._run.read(path):
            if kind == "call_module":
                below = self.get_submodule(read).state_dict()
                state |= {f"{self._origins[read]}.{name}": value for name, value in below.items()}
            elif read in own:
                state[read] = own[read]
        return state if self._statistics is None else self._statistics.state(state, path)

    def _drawn(self, path: Mapping[str, Any] | None) -> dict[str, Value | Mixture]:
        """Return the choices of a call."""
        if path is None:
            path = self._path if self._path is not None else self.paths(self.table)
        candidates = {decision.name: decision.candidates for decision in self.table}
        choices: dict[str, Value | Mixture] = {}
        for name, chosen in path.items():
            require(name in candidates, "path", name, f"the decisions {', '.join(candidates)}")
            if isinstance(chosen, Tensor):
                chosen = Mixture(candidates[name], chosen)
            if isinstance(chosen, Mixture):
                count, weights = len(chosen.candidates), chosen.weights
                require(weights.shape == (count,), f"path.{name}", weights, f"a weight for each of {count} candidates")
                if chosen.taken is not None and not weights.requires_grad:
                    chosen = chosen.taken
            choices[name] = chosen
        return choices


# Candidates and their probabilities by decision in, the candidate of each decision out.
Rule = Callable[[Mapping[str, Sequence[Value]], Mapping[str, Tensor]], Mapping[str, Value]]


class AbstractArchitecture(nn.Module):
    """Base class of distributions over the candidates of each decision of a shared space, with learned logits.

    Args:
        space: makes the space; in a recipe `${problems.NAME.module}`.
        scale: standard deviation of the initial logits.
        rule: derives the result of a search, one candidate per decision, from the candidates and their probabilities,
            both by decision. None: the most probable candidates.

    Raises:
        ConfigError: `space` does not make a shared space, or the space has no decisions.
    """

    table: tuple[SharedDecision, ...]

    factories: ClassVar[tuple[str, ...]] = ("space",)
    """Settings that are handed over as functions: what they describe is built here."""

    def __init__(self, space: Callable[[], SharedSpace], scale: float = 0.0, rule: Rule | None = None) -> None:
        super().__init__()
        self.rule = rule
        with deciding():
            made = space()
        advice = "Write space: ${problems.NAME.module}, with shared: true and mutators in that module."
        is_right = isinstance(made, SharedSpace) and bool(made.table)
        require(is_right, "space", type(made).__name__, "a shared space with decisions", advice)
        self.table = made.table
        self.logits = nn.ParameterDict(
            {decision.name: nn.Parameter(scale * torch.randn(len(decision.candidates))) for decision in self.table}
        )

    def found(self) -> dict[str, Value]:
        """Return the path that `rule` derives from the probabilities of the candidates."""
        if self.rule is None:
            return path_of(self.table, lambda decision: decision.candidates[int(self.logits[decision.name].argmax())])
        candidates = {decision.name: decision.candidates for decision in self.table}
        chosen = self.rule(candidates, {name: logits.detach().softmax(0) for name, logits in self.logits.items()})
        return path_of(self.table, lambda decision: chosen[decision.name])

    def entropy(self) -> Tensor:
        """Return the entropy in nats, mean over decisions, 0-D; it is log k for k equally probable candidates."""
        logarithms = [F.log_softmax(logits, 0) for logits in self.logits.values()]
        return torch.stack([-(logarithm.exp() * logarithm).sum() for logarithm in logarithms]).mean()


@target("module")
class PathWeights(AbstractArchitecture):
    """A weight for each candidate: the space as a mixture, through which gradients reach the logits (DARTS).

        y = sum_k softmax(logits)_k candidate_k(x)

    Args: as for `AbstractArchitecture`.

    Source: Liu et al. 2019, DARTS (arXiv 1806.09055), equation 2.

    Example:
        >>> from mlotool.spaces import Operator
        >>> def space():
        ...     activation = Operator("activation", "1", {"relu": None, "tanh": nn.Tanh})
        ...     return SharedSpace(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()), [activation], inputs=[4])
        >>> weights = PathWeights(space)
        >>> space()(torch.zeros(3, 4), path=weights()).shape, weights.found()
        (torch.Size([3, 2]), {'activation_0': 'relu'})
    """

    def forward(self) -> dict[str, Tensor]:
        """Return by decision one weight per candidate (k,), with sum 1."""
        return {name: logits.softmax(0) for name, logits in self.logits.items()}


@target("module")
class BinaryPaths(AbstractArchitecture):
    """One candidate per decision, drawn from two sampled ones, with a gradient for the logits of both (ProxylessNAS).

    Two candidates are drawn without replacement, by their probabilities, and one of the two is drawn by its probability
    among them: its result is used. The other one is computed too, since the gradient of its gate depends on its result.
    The memory is that of two paths, for any number of candidates.

        y = sum over the two of g_k candidate_k(x),   g = one_hot(drawn),   dg / dlogits := dp / dlogits
        p = softmax(logits of the two)

    In evaluation the most probable candidates are taken.

    Args: as for `AbstractArchitecture`.

    Source: Cai et al. 2019, ProxylessNAS (arXiv 1812.00332), section 3.2, equations 3 and 4. There, the logits are
    rescaled after a step, so that the probabilities of other candidates do not change; here they change, as in any
    softmax.

    Example:
        >>> from mlotool.spaces import Operator
        >>> def space():
        ...     activation = Operator("activation", "1", {"relu": None, "tanh": nn.Tanh, "same": nn.Identity})
        ...     return SharedSpace(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()), [activation], inputs=[4])
        >>> drawn = BinaryPaths(space)()["activation_0"]
        >>> len(drawn.candidates), sorted(drawn.weights.tolist())
        (2, [0.0, 1.0])
    """

    has_paths = True

    def forward(self) -> dict[str, Value | Mixture]:
        """Return by decision two candidates, one with weight 1 and one with weight 0."""
        return {decision.name: self._drawn(decision) for decision in self.table} if self.training else {**self.found()}

    def _drawn(self, decision: SharedDecision) -> Value | Mixture:
        if len(decision.candidates) == 1:
            return decision.candidates[0]
        logits = self.logits[decision.name]
        two = torch.multinomial(logits.detach().softmax(0), 2)
        numbers = [shared_graph.number_drawn(number) for number in two]
        probability = logits[two].softmax(0)
        number = shared_graph.number_drawn(torch.multinomial(probability.detach(), 1))
        gate = F.one_hot(torch.tensor(number, device=logits.device), 2).to(probability)
        both = tuple(decision.candidates[number] for number in numbers)
        return Mixture(both, gate + probability - probability.detach(), both[number])


@target("module")
class PathPolicy(AbstractArchitecture):
    """Samples a path from learned probabilities, and returns its log-probability (ENAS, REINFORCE).

    Losses on such paths are differentiated by the score function (see `mlotool.losses.expected_path_cross_entropy`).

    Args: as for `AbstractArchitecture`.

    Source: Pham et al. 2018, ENAS (arXiv 1802.03268), section 2.1; Williams 1992 (REINFORCE). ENAS samples with a
    recurrent network; here each decision has its own logits.

    Example:
        >>> from mlotool.spaces import Operator
        >>> def space():
        ...     activation = Operator("activation", "1", {"relu": None, "tanh": nn.Tanh})
        ...     return SharedSpace(lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU()), [activation], inputs=[4])
        >>> path, log_probability = PathPolicy(space)()
        >>> list(path), round(log_probability.item(), 3)
        (['activation_0'], -0.693)
    """

    has_paths = True

    def forward(self) -> tuple[dict[str, Value], Tensor]:
        """Return a path, and the logarithm of its probability, 0-D."""
        terms = []

        def drawn(decision: SharedDecision) -> Value:
            log_probability = F.log_softmax(self.logits[decision.name], 0)
            number = shared_graph.number_drawn(torch.multinomial(log_probability.detach().exp(), 1))
            terms.append(log_probability[number])
            return decision.candidates[number]

        path = path_of(self.table, drawn)
        return path, torch.stack(terms).sum()
