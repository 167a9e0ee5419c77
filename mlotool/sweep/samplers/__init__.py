"""Samplers of our own for Optuna studies, one a file; each is imported when a study wants it, as Optuna is optional."""
