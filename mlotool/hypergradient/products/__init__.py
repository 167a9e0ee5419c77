"""Second-order products of a lower loss."""

from mlotool.hypergradient.products.base import AbstractProduct
from mlotool.hypergradient.products.finite_difference import FiniteDifferenceProduct, default_radius
from mlotool.hypergradient.products.forward import ForwardProduct
from mlotool.hypergradient.products.reverse import ReverseProduct

__all__ = ["AbstractProduct", "FiniteDifferenceProduct", "ForwardProduct", "ReverseProduct", "default_radius"]
