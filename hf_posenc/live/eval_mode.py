"""Evaluation mode for the length of a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and afterwards back into the mode that it was in.

    Args:
        model: any module.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
