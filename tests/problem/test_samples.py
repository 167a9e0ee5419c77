import pytest

from mlotool.core.errors import ConfigError
from mlotool.problem.samples import collated


def test_a_data_set_that_has_become_shorter_is_told() -> None:
    with pytest.raises(ConfigError, match=r"list gave no samples for a batch.*Correct __len__"):
        collated([1, 2], [])
