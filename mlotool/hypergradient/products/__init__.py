"""Second-order products of a lower loss."""
