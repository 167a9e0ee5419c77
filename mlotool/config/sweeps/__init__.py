"""What a sweep asks for, read from its config."""
