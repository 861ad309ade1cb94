"""Attention engines: pure tensor code that computes a scheme's attention; they do not know transformers."""
