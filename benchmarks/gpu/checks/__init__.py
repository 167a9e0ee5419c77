"""A check a file: `CHECK` says what it is, and `run` fills in its rows."""
