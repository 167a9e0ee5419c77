"""Runs that share a process, beside the same runs alone."""
