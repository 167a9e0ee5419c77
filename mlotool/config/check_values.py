"""Values that fit their own setting, but not each other: names, edges, splits, metrics, and what has no effect."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from mlotool.config import schema
from mlotool.config.instantiate import optimizer_roles
from mlotool.config.objective import direction_faults, objective_direction
from mlotool.config.resolve import is_known
from mlotool.config.schema import METRIC_NAMES, is_identifier, is_plain_name, name_fault
from mlotool.config.security.trusted import is_of_user
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean
from mlotool.folders.documents import leaves
from mlotool.problem.settings import ProblemNode
from mlotool.program.graph import Graph

Values = Mapping[str, Any]
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def unknown_name(key: str, name: Any, options: Iterable[str], advice: str = "Correct it.") -> str:
    """Return the message for a name that refers to nothing.

    Args:
        key: where it stands.
        name: what stands there.
        options: the names there are.
        advice: what to do.
    """
    options = list(options)
    known = ", ".join(options) or "none, as there is none"
    return f"{key}: found '{name}'; expected one of {known}.{did_you_mean(str(name), options)} {advice}"


def name_faults(values: Values) -> Iterator[str]:
    """Yield the names that cannot be those of keys, metrics or files, or that two things have."""
    problems, analyses, splits = values["problems"], values["analyses"], _splits(values)
    if fault := name_fault(values["name"]):
        yield fault
    if not problems:
        yield "problems: found none; expected at least one. Choose a recipe: mlotool run mwn."
    for key, names in (("analyses", analyses), ("evaluate.splits", splits)):
        for name in itertools.filterfalse(is_plain_name, names):
            yield f"{key}: found the name {name!r}; expected letters, digits, '-', '_' and '.'. Rename it."
    for name in itertools.filterfalse(is_identifier, problems):
        yield f"problems.{name}: found the name {name!r}; expected letters and '_', then also digits. Rename it."
    for key, names, others in (
        ("problems", problems, {"split": splits}),
        ("analyses", analyses, {"problem": problems, "split": splits}),
    ):
        for name, kind in itertools.product(names, others):
            if name in others[kind]:
                yield (
                    f"{key}.{name}: found the name of a {kind}; expected another name, since metrics are logged as "
                    "<name>/<metric>. Rename it."
                )


def _splits(values: Values) -> Values:
    splits: Values = (values["evaluate"] or {}).get("splits", {})
    return splits


def graph_faults(values: Values) -> Iterator[str]:
    """Yield edges that no loss reads, roles without an edge, and problems that learn nothing as the edges point."""
    problems, graph = values["problems"], Graph(**values["graph"])
    nodes = {
        name: ProblemNode(dict(_played(name, problem)), _other_uses(problem)) for name, problem in problems.items()
    }
    try:
        graph.validate(nodes)
    except ConfigError as error:
        yield from str(error).splitlines()
    if values["baseline"] == "fixed" and not any(graph.upper_to_lower.values()):
        yield (
            "baseline: found fixed, but no problem shapes another; expected a problem whose outputs can be held fixed. "
            "Set baseline=null, or add graph.upper_to_lower."
        )
    for name, node in nodes.items():
        players = set(node.roles.values())
        if not players or name in players or graph.lowers(name):
            continue
        advice = " ".join(
            f"Write graph.upper_to_lower.{name}: [{other}] and graph.lower_to_upper.{other}: [{name}]."
            for other in sorted(players & {*graph.readers(name), *graph.uppers(name)})
        )
        advice = f"The edges are the wrong way round? {advice}" if advice else f"Add a role for '{name}' to its loss."
        yield f"graph: '{name}' reads no solution, and its loss does not use its own module: it cannot learn. {advice}"


def _other_uses(problem: Values) -> dict[str, str]:
    uses = {f"optimizer.{key}": name for key, name in optimizer_roles(problem.get("optimizer")).items()}
    start = problem.get("reset_to")
    return uses if not isinstance(start, str) or start == "initial" else {**uses, "reset_to": start}


def _played(name: str, problem: Values) -> Iterator[tuple[str, str]]:
    loss = problem.get("loss")
    if loss is None:
        # The training_step of its own module.
        yield "model", name
    roles = loss.get("roles") if isinstance(loss, Mapping) else None
    for role, value in roles.items() if isinstance(roles, Mapping) else ():
        player = value.get("problem") if isinstance(value, Mapping) else value
        if isinstance(player, str):
            yield role, player


def stream_faults(values: Values) -> Iterator[str]:
    """Yield what names a problem without a stream, or a split that the data have not, and batches of no rank's."""
    problems, devices = values["problems"], values["runner"]["devices"]
    for name, problem in problems.items():
        other, key = problem.get("same_batch_as"), f"problems.{name}.same_batch_as"
        streaming = [other_name for other_name, node in problems.items() if node.get("stream") and other_name != name]
        if isinstance(other, str) and problem.get("stream"):
            yield f"{key}: found '{other}' beside a stream; expected one of the two. Remove one of them."
        elif isinstance(other, str) and other not in streaming:
            yield unknown_name(key, other, streaming)
        tasks = problem.get("tasks")
        if isinstance(devices, int) and isinstance(tasks, int) and devices > 0 and tasks % devices:
            yield (
                f"problems.{name}.tasks: found {tasks} with runner.devices={devices}, which divides the tasks into "
                f"equal parts; expected a multiple of {devices}. Change it with problems.{name}.stream.batch_size, or "
                "runner.devices."
            )
    sizes = values["data"].get("sizes") if isinstance(values["data"], Mapping) else None
    if isinstance(sizes, Mapping):
        of_data = [name for name, size in sizes.items() if size]
        for key, split in named_splits(values):
            if split not in of_data:
                yield unknown_name(key, split, of_data, f"Correct it, or set data.sizes.{split}=100.")


