from tests.cli.conftest import call, jobs_are_forked

__all__ = ["call", "jobs_are_forked"]
