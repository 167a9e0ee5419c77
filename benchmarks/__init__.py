"""Benchmarks; not a part of the installed package."""
