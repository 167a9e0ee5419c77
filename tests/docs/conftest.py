from tests.cli.conftest import call, hydra_composes_once, jobs_are_forked

__all__ = ["call", "hydra_composes_once", "jobs_are_forked"]
