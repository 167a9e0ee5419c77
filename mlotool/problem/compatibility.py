"""Which features exclude each other: one table, from which the error messages and docs/compatibility.md are made.

A `Case` is one problem with what it is combined with. A row names two features; it holds for a case that has both.
`python -m docs.generated.compatibility` writes the tables of the page.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
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
        algorithm: the hypergradient method by which a gradient passes through a solution.
        solution: the problem whose solution the gradient passes through; "" is this problem.
        reader: the problem whose gradient passes through the solution.
        is_nested: a problem above reads this one, and this one's own gradient passes through a lower solution.
        is_differentiated: the gradient through its solution is itself differentiated, for a problem further above.
        read: a lower problem; this problem's gradient passes through its solution.
        shaped_by_tasks: a problem with tasks; the solution of this problem depends on its parameters.
        num_ranks: processes that share each batch.
        runs_in_part: on several ranks, each call of its module runs only a part of the module.
        is_traced: its gradient is to run as a traced program.
        is_fused: its gradient is to run in a program of several runs.
        module: its module.
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
    # By name: these classes are in packages that import this one.
    return lambda case: any(kind.__name__ == name for kind in type(case.algorithm).__mro__)


def _has_no_derivative(case: Case) -> bool:
    solver = getattr(case.algorithm, "solver", None)
    return solver is not None and not solver.is_differentiable


def _has_complex(case: Case) -> bool:
    parameters = () if case.module is None else case.module.parameters()
    return any(parameter.requires_grad and parameter.is_complex() for parameter in parameters)


def _steps_sparsely(case: Case) -> bool:
    layers = () if case.module is None else case.module.modules()
    return isinstance(case.optimizer, SparseAdam) or any(getattr(layer, "sparse", None) is True for layer in layers)


SETTINGS = ("tasks", "compile", "shard", "remat", "optimizer_roles", "reset_to", "roll_back", "warmup_steps")

_KNOWN_OPTIMIZERS = ", ".join(kind.__name__ for kind in RULES)
_OTHER_OPTIMIZER = f"optimizer other than {_KNOWN_OPTIMIZERS}"
# docs/compatibility.md explains these names.
_OF_STEPS, _MAKES_STEPS = "hypergradient through the steps", "hypergradient that makes the steps"
_HYPERGRADIENT = "hypergradient other than first_order"
_DRAWS = "module that draws paths"
_ON_RANKS, _TASKS_ON_RANKS = "shared space on several ranks", "tasks on several ranks"
_LOWER, _DIFFERENTIATED = "gradient through a lower solution", "differentiated hypergradient"
_FP16 = "precision: fp16"

# By name, the features of a case, which rows combine. A setting of a problem has the name of its key.
FEATURES: Mapping[str, Callable[[Case], bool]] = {
    **{name: _has("settings", name) for name in (*SETTINGS, "gradient_clip_norm")},
    "shard: true": lambda case: case.settings.shard is True,
    _FP16: lambda case: case.settings.precision == "fp16",
    "scheduler": lambda case: case.scheduler is not None,
    "same_batch_as": lambda case: type(case.stream).__name__ == "SameBatch",
    "data set of whole batches": _has("stream", "has_ready_batches"),
    "parallel": lambda case: case.parallel is not None,
    "parallel: Auxiliary": lambda case: case.parallel is not None and not case.parallel.is_repeatable,
    "parallel.processes": lambda case: case.parallel is not None and case.parallel.is_divided,
    _DRAWS: _has("module", "has_paths"),
    "module.statistics: path": _has("module", "has_path_statistics"),
    "training_step": lambda case: case.takes_steps,
    "complex parameters": _has_complex,
    "sparse gradients": _steps_sparsely,
    "line search": lambda case: case.optimizer is not None and needs_closure(case.optimizer),
    _OTHER_OPTIMIZER: lambda case: case.optimizer is not None and type(case.optimizer) not in RULES,
    _LOWER: lambda case: case.read != "",
    _HYPERGRADIENT: lambda case: case.algorithm is not None and not case.algorithm.is_constant,
    "hypergradient.product: finite_difference": _has("algorithm", "moves_solutions"),
    "hypergradient.product: forward": lambda case: getattr(case.algorithm, "product", None) == "forward",
    "solver without a derivative": _has_no_derivative,
    _OF_STEPS: _has("algorithm", "sees_steps"),
    _MAKES_STEPS: lambda case: isinstance(case.algorithm, AbstractDirector),
    "hypergradient.persistent: true": _has("algorithm", "is_persistent"),
    "hypergradient.remat: false": _has("algorithm", "keeps_graphs"),
    "trajectory that stores only some steps": (
        lambda case: isinstance(case.algorithm, AbstractStepwise) and not case.algorithm.trajectory.is_whole
    ),
    "hypergradient that a trace cannot repeat": (
        lambda case: case.algorithm is not None and not case.algorithm.is_traceable
    ),
    "penalty method": _is("Penalty"),
    "saba": _is("SABA"),
    "evolution": _is("EvolutionStrategies"),
    "middle problem": lambda case: case.is_nested,
    _DIFFERENTIATED: lambda case: case.is_differentiated,
    "hypergradient.rule: barrier": lambda case: getattr(case.algorithm, "rule", None) == "barrier",
    "solution that depends on tasks": lambda case: case.shaped_by_tasks != "",
    "several ranks": lambda case: case.num_ranks > 1,
    _TASKS_ON_RANKS: lambda case: case.settings.tasks is not None and case.num_ranks > 1,
    _ON_RANKS: lambda case: case.runs_in_part,
    "runner.trace": lambda case: case.is_traced,
    "sweep.fuse": lambda case: case.is_fused,
}


class Row(NamedTuple):
    """Two features that do not go together.

    The texts may name `{name}`, `{solution}`, `{reader}`, `{read}`, `{tasks}`, `{algorithm}` and `{optimizer}` of the
    case.

    Args:
        first: a key of FEATURES.
        second: another key of FEATURES.
        reason: why they exclude each other; it follows the word "since" in a message.
        key: the setting to change, behind `problems.<name>.`; "" where the second feature is left out instead, and the
            run goes on.
        expected: the value that the setting should have.
        advice: what to do; "" says to correct the setting.
    """

    first: str
    second: str
    reason: str
    key: str = ""
    expected: str = ""
    advice: str = ""


_IN_PARTS = "layer-parallel training runs the module in parts"
_FORWARD = "compile, shard and parallel need a loss that calls the module's forward"
_VMAP = "the loss of a problem with tasks runs under torch.vmap"
_OWN_TASKS = "each rank trains its own tasks"
_PART = "but each rank holds only a part of them"
_OTHER_STEPS = (
    "{algorithm} needs steps along the serial gradient of '{name}', and layer-parallel steps follow another gradient"
)
_PART_STEPS = (
    "the gradient of a parameter is the mean over the ranks whose path used it, and {algorithm} supports only means "
    "over all ranks"
)
_SECOND_ORDER = (
    "the gradient of '{reader}' passes through the solution of '{solution}' by {algorithm}, and sharded parameters "
    "have first derivatives only"
)
_SHAPED = (
    "the solution of '{name}' depends on the parameters of '{tasks}', and each rank has only the parameters of its own "
    "tasks (runner.devices=1 works)"
)
_PERSISTENT = (
    "persistent rollouts continue where the last ones ended, while the training steps of '{name}' begin somewhere else"
)
_SKIPPED = "{algorithm} differentiates or repeats the training steps, and an overflow in fp16 skips some of them"
_UNDERFLOW = "one hypergradient is computed inside another one, where no loss scale keeps small numbers from becoming 0"
_NO_RULE = "and mlotool has no update rule for {optimizer}"
_TWICE = "the gradient through the solution of '{name}' is itself differentiated, for a problem two levels above"
_AT_OTHERS = (
    "{algorithm} evaluates the loss of '{name}' at other parameters, for which the solution of the problem below it is "
    "not known"
)
_KNOWN = "one whose derivative is known (ConjugateGradient, NormalEquationConjugateGradient, Exact, Neumann, ...)"
_STEPS = f"one of torch.optim's {_KNOWN_OPTIMIZERS}"
# Settings to change, each with what it should be.
_NO_COMPILE, _NO_SHARD = ("compile", "false"), ("shard", "false")
_NO_TASKS, _NO_REMAT = ("tasks", "null"), ("remat", "null")
_FP32 = ("precision", "fp32 or bf16")
_ADAM, _PURE = ("optimizer", "adam"), ("optimizer", f"{_STEPS}, or an implicit hypergradient")
_IMPLICIT = ("hypergradient", "an implicit one")
_IMPLICIT_OR_NONE = ("hypergradient", "an implicit one, or first_order")
_REAL = ("module", "real parameters, such as torch.view_as_real(z)")
_CG = "Write +hypergradient@problems.{name}.hypergradient=cg."
_CG_OR_PARTIAL = f"{_CG[:-1]}, or set hypergradient.curvature: partial for the problem that reads '{{name}}'."

# By subject, as on the page; a row that fits two subjects is in the first of them. The first row that holds is told.
REFUSED: Mapping[str, tuple[Row, ...]] = {
    "precision: fp16": (
        Row(_FP16, _OF_STEPS, _SKIPPED, *_FP32),
        Row(_FP16, "middle problem", _UNDERFLOW, *_FP32),
        Row(_FP16, _DIFFERENTIATED, _UNDERFLOW, *_FP32),
        Row(
            _FP16, "shard", f"the loss scale of fp16 needs whole gradients, {_PART}; bf16 has no loss scale", *_NO_SHARD
        ),
        Row(_FP16, "parallel", "layer-parallel training has no loss scale", *_FP32),
        Row(_FP16, "line search", "a line search compares losses, which fp16 multiplies by a loss scale", *_FP32),
        Row(_FP16, _TASKS_ON_RANKS, "an overflow in one task has to skip the step of all tasks, on all ranks", *_FP32),
    ),
    "compile": (
        Row("compile", "tasks", f"{_VMAP}, not through a compiled module", *_NO_COMPILE),
        Row("compile", _DRAWS, "each path that is drawn would have to be compiled separately", *_NO_COMPILE),
        Row("compile", "parallel", f"{_IN_PARTS}, not as one compiled module", *_NO_COMPILE),
        Row("compile", "shard", "torch.compile cannot trace the code that gathers the shards", *_NO_SHARD),
        Row("compile", "remat", "torch.compile decides by itself what a backward pass recomputes", *_NO_REMAT),
        Row("compile", "training_step", _FORWARD, *_NO_COMPILE),
    ),
    "shard": (
        Row("shard", "tasks", "each rank already holds the parameters of its own tasks only", *_NO_SHARD),
        Row("shard", "reset_to", f"reset_to copies whole parameters, {_PART}", *_NO_SHARD),
        Row(
            "shard",
            "optimizer_roles",
            "learned hyperparameters need a gradient through the optimizer's steps, which shard does not support",
            *_NO_SHARD,
        ),
        Row("shard", "parallel", f"{_IN_PARTS}, and shards are gathered for the whole module", *_NO_SHARD),
        Row("shard", "line search", f"a line search needs whole parameters, {_PART}", *_NO_SHARD),
        Row("shard", _HYPERGRADIENT, _SECOND_ORDER, "shard", "false, or hypergradient: first_order for '{solution}'"),
        Row("shard", "remat", "each block that is recomputed would have to gather its shards again", *_NO_REMAT),
        Row("shard", "training_step", _FORWARD, *_NO_SHARD),
        Row(
            "shard: true",
            _ON_RANKS,
            "each layer would wait for all ranks, and ranks with different paths run different layers",
            "shard",
            "false, or a list of patterns such as ['head.*']",
        ),
    ),
    "parallel": (
        Row("parallel", "tasks", f"{_IN_PARTS} and with one set of parameters, not one for each task", *_NO_TASKS),
        Row("parallel", "remat", f"{_IN_PARTS}, without remat", *_NO_REMAT),
        Row("parallel", "training_step", _FORWARD, "parallel", "null"),
        Row("parallel", _MAKES_STEPS, _OTHER_STEPS, *_IMPLICIT),
        Row("parallel", _OF_STEPS, _OTHER_STEPS, *_IMPLICIT),
        Row(
            "parallel: Auxiliary",
            "line search",
            "a line search evaluates the loss several times, and each evaluation moves the auxiliary variables",
            *_ADAM,
        ),
        Row(
            "parallel.processes",
            "gradient_clip_norm",
            "no process has the whole gradient",
            "gradient_clip_norm",
            "null",
        ),
        Row(
            "parallel.processes",
            "same_batch_as",
            "all stages need the same samples, but another problem's batches may be divided among the ranks",
            "same_batch_as",
            "null",
        ),
        Row(
            "parallel.processes",
            _LOWER,
            "the gradient of '{name}' passes through the solution of '{read}', which works in one process only",
            "parallel.processes",
            "false",
        ),
    ),
    "Several ranks": (
        Row(
            "several ranks",
            "data set of whole batches",
            "ranks divide the samples of each batch, and this data set gives no single samples",
            "stream",
            "a data set of samples, and a batch_size",
        ),
        Row(
            _TASKS_ON_RANKS, _OTHER_OPTIMIZER, f"{_OWN_TASKS}, and {{optimizer}} may mix the tasks", "optimizer", _STEPS
        ),
        Row(_TASKS_ON_RANKS, "saba", f"{_OWN_TASKS}, and the tables that saba keeps mix the tasks", *_IMPLICIT),
        Row(
            _TASKS_ON_RANKS,
            "hypergradient.rule: barrier",
            f"{_OWN_TASKS}, and with rule: barrier one weight of the penalty is adapted to all tasks",
            "hypergradient.rule",
            "fixed",
        ),
        Row("several ranks", "solution that depends on tasks", _SHAPED, "tasks", "the same number as '{tasks}'"),
        Row(_ON_RANKS, _OF_STEPS, _PART_STEPS, *_IMPLICIT_OR_NONE),
        Row(_ON_RANKS, _MAKES_STEPS, _PART_STEPS, *_IMPLICIT_OR_NONE),
        Row(
            "several ranks",
            "module.statistics: path",
            "ranks average the running statistics over all paths",
            "module.statistics",
            "shared",
        ),
    ),
    "Tasks": (
        Row(
            "tasks",
            _DRAWS,
            f"{_VMAP}, where a value drawn at random cannot decide which layers run; spaces.PathWeights works, because "
            "it runs all of them",
            *_NO_TASKS,
        ),
        Row(
            "tasks",
            "sparse gradients",
            f"{_VMAP}, which has no sparse gradients",
            "module",
            "layers without sparse=True, and no SparseAdam",
        ),
    ),
    "Optimizers and parameters": (
        Row(
            "line search",
            _LOWER,
            "a line search compares losses at fixed parameters of '{read}', but the gradient of '{name}' passes "
            "through the solution of '{read}'",
            *_ADAM,
        ),
        Row("complex parameters", _HYPERGRADIENT, "{algorithm} supports real numbers only", *_REAL),
        Row(
            "complex parameters",
            "optimizer_roles",
            "steps with learned hyperparameters support real numbers only",
            *_REAL,
        ),
        Row(
            _OTHER_OPTIMIZER,
            _OF_STEPS,
            f"{{algorithm}} differentiates or repeats the optimizer's steps, {_NO_RULE}",
            *_PURE,
        ),
        Row(
            _OTHER_OPTIMIZER,
            "optimizer_roles",
            f"learned hyperparameters need a derivative of the optimizer's steps, {_NO_RULE}",
            *_PURE,
        ),
        Row(
            "optimizer_roles",
            "scheduler",
            "another problem already sets hyperparameters of the optimizer",
            "scheduler",
            "null",
        ),
    ),
    "Where the training steps start": (
        Row(
            "reset_to",
            "roll_back",
            "after an upper step, reset_to goes back to the initialization, but roll_back undoes only the last steps",
            "roll_back",
            "false",
        ),
        Row("hypergradient.persistent: true", "roll_back", _PERSISTENT, "roll_back", "false"),
        Row("reset_to", "warmup_steps", "reset_to would undo the steps of the warm-up", "warmup_steps", "0"),
        Row("hypergradient.persistent: true", "reset_to", _PERSISTENT, "reset_to", "null"),
    ),
    "Three or more levels": (
        Row(
            "hypergradient.product: finite_difference",
            _DIFFERENTIATED,
            _TWICE,
            "hypergradient.product",
            "reverse",
            _CG_OR_PARTIAL,
        ),
        Row("solver without a derivative", _DIFFERENTIATED, _TWICE, "hypergradient.solver", _KNOWN, _CG_OR_PARTIAL),
        Row("penalty method", "middle problem", _AT_OTHERS, *_IMPLICIT, _CG),
        Row("penalty method", _DIFFERENTIATED, _TWICE, *_IMPLICIT, _CG_OR_PARTIAL),
        Row("saba", _DIFFERENTIATED, _TWICE, *_IMPLICIT, _CG_OR_PARTIAL),
        Row("evolution", "middle problem", _AT_OTHERS, *_IMPLICIT, _CG),
        Row("evolution", _DIFFERENTIATED, _TWICE, *_IMPLICIT, _CG_OR_PARTIAL),
    ),
}

TRACE, FUSE = "runner.trace", "sweep.fuse"

# By feature, what a problem that has it runs without, and why.
LEFT_OUT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("several ranks", (TRACE, FUSE), "the gradient of '{name}' is a mean over ranks"),
    ("parallel", (TRACE, FUSE), "'{name}' trains its layers in parallel"),
    (_FP16, (TRACE, FUSE), "in fp16 the values of the gradient decide whether '{name}' takes a step"),
    (_OTHER_OPTIMIZER, (TRACE,), f"the optimizer of '{{name}}' is none of {_KNOWN_OPTIMIZERS}"),
    ("line search", (FUSE,), "the optimizer of '{name}' evaluates the loss itself"),
    ("optimizer_roles", (TRACE,), "another problem gives hyperparameters of the optimizer of '{name}'"),
    ("reset_to", (TRACE,), "'{name}' restarts from its initialization after each upper step (reset_to)"),
    ("roll_back", (TRACE,), "the last steps of '{name}' are undone after each upper step (roll_back)"),
    (_MAKES_STEPS, (TRACE, FUSE), "the hypergradient method of '{solution}' also makes its training steps"),
    (
        "hypergradient.remat: false",
        (TRACE, FUSE),
        "the hypergradient method of '{solution}' keeps the graphs of the training steps (remat: false)",
    ),
    ("compile", (TRACE, FUSE), "the module of '{name}' is already compiled (compile: true)"),
    ("complex parameters", (TRACE, FUSE), "the parameters of '{name}' are complex"),
    ("sparse gradients", (TRACE, FUSE), "the gradient of '{name}' is sparse"),
    ("shard", (TRACE, FUSE), "the parameters of '{name}' are divided among ranks (shard)"),
    (
        "trajectory that stores only some steps",
        (TRACE, FUSE),
        "the hypergradient method of '{solution}' recomputes training steps that it has not stored (trajectory)",
    ),
    (
        "hypergradient.product: forward",
        (TRACE, FUSE),
        "the hypergradient method of '{solution}' uses forward mode, which a trace does not record",
    ),
    (
        "remat",
        (TRACE, FUSE),
        "a trace would keep the values in memory that remat of '{name}' recomputes",
    ),
    (
        "hypergradient that a trace cannot repeat",
        (TRACE, FUSE),
        "the hypergradient method of '{solution}' may compute something else at each use, which a trace cannot repeat",
    ),
    (_OF_STEPS, (TRACE,), "a trace does not keep the steps of '{solution}' that its hypergradient method needs"),
)

ROWS = (
    *chain.from_iterable(REFUSED.values()),
    *(Row(first, use, reason) for first, uses, reason in LEFT_OUT for use in uses),
)


def check(case: Case) -> None:
    """Refuse features that exclude each other.

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
    """Return why the two features of a row exclude each other in a case."""
    return _filled(row.reason, case)


def message(row: Row, case: Case) -> str:
    """Return the message of a row that holds: what was found, what was expected, why, and what to do."""
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
