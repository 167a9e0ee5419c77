"""Settings that have no effect, or another one than they seem to have: warnings."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.resolve import value_at

Values = Mapping[str, Any]


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
