"""Every hypergradient of mlotool beside Betty's and TorchOpt's: time, memory, error, and what they do to training."""
