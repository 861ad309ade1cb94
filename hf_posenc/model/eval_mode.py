"""Evaluation mode for a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put a model's modules into evaluation mode for a `with` block, and restore their modes afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
