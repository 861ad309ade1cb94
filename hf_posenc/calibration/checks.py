"""Check the arguments of a calibration: the model, the tokens and the base."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import NotPatchedError, UnsupportedModelError
from ..families.base import base_model_type
from ..live.base_model import BaseModel
from ..live.obstacles import check_in_place, check_unquantized, check_unwrapped
from ..live.patch_record import Patch, adapted_parts, patch_of
from ..live.weight_samples import have_moved
from ..modules import PositionModule
from .held_out import IGNORED

GIVE_BASE = "give the base, calibrate(model, tokens, base=...)"

ADAPTER_EFFECT = 1e-3
"""An adapter that changes the logits by more than this, relative to their norm, counts as trained. Some untrained
adapters add rounding."""


HELD_OUT, CLOSED_WINDOWS = (8, 2048), (24, 3072)
"""Held-out windows, and those that closed forms average over, where the caller gives no number: so many windows, or
fewer that hold so many tokens. Both measure tokens, so that long windows need not be many."""


def check_model(inner: PreTrainedModel) -> Patch:
    """Check that a model can be calibrated, and return the record of its patch.

    Args:
        inner: the model without an adapter around it.

    Raises:
        NotPatchedError: if it is not patched.
        UnsupportedModelError: if it is sharded, offloaded or quantised, or predicts no tokens.
        ValueError: under `torch.inference_mode`, or if the model's weights were made under it.
    """
    patch = patch_of(inner)
    if patch is None:
        raise NotPatchedError(f"this {type(inner).__name__} is not patched: there is nothing to calibrate")
    if torch.is_inference_mode_enabled():
        raise ValueError("calibrate takes gradients, which torch.inference_mode() forbids: call it outside")
    check_in_place(inner, "calibrate the model")
    check_unquantized(inner, "calibrate the model")
    check_head(inner)
    if any(p.is_inference() for p in inner.parameters()):
        raise ValueError(
            "weights of this model were made under torch.inference_mode(), and take no gradients: make it outside"
        )
    return patch


def check_adapter(inner: PreTrainedModel, *, moves_weights: bool) -> None:
    """Check that an adapter saves everything that a calibration would change.

    Args:
        inner: the patched model, below the adapter.
        moves_weights: whether the second stage would train weights of the model itself.

    Raises:
        ValueError: if something would not be saved with the adapter.
    """
    if moves_weights:
        raise ValueError(
            "weights='query_key' trains weights that no adapter holds: leave it out (weights='adapter'), or calibrate "
            "the model before the adapter is added"
        )
    modules = [module for module in inner.modules() if isinstance(module, PositionModule)]
    parameters = [p for module in modules for p in module.parameters()]
    if parameters and not any(p.requires_grad for p in parameters):
        raise ValueError(
            "the adapter neither trains nor saves the scheme's parameters, so that it would lose their calibrated "
            "values: make it with hf_posenc.lora_config(model), or calibrate the model before the adapter is added"
        )


def number_of_windows(given: int | None, default: tuple[int, int], length: int) -> int:
    """Return how many windows of this length to read: the number given, or the default, but at least 2."""
    most, enough = default
    return min(most, max(2, math.ceil(enough / length))) if given is None else given


def check_tokens(tokens: object, model: PreTrainedModel, held_out: int | None) -> int:
    """Check windows of tokens, and return how many of them are held out: `held_out`, or the default for None.

    Raises:
        ValueError: if they are not windows of token ids of the model's vocabulary, or too few.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64) or tokens.ndim != 2:
        actual = (
            f"{tuple(tokens.shape)} of {tokens.dtype}" if isinstance(tokens, Tensor) else f"a {type(tokens).__name__}"
        )
        raise ValueError(
            f"tokens must be integers (windows, length), an int64 tensor, not {actual}. From a text: "
            'tokenizer(text, return_tensors="pt").input_ids[0].unfold(0, 256, 256)'
        )
    if tokens.shape[1] < 2:
        raise ValueError("tokens must be integers (windows, length) with a length of at least 2, not 1")
    held_out = number_of_windows(held_out, HELD_OUT, tokens.shape[1])
    if len(tokens) <= held_out:
        raise ValueError(f"{len(tokens)} windows are too few: {held_out} are held out, and at least one more is needed")
    count = model.get_input_embeddings().weight.shape[0]
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= count:
        raise ValueError(
            f"tokens hold the id {least if least < 0 else most}, and the model's vocabulary has the ids 0 to "
            f"{count - 1}: use the model's own tokenizer"
        )
    return held_out


