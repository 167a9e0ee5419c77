"""What speed stages are to be expected to have, from times that were recorded in one process."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlotool.layerparallel.partition.choice import imbalance
from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup

PASSES = ("forward", "backward")


def forecast(cut: Sequence[str], timeline: Mapping[str, Any] | None) -> list[str]:
    """Return how well stages are balanced, and how much faster they are at most, in sentences.

    The first batch is left out where there are others, since it has work of its own.

    Args:
        cut: names of the layers that begin the stages 1 .. K-1.
        timeline: as of `Auxiliary.timeline`; None where nothing was recorded.

    Example:
        >>> spans = [{"rank": rank, "batch": 0, "what": what, "begin": 0.0, "end": seconds}
        ...          for rank, what, seconds in ((0, "forward", 1.0), (1, "forward", 2.0), (1, "auxnet", 0.3))]
        >>> for line in forecast(["blocks.3"], {"stages": 2, "spans": spans}):
        ...     print(line)
        2 stages begin at the input and at blocks.3; the longest takes 1.33 times the mean (1e+03 / 2e+03 ms).
        With a process for each stage a batch is at most 1.30 times as fast as in one process, and 1.67 times with \
stages of equal length (equation 27 of Sun et al. 2021).
    """
    if timeline is None or timeline["stages"] == 1:
        return []
    spans = timeline["spans"]
    batches = {span["batch"] for span in spans}
    kept = batches - {min(batches)} or batches
    count = timeline["stages"]

    def mean(rank: int, kinds: Sequence[str]) -> float:
        found = [each for each in spans if each["rank"] == rank and each["what"] in kinds and each["batch"] in kept]
        return sum(each["end"] - each["begin"] for each in found) / len(kept)

    stages = [mean(rank, PASSES) for rank in range(count)]
    method = max(mean(rank, ("auxnet",)) for rank in range(count))
    equal = predicted_speedup(BatchSeconds(forward=sum(stages), backward=0.0, penalty=method), count)
    places = " and at ".join(["the input", ", ".join(cut)])
    times = " / ".join(f"{1e3 * each:.3g}" for each in stages)
    return [
        f"{count} stages begin at {places}; the longest takes {imbalance(stages):.2f} times the mean ({times} ms).",
        f"With a process for each stage a batch is at most {sum(stages) / (max(stages) + method):.2f} times as fast as "
        f"in one process, and {equal:.2f} times with stages of equal length (equation 27 of Sun et al. 2021).",
    ]
