"""Spaces whose models share their weights: all candidates in one graph, of which a path is one model."""
