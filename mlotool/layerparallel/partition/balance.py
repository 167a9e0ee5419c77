"""Stages of a chain of links, none of which costs much more than the others."""

from collections.abc import Sequence


def balanced(costs: Sequence[int], names: Sequence[str], num_stages: int) -> list[str]:
    """Return the names before which to cut: smallest largest cost of a stage, then smallest sum of squares.

    Of equal cuts the latest is taken, since what costs nothing (a norm, an activation) belongs to what it follows.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the number of links in the first stages: (largest cost, sum of squares, cuts).
    best: dict[int, tuple[int, int, list[int]]] = {
        end: (sums[end], sums[end] ** 2, []) for end in range(1, len(costs) + 1)
    }
    for number in range(2, num_stages + 1):
        best = {
            end: min(
                (
                    (max(largest, last), squares + last**2, [*cuts, begin])
                    for begin, (largest, squares, cuts) in best.items()
                    if begin < end
                    for last in [sums[end] - sums[begin]]
                ),
                key=lambda found: (found[0], found[1], [-cut for cut in found[2]]),
            )
            for end in range(number, len(costs) + 1)
        }
    return [names[begin - 1] for begin in best[len(costs)][2]]
