"""What is evaluated, and what a run is judged by."""

from collections.abc import Iterable, Iterator, Mapping
from numbers import Integral
from typing import Any

from mlotool.config.objective import direction_faults, objective_direction
from mlotool.config.resolve import is_known, value_at
from mlotool.config.schema import CLASSIFICATION_METRIC_NAMES, METRIC_NAMES
from mlotool.core.messages import did_you_mean

Values = Mapping[str, Any]

PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def evaluation_faults(values: Values) -> Iterator[str]:
    """Yield what is wrong with `evaluate`, `objective` and early stopping."""
    evaluate, unknown = values["evaluate"], list[str]()
    if evaluate is not None:
        yield from _problem_faults(evaluate, values["problems"])
        yield from _argument_faults(evaluate["arguments"], values["problems"])
        unknown = list(_metric_faults(evaluate["metrics"]))
        yield from unknown
        yield from _interval_faults(evaluate["splits"])
    objective = values["objective"]
    # Of a metric that is right there is nothing to say where the list of metrics is wrong.
    if isinstance(objective, str) and not (unknown and objective.partition("/")[2] in METRIC_NAMES):
        # Of a key that is not logged there is no direction.
        yield from list(_objective_faults(values["objective"], values)) or direction_faults(values)
        yield from _plateau_faults(values)
    yield from _patience_faults(values)
    yield from _no_tick_faults(values)


def evaluation_warnings(values: Values) -> Iterator[str]:
    """Yield where something is selected or trained on data that should only be looked at in the end."""
    source = (values["objective"] or "").partition("/")[0]
    if source == "test":
        chosen = "the best checkpoint"
        if values["runner"]["early_stopping_patience"] is not None:
            chosen += " and the end of training"
        yield (
            f"objective: '{values['objective']}' selects {chosen} on test data, so the test metrics are too good; "
            "expected validation data. Set objective=val/accuracy."
        )
    yield from _idle_patience(values)
    for name, problem in values["problems"].items():
        split = (problem["stream"] or {}).get("split")
        if split == "test" or (split == source and split in (values["evaluate"] or {}).get("splits", ())):
            what = "test data" if split == "test" else "the data of the objective"
            yield (
                f"problems.{name}.stream.split: '{split}' trains on {what}, so the metrics on it are too good; "
                "expected train or meta. Set it to another split."
            )


def _problem_faults(evaluate: Values, problems: Values) -> Iterator[str]:
    problem = evaluate["problem"]
    if is_known(problem) and problem not in problems:
        yield (
            f"evaluate.problem: found '{problem}'; expected one of {', '.join(problems)}."
            f"{did_you_mean(problem, problems)} Correct evaluate.problem."
        )


def _argument_faults(arguments: Values, problems: Values) -> Iterator[str]:
    for argument, source in arguments.items():
        problem, dot, method = str(source).partition(".")
        if is_known(source) and (problem not in problems or (dot and not method.isidentifier())):
            yield (
                f"evaluate.arguments.{argument}: found '{source}'; expected a problem, or a problem and a method of "
                f"its module: {', '.join(problems)}.{did_you_mean(problem, problems)} Correct it, as in "
                f"evaluate.arguments.{argument}: {next(iter(problems), 'architecture')}.found."
            )


def _metric_faults(metrics: Any) -> Iterator[str]:
    for metric in metrics:
        # A node is a target like any other.
        if is_known(metric) and not isinstance(metric, Mapping) and metric not in METRIC_NAMES:
            yield (
                f"evaluate.metrics: found '{metric}'; expected one of {', '.join(METRIC_NAMES)}."
                f"{did_you_mean(str(metric).rpartition('.')[2], METRIC_NAMES)} Correct evaluate.metrics, or give a "
                "function of yours: {_target_: mypackage.metrics.f}."
            )


def class_faults(metrics: Iterable[Any], num_classes: Any) -> Iterator[str]:
    """Yield what is wrong with the number of classes, for metrics of classification.

    Args:
        metrics: names and nodes; only names of built-in metrics are looked at.
        num_classes: what the data says, None where it says nothing.
    """
    for name in metrics:
        if name not in CLASSIFICATION_METRIC_NAMES:
            continue
        if not num_classes:
            yield (
                f"evaluate.metrics: found '{name}', which needs classes; the data has num_classes={num_classes}. "
                "Use one of mean_squared_error, mean_absolute_error, r2, or data with classes."
            )
        elif not isinstance(num_classes, Integral) or isinstance(num_classes, bool) or num_classes < 2:
            yield (
                f"data.num_classes: found {num_classes!r}, which '{name}' cannot count; expected a whole number of at "
                "least 2. Correct it."
            )


