"""What cannot go together: one table, from which both the messages and those of docs/compatibility.md are made.

A row names two features of a `Case`, which is one problem with what it is combined with; it holds where both are there.
`python -m docs.generated.compatibility` writes the tables of the page.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.optim import SparseAdam

from mlotool.core.errors import ConfigError
from mlotool.problem.arguments import needs_closure
from mlotool.problem.interface import AbstractDirector, AbstractHypergradient, AbstractStepwise
from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.parallel import AbstractParallel
from mlotool.problem.settings import ProblemSettings


@dataclass(frozen=True)
class Case:
    """One problem with what it is combined with. What is not known yet is left out, and no row holds for it.

    Args:
        name: the problem whose setting would have to change.
        settings: its settings.
        parallel: its layer-parallel training.
        optimizer: its optimizer.
        scheduler: its learning-rate scheduler.
        stream: its stream.
        algorithm: by which a gradient passes through a solution.
        solution: the problem whose solution that is; "" is this one.
        reader: the problem whose gradient passes through it.
        is_nested: that problem eliminates lower solutions inside its own stationarity.
        is_differentiated: a nested problem above needs the derivative of its pullback.
        read: a problem whose solution this problem's gradient passes through.
        shaped_by_tasks: a problem with tasks, on whose parameters its solution depends.
        num_ranks: processes that share each batch.
        runs_in_part: each call of its module runs a part of it, on several ranks.
        is_traced: its gradient is to run as a traced program.
        is_fused: its gradients are to run as a program of several runs.
        module: what it trains.
        takes_steps: its loss is the training_step of a LightningModule.
    """

    name: str
    settings: ProblemSettings
    parallel: AbstractParallel | None = None
    optimizer: Any = None
    scheduler: Any = None
    stream: Any = None
    algorithm: AbstractHypergradient | None = None
    solution: str = ""
    reader: str = ""
    is_nested: bool = False
    is_differentiated: bool = False
    read: str = ""
    shaped_by_tasks: str = ""
    num_ranks: int = 1
    runs_in_part: bool = False
    is_traced: bool = False
    is_fused: bool = False
    module: Any = None
    takes_steps: bool = False


def _has(part: str, attribute: str) -> Callable[[Case], bool]:
    return lambda case: bool(getattr(getattr(case, part), attribute, False))


def _is(name: str) -> Callable[[Case], bool]:
    # By name: they stand in packages above this one.
    return lambda case: any(kind.__name__ == name for kind in type(case.algorithm).__mro__)


def _approximates(case: Case) -> bool:
    solver = getattr(case.algorithm, "solver", None)
    return solver is not None and not solver.is_differentiable


def _remembers(case: Case) -> bool:
    algorithm = case.algorithm
    # The steps of an unroll are arguments of a program of several runs; one of a single run's ticks has none for them.
    return algorithm is not None and not (algorithm.is_traceable and (case.is_fused or not algorithm.sees_steps))


def _has_complex(case: Case) -> bool:
    parameters = () if case.module is None else case.module.parameters()
    return any(parameter.requires_grad and parameter.is_complex() for parameter in parameters)


def _steps_sparsely(case: Case) -> bool:
    layers = () if case.module is None else case.module.modules()
    return isinstance(case.optimizer, SparseAdam) or any(getattr(layer, "sparse", None) is True for layer in layers)


SETTINGS = ("tasks", "compile", "shard", "remat", "optimizer_roles", "reset_to", "roll_back", "warmup_steps")

# By name, what a row may speak of: whether a case has it. Settings of a problem have the names of their keys.
FEATURES: Mapping[str, Callable[[Case], bool]] = {
    **{name: _has("settings", name) for name in (*SETTINGS, "gradient_clip_norm")},
    "shard: true": lambda case: case.settings.shard is True,
    "precision: fp16": lambda case: case.settings.precision == "fp16",
    "scheduler": lambda case: case.scheduler is not None,
    "same_batch_as": lambda case: type(case.stream).__name__ == "SameBatch",
    "ready batches": _has("stream", "has_ready_batches"),
    "parallel": lambda case: case.parallel is not None,
    "parallel: Auxiliary": lambda case: case.parallel is not None and not case.parallel.is_repeatable,
    "parallel.processes": lambda case: case.parallel is not None and case.parallel.is_divided,
    "drawn paths": _has("module", "has_paths"),
    "statistics: path": _has("module", "has_path_statistics"),
    "training_step": lambda case: case.takes_steps,
    "complex parameters": _has_complex,
    "sparse gradients": _steps_sparsely,
    "line search": lambda case: case.optimizer is not None and needs_closure(case.optimizer),
    "another optimizer": lambda case: case.optimizer is not None and type(case.optimizer) not in RULES,
    "solutions in its gradient": lambda case: case.read != "",
    "hypergradient": lambda case: case.algorithm is not None and not case.algorithm.is_constant,
    "product: finite_difference": _has("algorithm", "moves_solutions"),
    "product: forward": lambda case: getattr(case.algorithm, "product", None) == "forward",
    "approximate solver": _approximates,
    "simulated steps": _has("algorithm", "sees_steps"),
    "persistent: true": _has("algorithm", "is_persistent"),
    "remat: false": _has("algorithm", "keeps_graphs"),
    "trajectory": lambda case: isinstance(case.algorithm, AbstractStepwise) and not case.algorithm.trajectory.is_whole,
    "state between pullbacks": _remembers,
    "directed steps": lambda case: isinstance(case.algorithm, AbstractDirector),
    "Penalty": _is("Penalty"),
    "SABA": _is("SABA"),
    "EvolutionStrategies": _is("EvolutionStrategies"),
    "nested": lambda case: case.is_nested,
    "nested above": lambda case: case.is_differentiated,
    "rule: barrier": lambda case: getattr(case.algorithm, "rule", None) == "barrier",
    "shaped by tasks": lambda case: case.shaped_by_tasks != "",
    "several ranks": lambda case: case.num_ranks > 1,
    "tasks on several ranks": lambda case: case.settings.tasks is not None and case.num_ranks > 1,
    "shared space on ranks": lambda case: case.runs_in_part,
    "runner.trace": lambda case: case.is_traced,
    "sweep.fuse": lambda case: case.is_fused,
}


class Row(NamedTuple):
    """Two features that do not go together.

    The texts may name `{name}`, `{solution}`, `{reader}`, `{read}`, `{tasks}`, `{algorithm}` and `{optimizer}` of the
    case.

    Args:
        first: a key of FEATURES.
        second: another one.
        reason: why.
        key: the setting to change, behind `problems.<name>.`; "" where the second feature is left out instead, and the
            run goes on.
        expected: what it should be.
        advice: what to do; "" says to correct the setting.
    """

    first: str
    second: str
    reason: str
    key: str = ""
    expected: str = ""
    advice: str = ""


_STAGES = "layer-parallel stages run the module in parts, in fp32 or bf16, for one set of parameters"
_PERSISTENT = "persistent rollouts go on where the last ones ended, while the problem's own steps begin elsewhere"
_PART_STEPS = "ranks that used a parameter average its gradient, and {algorithm} knows only means over all ranks"
_ABOVE = "a problem above both shapes and reads '{name}', so its pullback is differentiated"
_NESTED = "'{name}' both shapes and reads a lower problem, whose solution it does not know at each of its points"
_UNDERFLOW = "its pullback is part of another one, where no loss scale keeps from underflow"
_READY = "ranks divide the samples of a batch, and an iterable data set that gives batches hides them"
_OWN_TASKS = "each rank has tasks of its own"
_SHAPED = (
    "its solution is that of all ranks, and depends on parameters of '{tasks}', of which each rank has those of its "
    "own tasks (runner.devices=1 divides none)"
)
_SECOND_ORDER = (
    "the gradient of '{reader}' passes through that solution by {algorithm}, and sharded parameters have no second "
    "derivatives (FSDP2 frees what they need)"
)
_CG = "Write +hypergradient@problems.{name}.hypergradient=cg, or set curvature: partial on the problem above."
_KNOWN = "one whose derivative is known (ConjugateGradient, NormalEquationConjugateGradient, Exact, Neumann, ...)"
_REAL = "real parameters, such as torch.view_as_real(z)"
_OTHER_STEPS = "{algorithm} needs the gradients of '{name}', and layer-parallel steps follow others"
_ONE_PROCESS = "its gradient passes through the solution of '{read}' on one process alone"
_KNOWN_OPTIMIZERS = ", ".join(kind.__name__ for kind in RULES)
_STEPS = f"one of torch.optim's {_KNOWN_OPTIMIZERS}"
_PURE = f"{_STEPS}, or an implicit hypergradient"

REFUSED: tuple[Row, ...] = (
    Row("tasks", "compile", "tasks run through torch.vmap", "compile", "false"),
    Row("compile", "drawn paths", "each batch draws a path, which is another program", "compile", "false"),
    Row("parallel", "compile", _STAGES, "compile", "false"),
    Row("tasks", "shard", "tasks divide the batch by themselves", "shard", "false"),
    Row("shard", "compile", "torch.compile cannot trace what gathers the shards", "shard", "false"),
    Row("shard", "precision: fp16", "the loss scale needs whole gradients; bf16 needs none", "shard", "false"),
    Row("shard", "reset_to", "reset_to copies whole parameters", "shard", "false"),
    Row("shard", "optimizer_roles", "other problems give its optimizer's settings", "shard", "false"),
    Row("shard", "parallel", _STAGES, "shard", "false"),
    Row("shard", "line search", "a line search compares values at parameters that are divided", "shard", "false"),
    Row("shard", "hypergradient", _SECOND_ORDER, "shard", "false, or hypergradient: first_order at '{solution}'"),
    Row("shared space on ranks", "shard: true", "ranks on other paths wait for them", "shard", "false, or ['head.*']"),
    Row("tasks", "parallel", _STAGES, "tasks", "null"),
    Row("ready batches", "several ranks", _READY, "stream", "a data set of samples, and a batch_size"),
    Row(
        "tasks on several ranks",
        "another optimizer",
        f"{_OWN_TASKS}, and {{optimizer}} may mix them",
        "optimizer",
        _STEPS,
    ),
    Row("tasks on several ranks", "precision: fp16", "an overflow in one task skips all", "precision", "fp32 or bf16"),
    Row("tasks on several ranks", "SABA", f"{_OWN_TASKS}, and its tables mix them", "hypergradient", "an implicit one"),
    Row("tasks on several ranks", "rule: barrier", "all tasks share its multiplier", "hypergradient.rule", "fixed"),
    Row("several ranks", "shaped by tasks", _SHAPED, "tasks", "that of '{tasks}'"),
    Row("tasks", "drawn paths", "torch.vmap cannot draw by values (spaces.PathWeights mixes)", "tasks", "null"),
    Row("shared space on ranks", "simulated steps", _PART_STEPS, "hypergradient", "an implicit one, or first_order"),
    Row("shared space on ranks", "directed steps", _PART_STEPS, "hypergradient", "an implicit one, or first_order"),
    Row("several ranks", "statistics: path", "ranks average statistics of all paths", "module.statistics", "shared"),
    Row("remat", "compile", "torch.compile decides itself what a backward pass computes again", "remat", "null"),
    Row("remat", "shard", "a block that is evaluated again would gather its shards again", "remat", "null"),
    Row("remat", "parallel", _STAGES, "remat", "null"),
    Row("parallel", "precision: fp16", _STAGES, "precision", "fp32 or bf16"),
    Row("line search", "precision: fp16", "it compares losses, which fp16 scales", "precision", "fp32 or bf16"),
    Row("precision: fp16", "simulated steps", "an overflow skips some of its steps", "precision", "fp32 or bf16"),
    Row("precision: fp16", "nested", _UNDERFLOW, "precision", "fp32 or bf16"),
    Row("precision: fp16", "nested above", _UNDERFLOW, "precision", "fp32 or bf16"),
    Row("parallel", "directed steps", _OTHER_STEPS, "hypergradient", "an implicit one"),
    Row("parallel", "simulated steps", _OTHER_STEPS, "hypergradient", "an implicit one"),
    Row("parallel: Auxiliary", "line search", "each evaluation moves auxiliary variables", "optimizer", "adam"),
    Row("line search", "solutions in its gradient", "it compares losses at '{read}' as it is", "optimizer", "adam"),
    Row("parallel.processes", "gradient_clip_norm", "no process has the whole gradient", "gradient_clip_norm", "null"),
    Row("parallel.processes", "same_batch_as", "all stages need the same samples", "same_batch_as", "null"),
    Row("parallel.processes", "solutions in its gradient", _ONE_PROCESS, "parallel.processes", "false"),
    Row("training_step", "compile", "torch.compile sees the forward alone", "compile", "false"),
    Row("training_step", "shard", "shards are gathered for the forward alone", "shard", "false"),
    Row("training_step", "parallel", _STAGES, "parallel", "null"),
    Row("complex parameters", "hypergradient", "{algorithm} computes with real numbers", "module", _REAL),
    Row("complex parameters", "optimizer_roles", "such steps are of real numbers", "module", _REAL),
    Row("tasks", "sparse gradients", "torch.vmap has none", "module", "layers without sparse=True, and no SparseAdam"),
    Row("another optimizer", "simulated steps", "{algorithm} needs {optimizer} as a function", "optimizer", _PURE),
    Row("another optimizer", "optimizer_roles", "{optimizer} has to be a function of them", "optimizer", _PURE),
    Row("optimizer_roles", "scheduler", "a problem sets hyperparameters", "scheduler", "null"),
    Row("reset_to", "roll_back", "reset_to begins each unroll anew", "roll_back", "false"),
    Row("persistent: true", "roll_back", _PERSISTENT, "roll_back", "false"),
    Row("reset_to", "warmup_steps", "reset_to undoes them", "warmup_steps", "0"),
    Row("persistent: true", "reset_to", _PERSISTENT, "reset_to", "null"),
    Row("product: finite_difference", "nested above", _ABOVE, "hypergradient.product", "reverse", _CG),
    Row("approximate solver", "nested above", _ABOVE, "hypergradient.solver", _KNOWN, _CG),
    Row("Penalty", "nested", _NESTED, "hypergradient", "an implicit one", _CG),
    Row("Penalty", "nested above", _ABOVE, "hypergradient", "an implicit one", _CG),
    Row("SABA", "nested above", _ABOVE, "hypergradient", "an implicit one", _CG),
    Row("EvolutionStrategies", "nested", _NESTED, "hypergradient", "an implicit one", _CG),
    Row("EvolutionStrategies", "nested above", _ABOVE, "hypergradient", "an implicit one", _CG),
)

TRACE, FUSE = "runner.trace", "sweep.fuse"

# Without which uses a problem runs that has a feature, and why.
LEFT_OUT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("several ranks", (TRACE, FUSE), "its gradient is a mean over ranks"),
    ("parallel", (TRACE, FUSE), "its training is layer-parallel"),
    ("precision: fp16", (TRACE, FUSE), "in fp16 a step decides by its gradient whether it is taken"),
    ("another optimizer", (TRACE,), f"its optimizer is none of {_KNOWN_OPTIMIZERS}"),
    ("line search", (FUSE,), "its optimizer evaluates the loss itself"),
    ("optimizer_roles", (TRACE,), "another problem gives hyperparameters of its optimizer"),
    ("reset_to", (TRACE,), "each of its unrolls begins anew (reset_to)"),
    ("roll_back", (TRACE,), "its steps are a look-ahead (roll_back)"),
    ("directed steps", (TRACE, FUSE), "the hypergradient of '{solution}' makes the steps of '{solution}'"),
    ("remat: false", (TRACE, FUSE), "the hypergradient of '{solution}' keeps the graphs of the steps of '{solution}'"),
    ("compile", (TRACE, FUSE), "the module of '{name}' is compiled by itself"),
    ("complex parameters", (TRACE, FUSE), "the parameters of '{name}' are complex"),
    ("sparse gradients", (TRACE, FUSE), "the gradient of '{name}' is sparse"),
    ("shard", (TRACE, FUSE), "the parameters of '{name}' are divided among ranks"),
    ("trajectory", (TRACE, FUSE), "the steps of '{solution}' are taken again from their gradients (trajectory)"),
    ("product: forward", (TRACE, FUSE), "the hypergradient of '{solution}' takes tangents, which a trace does not see"),
    ("remat", (TRACE, FUSE), "a trace takes equal evaluations once, and would keep what remat of '{name}' drops"),
    ("state between pullbacks", (TRACE, FUSE), "its hypergradient keeps something from one use to the next"),
)

ROWS = (*REFUSED, *(Row(first, use, reason) for first, uses, reason in LEFT_OUT for use in uses))


def check(case: Case) -> None:
    """Refuse what does not go together.

    Args:
        case: the problem, with what it is combined with.

    Raises:
        ConfigError: with the first row of the table that holds.
    """
    for row in broken(case):
        if row.key:
            raise ConfigError(message(row, case))


def broken(case: Case) -> Iterator[Row]:
    """Yield the rows that hold for a case."""
    held = {name: holds(case) for name, holds in FEATURES.items()}
    return (row for row in ROWS if held[row.first] and held[row.second])


def reason(row: Row, case: Case) -> str:
    """Return why a row that holds for a case does."""
    return _filled(row.reason, case)


def message(row: Row, case: Case) -> str:
    """Return what to tell of a row that holds: what was found, what was expected, what to do."""
    key = f"problems.{case.name}.{row.key}"
    text = f"{key}: found {row.first} with {row.second}; expected {row.expected}, since {row.reason}. "
    return _filled(text + (row.advice or f"Correct {key}."), case)


def _filled(text: str, case: Case) -> str:
    names = {
        "name": case.name,
        "solution": case.solution or case.name,
        "reader": case.reader,
        "read": case.read,
        "tasks": case.shaped_by_tasks,
        "algorithm": type(case.algorithm).__name__,
        "optimizer": type(case.optimizer).__name__,
    }
    return re.sub(r"\{(\w+)\}", lambda match: names[match[1]], text)
