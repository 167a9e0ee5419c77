import pytest

from mlotool.layerparallel.speedup import BatchSeconds, predicted_speedup


def test_it_is_the_printed_formula() -> None:
    data, forward, backward, penalty, auxiliary, num_stages = 0.1, 1.1, 2.3, 0.05, 0.4, 3
    total = data + forward + backward
    printed = 1 / ((1 / num_stages) * (forward + backward) / total + (data + penalty + auxiliary) / total)
    assert predicted_speedup(BatchSeconds(forward, backward, data, penalty, auxiliary), num_stages) == pytest.approx(
        printed
    )


def test_it_rises_with_the_stages_to_the_bound() -> None:
    seconds = BatchSeconds(forward=1.0, backward=2.0, data=0.1, penalty=0.1, auxiliary=0.3)
    found = [predicted_speedup(seconds, num_stages) for num_stages in (1, 2, 4, 1000, 10**9)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(seconds.bound) == pytest.approx(3.1 / 0.5)
    assert found[0] < 1
    assert BatchSeconds(forward=1.0, backward=2.0).bound == float("inf")
