"""Problems and their graph as one differentiable object."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.core.loss_output import LossOutput
from mlotool.core.plain_state import ADVICE, check_mapping, check_plain
from mlotool.core.private import tree_leaves
from mlotool.core.random_stream import RandomStream
from mlotool.problem.arguments import check_owners, check_saving, check_shared
from mlotool.problem.description import facts_of, formula_of
from mlotool.problem.neutral import hold, is_held
from mlotool.problem.problem import Problem
from mlotool.problem.rank_mean import Reduce
from mlotool.problem.saved_form import check_whole
from mlotool.program.algorithms import algorithm_of
from mlotool.program.backends import BACKENDS
from mlotool.program.graph import Graph
from mlotool.program.internals import Internals, Tracing
from mlotool.program.solution_plan import NOW, Moment, SolutionPlan, Values


def check_saved(problems: Iterable[Problem]) -> None:
    """Refuse problems whose state a checkpoint cannot hold, or that do not take it back.

    Raises:
        ConfigError: with the module, optimizer or scheduler, and the place in its state.
    """
    for problem in problems:
        check_saving(problem.name, problem.module)
        state = {"module": problem.module.state_dict(), **problem.optimizer_step.state_dict()}
        check_plain({problem.name: state}, ConfigError, before_run=True)


@contextmanager
def _told() -> Iterator[None]:
    """Turn what a user's module, optimizer or algorithm says of its state into one message."""
    try:
        yield
    except MlotoolError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(".")
        text = f"state: found a state that does not fit ({reason}); expected one of the same program. {ADVICE}"
        raise ConfigError(text) from error


