"""Short runs of a model on random tokens, the comparison of what they give, and the model left as it was.

`check` and `verify` share them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..model.obstacles import check_unwrapped
from ..model.patch_record import without_adapter
from ..model.watch import LayerCall, first, uncompiled
from .report import Outcome

LARGEST = 1e30
"""Absolute value from which a logit counts as masked. Some models set the logits of unusable tokens to the minimum."""

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Relative change of the logits up to which two ways of computing the same thing agree, by dtype."""

COARSE_TOLERANCE = 0.1
"""The same for half precision, whose roundings add up over the layers."""

FAILURES = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model of anybody's code may raise in a run that it was not made for."""

HALF = (torch.float16, torch.bfloat16)
"""The dtypes in half precision."""

_SELECTING = frozenset("__get__ __getitem__ chunk embedding permute reshape split t transpose unbind view".split())
"""Names of functions that read or select numbers, whose result is small where the tensor itself may be large."""


def change(changed: Tensor, original: Tensor) -> float:
    """Return a relative change: the norm of the difference, divided by the norm of the original.

    It is infinite if only one of the two is NaN somewhere.
    """
    changed, original = changed.double(), original.double()
    if not torch.equal(changed.isnan(), original.isnan()):
        return math.inf
    counted = (changed.abs() < LARGEST) & (original.abs() < LARGEST)
    difference = (changed - original)[counted].norm()
    return (difference / original[counted].norm().clamp(min=1e-30)).item()


class NotMeasuredError(Exception):
    """A question that cannot be asked of a model, for the reason in the message."""


