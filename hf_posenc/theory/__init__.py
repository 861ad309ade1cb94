"""Compute the claims of the papers on position encodings."""

from .expansion import DiagonalTerm, Expansion, Terms, expansion
from .tables import (
    EmbeddingStatistics,
    PositionScores,
    VectorStatistics,
    embedding_statistics,
    negative_products,
    position_scores,
)
from .terms import LayerTerms, ScoreTerms, score_terms
from .waves import (
    RotaryWeights,
    WaveDecay,
    rotary_weights,
    wave_decay,
    wave_integral,
)

__all__ = [
    "DiagonalTerm",
    "EmbeddingStatistics",
    "Expansion",
    "LayerTerms",
    "PositionScores",
    "RotaryWeights",
    "ScoreTerms",
    "Terms",
    "VectorStatistics",
    "WaveDecay",
    "embedding_statistics",
    "expansion",
    "negative_products",
    "position_scores",
    "rotary_weights",
    "score_terms",
    "wave_decay",
    "wave_integral",
]
