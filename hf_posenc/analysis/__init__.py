"""What positions do, as numbers: for a scheme on its own, and for a real model. `plots` draws them."""

from .decay import (
    AttentionByDistance,
    Decay,
    attention_by_distance,
    cosine_integral,
    decay,
    model_decay,
    power_asymptote,
    power_integral,
    sinusoidal_integral,
)
from .frequencies import Frequencies, frequencies
from .order import LayerOrder, OrderSensitivity, order_sensitivity
from .precision import DistinctBiases, precision_audit
from .probe import position_vectors, scheme_vectors
from .properties import Properties, Property, linear_map, properties
from .statistics import (
    EmbeddingStatistics,
    Interaction,
    VectorStatistics,
    embedding_statistics,
    interaction,
    neighbour_distances,
    vector_statistics,
)

__all__ = [
    "AttentionByDistance",
    "Decay",
    "DistinctBiases",
    "EmbeddingStatistics",
    "Frequencies",
    "Interaction",
    "LayerOrder",
    "OrderSensitivity",
    "Properties",
    "Property",
    "VectorStatistics",
    "attention_by_distance",
    "cosine_integral",
    "decay",
    "embedding_statistics",
    "frequencies",
    "interaction",
    "linear_map",
    "model_decay",
    "neighbour_distances",
    "order_sensitivity",
    "position_vectors",
    "power_asymptote",
    "power_integral",
    "precision_audit",
    "properties",
    "scheme_vectors",
    "sinusoidal_integral",
    "vector_statistics",
]
