"""Measure how far the context of a causal language model reaches: perplexity, retrieval and recurrence."""

from .context import ContextMeasurement, PositionLoss, measure_context, short_context_regression
from .harness import harness_model
from .perplexity import Perplexity, non_overlapping_perplexity, sliding_window_perplexity
from .recurrence import RecurrenceMeasurement, measure_recurrence
from .retrieval import Cell, associative_recall, induction_copy, needle, passkey

__all__ = [
    "Cell",
    "ContextMeasurement",
    "Perplexity",
    "PositionLoss",
    "RecurrenceMeasurement",
    "associative_recall",
    "harness_model",
    "induction_copy",
    "measure_context",
    "measure_recurrence",
    "needle",
    "non_overlapping_perplexity",
    "passkey",
    "short_context_regression",
    "sliding_window_perplexity",
]
