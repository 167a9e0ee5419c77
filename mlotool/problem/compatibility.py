"""What cannot go together: one table, from which both the messages and docs/compatibility.md are made.

A row names two features of a `Case`, which is one problem with what it is combined with; it holds where both are there.
`python -m mlotool.problem.compatibility > docs/compatibility.md` writes the page.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.optim import SparseAdam

from mlotool.core.arguments import shown
from mlotool.core.errors import ConfigError
from mlotool.problem.arguments import needs_closure
from mlotool.problem.interface import AbstractHypergradient
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
        num_ranks: processes that share each batch.
        runs_in_part: each call of its module runs a part of it, on several ranks.
        is_traced: its gradient is to run as a traced program.
        is_fused: its gradients are to run as a program of several runs.
        module: what it trains.
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
    num_ranks: int = 1
    runs_in_part: bool = False
    is_traced: bool = False
    is_fused: bool = False
    module: Any = None


def _algorithm_has(attribute: str) -> Callable[[Case], bool]:
    return lambda case: case.algorithm is not None and bool(getattr(case.algorithm, attribute))


def _algorithm_is(name: str) -> Callable[[Case], bool]:
    # By name: they stand in packages above this one.
    return lambda case: any(kind.__name__ == name for kind in type(case.algorithm).__mro__)


def _approximates(case: Case) -> bool:
    solver = getattr(case.algorithm, "solver", None)
    return solver is not None and not solver.is_differentiable


def _remembers(case: Case) -> bool:
    algorithm = case.algorithm
    # The steps of an unroll are arguments of a program of several runs; one of a single run's ticks has none for them.
    return algorithm is not None and not (algorithm.is_traceable and (case.is_fused or not algorithm.sees_steps))


def _draws_paths(case: Case) -> bool:
    from mlotool.spaces.shared.architecture import BinaryPaths, PathPolicy
    from mlotool.spaces.shared.shared_space import SharedSpace

    module = case.module
    return isinstance(module, BinaryPaths | PathPolicy) or (isinstance(module, SharedSpace) and module.has_paths)


def _has_path_statistics(case: Case) -> bool:
    from mlotool.spaces.shared.shared_space import SharedSpace

    return isinstance(case.module, SharedSpace) and case.module.has_path_statistics


def _has_complex(case: Case) -> bool:
    parameters = () if case.module is None else case.module.parameters()
    return any(each.requires_grad and each.dtype.is_complex for each in parameters)


def _steps_sparsely(case: Case) -> bool:
    layers = () if case.module is None else case.module.modules()
    return isinstance(case.optimizer, SparseAdam) or any(getattr(each, "sparse", None) is True for each in layers)


FEATURES: Mapping[str, tuple[str, Callable[[Case], bool]]] = {
    "tasks": ("`tasks`", lambda case: case.settings.tasks is not None),
    "compile": ("`compile`", lambda case: case.settings.compile),
    "shard": ("`shard`", lambda case: bool(case.settings.shard)),
    "shard_all": ("`shard: true`", lambda case: case.settings.shard is True),
    "blocks": ("`remat` of a problem", lambda case: case.settings.remat is not None),
    "draws": ("a module that draws paths (`paths` of a shared space, BinaryPaths, PathPolicy)", _draws_paths),
    "complex": ("complex parameters", _has_complex),
    "sparse_layers": ("layers with `sparse=True`, SparseAdam", _steps_sparsely),
    "parallel": ("`parallel`", lambda case: case.parallel is not None),
    "auxiliary": ("`parallel`: Auxiliary", lambda case: case.parallel is not None and not case.parallel.is_repeatable),
    "processes": ("`parallel.processes`", lambda case: case.parallel is not None and case.parallel.is_divided),
    "fp16": ("`precision: fp16`", lambda case: case.settings.precision == "fp16"),
    "line_search": (
        "an optimizer with a line search",
        lambda case: case.optimizer is not None and needs_closure(case.optimizer),
    ),
    "impure": (
        "another optimizer than SGD, Adam and AdamW",
        lambda case: case.optimizer is not None and type(case.optimizer) not in RULES,
    ),
    "optimizer_roles": ("hyperparameters that a problem gives", lambda case: bool(case.settings.optimizer_roles)),
    "scheduler": ("`scheduler`", lambda case: case.scheduler is not None),
    "reset_to": ("`reset_to`", lambda case: case.settings.reset_to is not None),
    "roll_back": ("`roll_back`", lambda case: case.settings.roll_back),
    "warmup": ("`warmup_steps`", lambda case: case.settings.warmup_steps > 0),
    "clip": ("`gradient_clip_norm`", lambda case: case.settings.gradient_clip_norm is not None),
    "same_batch": ("`same_batch_as`", lambda case: type(case.stream).__name__ == "SameBatch"),
    "reads": ("a gradient that passes through solutions of other problems", lambda case: case.read != ""),
    "hypergradient": (
        "a solution that is differentiated",
        lambda case: case.algorithm is not None and not case.algorithm.is_constant,
    ),
    "differences": ("`product: finite_difference`", _algorithm_has("moves_solutions")),
    "forward": ("`product: forward`", lambda case: getattr(case.algorithm, "product", None) == "forward"),
    "approximate": ("a solver whose derivative is not known", _approximates),
    "unrolled": ("Unrolled, EvolutionStrategies", _algorithm_has("sees_steps")),
    "persistent": ("`persistent: true`", _algorithm_has("is_persistent")),
    "penalty": ("Penalty", _algorithm_is("Penalty")),
    "saba": ("SABA", _algorithm_is("SABA")),
    "directing": ("a hypergradient that makes the problem's steps (SABA)", _algorithm_has("directs_steps")),
    "evolution": ("EvolutionStrategies", _algorithm_is("EvolutionStrategies")),
    "nested": ("a problem that shapes and reads a lower one", lambda case: case.is_nested),
    "differentiated": (
        "a problem whose pullback is differentiated, by one above that both shapes and reads it",
        lambda case: case.is_differentiated,
    ),
    "ranks": ("several ranks", lambda case: case.num_ranks > 1),
    "parts": ("a shared space on several ranks", lambda case: case.runs_in_part),
    "path_statistics": ("`statistics: path` of a shared space", _has_path_statistics),
    "trace": ("`runner.trace`", lambda case: case.is_traced),
    "fuse": ("`sweep.fuse`", lambda case: case.is_fused),
    "graphs": ("`remat: false`", _algorithm_has("keeps_graphs")),
    "sparse": (
        "`trajectory` without all steps",
        lambda case: case.algorithm is not None and not case.algorithm.trajectory.is_whole,
    ),
    "remembering": ("a hypergradient that keeps something from pullback to pullback", _remembers),
}
"""By name, what a row may speak of: its label in the page, and whether a case has it."""


class Row(NamedTuple):
    """Two features that do not go together.

    The texts may name `{name}`, `{solution}`, `{reader}`, `{read}` and `{algorithm}` of the case.

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
_CG = "Write +hypergradient@problems.{name}.hypergradient=cg, or set curvature: partial on the problem above."
_KNOWN = "ConjugateGradient, NormalEquationConjugateGradient, Exact, Neumann, FixedPoint or Identity"
_PURE = "SGD, Adam or AdamW of torch.optim"

