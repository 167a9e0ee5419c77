"""Counts of the schema's own keys that are below the least that a run can use."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.resolve import value_at

Values = Mapping[str, Any]


def count_faults(values: Values) -> Iterator[str]:
    """Yield the counts, seconds and norms that are too small."""
    at_least_one = [
        *(f"runner.{key}" for key in ("ticks_per_chunk", "log_every", "num_threads", "keep_checkpoints")),
        *("runner.early_stopping_patience", "debug.limit_ticks", "debug.limit_samples", "evaluate.batch_size"),
        "evaluate.recalibrate",
        "debug.limit_unroll_steps",
    ]
    at_least_zero = ["seed", "runner.max_ticks", "debug.limit_warmup_steps"]
    for name in values["problems"]:
        at_least_one += [
            f"problems.{name}.{key}"
            for key in ("unroll_steps", "accumulate_batches", "tasks", "stream.batch_size", "stream.repeat")
        ]
        at_least_zero += [f"problems.{name}.{key}" for key in ("warmup_steps", "stream.num_workers")]
    for low, keys in ((1, at_least_one), (0, at_least_zero)):
        for key in keys:
            value = value_at(values, key)
            if isinstance(value, int) and value < low:
                yield f"{key}: found {value}; expected a whole number of at least {low}. Correct {key}."
    seconds = values["runner"]["checkpoint_seconds"]
    if isinstance(seconds, int | float) and not seconds > 0:
        yield (
            f"runner.checkpoint_seconds: found {seconds}; expected a positive number of seconds. "
            "Correct runner.checkpoint_seconds, or set runner.checkpoint=false."
        )
    for name, problem in values["problems"].items():
        norm = problem.get("gradient_clip_norm")
        if isinstance(norm, int | float) and not norm > 0:
            yield (
                f"problems.{name}.gradient_clip_norm: found {norm}; expected a positive norm or null. "
                f"Correct problems.{name}.gradient_clip_norm."
            )
