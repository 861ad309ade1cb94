"""Short runs of a model on random tokens, and the comparison of their outputs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LARGEST = 1e30
"""Absolute value from which a logit counts as masked. Some models set the logits of unusable tokens to the minimum."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative change of the logits up to which two ways of computing the same thing agree, by dtype."""

COARSE_TOLERANCE = 0.1
"""The same for half precision, whose roundings add up over the layers."""


def tolerance(dtype: torch.dtype) -> float:
    """Return the relative change of the logits up to which two ways of computing the same thing agree."""
    return TOLERANCES.get(dtype, COARSE_TOLERANCE)


def change(changed: Tensor, original: Tensor) -> float:
    """Return the relative change of logits: the norm of the difference, divided by the norm of the original.

    It is infinite if only one of the two is NaN somewhere.
    """
    changed, original = changed.double(), original.double()
    if not torch.equal(changed.isnan(), original.isnan()):
        return math.inf
    counted = (changed.abs() < LARGEST) & (original.abs() < LARGEST)
    difference = (changed - original)[counted].norm()
    return (difference / original[counted].norm().clamp(min=1e-30)).item()


class Runner:
    """Runs a model on tokens (1, T) of its vocabulary.

    Attributes:
        model: the model, in evaluation mode.
        coordinates: whether a position of the model has several coordinates (time, height, width).
    """

    def __init__(self, model: PreTrainedModel, seed: int, coordinates: bool = False) -> None:
        """Prepare the generator of the tokens."""
        self.model = model
        self.coordinates = coordinates
        self._embedding: Any = model.get_input_embeddings()
        self._generator = torch.Generator().manual_seed(seed)
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes = None if open_ended else set(parameters)

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        device: torch.device = self._embedding.weight.device
        return torch.device("cpu") if device.type == "meta" else device

    def tokens(self, length: int) -> Tensor:
        """Return random tokens (1, length), without the token for padding, which some models treat by itself."""
        size, padding = self._embedding.weight.shape[0], getattr(self.model.config, "pad_token_id", None)
        tokens = torch.randint(size, (1, length), generator=self._generator)
        if padding is not None:
            tokens = tokens.where(tokens != padding, (tokens + 1) % size)
        return tokens.to(self.device)

    def output(self, tokens: Tensor, **arguments: object) -> Any:
        """Return the output of the model. Arguments that its `forward` does not have are left out."""
        arguments = {"use_cache": False, "return_dict": True} | arguments
        taken = {name: value for name, value in arguments.items() if self._takes is None or name in self._takes}
        return self.model(tokens, **taken)

    def logits(self, tokens: Tensor, **arguments: object) -> Tensor:
        """Return the logits (1, T, V), or the last hidden states (1, T, E) of a model without a head."""
        return logits_of(self.output(tokens, **arguments))

    def at(self, tokens: Tensor, positions: Tensor, **arguments: object) -> Tensor:
        """Return the logits of tokens at position ids (1, T) that all belong to one document."""
        return self.logits(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), **arguments)


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output, or its last hidden states."""
    logits = getattr(output, "logits", None)
    result: Tensor = output[0] if logits is None else logits
    return result


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore the buffers and attributes of a model's modules after a `with` block.

    A rotary module with a dynamic scaling keeps frequencies of the longest run. Random numbers stay as they were, too.
    """
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    kept = [buffer for _, _, buffers in saved for buffer in buffers.values() if buffer is not None]
    values = [buffer.clone() for buffer in kept]
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(devices=[device for device in devices if device is not None]):
        try:
            yield
        finally:
            for module, attributes, buffers in saved:
                vars(module).clear()
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)
            for buffer, value in zip(kept, values, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
