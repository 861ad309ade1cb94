"""Measure how far the context of a causal language model reaches: perplexity, retrieval and recurrence."""

from .context import ContextMeasurement, PositionLoss, measure_context, short_context_regression
from .harness import harness_model
from .perplexity import Perplexity, non_overlapping_perplexity, sliding_window_perplexity
from .recall_tasks import TASKS, RecallCell, TaskTokens, measure_recall, recall_examples
from .recurrence import RecurrenceMeasurement, measure_recurrence
from .retrieval import Cell, associative_recall, induction_copy, needle, passkey

__all__ = [
    "TASKS",
    "Cell",
    "ContextMeasurement",
    "Perplexity",
    "PositionLoss",
    "RecallCell",
    "RecurrenceMeasurement",
    "TaskTokens",
    "associative_recall",
    "harness_model",
    "induction_copy",
    "measure_context",
    "measure_recall",
    "measure_recurrence",
    "needle",
    "non_overlapping_perplexity",
    "passkey",
    "recall_examples",
    "short_context_regression",
    "sliding_window_perplexity",
]
