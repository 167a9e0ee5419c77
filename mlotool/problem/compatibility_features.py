"""The features of a problem that the table of what does not go together knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mlotool.problem.compatibility_case import Case


@dataclass(frozen=True)
class Feature:
    """One side of a row.

    Args:
        label: in the page.
        holds: whether a case has it.
    """

    label: str
    holds: Callable[[Case], bool]


def _algorithm(attribute: str) -> Callable[[Case], bool]:
    return lambda case: case.algorithm is not None and bool(getattr(case.algorithm, attribute))


def _is_algorithm(name: str) -> Callable[[Case], bool]:
    return lambda case: any(each.__name__ == name for each in type(case.algorithm).__mro__)


def _of_parallel(attribute: str, value: bool) -> Callable[[Case], bool]:
    return lambda case: case.parallel is not None and bool(getattr(case.parallel, attribute)) is value


def _searches(case: Case) -> bool:
    from mlotool.problem.usable import needs_closure

    return case.optimizer is not None and needs_closure(case.optimizer)


def _has_no_pure_form(case: Case) -> bool:
    from mlotool.problem.optimizers.registry import RULES

    return case.optimizer is not None and type(case.optimizer) not in RULES


def _drops_steps(case: Case) -> bool:
    return case.algorithm is not None and not case.algorithm.trajectory.is_whole


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
    from torch.optim import SparseAdam

    layers = () if case.module is None else case.module.modules()
    return isinstance(case.optimizer, SparseAdam) or any(getattr(each, "sparse", None) is True for each in layers)


FEATURES: Mapping[str, Feature] = {
    "tasks": Feature("`tasks`", lambda case: case.settings.tasks is not None),
    "compile": Feature("`compile`", lambda case: case.settings.compile),
    "shard": Feature("`shard`", lambda case: bool(case.settings.shard)),
    "shard_all": Feature("`shard: true`", lambda case: case.settings.shard is True),
    "blocks": Feature("`remat` of a problem", lambda case: case.settings.remat is not None),
    "draws": Feature("a module that draws paths (`paths` of a shared space, BinaryPaths, PathPolicy)", _draws_paths),
    "complex": Feature("complex parameters", _has_complex),
    "sparse_layers": Feature("layers with `sparse=True`, SparseAdam", _steps_sparsely),
    "parallel": Feature("`parallel`", lambda case: case.parallel is not None),
    "auxiliary": Feature("`parallel`: Auxiliary", _of_parallel("is_repeatable", False)),
    "processes": Feature("`parallel.processes`", _of_parallel("is_divided", True)),
    "fp16": Feature("`precision: fp16`", lambda case: case.settings.precision == "fp16"),
    "line_search": Feature("an optimizer with a line search", _searches),
    "impure": Feature("another optimizer than SGD, Adam and AdamW", _has_no_pure_form),
    "optimizer_roles": Feature(
        "hyperparameters that a problem gives", lambda case: bool(case.settings.optimizer_roles)
    ),
    "scheduler": Feature("`scheduler`", lambda case: case.scheduler is not None),
    "reset_to": Feature("`reset_to`", lambda case: case.settings.reset_to is not None),
    "roll_back": Feature("`roll_back`", lambda case: case.settings.roll_back),
    "warmup": Feature("`warmup_steps`", lambda case: case.settings.warmup_steps > 0),
    "clip": Feature("`gradient_clip_norm`", lambda case: case.settings.gradient_clip_norm is not None),
    "same_batch": Feature("`same_batch_as`", lambda case: type(case.stream).__name__ == "SameBatch"),
    "reads": Feature("a gradient that passes through solutions of other problems", lambda case: case.read != ""),
    "hypergradient": Feature(
        "a solution that is differentiated", lambda case: case.algorithm is not None and not case.algorithm.is_constant
    ),
    "differences": Feature("`product: finite_difference`", _algorithm("moves_solutions")),
    "forward": Feature("`product: forward`", lambda case: getattr(case.algorithm, "product", None) == "forward"),
    "approximate": Feature("a solver whose derivative is not known", _approximates),
    "unrolled": Feature("Unrolled, EvolutionStrategies", _algorithm("sees_steps")),
    "persistent": Feature("`persistent: true`", _algorithm("is_persistent")),
    "penalty": Feature("Penalty", _is_algorithm("Penalty")),
    "saba": Feature("SABA", _is_algorithm("SABA")),
    "directing": Feature("a hypergradient that makes the problem's steps (SABA)", _algorithm("directs_steps")),
    "evolution": Feature("EvolutionStrategies", _is_algorithm("EvolutionStrategies")),
    "nested": Feature("a problem that shapes and reads a lower one", lambda case: case.is_nested),
    "differentiated": Feature(
        "a problem whose pullback is differentiated, by one above that both shapes and reads it",
        lambda case: case.is_differentiated,
    ),
    "ranks": Feature("several ranks", lambda case: case.num_ranks > 1),
    "parts": Feature("a shared space on several ranks", lambda case: case.runs_in_part),
    "path_statistics": Feature("`statistics: path` of a shared space", _has_path_statistics),
    "trace": Feature("`runner.trace`", lambda case: case.is_traced),
    "fuse": Feature("`sweep.fuse`", lambda case: case.is_fused),
    "graphs": Feature("`remat: false`", _algorithm("keeps_graphs")),
    "sparse": Feature("`trajectory` without all steps", _drops_steps),
    "remembering": Feature("a hypergradient that keeps something from pullback to pullback", _remembers),
}
