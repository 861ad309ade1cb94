"""Attention engines: pure tensor code that computes a scheme's attention. They know neither transformers nor model families."""
