import pytest

from mlotool.config import trusted
from mlotool.core import user_code


@pytest.fixture(autouse=True)
def _trust_ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps what it trusts; what one test trusts, the next one must not."""
    monkeypatch.setattr(trusted, "_packages", dict(trusted._packages))
    monkeypatch.setattr(user_code, "_packages", set(user_code._packages))
