"""Solvers of `H q = v`, one a file."""
