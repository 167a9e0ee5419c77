"""Where problems, evaluations and analyses take their batches from."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlotool.config.resolve import is_known
from mlotool.core.messages import did_you_mean

Values = Mapping[str, Any]


def stream_faults(values: Values) -> Iterator[str]:
    """Yield what names a problem without a stream, or a split that the data have not."""
    problems = values["problems"]
    for name, problem in problems.items():
        other = problem.get("same_batch_as")
        streaming = [each for each, node in problems.items() if node.get("stream") and each != name]
        if isinstance(other, str) and problem.get("stream"):
            advice = f"Write problems.{name}.stream: null, or remove same_batch_as."
            yield (
                f"problems.{name}.same_batch_as: found '{other}' beside a stream; expected one of the two, as the "
                f"problem sees the batches of '{other}' or its own. "
                f"{advice if other in streaming else 'Remove same_batch_as.'}"
            )
        elif isinstance(other, str) and other not in streaming:
            yield (
                f"problems.{name}.same_batch_as: found '{other}'; expected another problem, one that has a stream: "
                f"{', '.join(streaming) or 'there is none'}.{did_you_mean(other, streaming)} Correct it, or remove it."
            )
    sizes = values["data"].get("sizes") if isinstance(values["data"], Mapping) else None
    if not isinstance(sizes, Mapping):
        return
    splits = [name for name, size in sizes.items() if size]
    used = {
        f"problems.{name}.stream.split": problem["stream"].get("split")
        for name, problem in values["problems"].items()
        if problem.get("stream")
    }
    used.update({f"evaluate.splits.{name}": name for name in (values["evaluate"] or {}).get("splits", ())})
    for name, analysis in values["analyses"].items():
        if isinstance(analysis, Mapping):
            used[f"analyses.{name}.split"] = analysis.get("split", "train")
    for key, split in used.items():
        if is_known(split) and split not in splits:
            yield (
                f"{key}: found '{split}'; expected a split of the data: {', '.join(splits)}."
                f"{did_you_mean(split, splits)} Correct it, or set data.sizes.{split}=100."
            )
