"""Check how a live model handles positions, as it computes them: check."""
