"""Several runs in one process, several times as fast as one by one: what they can share and take together."""
