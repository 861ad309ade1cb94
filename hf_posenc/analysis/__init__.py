"""Measures of what positions do, for a scheme on its own and for a real model. `plots` draws them."""

from .decay import AttentionByDistance, Decay, attention_by_distance, decay, model_decay
from .frequencies import Frequencies, frequencies
from .order import Equivariance, LayerEquivariance, LayerOrder, OrderSensitivity, equivariance, order_sensitivity
from .precision import DistinctBiases, precision_audit
from .probe import position_vectors, scheme_vectors
from .properties import Properties, Property, linear_map, properties

__all__ = [
    "AttentionByDistance",
    "Decay",
    "DistinctBiases",
    "Equivariance",
    "Frequencies",
    "LayerEquivariance",
    "LayerOrder",
    "OrderSensitivity",
    "Properties",
    "Property",
    "attention_by_distance",
    "decay",
    "equivariance",
    "frequencies",
    "linear_map",
    "model_decay",
    "order_sensitivity",
    "position_vectors",
    "precision_audit",
    "properties",
    "scheme_vectors",
]
