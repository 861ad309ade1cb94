"""Compute the claims of the papers on position encodings. `plots` draws the results."""

from .expansion import DiagonalTerm, Expansion, MixedHessian, Terms, expansion, mixed_hessian
from .grids import axis_frequencies, grid_decay, grid_rotation, grid_shift, grid_sinusoids
from .integrals import WaveDecay, power_asymptote, power_integral, sinusoidal_integral, wave_decay, wave_integral
from .position_scores import PositionScores, position_scores, scores_between
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
    "DiagonalTerm",
    "EmbeddingStatistics",
    "Expansion",
    "LayerTerms",
    "MixedHessian",
    "NegativeProducts",
    "PositionScores",
    "RotaryWeights",
    "ScoreTerms",
    "Terms",
    "VectorStatistics",
    "WaveDecay",
    "axis_frequencies",
    "distance_share",
    "embedding_statistics",
    "expansion",
    "grid_decay",
    "grid_rotation",
    "grid_shift",
    "grid_sinusoids",
    "mixed_hessian",
    "negative_products",
    "neighbour_distances",
    "position_scores",
    "power_asymptote",
    "power_integral",
    "rotary_weights",
    "score_terms",
    "scores_between",
    "sinusoidal_integral",
    "vector_statistics",
    "wave_decay",
    "wave_integral",
]
