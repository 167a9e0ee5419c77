"""Stages of a chain of links, none of which costs much more than the others."""

from collections.abc import Sequence


def balanced(costs: Sequence[float], names: Sequence[str], num_stages: int) -> list[str]:
    """Cut a chain of links into stages so that the most expensive stage costs as little as possible.

    Of cuts that do this equally well, those with the smallest sum of squared costs are taken, and of these the latest:
    what costs nothing (a norm, an activation) then belongs to the stage of what it follows.

    Args:
        costs: of each link, in any unit; one more than `names`.
        names: of all links but the first, which begins the first stage in any case.
        num_stages: K, at most the number of links.

    Returns:
        The names of the links that begin the stages 1 .. K-1.

    Example:
        >>> balanced([4, 1, 1, 2], ["b", "c", "d"], num_stages=2)
        ['b']
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # By the number of links in the first stages: (largest cost, sum of squares, cuts).
    best: dict[int, tuple[float, float, list[int]]] = {
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