class Runner:
    """Runs a model on tokens (1, T) of its vocabulary.

    Attributes:
        model: the model, in evaluation mode.
        coordinates: whether a position of the model has several coordinates (time, height, width).
        generator: draws the tokens.
        vocabulary: number of tokens that the model knows.
        device: the device of the tokens.
        ends_at_length: whether runs must not go past the trained length: on CUDA, a table that ends there would end the
            process.
    """

    def __init__(self, model: PreTrainedModel, seed: int, *, coordinates: bool = False) -> None:
        """Prepare the generator of the tokens."""
        self.model, self.coordinates = model, coordinates
        self.generator = torch.Generator().manual_seed(seed)
        embedding: Any = model.get_input_embeddings()
        self.vocabulary = int(embedding.weight.shape[0])
        self.device: torch.device = embedding.weight.device
        self.ends_at_length = self.device.type == "cuda"
        parameters = inspect.signature(model.forward).parameters
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        self._takes = None if open_ended else set(parameters)

    @property
    def tolerance(self) -> float:
        """Relative change of the logits up to which two ways of computing the same thing agree."""
        return TOLERANCES.get(self.model.dtype, COARSE_TOLERANCE)

    def tokens(self, length: int) -> Tensor:
        """Return random tokens (1, length), without the token for padding, which some models treat by itself."""
        padding = getattr(self.model.config, "pad_token_id", None)
        tokens = torch.randint(self.vocabulary, (1, length), generator=self.generator)
        if padding is not None:
            tokens = tokens.where(tokens != padding, (tokens + 1) % self.vocabulary)
        return tokens.to(self.device)

    def positions(self, length: int, start: int = 0) -> Tensor:
        """Return the position ids (1, length) of tokens that follow each other."""
        return start + torch.arange(length, device=self.device)[None]

    def output(self, tokens: Tensor, **arguments: object) -> Any:
        """Return the output of the model. Arguments that its `forward` does not have are left out."""
        arguments = {"use_cache": False, "return_dict": True} | arguments
        taken = {name: value for name, value in arguments.items() if self._takes is None or name in self._takes}
        return self.model(tokens, **taken)

    def logits(self, tokens: Tensor, **arguments: object) -> Tensor:
        """Return the logits (1, T, V), or the last hidden states (1, T, E) of a model without a head."""
        return logits_of(self.output(tokens, **arguments))

    def at(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return the logits of tokens at position ids (1, T) that all belong to one document, as the mask says."""
        return self.logits(tokens, position_ids=positions, attention_mask=torch.ones_like(tokens))

    def in_steps(
        self,
        tokens: Tensor,
        sizes: Sequence[int],
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: object = None,
    ) -> Tensor:
        """Return the logits of tokens (B, T) that are computed in several steps with a cache, (B, sum of sizes, V).

        Args:
            tokens: what to compute, behind the tokens in the cache.
            sizes: number of tokens in each step.
            positions: position ids (B, T); None passes none.
            mask: attention mask (B, T), of which a step gets all until its last token; None passes none.
            cache: what the first step goes on from.

        Raises:
            NotMeasuredError: if the model returns no cache.
        """
        logits, begin = [], 0
        for size in sizes:
            end = begin + size
            output = self.output(
                tokens[:, begin:end],
                position_ids=None if positions is None else positions[:, begin:end],
                attention_mask=None if mask is None else mask[:, :end],
                past_key_values=cache,
                use_cache=True,
            )
            cache, begin = cache_of(output), end
            logits.append(logits_of(output))
        return torch.cat(logits, 1)

    def judged(self, about: str, found: str, off: float, excuse: str | None = None, rounding: float = 0.0) -> Outcome:
        """Return the outcome of a comparison of two runs that should agree.

        Args:
            about: the question.
            found: what was compared, with {} in place of the difference.
            off: the difference, relative to what was compared.
            excuse: why a difference would be no fault of this model; None if it is one.
            rounding: what is allowed beside the tolerance.
        """
        if off <= self.tolerance + rounding:
            return Outcome(about, True, found.format(f"{off:.1e}"), off)
        found = found.format(f"{off:.1%}")
        return Outcome(about, False, found, off) if excuse is None else Outcome(about, None, f"{excuse}; {found}", off)


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output; NotMeasuredError if there is none."""
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise NotMeasuredError("the model returns no cache (past_key_values)")
    return cache


def logits_of(output: Any) -> Tensor:
    """Return the logits in a model's output, or its last hidden states."""
    logits = getattr(output, "logits", None)
    result: Tensor = output[0] if logits is None else logits
    return result


def again(module: nn.Module, call: LayerCall, states: Tensor | None = None, **changed: Any) -> Tensor:
    """Call a layer or an attention again.

    Args:
        module: the module.
        call: its arguments.
        states: hidden states (B, T, E) in place of those of the call.
        **changed: other arguments than those of the call.
    """
    # Layers write the keys that they lend to others into a dict of the call.
    kwargs = {
        name: dict(value) if isinstance(value, dict) else value for name, value in {**call.kwargs, **changed}.items()
    }
    return first(module(call.hidden_states if states is None else states, *call.args, **kwargs))


def unwrapped(model: Any, action: str, *, runs: bool = True) -> Any:
    """Return a model without compilation and adapter.

    Args:
        model: any object.
        action: what the caller is about to do, as in "verify the model".
        runs: whether the whole model runs, for which no weight may be elsewhere.

    Raises:
        UnsupportedModelError: if it is no model, or wrapped, sharded, or offloaded.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper has it
    check_unwrapped(model, action, in_place=runs, one_device=False)
    return without_adapter(model)


class InFloat32(TorchFunctionMode):
    """Computes with float32 copies of all half-precision numbers: cosines in bfloat16 would hide how fast a pair turns.

    A copy lives as long as the function that needs it, so that a model needs no more memory than its largest weight.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if name not in _SELECTING and not in_place:
            args, kwargs = (_widened(each) for each in (args, kwargs))
        result = func(*args, **(kwargs or {}))
        return torch.float32 if isinstance(result, torch.dtype) and result in HALF else result


def _widened(value: Any) -> Any:
    """Return arguments of a function with float32 copies of the tensors in half precision."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if type(value) in (tuple, list):
        return type(value)(map(_widened, value))
    return {name: _widened(each) for name, each in value.items()} if type(value) is dict else value


@contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, uncompiled, and restore it after a `with` block.

    Modes, attributes, hooks, buffers and random numbers stay as they were. A rotary module with a dynamic scaling, for
    example, keeps frequencies of the longest run.
    """
    saved = []
    for module in model.modules():
        attributes = dict(vars(module))
        tables = [(table, dict(table)) for table in attributes.values() if isinstance(table, dict)]
        saved.append((module, attributes, tables))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    model.eval()
    with torch.random.fork_rng(devices=[device for device in devices if device is not None]), uncompiled():
        try:
            yield
        finally:
            for module, attributes, tables in saved:
                vars(module).clear()
                vars(module).update(attributes)
                for table, entries in tables:  # the dicts stay the same objects, because handles of hooks refer to them
                    table.clear()
                    table.update(entries)
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
