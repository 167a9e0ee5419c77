"""Many jobs of one recipe: which points are tried, how many at a time, on which devices; no torch."""