def check_labels(labels: object, tokens: Tensor, held_out: int) -> None:
    """Raise ValueError unless labels are None, or `tokens` with `IGNORED` in some places, not in all held-out ones."""
    if labels is None:
        return
    if not isinstance(labels, Tensor) or labels.shape != tokens.shape:
        actual = tuple(labels.shape) if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"labels must have the shape of tokens, {tuple(tokens.shape)}, not {actual}")
    counted = labels != IGNORED
    if not labels[counted].equal(tokens[counted].to(labels)):
        raise ValueError(f"labels must be the tokens, or {IGNORED} for those that the held-out loss leaves out")
    if not counted[-held_out:, 1:].any():
        raise ValueError(
            f"labels leave out all tokens of the {held_out} held-out windows, which are the last ones: shuffle the "
            "windows, or hold out more"
        )


def check_head(model: PreTrainedModel) -> None:
    """Raise an UnsupportedModelError unless a model predicts tokens."""
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"the loss of the next token is measured, and a {type(model).__name__} predicts none: give a "
            "causal language model, with its head"
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
        raise ValueError(
            f"base must be a transformers model, like the one that was patched, not a {type(base).__name__}"
        )
    check_unwrapped(base, "take it as the base")
    check_in_place(base, "take it as the base")
    check_unquantized(base, "take it as the base")
    addresses = {p.data_ptr() for p in inner.parameters()}
    if base is inner or any(p.data_ptr() in addresses for p in base.parameters()):
        raise ValueError(
            "base is the model that is calibrated, or shares weights with it: patch_model works in place. Leave base "
            "out, or load the stock checkpoint once more"
        )
    check_head(base)
    if different := _differences(inner, base):
        raise ValueError(f"base does not fit this model: {'; '.join(different)}")


def _differences(model: PreTrainedModel, base: PreTrainedModel) -> list[str]:
    """Return the first difference that keeps a model from imitating a base, as a list of at most one sentence."""
    base_type, model_type = base_model_type(base.config), base_model_type(model.config)
    if base_type != model_type:
        return [f"it is a {base_type}, the model a {model_type}"]
    theirs, ours = BaseModel.of(base), BaseModel.of(model)
    pairs = {
        "number of layers": (len(theirs.modules.layers), len(ours.modules.layers)),
        "sizes of the attention": (dict(theirs.sizes), dict(ours.sizes)),
        "vocabulary": tuple(model.get_input_embeddings().weight.shape[0] for model in (base, model)),
        "dtype": (base.dtype, model.dtype),
        "device": (base.device, model.device),
    }
    return [f"its {name} is {its}, the model's {own}" for name, (its, own) in pairs.items() if its != own][:1]


@torch.no_grad()
def _is_adapter_trained(inner: PreTrainedModel, patch: Patch) -> bool:
    """Return whether an adapter was trained: whether it changes the output of the unpatched model."""
    assert patch.undo is not None
    active = [part for part in adapted_parts(inner) if not part.disable_adapters]
    if not active:
        return False
    tokens = torch.arange(min(16, inner.get_input_embeddings().weight.shape[0]), device=inner.device)[None]
    flags = [(p, p.requires_grad) for p in inner.parameters()]
    try:
        with patch.undo.suspended():
            with_adapter = inner(tokens, use_cache=False).logits
            for part in active:
                part.enable_adapters(False)
            without = inner(tokens, use_cache=False).logits
    finally:
        for part in active:
            part.enable_adapters(True)
        for p, flag in flags:
            p.requires_grad_(flag)
    return bool((with_adapter - without).norm() > ADAPTER_EFFECT * without.norm())
