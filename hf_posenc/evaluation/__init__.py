"""Measure how far the context of a causal language model reaches, and how it writes."""

from .context import ContextMeasurement, PositionLoss, effective_length, measure_context, short_context_regression
from .far_context import LongPerplexity, RepeatGain, long_perplexity, repeat_gain
from .generation import GenerationMeasurement, measure_generation, repeated_ngrams
from .harness import harness_model
from .perplexity import Perplexity, non_overlapping_perplexity, sliding_window_perplexity
from .recall_tasks import TASKS, RecallCell, TaskTokens, measure_recall, recall_examples
from .recurrence import RecurrenceMeasurement, measure_recurrence
from .retrieval import Cell, associative_recall, induction_copy, needle, passkey

__all__ = [
    "TASKS",
    "Cell",
    "ContextMeasurement",
    "GenerationMeasurement",
    "LongPerplexity",
    "Perplexity",
    "PositionLoss",
    "RecallCell",
    "RecurrenceMeasurement",
    "RepeatGain",
    "TaskTokens",
    "associative_recall",
    "effective_length",
    "harness_model",
    "induction_copy",
    "long_perplexity",
    "measure_context",
    "measure_generation",
    "measure_recall",
    "measure_recurrence",
    "needle",
    "non_overlapping_perplexity",
    "passkey",
    "recall_examples",
    "repeat_gain",
    "repeated_ngrams",
    "short_context_regression",
    "sliding_window_perplexity",
]
