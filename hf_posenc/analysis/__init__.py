"""What positions do, as numbers: for a scheme on its own, and for a real model. `plots` draws them."""

from .decay import (
    AttentionByDistance,
    Decay,
    attention_by_distance,
    decay,
    model_decay,
)
from .frequencies import Frequencies, frequencies
from .grids import axis_frequencies, grid_rotation, grid_shift, grid_sinusoids
from .integrals import (
    WaveDecay,
    cosine_integral,
    power_asymptote,
    power_integral,
    sinusoidal_integral,
    wave_decay,
    wave_integral,
    wave_sum,
)
from .order import LayerOrder, OrderSensitivity, order_sensitivity
from .precision import DistinctBiases, precision_audit
from .probe import position_vectors, scheme_vectors
from .properties import Properties, Property, linear_map, properties
from .rotary import RotaryWeights, rotary_weights
from .statistics import (
    EmbeddingStatistics,
    Interaction,
    VectorStatistics,
    distance_share,
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
    "RotaryWeights",
    "VectorStatistics",
    "WaveDecay",
    "attention_by_distance",
    "axis_frequencies",
    "cosine_integral",
    "decay",
    "distance_share",
    "embedding_statistics",
    "frequencies",
    "grid_rotation",
    "grid_shift",
    "grid_sinusoids",
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
    "rotary_weights",
    "scheme_vectors",
    "sinusoidal_integral",
    "vector_statistics",
    "wave_decay",
    "wave_integral",
    "wave_sum",
]