def _interval_faults(splits: Values) -> Iterator[str]:
    for split, every in splits.items():
        is_interval = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if is_known(every) and not is_interval and every != "end":
            yield (
                f"evaluate.splits.{split}: found {every!r}; expected the ticks between two evaluations, or end. "
                f"Write evaluate.splits.{split}: 100."
            )


def _objective_faults(objective: str, values: Values) -> Iterator[str]:
    evaluate = values["evaluate"] or {"splits": {}, "metrics": []}
    source, _, name = objective.partition("/")
    names = [metric for metric in evaluate["metrics"] if isinstance(metric, str)]
    logged = [f"{split}/{metric}" for split in evaluate["splits"] for metric in names]
    losses = [f"{problem}/loss" for problem in values["problems"]]
    # A loss, an analysis or a function in evaluate.metrics may return metrics of any name.
    has_functions = len(names) < len(evaluate["metrics"])
    free = (*values["problems"], *values["analyses"], *(evaluate["splits"] if has_functions else ()))
    if objective in logged or (name and source in free):
        return
    options = [*logged, *losses]
    yield (
        f"objective: found '{objective}', which is not logged; expected one of {', '.join(options)}."
        f"{did_you_mean(objective, options)} Correct objective, or add the split and the metric to evaluate."
    )


def _plateau_faults(values: Values) -> Iterator[str]:
    """Yield schedulers that take an improvement of the objective for the lack of one."""
    direction = objective_direction(values)
    for name, problem in values["problems"].items():
        node, key = problem.get("scheduler"), f"problems.{name}.scheduler"
        if direction is None or not isinstance(node, Mapping) or problem.get("scheduler_interval") != "evaluation":
            continue
        mode = node.get("mode", "min")
        if node.get("_target_") == PLATEAU and is_known(mode) and mode != direction:
            found = f"found '{mode}'" if "mode" in node else "found nothing, which ReduceLROnPlateau takes for 'min',"
            yield (
                f"{key}.mode: {found} with objective={values['objective']}; expected {direction}, or the rate falls "
                f"while the objective gets better. Write mode: {direction}."
            )


def _idle_patience(values: Values) -> Iterator[str]:
    """Yield a patience that is longer than the run."""
    runner, source = values["runner"], (values["objective"] or "").partition("/")[0]
    patience, every = runner["early_stopping_patience"], (values["evaluate"] or {"splits": {}})["splits"].get(source)
    if not isinstance(patience, int) or not isinstance(every, int) or values["debug"]["limit_ticks"] is not None:
        return
    if (patience + 1) * every > runner["max_ticks"]:
        yield (
            f"runner.early_stopping_patience: found {patience} with evaluate.splits.{source}={every} and "
            f"runner.max_ticks={runner['max_ticks']}; expected a run of more than {patience} evaluations, as this one "
            f"is never stopped early. Lower evaluate.splits.{source}, or leave the patience out."
        )


def _patience_faults(values: Values) -> Iterator[str]:
    patience, objective = values["runner"]["early_stopping_patience"], values["objective"]
    if patience is None or not is_known(objective):
        return
    source = (objective or "").partition("/")[0]
    every = (values["evaluate"] or {"splits": {}})["splits"].get(source)
    if source not in values["problems"] and not isinstance(every, int):
        yield (
            f"runner.early_stopping_patience: found {patience} with objective={objective or 'null'}; expected an "
            "objective that is evaluated during training. Set objective=val/accuracy and evaluate.splits.val=100, or "
            "runner.early_stopping_patience=null."
        )


def _no_tick_faults(values: Values) -> Iterator[str]:
    """Yield what a run without ticks does not have: something to evaluate, and the loss that is its objective."""
    splits = (values["evaluate"] or {"splits": {}})["splits"]
    source = str(values["objective"] or "").partition("/")[0]
    if values["runner"]["max_ticks"] != 0:
        return
    if not splits and not values["analyses"]:
        yield (
            "runner.max_ticks: found 0 with nothing to evaluate; expected ticks, or evaluate.splits, as such a run "
            "does nothing else. Write evaluate.splits.val=end, or at least one tick."
        )
    if source in values["problems"]:
        yield (
            f"objective: found '{values['objective']}' with runner.max_ticks=0; expected a metric of a split, since "
            "losses are those of ticks. Set objective=val/accuracy."
        )


