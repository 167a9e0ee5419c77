"""Whether a hypergradient can be trusted: comparisons, residuals, and what finite differences would miss."""
