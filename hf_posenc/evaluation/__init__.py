"""Measure how far the context of a causal language model reaches, and how it writes."""

from .far_context import RepeatGain, repeat_gain
from .generation import GenerationMeasurement, measure_generation, repeated_ngrams
from .perplexity import (
    ContextMeasurement,
    Perplexity,
    PositionLoss,
    measure_context,
    non_overlapping_perplexity,
    short_context_regression,
)
from .retrieval import Cell, induction_copy, retrieve

__all__ = [
    "Cell",
    "ContextMeasurement",
    "GenerationMeasurement",
    "Perplexity",
    "PositionLoss",
    "RepeatGain",
    "induction_copy",
    "measure_context",
    "measure_generation",
    "non_overlapping_perplexity",
    "repeat_gain",
    "repeated_ngrams",
    "retrieve",
    "short_context_regression",
]
