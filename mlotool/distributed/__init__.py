"""What processes tell each other: the only place that calls torch.distributed's exchanges; plain torch."""