def named_splits(values: Values) -> Iterator[tuple[str, str]]:
    """Yield the splits that streams, analyses and evaluations name, by key; what cannot be one has its own fault."""
    nodes = {f"problems.{name}.stream": problem["stream"] for name, problem in values["problems"].items()}
    for name, node in values["analyses"].items():
        nodes[f"analyses.{name}"] = {"split": "train", **node} if isinstance(node, Mapping) else None
    splits = {f"{key}.split": node.get("split") for key, node in nodes.items() if isinstance(node, Mapping)}
    splits |= {f"evaluate.splits.{name}": name for name in _splits(values)}
    yield from ((key, split) for key, split in splits.items() if isinstance(split, str))


def evaluation_faults(values: Values) -> Iterator[str]:
    """Yield what is wrong with `evaluate`, `objective` and early stopping."""
    evaluate, objective, problems = values["evaluate"] or {}, values["objective"], values["problems"]
    problem = evaluate.get("problem")
    if problem is not None and is_known(problem) and problem not in problems:
        yield unknown_name("evaluate.problem", problem, problems)
    for argument, source in evaluate.get("arguments", {}).items():
        name, dot, method = str(source).partition(".")
        if is_known(source) and (name not in problems or (dot and not method.isidentifier())):
            advice = "Write a problem, or a method of its module: problem.method."
            yield unknown_name(f"evaluate.arguments.{argument}", source, problems, advice)
    is_wrong = any(isinstance(metric, str) and metric not in METRIC_NAMES for metric in evaluate.get("metrics", ()))
    # Where the list of metrics is wrong, a metric that is right has no fault of its own.
    if isinstance(objective, str) and not (is_wrong and objective.partition("/")[2] in METRIC_NAMES):
        # Of a key that is not logged there is no direction.
        yield from list(_objective_faults(objective, values)) or direction_faults(values)
        yield from _plateau_faults(values)
    source = str(objective or "").partition("/")[0]
    patience, splits = values["runner"]["early_stopping_patience"], _splits(values)
    is_evaluated = source in problems or isinstance(splits.get(source), int)
    if patience is not None and is_known(objective) and not is_evaluated:
        yield (
            f"runner.early_stopping_patience: found {patience} with objective={objective or 'null'}; expected an "
            "objective that is evaluated during training. Set evaluate.splits.val=100, or leave the patience out."
        )
    if values["runner"]["max_ticks"] == 0:
        if not splits and not values["analyses"]:
            yield (
                "runner.max_ticks: found 0 with nothing to evaluate; expected a split to evaluate. Set "
                "evaluate.splits.val=end."
            )
        if source in problems:
            yield (
                f"objective: found '{objective}' with runner.max_ticks=0; expected a metric of a split. Set "
                "objective=val/accuracy."
            )


def _objective_faults(objective: str, values: Values) -> Iterator[str]:
    evaluate = values["evaluate"] or {"splits": {}, "metrics": []}
    source, _, name = objective.partition("/")
    metrics = [metric for metric in evaluate["metrics"] if isinstance(metric, str)]
    logged = [f"{split}/{metric}" for split in evaluate["splits"] for metric in metrics]
    # A loss, an analysis or a function in evaluate.metrics may return metrics of any name.
    has_functions = len(metrics) < len(evaluate["metrics"])
    free = (*values["problems"], *values["analyses"], *(evaluate["splits"] if has_functions else ()))
    if objective not in logged and not (name and source in free):
        options = [*logged, *(f"{problem}/loss" for problem in values["problems"])]
        advice = "Correct objective, or add the split and the metric to evaluate."
        yield unknown_name("objective", objective, options, advice)


