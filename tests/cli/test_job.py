"""What a job asks of a config that has not been checked yet."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from mlotool.cli.job import logs_to_wandb


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"logger": {"wandb": True, "mode": "offline"}}, True),
        ({"logger": {"wandb": True, "mode": "disabled"}}, False),
        ({"logger": {"wandb": "${nowhere}"}}, False),
        ({"logger": "wandb"}, False),
        ({}, False),
    ],
)
def test_whether_a_run_logs_to_wandb_is_known_before_its_config_is_checked(
    config: dict[str, Any], expected: bool
) -> None:
    assert logs_to_wandb(OmegaConf.create(config)) is expected