# By setting to change, what it should be and what to do: the pairs of features, each with the reason.
_REFUSED: Mapping[tuple[str, str, str], Mapping[str, str]] = {
    ("compile", "false", ""): {
        "tasks compile": "tasks run through torch.vmap",
        "compile draws": "its module draws a path for each batch, and each path is another program",
        "parallel compile": _STAGES,
    },
    ("shard", "false", ""): {
        "tasks shard": "tasks divide the batch by themselves",
        "shard compile": "torch.compile cannot trace what gathers the shards",
        "shard fp16": "the loss scale of fp16 needs whole gradients; bf16 needs none",
        "shard reset_to": "reset_to copies whole parameters",
        "shard optimizer_roles": "other problems give its optimizer's settings",
        "shard parallel": _STAGES,
        "shard line_search": "a line search compares values at parameters that are divided",
    },
    ("shard", "false, or first_order as the hypergradient of '{solution}'", ""): {
        "shard hypergradient": "the gradient of '{reader}' passes through that solution by {algorithm}, and sharded "
        "parameters have no second derivatives (FSDP2 frees what they need)",
    },
    ("shard", "false, or patterns of names such as ['head.*']", ""): {
        "parts shard_all": "ranks that run different paths would wait for each other's shards",
    },
    ("tasks", "null", ""): {
        "tasks parallel": _STAGES,
        "tasks ranks": "the tasks are the batch's first axis, which ranks would divide (runner.devices=1 does not)",
        "tasks draws": "its module draws a path by values, which torch.vmap cannot (mlotool.spaces.PathWeights mixes)",
    },
    ("hypergradient", "an implicit one (cg), or first_order", ""): {
        "parts unrolled": _PART_STEPS,
        "parts directing": _PART_STEPS,
    },
    ("module.statistics", "shared", "Set evaluate.recalibrate=20 with it, or runner.devices=1."): {
        "ranks path_statistics": "ranks average running statistics, those of paths that they have not run included",
    },
    ("remat", "null", ""): {
        "blocks compile": "torch.compile decides by itself what a backward pass computes again",
        "blocks shard": "a block that is evaluated again would have to gather its shards again",
        "blocks parallel": _STAGES,
    },
    ("precision", "fp32 or bf16", ""): {
        "parallel fp16": _STAGES,
        "line_search fp16": "a line search compares losses, and fp16 scales them",
        "fp16 unrolled": "{algorithm} differentiates its steps, of which an overflow skips some",
        "fp16 nested": "its pullback contains another one, where no loss scale keeps from underflow",
        "fp16 differentiated": "its pullback is differentiated, where no loss scale keeps from underflow",
    },
    ("hypergradient", "an implicit one", "Write hypergradient: finite_difference, or remove parallel."): {
        "parallel directing": "it steps '{name}' along gradients that it keeps, and layer-parallel steps follow others",
        "parallel unrolled": "it takes the steps of '{name}' again, and layer-parallel steps follow other gradients",
    },
    ("optimizer", "one that steps along one gradient", "Write optimizer: adam."): {
        "auxiliary line_search": "each evaluation moves auxiliary variables",
        "line_search reads": "it compares values of the loss, whose gradient passes through the solution of '{read}'",
    },
    ("gradient_clip_norm", "null", "Set it to null, or parallel.processes=false."): {
        "processes clip": "no process has the whole gradient, whose norm it is",
    },
    ("same_batch_as", "null", "Give it a stream, or set parallel.processes=false."): {
        "processes same_batch": "all stages need the same samples, which are divided otherwise",
    },
    ("parallel.processes", "false", ""): {
        "processes reads": "its gradient passes through the solution of '{read}' in its loss, on one process alone",
    },
    ("module", "real parameters", "Give it torch.view_as_real(z), and call torch.view_as_complex in forward."): {
        "complex hypergradient": "{algorithm} computes with real numbers",
        "complex optimizer_roles": "steps with hyperparameters that a problem gives are of real numbers",
    },
    ("module", "layers with dense gradients", "Leave out sparse=True, and SparseAdam."): {
        "tasks sparse_layers": "torch.vmap has no sparse ones",
    },
    ("optimizer", _PURE, "Choose one of them, or an implicit hypergradient for '{name}' (hypergradient=cg)."): {
        "impure unrolled": "{algorithm} takes its steps again, as pure functions",
    },
    ("optimizer", _PURE, ""): {
        "impure optimizer_roles": "a problem gives its hyperparameters, through which gradients pass",
    },
    ("scheduler", "null", ""): {"optimizer_roles scheduler": "a problem sets hyperparameters"},
    ("roll_back", "false", ""): {
        "reset_to roll_back": "reset_to begins each unroll anew",
        "persistent roll_back": _PERSISTENT,
    },
    ("warmup_steps", "0", ""): {"reset_to warmup": "reset_to undoes them"},
    ("reset_to", "null", ""): {"persistent reset_to": _PERSISTENT},
    ("hypergradient.product", "reverse", _CG): {"differences differentiated": _ABOVE},
    ("hypergradient.solver", f"a solver whose derivative is known: {_KNOWN}", _CG): {
        "approximate differentiated": _ABOVE
    },
    ("hypergradient", "an implicit one", _CG): {
        "penalty nested": _NESTED,
        "penalty differentiated": _ABOVE,
        "saba differentiated": _ABOVE,
        "evolution nested": _NESTED,
        "evolution differentiated": _ABOVE,
    },
}