def _plateau_faults(values: Values) -> Iterator[str]:
    """Yield schedulers that take an improvement of the objective for the lack of one."""
    direction = objective_direction(values)
    for name, problem in values["problems"].items():
        node = problem.get("scheduler")
        if direction is None or not isinstance(node, Mapping) or problem.get("scheduler_interval") != "evaluation":
            continue
        mode = node.get("mode", "min")
        if node.get("_target_") == PLATEAU and is_known(mode) and mode != direction:
            yield (
                f"problems.{name}.scheduler.mode: found '{mode}' with objective={values['objective']}; expected "
                f"{direction}, or the rate falls while the objective gets better. Write mode: {direction}."
            )


def class_faults(metrics: Iterable[Any], num_classes: Any) -> Iterator[str]:
    """Yield what is wrong with the number of classes, for metrics of classification.

    Args:
        metrics: names and nodes; only names of built-in metrics are looked at.
        num_classes: what the data says, None where it says nothing.
    """
    for name in metrics:
        if name not in schema.CLASSIFICATION_METRIC_NAMES:
            continue
        if not num_classes:
            yield (
                f"evaluate.metrics: found '{name}', which needs classes; the data has num_classes={num_classes}. "
                "Use one of mean_squared_error, mean_absolute_error, r2, or data with classes."
            )
        elif not isinstance(num_classes, Integral) or isinstance(num_classes, bool) or num_classes < 2:
            yield f"data.num_classes: found {num_classes!r}, for '{name}'; expected a whole number of at least 2."


def sweep_faults(values: Values) -> Iterator[str]:
    """Yield what does not go together in `sweep`; Optuna's own options are checked where Optuna is there."""
    sweep = values["sweep"]
    options, second = sweep["launcher_options"], sweep["second_objective"]
    if sweep["launcher"] == "local" and isinstance(options, Mapping) and options:
        yield f"sweep.launcher_options: found {options}; expected none with sweep.launcher=local. Choose slurm or ray."
    if sweep["method"] == "grid" and is_known(sweep["repeats"]) and sweep["repeats"] != 1:
        repeats = sweep["repeats"]
        yield f"sweep.repeats: found {repeats} in a grid; expected 1. Write 'seed=range(0,{repeats})'."
    if second is not None and sweep["second_objective_mode"] is None:
        key = "sweep.second_objective_mode"
        yield f"{key}: found null beside sweep.second_objective={second}; expected min or max. Write {key}=min."
    if second is not None and sweep["sampler"] in schema.OF_ONE_OBJECTIVE:
        yield (
            f"sweep.sampler: found {sweep['sampler']}, which supports one objective only, with "
            f"sweep.second_objective={second}; expected a sampler for two. Write sweep.sampler=nsga2."
        )


# What yields faults of a config.
ALL = (name_faults, graph_faults, stream_faults, evaluation_faults, sweep_faults)


def nan_faults(values: Values, known: Sequence[str]) -> Iterator[str]:
    """Yield where NaN stands, but for the keys that `known` messages name already, and settings of the user's code."""
    keys = {message.partition(": ")[0] for message in known}
    plain = leaves({name: node for name, node in values.items() if name != "sweep"})
    of_user = tuple(
        key.removesuffix("_target_") for key, value in plain if key.endswith("._target_") and is_of_user(value)
    )
    for key, value in plain:
        if isinstance(value, float) and math.isnan(value) and key not in keys and not key.startswith(of_user):
            yield f"{key}: found nan; expected a number. Correct {key}."


def warnings_of(values: Values, hypergradients: Values) -> Iterator[str]:
    """Yield what has no effect or another one than it seems to have, and what is chosen or trained on test data.

    Args:
        values: the config.
        hypergradients: those that are used, by key.
    """
    data, logger = values["data"], values["logger"]
    if data.get("download") is True:
        yield f"data.download: files that are missing will be downloaded to '{data.get('root')}'."
    for name, problem in values["problems"].items():
        yield from _stream_warnings(f"problems.{name}", problem, values)
        yield from _unused(name, problem, values)
    yield from _idle_uppers(values)
    if values["runner"]["tf32"] is True:
        yield from filter(None, (_coarse(key, node) for key, node in hypergradients.items()))
    if logger["mode"] == "online" and logger["wandb"] is False:
        yield "logger.mode: found 'online' with logger.wandb=false, which ignores it. Leave one of them out."
    yield from _objective_warnings(values)


