"""Layer-parallel training: multigrid across layers, auxiliary variables; plain torch."""

__all__: list[str] = []
