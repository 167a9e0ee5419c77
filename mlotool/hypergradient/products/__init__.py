"""Second-order products of a lower loss."""

from mlotool.hypergradient.products.base import AbstractProduct, ReverseProduct
from mlotool.hypergradient.products.finite_difference import FiniteDifferenceProduct, default_radius
from mlotool.hypergradient.products.forward import ForwardProduct

__all__ = ["AbstractProduct", "FiniteDifferenceProduct", "ForwardProduct", "ReverseProduct", "default_radius"]
