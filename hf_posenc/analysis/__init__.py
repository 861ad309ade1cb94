"""What positions do, as numbers: for a scheme on its own, and for a real model. `plots` draws them."""

from .decay import (
    AttentionByDistance,
    Decay,
    attention_by_distance,
    decay,
    model_decay,
)
from .expansion import DiagonalTerm, Expansion, MixedHessian, Terms, expansion, mixed_hessian
from .frequencies import Frequencies, frequencies
from .grids import axis_frequencies, grid_decay, grid_rotation, grid_shift, grid_sinusoids
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
from .order import (
    Equivariance,
    LayerEquivariance,
    LayerOrder,
    OrderSensitivity,
    equivariance,
    order_sensitivity,
)
from .position_scores import PositionScores, position_scores, scores_between
from .precision import DistinctBiases, precision_audit
from .probe import position_vectors, scheme_vectors
from .properties import Properties, Property, linear_map, properties
from .rotary import RotaryWeights, rotary_weights
from .sparsity import NegativeProducts, negative_products
from .statistics import (
    EmbeddingStatistics,
    VectorStatistics,
    distance_share,
    embedding_statistics,
    neighbour_distances,
    vector_statistics,
)
from .terms import LayerTerms, ScoreTerms, score_terms

__all__ = [
    "AttentionByDistance",
    "Decay",
    "DiagonalTerm",
    "DistinctBiases",
    "EmbeddingStatistics",
    "Equivariance",
    "Expansion",
    "Frequencies",
    "LayerEquivariance",
    "LayerOrder",
    "LayerTerms",
    "MixedHessian",
    "NegativeProducts",
    "OrderSensitivity",
    "PositionScores",
    "Properties",
    "Property",
    "RotaryWeights",
    "ScoreTerms",
    "Terms",
    "VectorStatistics",
    "WaveDecay",
    "attention_by_distance",
    "axis_frequencies",
    "cosine_integral",
    "decay",
    "distance_share",
    "embedding_statistics",
    "equivariance",
    "expansion",
    "frequencies",
    "grid_decay",
    "grid_rotation",
    "grid_shift",
    "grid_sinusoids",
    "linear_map",
    "mixed_hessian",
    "model_decay",
    "negative_products",
    "neighbour_distances",
    "order_sensitivity",
    "position_scores",
    "position_vectors",
    "power_asymptote",
    "power_integral",
    "precision_audit",
    "properties",
    "rotary_weights",
    "scheme_vectors",
    "score_terms",
    "scores_between",
    "sinusoidal_integral",
    "vector_statistics",
    "wave_decay",
    "wave_integral",
    "wave_sum",
]
