"""Checks of the GPU kit's own tests: one that works in two calls, and three that fail."""
