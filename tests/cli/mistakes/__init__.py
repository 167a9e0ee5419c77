"""Mistakes of users, by what they did: a table each for recipes, code of their own, and commands."""
