"""Where the batches of a problem come from."""
