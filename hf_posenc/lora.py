"""LoRA for patched models: which modules to adapt, and which to train and save whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .adapters.base import resolve
from .errors import CheckpointError, NotPatchedError
from .patching import patch_of
from .registry import adapter_for
from .schemes.base import PositionModule
from .surgery import base_model_type

ENTRY = "position_encoding"
"""Key of `auto_mapping` in adapter_config.json that holds the patched base's entry. PEFT keeps the dict as it is."""


def lora_config(
    model: PreTrainedModel, *, norms: bool = True, embeddings: bool = True, positions: bool = True, **options: Any
) -> LoraConfig:
    """Return a LoRA config for a patched model.

    A model with new positions needs more than low-rank updates of its attention: with its normalisation layers and
    embeddings trained as well, LoRA comes close to full fine-tuning (Chen et al. 2024, LongLoRA, arXiv:2309.12307,
    table 2: perplexity 11.44 without, 8.12 with both).

    Args:
        model: patched.
        norms: train and save the normalisation layers whole.
        embeddings: train and save the token embeddings whole. Output embeddings that are tied to them follow where PEFT
            can tie them (not on GPT-2, where they stay as they were).
        positions: train and save the scheme's parameters whole.
        **options: of `peft.LoraConfig`. `target_modules` defaults to the attention projections, `modules_to_save` are
            added to those above.

    Returns:
        The config, for `peft.get_peft_model`.

    Raises:
        NotPatchedError: if the model is not patched: adapt a stock model with `peft.LoraConfig`.
    """
    if patch_of(model) is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: use peft.LoraConfig")
    adapter = adapter_for(base_model_type(model.config))
    found = resolve(adapter, model)
    projections = {
        name: child
        for attention in found.attentions
        for name, child in attention.named_children()
        if isinstance(child, (nn.Linear, Conv1D))
    }
    whole = list(options.pop("modules_to_save", None) or [])
    for name, module in model.named_modules():
        own_parameters = any(True for _ in module.parameters(recurse=False))
        if not own_parameters:
            continue
        if (norms and type(module).__name__.endswith("Norm")) or (positions and isinstance(module, PositionModule)):
            whole.append(name)
    if embeddings:
        whole.append(adapter.token_embedding)
    table = found.position_table
    if adapter.position_table is not None and table is not None and not any(True for _ in table.parameters()):
        # It has nothing to save, but on a stock base it has: PEFT itself then refuses the adapter.
        whole.append(adapter.position_table)
    options.setdefault("target_modules", sorted(projections))
    options.setdefault("fan_in_fan_out", any(isinstance(child, Conv1D) for child in projections.values()))
    # PEFT keeps tied what it knows by name; GPT-2's `wte` it does not: its output embeddings then stay as they were.
    tied = embeddings and model.config.tie_word_embeddings and adapter.token_embedding in EMBEDDING_LAYER_NAMES
    options.setdefault("ensure_weight_tying", tied)
    options.setdefault("task_type", "CAUSAL_LM")
    mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
        ENTRY: dict(model.config.position_encoding),
    }
    return LoraConfig(modules_to_save=whole or None, auto_mapping=mapping, **options)


def load_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **kwargs: Any) -> PeftModel:
    """Load an adapter onto the patched base that it was trained on, and onto no other.

    Args:
        model: patched.
        adapter: the adapter's directory, or a Hub id.
        **kwargs: of `peft.PeftModel.from_pretrained`.

    Returns:
        The model, wrapped.

    Raises:
        CheckpointError: if the model is not patched as the adapter's base was.
    """
    check_adapter(model, adapter)
    return PeftModel.from_pretrained(model, adapter, **kwargs)


def check_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str]) -> None:
    """Check that an adapter was trained on a base patched like this model.

    Args:
        model: patched or stock.
        adapter: the adapter's directory, or a Hub id.

    Raises:
        CheckpointError: if not.
    """
    trained_on = _scheme((_read(adapter).get("auto_mapping") or {}).get(ENTRY))
    here = _scheme(getattr(model.config, ENTRY, None))
    if trained_on != here:
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} was trained on {trained_on or 'stock positions'}, this model has "
            f"{here or 'stock positions'}"
        )


def _scheme(entry: dict[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (entry or {}).items() if key != "hf_posenc_version"}


def _read(adapter: str | os.PathLike[str]) -> dict[str, Any]:
    path = Path(adapter) / "adapter_config.json"
    if not path.is_file():
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(str(adapter), "adapter_config.json"))
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config
