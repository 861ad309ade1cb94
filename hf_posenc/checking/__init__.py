"""Check how a live model handles positions, as it computes them: check."""

from .report import CheckReport, Outcome

__all__ = ["CheckReport", "Outcome"]
