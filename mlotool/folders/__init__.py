"""What runs and sweeps leave on the disk: each folder is a class, which names, writes and reads its files."""
