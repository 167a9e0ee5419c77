import pytest

from tests.cli.conftest import call, jobs_are_forked

__all__ = ["call", "jobs_are_forked"]


@pytest.fixture(autouse=True)
def runs_are_composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra 1.3 composes each run twice, to see whether its config says that it is a sweep; on pages `-m` says so.

    And each job of a sweep, to see whether it composes.
    """
    monkeypatch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None, raising=False)
    monkeypatch.setattr("hydra.plugins.sweeper.Sweeper.validate_batch_is_legal", lambda *_: None)
