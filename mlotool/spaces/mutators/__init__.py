"""Mutators, one a file."""