# Without which uses a problem runs that has a feature, and why.
_LEFT_OUT: Mapping[str, tuple[str, str]] = {
    "ranks": ("trace fuse", "its gradient is a mean over ranks"),
    "parallel": ("trace fuse", "its training is layer-parallel"),
    "fp16": ("trace fuse", "in fp16 a step decides by its gradient whether it is taken"),
    "impure": ("trace", "its optimizer is none of SGD, Adam and AdamW"),
    "line_search": ("fuse", "its optimizer evaluates the loss itself"),
    "optimizer_roles": ("trace", "another problem gives hyperparameters of its optimizer"),
    "reset_to": ("trace", "each of its unrolls begins anew (reset_to)"),
    "roll_back": ("trace", "its steps are a look-ahead (roll_back)"),
    "directing": ("trace fuse", "the hypergradient of '{solution}' makes the steps of '{solution}'"),
    "graphs": ("trace fuse", "the hypergradient of '{solution}' keeps the graphs of the steps of '{solution}'"),
    "compile": ("trace fuse", "the module of '{name}' is compiled by itself"),
    "complex": ("trace fuse", "the parameters of '{name}' are complex"),
    "sparse_layers": ("trace fuse", "the gradient of '{name}' is sparse"),
    "shard": ("trace fuse", "the parameters of '{name}' are divided among ranks"),
    "sparse": ("trace fuse", "the steps of '{solution}' are taken again from their gradients (trajectory)"),
    "forward": ("trace fuse", "the hypergradient of '{solution}' takes tangents, which a trace does not record"),
    "blocks": ("trace fuse", "a trace takes equal evaluations once, and would keep what remat of '{name}' drops"),
    "remembering": (
        "trace fuse",
        "the hypergradient of '{solution}' keeps something from one use to the next, or decides by values",
    ),
}

