from tests.cli.conftest import call

__all__ = ["call"]
