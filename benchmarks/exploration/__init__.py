"""Searches of model spaces."""