ROWS: tuple[Row, ...] = (
    *(
        Row(pair.split()[0], pair.split()[1], reason, key, expected, advice)
        for (key, expected, advice), pairs in _REFUSED.items()
        for pair, reason in pairs.items()
    ),
    *(Row(first, use, reason) for first, (uses, reason) in _LEFT_OUT.items() for use in uses.split()),
)


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
    held = {name: holds(case) for name, (_, holds) in FEATURES.items()}
    return (row for row in ROWS if held[row.first] and held[row.second])


def reason(row: Row, case: Case) -> str:
    """Return why a row that holds for a case does."""
    return _filled(row.reason, case)


def message(row: Row, case: Case) -> str:
    """Return what to tell of a row that holds: what was found, what was expected, what to do."""
    key = f"problems.{case.name}.{row.key}"
    expected, why, advice = (_filled(text, case) for text in (row.expected, row.reason, row.advice))
    return f"{key}: found {_found(row.key, case)}; expected {expected}, since {why}. {advice or f'Correct {key}.'}"


def _filled(text: str, case: Case) -> str:
    return text.format(
        name=case.name,
        solution=case.solution or case.name,
        reader=case.reader,
        read=case.read,
        algorithm=type(case.algorithm).__name__,
    )


def _found(key: str, case: Case) -> str:
    objects = {"hypergradient": case.algorithm, "hypergradient.solver": getattr(case.algorithm, "solver", None)}
    objects |= {"optimizer": case.optimizer, "scheduler": case.scheduler, "module": case.module}
    words = {
        "hypergradient.product": "finite_difference",
        "parallel.processes": "true",
        "module.statistics": "path",
        "same_batch_as": "a problem",
    }
    if key in objects:
        return type(objects[key]).__name__
    value = getattr(case.settings, key, None)
    return words.get(key) or ("true" if value is True else shown([*value] if isinstance(value, tuple) else value))


_PAGE = """# What goes together

Features that exclude each other. These tables are those that the program itself looks up
(`mlotool/problem/compatibility.py`): `mlotool validate --targets` and `mlotool run` refuse a pair with the
setting that was found, what is expected and what to do. What is in no row goes together, within the ranges that each
setting's own message tells. This page is made by `python -m mlotool.problem.compatibility`.

## Refused
| this | with | change | to | because |
|---|---|---|---|---|
{refused}
## Left out
A problem's steps are not traced, or not taken with those of other runs as one program, where one of these is marked;
the run goes on without it.

| this | {uses} | because |
|---|---|---|---|
{left}"""

_WORDS = {"name": "the problem", "solution": "the problem", "reader": "another problem", "read": "another problem"}


def page() -> str:
    """Return the page docs/compatibility.md."""
    label = {name: text for name, (text, _) in FEATURES.items()}
    refused = [
        (label[row.first], label[row.second], f"`{row.key}`", _plain(row.expected), _plain(row.reason))
        for row in ROWS
        if row.key
    ]
    left = [
        (label[first], *("x" if use in uses else "" for use in ("trace", "fuse")), _plain(why))
        for first, (uses, why) in _LEFT_OUT.items()
    ]
    return _PAGE.format(refused=_lines(refused), uses=f"{label['trace']} | {label['fuse']}", left=_lines(left))


def _plain(text: str) -> str:
    """Return a text of a row for any problem: `'{name}'` becomes "the problem"."""
    return re.sub(r"'?\{(\w+)\}'?", lambda match: _WORDS.get(match[1], "the hypergradient"), text).replace("|", r"\|")


def _lines(rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


if __name__ == "__main__":
    print(page(), end="")