def effect_warnings(values: Values, hypergradients: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings that have no effect, or another one than they seem to have.

    Args:
        values: the config.
        hypergradients: those that are used, by key.
    """
    for name, problem in values["problems"].items():
        stream, key = problem["stream"] or {}, f"problems.{name}.stream.batch_size"
        split, batch_size = f"data.sizes.{stream.get('split')}", stream.get("batch_size")
        size = value_at(values, split)
        if isinstance(size, int) and isinstance(batch_size, int) and 0 < size < batch_size:
            yield (
                f"{key}: found {batch_size}, while {split}={size}; expected no more than the split has, so each batch "
                f"has {size} samples. Set {key}={size}, or {split}={batch_size}."
            )
    yield from _unused(values)
    yield from _broken_episodes(values)
    yield from _idle(values)
    yield from _coarse_differences(values, hypergradients)
    logger = values["logger"]
    if logger["mode"] != "offline" and logger["wandb"] is False:
        yield (
            f"logger.mode: found '{logger['mode']}' with logger.wandb=false, which ignores it; expected W&B to log. "
            "Set logger.wandb=true, or leave logger.mode out."
        )


def _unused(values: Values) -> Iterator[str]:
    """Yield hypergradients and schedulers that nothing asks for."""
    readers, splits = values["graph"]["lower_to_upper"], (values["evaluate"] or {}).get("splits", {})
    for name, problem in values["problems"].items():
        lower = next((low for low, uppers in readers.items() if name in uppers), None)
        if problem.get("hypergradient") is not None and not readers.get(name):
            yield (
                f"problems.{name}.hypergradient: found one, while no problem reads the solution of '{name}'; expected "
                "it at the lower problem, through whose solution it leads. "
                + (f"Move it to problems.{lower}.hypergradient." if lower else "Remove it.")
            )
        for key, least in (("unroll_steps", 1), ("warmup_steps", 0)):
            steps = problem.get(key)
            if isinstance(steps, int) and steps > least and not readers.get(name) and problem.get("reset_to") is None:
                yield (
                    f"problems.{name}.{key}: found {steps}, while no problem reads the solution of '{name}'; expected "
                    "it at the lower problem, whose steps are counted. Here it has no effect. "
                    + (f"Move it to problems.{lower}.{key}." if lower else "Remove it.")
                )
        is_idle = not any(isinstance(every, int) for every in splits.values())
        if problem.get("scheduler") is not None and problem.get("scheduler_interval") == "evaluation" and is_idle:
            yield (
                f"problems.{name}.scheduler_interval: found evaluation, while nothing is evaluated during training, so "
                f"the scheduler never steps; expected evaluate.splits.val=100, or step. Set "
                f"problems.{name}.scheduler_interval=step."
            )


def _coarse_differences(values: Values, hypergradients: Mapping[str, Any]) -> Iterator[str]:
    """Yield the hypergradients that compare nearby points, where TF32 rounds what they compare to three digits."""
    if values["runner"]["tf32"] is not True:
        return
    for key, node in hypergradients.items():
        target = str(node.get("_target_")).rpartition(".")[2]
        is_difference = node.get("product") == "finite_difference"
        if is_difference or target in ("Penalty", "EvolutionStrategies"):
            kind = "finite differences" if is_difference else target
            yield (
                f"runner.tf32: found true, while {key} compares nearby points ({kind}), which TF32 rounds to three "
                f"digits on a GPU; expected float32 there. Set runner.tf32=false, or for {key} an option with second "
                "derivatives, such as neumann."
            )


def _broken_episodes(values: Values) -> Iterator[str]:
    """Yield the problems whose tasks change between the steps that are to learn them."""
    for name, problem in values["problems"].items():
        steps, stream = problem.get("unroll_steps"), problem.get("stream") or {}
        repeat = stream.get("repeat")
        if problem.get("tasks") is None or not isinstance(steps, int) or not isinstance(repeat, int):
            continue
        if repeat % max(steps, 1):
            yield (
                f"problems.{name}.stream.repeat: found {repeat} with unroll_steps={steps} and tasks; expected a "
                f"multiple of {steps}, or the tasks change before all of their steps are done. Set "
                f"problems.{name}.stream.repeat={steps}."
            )


def _idle(values: Values) -> Iterator[str]:
    """Yield the upper problems that wait for more steps than the run has."""
    debug, ticks = values["debug"], values["runner"]["max_ticks"]
    limits = {key: debug.get(f"limit_{key}") for key in ("warmup_steps", "unroll_steps")}
    if not isinstance(ticks, int) or ticks == 0 or debug["limit_ticks"] is not None:
        return
    for lower, uppers in values["graph"]["lower_to_upper"].items():
        problem = values["problems"].get(lower) or {}
        steps = 0
        for key, limit in limits.items():
            found = problem.get(key)
            steps += min(found, found if limit is None else limit) if isinstance(found, int) else 0
        if uppers and steps > ticks:
            yield (
                f"runner.max_ticks: found {ticks}, while {', '.join(uppers)} waits for {steps} steps of '{lower}' "
                f"(warmup_steps and unroll_steps); expected at least as many. Nothing above '{lower}' is trained: set "
                f"runner.max_ticks={2 * steps}."
            )
