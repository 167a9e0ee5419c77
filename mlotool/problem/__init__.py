"""One optimization problem: settings, steps, data, and what a hypergradient algorithm must offer; plain torch."""
