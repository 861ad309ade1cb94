"""Windows of text and the loss on them, and checks of the arguments of a calibration or a search."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core.did_you_mean import did_you_mean
from ..core.errors import NotPatchedError, UnsupportedModelError
from ..core.modules import PositionModule
from ..families.base import base_model_type
from ..model.base_model import BaseModel
from ..model.logits import IGNORED, logits_function, token_losses
from ..model.obstacles import check_unquantized, check_unwrapped
from ..model.patch_record import Patch, adapted_parts, have_moved, patch_of, without_adapter

GIVE_BASE = "give the base, calibrate(model, tokens, base=...)"

ADAPTER_EFFECT = 1e-3
"""An adapter that changes the logits by more than this, relative to their norm, counts as trained. Some untrained
adapters add rounding."""

HELD_OUT, CLOSED_WINDOWS = (8, 2048), (24, 3072)
"""Held-out windows, and those that closed forms average over, where the caller gives no number: so many windows, or
fewer that hold so many tokens. Both measure tokens, so that long windows need not be many."""


NOISE = 0.01
"""A smaller difference of held-out losses, in nats, is taken for noise: the held-out windows are few."""

TOKENS_AT_ONCE = 1024
"""Number of tokens in one forward pass, about; at least one window."""


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless an argument has one of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}{did_you_mean(value, choices)}")


def check_positive(kind: str, **numbers: object) -> None:
    """Raise ValueError unless all arguments but None are positive and finite, of kind `integer` or `number`."""
    wanted = {"integer": Integral, "number": Real}[kind]
    for name, number in numbers.items():
        fits = isinstance(number, wanted) and not isinstance(number, bool) and 0 < float(number) < math.inf
        if number is not None and not fits:
            raise ValueError(f"{name} must be a positive {kind}, not {number!r}")


def check_patched(model: PreTrainedModel, action: str) -> Patch:
    """Check that a model is patched, whole and has a head, and return the record of its patch.

    Args:
        model: a model, maybe with an adapter of PEFT around it.
        action: what the caller is about to do, as in "calibrate the model".

    Raises:
        NotPatchedError: if it is not patched.
        UnsupportedModelError: if it is wrapped, sharded or offloaded, or predicts no tokens.
    """
    check_unwrapped(model, action)
    inner = without_adapter(model)
    patch = patch_of(inner)
    if patch is None:
        raise NotPatchedError(f"this {type(inner).__name__} is not patched: patch it first, then {action}")
    check_head(inner)
    return patch


def check_head(model: PreTrainedModel) -> None:
    """Raise an UnsupportedModelError unless a model predicts tokens."""
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"the loss of the next token is measured, and a {type(model).__name__} predicts none: give a "
            "causal language model, with its head"
        )


def check_adapter(inner: PreTrainedModel, weights: str | None) -> None:
    """Check that an adapter saves everything that a calibration would change.

    Args:
        inner: the patched model, below the adapter.
        weights: what the second stage trains, see `Matching`; None if there is none, or it may choose.

    Raises:
        ValueError: if something would not be saved with the adapter.
    """
    if weights in ("query_key", "attention"):
        raise ValueError(
            f"weights={weights!r} trains weights that no adapter holds: leave it out (weights='adapter'), or calibrate "
            "the model before the adapter is added"
        )
    parameters = [p for each in inner.modules() if isinstance(each, PositionModule) for p in each.parameters()]
    if parameters and not any(p.requires_grad for p in parameters):
        raise ValueError(
            "the adapter neither trains nor saves the scheme's parameters, so that it would lose their calibrated "
            "values: make it with hf_posenc.lora_config(model), or calibrate the model before the adapter is added"
        )


def number_of_windows(given: int | None, default: tuple[int, int], length: int) -> int:
    """Return how many windows of this length to read: the number given, or the default, but at least 2."""
    most, enough = default
    return min(most, max(2, math.ceil(enough / length))) if given is None else given


def split_tokens(tokens: object, model: PreTrainedModel, held_out: int | None) -> tuple[Tensor, Tensor]:
    """Check windows of tokens, and return those to read and the held-out ones, int64 on the model's device.

    Args:
        tokens: the windows.
        model: the model that reads them.
        held_out: number of windows, from the end, that are held out; None means the default.

    Raises:
        ValueError: if they are not windows of token ids of the model's vocabulary, or too few.
    """
    integers = (torch.int32, torch.int64)
    if not (isinstance(tokens, Tensor) and tokens.dtype in integers and tokens.ndim == 2 and tokens.shape[1] > 1):
        actual = f"{tuple(tokens.shape)} of {tokens.dtype}" if isinstance(tokens, Tensor) else f"a {type(tokens)}"
        raise ValueError(
            f"tokens must be integers (windows, length), an int64 tensor with a length of at least 2, not {actual}. "
            'From a text: tokenizer(text, return_tensors="pt").input_ids[0].unfold(0, 256, 256)'
        )
    held_out = number_of_windows(held_out, HELD_OUT, tokens.shape[1])
    if len(tokens) <= held_out:
        raise ValueError(f"{len(tokens)} windows are too few: {held_out} are held out, and at least one more is needed")
    last = model.get_input_embeddings().weight.shape[0] - 1
    if outside := [each for each in (int(tokens.min()), int(tokens.max())) if not 0 <= each <= last]:
        raise ValueError(
            f"tokens hold the id {outside[0]}, and the model's vocabulary has the ids 0 to {last}: use the model's own "
            "tokenizer"
        )
    read, held = tokens.to(next(model.parameters()).device, torch.int64).split([len(tokens) - held_out, held_out])
    return read, held


@torch.no_grad()
def mean_loss(model: PreTrainedModel, windows: Tensor, labels: Tensor | None = None) -> float:
    """Return the mean loss of the next token, in nats. NaN becomes infinity.

    Args:
        model: a model in evaluation mode.
        windows: (N, T) tokens.
        labels: (N, T) the same, with `IGNORED` for those that do not count; None means that all count.
    """
    labels = windows if labels is None else labels
    logits_of, total = logits_function(model, windows[0]), 0.0
    size = max(1, TOKENS_AT_ONCE // windows.shape[1])
    for batch, wanted in zip(windows.split(size), labels.split(size), strict=True):
        pieces = token_losses(logits_of(batch, slice(windows.shape[1] - 1)), wanted[:, 1:].flatten())
        total += sum(losses.sum(dtype=torch.float64).item() for losses in pieces)
    mean = total / int((labels[:, 1:] != IGNORED).sum())
    return mean if math.isfinite(mean) else math.inf


def check_labels(labels: object, tokens: Tensor, held_out: int) -> None:
    """Raise ValueError unless labels are None, or `tokens` with `IGNORED` in some places, not in all held-out ones."""
    if labels is None:
        return
    if isinstance(labels, Tensor) and labels.shape == tokens.shape:
        counted = labels != IGNORED
        if labels[counted].equal(tokens[counted].to(labels)) and counted[-held_out:, 1:].any():
            return
    raise ValueError(
        f"labels must be the tokens, or {IGNORED} for those that the held-out loss leaves out, and not for all in the "
        f"{held_out} held-out windows, which are the last ones"
    )


def check_base(inner: PreTrainedModel, patch: Patch, base: object) -> None:
    """Check the model that a calibration is to imitate.

    Args:
        inner: the patched model, with the adapter's layers inside it if it has an adapter.
        patch: its patch.
        base: another model; None means the same model before its patch.

    Raises:
        NotPatchedError: if `base` is None and the model was loaded patched.
        UnsupportedModelError: if the base is wrapped, sharded, offloaded or quantised.
        ValueError: if the base is the model itself, shares weights with it, or has another type or size; or if `base`
            is None and the model's weights have changed since its patch.
    """
    if base is None:
        if patch.undo is None:
            raise NotPatchedError(f"this model was loaded patched, without the stock positions: {GIVE_BASE}")
        if have_moved(inner, patch.samples) or _is_adapter_trained(inner, patch):
            raise ValueError(
                "weights of this model have changed since it was patched, by a calibration or in training, so that it "
                f"is no longer the base: {GIVE_BASE}"
            )
        return
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"base must be a transformers model, not a {type(base).__name__}")
    for check in (check_unwrapped, check_unquantized):
        check(base, "take it as the base")
    addresses = {p.data_ptr() for p in inner.parameters()}
    if any(p.data_ptr() in addresses for p in base.parameters()):
        raise ValueError(
            "base is the model that is calibrated, or shares weights with it: patch_model works in place. Leave base "
            "out, or load the stock checkpoint once more"
        )
    check_head(base)
    own = _described(inner)
    for name, its in _described(base).items():
        if its != own[name]:
            raise ValueError(f"base does not fit this model: its {name} is {its}, the model's {own[name]}")


def _described(model: PreTrainedModel) -> dict[str, Any]:
    """Return what a model and its base have in common."""
    base = BaseModel.of(model)
    return {
        "type": base_model_type(model.config),
        "number of layers": len(base.modules.layers),
        "sizes of the attention": dict(base.sizes),
        "vocabulary": model.get_input_embeddings().weight.shape[0],
        "dtype": model.dtype,
        "device": model.device,
    }


@torch.no_grad()
def _is_adapter_trained(inner: PreTrainedModel, patch: Patch) -> bool:
    """Return whether an adapter was trained: whether it changes the output of the unpatched model."""
    assert patch.undo is not None
    active = [part for part in adapted_parts(inner) if not part.disable_adapters]
    if not active:
        return False
    tokens = torch.arange(min(16, inner.get_input_embeddings().weight.shape[0]), device=inner.device)[None]
    logits = []
    try:
        with patch.undo.suspended():
            for disabled in (False, True):
                for part in active:
                    part._disable_adapters = disabled  # `enable_adapters` would change what requires gradients
                logits.append(inner(tokens, use_cache=False).logits)
    finally:
        for part in active:
            part._disable_adapters = False
    return bool((logits[0] - logits[1]).norm() > ADAPTER_EFFECT * logits[1].norm())
