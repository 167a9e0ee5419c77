from typing import Any

import pytest


@pytest.fixture(autouse=True)
def waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlotool.sweep.driver.SECONDS_BETWEEN_LOOKS", 0.0)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep studies in memory, one a URL: a database takes fifty times as long."""
    optuna = pytest.importorskip("optuna")
    storages: dict[str, Any] = {}

    def opened(url: str) -> Any:
        if url not in storages:
            storages[url] = optuna.storages.InMemoryStorage()
        return storages[url]

    monkeypatch.setattr("mlotool.sweep.study.open_storage", opened)