def _stream_warnings(key: str, problem: Values, values: Values) -> Iterator[str]:
    stream, sizes = problem["stream"] or {}, values["data"].get("sizes")
    split, batch_size, repeat = stream.get("split"), stream.get("batch_size"), stream.get("repeat")
    size = sizes.get(split) if isinstance(sizes, Mapping) else None
    if isinstance(size, int) and isinstance(batch_size, int) and 0 < size < batch_size:
        yield (
            f"{key}.stream.batch_size: found {batch_size} with data.sizes.{split}={size}, so each batch has {size} "
            f"samples. Set {key}.stream.batch_size={size}."
        )
    steps = problem.get("unroll_steps")
    if problem.get("tasks") is not None and isinstance(steps, int) and isinstance(repeat, int) and repeat % steps:
        yield (
            f"{key}.stream.repeat: found {repeat} with unroll_steps={steps}, so tasks change before their steps are "
            f"done. Set {key}.stream.repeat={steps}."
        )
    of_objective = str(values["objective"] or "").partition("/")[0]
    if split == "test" or (split == of_objective and split in _splits(values)):
        what = "test data" if split == "test" else "the data of the objective"
        yield f"{key}.stream.split: '{split}' trains on {what}, so the metrics on it are too good. Set train or meta."


def _unused(name: str, problem: Values, values: Values) -> Iterator[str]:
    """Yield hypergradients, steps and schedulers that nothing asks for."""
    readers, key = values["graph"]["lower_to_upper"], f"problems.{name}"
    if problem.get("neutral") is not None and not values["graph"]["upper_to_lower"].get(name):
        yield f"{key}.neutral: has no effect, as '{name}' shapes no problem. Remove it."
    lower = next((low for low, uppers in readers.items() if name in uppers), None)
    settings = [
        setting
        for setting, least in (("unroll_steps", 1), ("warmup_steps", 0))
        if isinstance(problem.get(setting), int) and problem[setting] > least and problem.get("reset_to") is None
    ]
    for setting in [*settings, *(["hypergradient"] if problem.get("hypergradient") is not None else [])]:
        if not readers.get(name):
            advice = f"Move it to problems.{lower}.{setting}." if lower else "Remove it."
            yield f"{key}.{setting}: has no effect, as no problem reads the solution of '{name}'. {advice}"
    is_evaluated = any(isinstance(every, int) for every in _splits(values).values())
    if problem.get("scheduler") is not None and problem["scheduler_interval"] == "evaluation" and not is_evaluated:
        yield (
            f"{key}.scheduler_interval: found evaluation, but nothing is evaluated during training, so the scheduler "
            "never steps. Set evaluate.splits.val=100."
        )


def _idle_uppers(values: Values) -> Iterator[str]:
    """Yield the upper problems that wait for more steps than the run has."""
    debug, ticks = values["debug"], values["runner"]["max_ticks"]
    if not isinstance(ticks, int) or ticks == 0 or debug["limit_ticks"] is not None:
        return
    for lower, uppers in values["graph"]["lower_to_upper"].items():
        problem, steps = values["problems"].get(lower) or {}, 0
        for key in ("warmup_steps", "unroll_steps"):
            limits = [value for value in (problem.get(key), debug[f"limit_{key}"]) if isinstance(value, int)]
            steps += min(limits) if isinstance(problem.get(key), int) else 0
        if uppers and steps > ticks:
            yield (
                f"runner.max_ticks: found {ticks}, while {', '.join(uppers)} waits for {steps} steps of '{lower}', so "
                f"nothing above it is trained. Set runner.max_ticks={2 * steps}."
            )


def _coarse(key: str, node: Values) -> str | None:
    """Return what is said of a hypergradient that compares nearby points, which TF32 rounds to three digits."""
    target = str(node.get("_target_")).rpartition(".")[2]
    kind = "finite differences" if node.get("product") == "finite_difference" else target
    if kind not in ("finite differences", "Penalty", "EvolutionStrategies"):
        return None
    return f"runner.tf32: found true, while {key} compares nearby points ({kind}), and TF32 keeps only three digits."


def _objective_warnings(values: Values) -> Iterator[str]:
    runner, source = values["runner"], str(values["objective"] or "").partition("/")[0]
    patience, every = runner["early_stopping_patience"], _splits(values).get(source)
    if source == "test":
        yield (
            f"objective: '{values['objective']}' selects the best checkpoint on test data, so the test metrics are too "
            "good. Set objective=val/accuracy."
        )
    is_whole = isinstance(patience, int) and isinstance(every, int) and values["debug"]["limit_ticks"] is None
    if is_whole and (patience + 1) * every > runner["max_ticks"]:
        yield (
            f"runner.early_stopping_patience: found {patience} with evaluate.splits.{source}={every}, so the run of "
            f"{runner['max_ticks']} ticks is never stopped early. Lower evaluate.splits.{source}."
        )