class Program:
    """Optimization problems and the graph between them.

    A lower problem's solution enters the losses above it as ordinary tensors with their own backward function. So the
    total gradient of problem k is `torch.autograd.grad(C_k, theta_k)`: PyTorch adds up the gradients that arrive at a
    solution along all paths, and calls that solution's backward function once.

    Cost: linear in the number of edges of the graph.

    Args:
        problems: the problems, in the order in which they are reported.
        graph: the edges between the problems. None: `problems` is a list from the top level down; a problem then shapes
            each later problem whose loss uses it, and reads each later problem that its own loss uses.
        reduce: returns the mean over ranks of a list of tensors (`Ranks.reduce`); None in a single process.
        trace: how to run the steps of a tick as one program of tensor operations, which is recorded once (traced) and
            runs without autograd: "eager", one operation after the other; "inductor", compiled; "cuda_graph", as one
            launch on a GPU. None: steps are not traced.
        trace_from: the number of the step from which on a problem's steps are traced.
        traces_users_code: whether the user's own losses and modules are traced too, which takes them for pure functions
            of tensors.
        held: problems that take no steps, as those of `baseline=fixed`; no hypergradient is computed for them. Their
            modules return the neutral value that they declare (`neutral = 1.0`), if they do.
        run_length: number of ticks of the run, if known; traced steps are compared with steps that are not traced 100
            times in a run.

    Attributes:
        problems: by name.
        graph: the edges between them.
        random: the program's random numbers, which begin with the state of torch's generators when the program is made;
            `program.random.manual_seed(0)` seeds them anew. A checkpoint needs `random.state_dict()` beside the
            program's own.
        internals: what `Schedule` and runs use to take steps; not part of the public API.

    Raises:
        ConfigError: the graph does not fit the problems, or a hypergradient method does not support the graph.

    Example:
        >>> import torch
        >>> from mlotool import BoundModule, Exact, Implicit
        >>> class Point(torch.nn.Module):
        ...     def __init__(self): super().__init__(); self.x = torch.nn.Parameter(torch.tensor([2.0]))
        ...     def forward(self): return self.x
        >>> lower = Problem("w", Point(), lambda batch, *, w, lam: ((w() - lam()) ** 2).sum(),
        ...                 roles={"w": "w", "lam": "lam"}, hypergradient=Implicit(Exact()))
        >>> upper = Problem("lam", Point(), lambda batch, *, w: (w() ** 2).sum(), roles={"w": "w"})
        >>> program = Program([upper, lower])  # as with Graph({"lam": ["w"]}, {"w": ["lam"]})
        >>> program.gradient("lam")
        {'x': tensor([4.])}
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        graph: Graph | None = None,
        reduce: Reduce | None = None,
        *,
        trace: str | None = None,
        trace_from: int = 0,
        traces_users_code: bool = True,
        held: Iterable[str] = (),
        run_length: int | None = None,
    ) -> None:
        problems = list(problems) if isinstance(problems, Iterable) else problems
        graph = self.graph = _graph_of(problems) if graph is None else graph
        self.problems: dict[str, Problem] = check_program(problems, graph, reduce, trace)
        self.random = RandomStream(self.devices)
        tracing = Tracing(trace, trace_from, traces_users_code, run_length)
        self.internals = Internals(self.problems, graph, reduce, self.random, tracing, held)
        for name, problem in self.problems.items():
            if name in self.internals.held:
                hold(problem.module)
            else:
                expected, advice = "a module that no program holds at its neutral value", "Make a new module."
                require(not is_held(problem.module), f"problems.{name}.module", "one of a control", expected, advice)

    def __repr__(self) -> str:
        lines = [f"Program of {len(self.problems)} problem{'s' * (len(self.problems) > 1)}"]
        for name, problem in self.problems.items():
            lowers, readers = self.graph.lowers(name), self.graph.readers(name)
            start = f"{name}* = argmin" if readers else "min"
            lines += [f"  {start} over {name} of {formula_of(problem, lowers)}", f"      {facts_of(problem)}"]
            if readers:
                steps = problem.settings.unroll_steps
                lines.append(f"      {steps} step{'s' * (steps > 1)} for each step of {', '.join(readers)}")
            if problem.hypergradient is not None:
                lines.append(f"      hypergradient: {problem.hypergradient}")
        lines += [f"  {upper} shapes {', '.join(shaped)}" for upper, shaped in self.graph.upper_to_lower.items()]
        return "\n".join(lines)

    def rehearse(self) -> None:
        """Evaluate once each loss that takes part in a hypergradient; the first tick of a schedule does so too.

        Raises:
            ConfigError: a loss or a module cannot be differentiated as it is written.
        """
        self.internals.rehearsals.once(self.random)

    def gradient(self, name: str, batches: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the total gradient of problem `name`, its hypergradient; parameters and optimizers do not change.

            dC_k/dtheta_k = partial C_k/partial theta_k
                            + sum over read solutions l of (dtheta*_l/dtheta_k)^T partial C_k/partial theta*_l

        at the current parameters of all problems.

        As in a training step, the losses draw random numbers (dropout), and a hypergradient method updates what it
        keeps between calls: the second iterate of Penalty, q and the tables of SABA, the start of the next solve
        (`warm_start`), the directions of EvolutionStrategies, the columns of Nystrom, the choice of
        `Unrolled(remat="auto")`.

        Args:
            name: the problem.
            batches: batches by problem; a problem without an entry uses the last batch of its stream. For a lower
                problem whose hypergradient differentiates its steps (`Unrolled`), a list with the batches of all steps
                in order, `accumulate_batches` per step: the steps are taken from the current parameters without
                changing them. Without such a list, the steps that the problem took last are differentiated; if it took
                none, `unroll_steps` steps on the last batch of its stream.

        Returns:
            By parameter name, a tensor of the parameter's shape; zeros if the loss does not depend on the parameter.

        Raises:
            ConfigError: there is no problem of that name.
        """
        internals, is_mapping = self.internals, batches is None or isinstance(batches, Mapping)
        problem = self.problems[internals.name_of(name)]
        require(is_mapping, "batches", batches, "batches by problem", "Write {'<name>': batch}.")
        given = dict(batches or {})
        for other in given:
            internals.name_of(other)
        with self.random:
            _, gradient = internals.gradients[name](internals.batch(name, given.get(name)), Moment(given), False)
        shards = problem.shards
        return {
            key: torch.zeros_like(like) if x is None else x if shards is None else shards.put_together(x, like)
            for (key, like), x in zip(problem.theta.items(), gradient, strict=True)
        }

    def solution(self, name: str) -> dict[str, Tensor]:
        """Return the solution theta* of problem `name`, as tensors that pass gradients on to the problems above it.

        Args:
            name: a problem whose `hypergradient` is set.

        Returns:
            By parameter name, tensors with the current values and the parameters' shapes.
        """
        number = self.internals.number(name)
        algorithm_of(self.problems[name])
        self.internals.sync()
        values: Values = [problem.own for problem in self.problems.values()]
        with self.random:
            for step in self.internals.order.steps_to(name):
                SolutionPlan(step, name, self.internals.engine).add(values, NOW)
        solution = values[number]
        assert solution is not None
        return dict(zip(self.problems[name].theta, solution, strict=True))

    def loss(self, name: str, batch: Any = None) -> LossOutput:
        """Return the loss of problem `name` at the current parameters, without a graph; nothing is updated.

        Args:
            name: the problem.
            batch: the batch to evaluate the loss on; None takes the last batch of the problem's stream.
        """
        engine, number = self.internals.engine, self.internals.number(name)
        with torch.no_grad(), self.random:
            return engine.losses[number](engine.nothing(), self.internals.batch(name, batch))

    def statistics(self) -> dict[str, float]:
        """Return the numbers that hypergradient methods and layer-parallel steps report, by `<problem>/<number>`."""
        numbers: dict[str, float] = {}
        for name, problem in self.problems.items():
            algorithm, parallel = problem.hypergradient, problem.parallel
            values = {} if algorithm is None else algorithm.statistics(self.internals.algorithm_state(name))
            values = values if parallel is None else {**values, **parallel.statistics()}
            numbers |= {f"{name}/{key}": value for key, value in values.items()}
        return numbers

    def to(self, device: torch.device | str) -> "Program":
        """Move the program to a device: modules, optimizer states, batches, and what solvers keep.

        `mlotool.fit` and `mlotool.run` call this themselves.

        Args:
            device: "cuda", "cpu", or a `torch.device`.

        Returns:
            The program itself.

        Raises:
            ConfigError: there is no such device.

        Example::

            program = mlotool.Program([lower, upper], graph).to("cuda")
        """
        place = _existing(device)
        # A step's state follows as it does when a run is resumed on another device.
        state = self.state_dict() if self._has_moved_from(place) else None
        for problem in self.problems.values():
            problem.module.to(place)
            if problem.stream is not None:
                problem.stream.to(place)
            if problem.parallel is not None:
                problem.parallel.to(place)
        self.random.cover(self.devices)
        if state is not None:
            self.load_state_dict(state)
        return self

    def _has_moved_from(self, place: torch.device) -> bool:
        """Return whether steps were taken whose state lies elsewhere than on a device."""
        stepped = [problem for problem in self.problems.values() if problem.num_steps > 0]
        states = [entry for problem in stepped if problem.optimizer for entry in problem.optimizer.state.values()]
        kept = [x for entry in states for x in tree_leaves(dict(entry)) if isinstance(x, Tensor) and x.dim() > 0]
        return any(tensor.device != place for tensor in (*kept, *(x for problem in stepped for x in problem.own)))

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The CUDA devices of the problems."""
        return tuple({device for problem in self.problems.values() for device in problem.devices})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all problems, in plain containers."""
        state: dict[str, Any] = {}
        for name, problem in self.problems.items():
            algorithm = problem.hypergradient
            kept = {} if algorithm is None else algorithm.state_dict(self.internals.algorithm_state(name))
            state[name] = {**problem.state_dict(), "hypergradient": kept}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state.

        Raises:
            ConfigError: the state belongs to other problems, or does not fit their modules or optimizers. Nothing has
                changed then.
        """
        problems = self.problems
        require(isinstance(state, Mapping), "state", state, "what state_dict() has returned", "Give that.")
        if set(state) != set(problems):
            names, advice = sorted(map(str, state)), "Load it with the recipe it was saved by."
            raise ConfigError(f"A saved program has the problems {names}; expected {sorted(problems)}. {advice}")
        for name, problem in problems.items():
            check_whole(f"state.{name}", state[name], problem, problems)
        streams = {name: problem.stream for name, problem in problems.items()}
        with _told():
            kept, shapes = {}, {tensor.shape for problem in problems.values() for tensor in problem.own}
            for name, problem in problems.items():
                saved, algorithm, key = state[name].get("hypergradient"), problem.hypergradient, f"state.{name}"
                check_mapping(f"{key}.hypergradient", saved)
                for value in tree_leaves(saved) if type(algorithm).__module__.startswith("mlotool.") else ():
                    # A generator's state is bytes, and a number has no axes.
                    is_vector = isinstance(value, Tensor) and value.dim() > 0 and value.dtype is not torch.uint8
                    is_right = not is_vector or value.shape in shapes
                    require(is_right, f"{key}.hypergradient", value, "tensors in the shapes of parameters", ADVICE)
                kept[name] = None if algorithm is None else algorithm.load_state(saved)
            for name, problem in problems.items():
                problem.load_state_dict(state[name], streams)
                self.internals.engine.memories[self.internals.engine.numbers[name]].value = kept[name]


def _existing(device: Any) -> torch.device:
    """Return a device with its number; refuse one that is not there."""
    advice = "Write program.to('cuda'), or 'cpu'."
    try:
        # Meta tensors have no numbers, and a number takes the place of a name in silence.
        require(isinstance(device, str | torch.device), "Program.to", device, "a device of torch", advice)
        place: torch.device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ConfigError(
            f"Program.to: found '{device}' ({reason}); expected a device that is here. {advice}"
        ) from error
    require(place.type != "meta", "Program.to", str(device), "a device whose tensors have numbers", advice)
    return place


def _graph_of(problems: Any) -> Graph:
    """Return the graph of problems that are given from the top level down."""
    nodes = {x.name: x.node for x in problems if isinstance(x, Problem)} if isinstance(problems, list) else {}
    pairs = list(combinations(nodes, 2))
    shaped = [(upper, lower) for upper, lower in pairs if upper in nodes[lower].uses]
    read = [(lower, upper) for upper, lower in pairs if lower in nodes[upper].uses]
    return Graph(*({start: [b for a, b in edges if a == start] for start, _ in edges} for edges in (shaped, read)))


def check_program(problems: Any, graph: Any, reduce: Any, trace: Any) -> dict[str, Problem]:
    """Refuse arguments of a program that are of a wrong kind or do not fit each other; return the problems by name.

    Raises:
        ConfigError: they are, or do not.
    """
    listed = list(problems) if isinstance(problems, Iterable) and not isinstance(problems, Mapping) else []
    are_problems = bool(listed) and all(isinstance(problem, Problem) for problem in listed)
    advice = "Write Program([upper, lower]), or give a Graph({'upper': ['lower']}, {'lower': ['upper']}) as well."
    require(are_problems, "Program.problems", problems, "a list of at least one problem", advice)
    require(isinstance(graph, Graph), "Program.graph", graph, "a Graph", advice)
    require(reduce is None or callable(reduce), "Program.reduce", reduce, "a function of a list of tensors, or null")
    require(trace in (None, *BACKENDS), "trace", trace, f"None or one of {', '.join(BACKENDS)}", "Correct trace.")
    if trace == "cuda_graph" and not torch.cuda.is_available():
        text = "trace: found 'cuda_graph', and torch finds no CUDA device; expected one. Write runner.trace=inductor."
        raise ConfigError(text)
    by_name, names = {problem.name: problem for problem in listed}, [problem.name for problem in listed]
    require(len(by_name) == len(names), "problems", names, "names that differ", "Rename one of the problems.")
    graph.validate({name: problem.node for name, problem in by_name.items()})
    check_owners({name: problem.module for name, problem in by_name.items()})
    for problem in listed:
        problem.look_at_module()
    check_shared("parallel", {problem.name: problem.parallel for problem in listed})
    return by_name
