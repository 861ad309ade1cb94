"""How far a causal language model's context really reaches: functions from (model, tokens) to numbers."""

from .perplexity import Perplexity, non_overlapping_perplexity, sliding_window_perplexity

__all__ = ["Perplexity", "non_overlapping_perplexity", "sliding_window_perplexity"]
