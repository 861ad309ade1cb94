"""LoRA for patched models: which modules to adapt, and which to train and save whole."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.constants import CONFIG_NAME, EMBEDDING_LAYER_NAMES
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .checkpoints.adapters import WHERE, check_adapter, name_base, read_adapter_config, require_same_base
from .checkpoints.headers import JsonObject
from .errors import CheckpointError, NotPatchedError, UnsupportedModelError
from .live.base_model import BaseModel
from .live.patch_record import adapted_parts, patch_of, without_adapter
from .modules import PositionEmbedding, PositionModule

__all__ = ["check_adapter", "load_adapter", "lora_config", "name_base"]


def lora_config(
    model: PreTrainedModel,
    *,
    norms: bool = True,
    embeddings: bool | None = None,
    positions: bool = True,
    **options: Any,
) -> LoraConfig:
    """Return a LoRA config for a patched model.

    A model with new positions needs more than low-rank updates of its attention. With its normalisation layers and
    embeddings trained as well, LoRA comes close to full fine-tuning (Chen et al. 2024, LongLoRA, arXiv:2309.12307,
    table 2: perplexity 11.44 without, 8.12 with both). Embeddings are a large part of many models, so they are trained
    by default only where the swap changes what is added to them.

    Args:
        model: patched.
        norms: train and save the normalisation layers whole.
        embeddings: train and save the token embeddings whole. None does so only where the swap needs it: where the
            vectors that are added to them were taken away (the table of GPT-2 or OPT) or are new (`learned`,
            `sinusoidal`). Output embeddings that are tied to them follow where PEFT can tie them (not on GPT-2, where
            they stay as they were).
        positions: train and save the scheme's parameters whole.
        **options: of `peft.LoraConfig`. `target_modules` defaults to the attention projections, `modules_to_save` are
            added to those above.

    Returns:
        The config, for `peft.get_peft_model`.

    Raises:
        NotPatchedError: if the model is not patched: adapt a stock model with `peft.LoraConfig`.
        UnsupportedModelError: if the model has an adapter already.
    """
    if patch_of(model) is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: use peft.LoraConfig")
    if without_adapter(model) is not model or adapted_parts(model):
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, whose layers have other names: call lora_config before the "
            "first adapter is added, and give that config to each"
        )
    base = BaseModel.of(model)
    names = base.family.names
    table = base.found.position_table
    taken_away = base.has_table and table is not None and not any(True for _ in table.parameters())
    if embeddings is None:
        embeddings = taken_away or any(isinstance(module, PositionEmbedding) for module in model.modules())
    whole = [*(options.pop("modules_to_save", None) or []), *_saved_whole(model, norms, positions)]
    if embeddings:
        whole.append(names.token_embedding)
    if taken_away:
        # It has nothing to save, but on a stock base it has: PEFT itself then refuses the adapter.
        whole.append(str(names.position_table))
    # PEFT keeps tied what it knows by name; GPT-2's `wte` it does not: its output embeddings then stay as they were.
    tied = embeddings and model.config.tie_word_embeddings and names.token_embedding in EMBEDDING_LAYER_NAMES
    defaults = {**_targets(base), "ensure_weight_tying": tied, "task_type": "CAUSAL_LM"}
    config: LoraConfig = name_base(model, LoraConfig(modules_to_save=whole or None, **{**defaults, **options}))
    return config


def _saved_whole(model: PreTrainedModel, norms: bool, positions: bool) -> Iterator[str]:
    """Yield the names of the normalisation layers and of the scheme's modules, as far as they are wanted."""
    for name, module in model.named_modules():
        wanted = (norms and type(module).__name__.endswith("Norm")) or (
            positions and isinstance(module, PositionModule)
        )
        if wanted and any(True for _ in module.parameters(recurse=False)):
            yield name


def _targets(base: BaseModel) -> dict[str, object]:
    """Return the options of LoRA that name the attention projections, and say how their weights lie."""
    projections = {
        name: child
        for attention in base.found.attentions
        for name, child in attention.named_children()
        if isinstance(child, (nn.Linear, Conv1D))
    }
    transposed = any(isinstance(child, Conv1D) for child in projections.values())
    return {"target_modules": sorted(projections), "fan_in_fan_out": transposed}


def load_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **kwargs: Any) -> PeftModel:
    """Load an adapter of PEFT, of any kind, onto the base that it was trained on, and onto no other.

    The base is known by the first of these that there is:

    1. the entry in the adapter's config. `lora_config` and `name_base` write it, and patched models write it for
       adapters that sit inside them;
    2. the config of the base that the adapter names, if that is on this machine;
    3. the name itself, if it is this model's.

    An adapter without any of them is refused.

    Args:
        model: patched, or stock for an adapter that was trained on a stock one.
        adapter: the adapter's directory, or a Hub id.
        **kwargs: of `peft.PeftModel.from_pretrained`. `subfolder`, `revision`, `token`, `cache_dir`, ... are used by
            the check as well.

    Returns:
        The model, wrapped.

    Raises:
        CheckpointError: if the model is not patched as the adapter's base was, the adapter does not say how that was,
            or its adapter_config.json is malformed.
        UnsupportedModelError: if the model has an adapter already.
        OSError: if there is no such adapter, or it cannot be read.
        TypeError: for an option that PEFT does not have.
    """
    if unknown := sorted(set(kwargs) - _OPTIONS):
        raise TypeError(f"load_adapter and peft.PeftModel.from_pretrained have no option {', '.join(unknown)}")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, and load_adapter takes a model without. To add another: "
            "hf_posenc.lora.check_adapter(model.get_base_model(), folder), then model.load_adapter(folder, name)"
        )
    source = {key: value for key, value in kwargs.items() if key in WHERE}
    raw = read_adapter_config(adapter, source)
    require_same_base(model, raw, adapter, source)
    if kwargs.get("config") is None:
        kwargs["config"] = _config(raw, adapter)
    try:
        return PeftModel.from_pretrained(model, adapter, **kwargs)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"hf_posenc: PEFT cannot put the adapter {adapter} on this model: {type(error).__name__}: {error}"
        ) from error


_OPTIONS = (
    WHERE
    | set(inspect.signature(PeftModel.from_pretrained).parameters)
    | set(inspect.signature(PeftModel.load_adapter).parameters)
    | {"device_map", "max_memory", "offload_folder", "offload_dir", "offload_index", "use_safetensors", "adapters"}
) - {"self", "model", "model_id", "kwargs"}


def _config(raw: JsonObject, adapter: str | os.PathLike[str]) -> PeftConfig:
    """Return the config of an adapter, as PEFT makes it."""
    known = {key: value for key, value in raw.items() if key != "runtime_config"}
    try:
        if not isinstance(raw.get("peft_type"), str):
            raise TypeError(f"peft_type must be text, not {raw.get('peft_type')!r}")
        config = PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**known))
        hints = get_type_hints(type(config))
        if wrong := sorted(key for key in set(known) & set(hints) if not _is_a(known[key], hints[key])):
            raise TypeError(", ".join(f"{key} cannot be {known[key]!r:.80}" for key in wrong))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"hf_posenc: {CONFIG_NAME} of {adapter} makes no adapter: {type(error).__name__}: {error}"
        ) from error
    return config


def _is_a(value: object, hint: object) -> bool:
    """Return whether a JSON value is of an annotated type. A type that JSON does not have is not checked."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, each) for each in inside)
    if origin is Literal:
        return value in inside
    if origin in (list, set, tuple):
        return isinstance(value, list) and all(_is_a(each, inside[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(each, inside[1]) for each in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, list, dict, type(None)) else True
