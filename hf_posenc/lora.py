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
from .modules import PositionEmbedding, modules_of_schemes

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

    A model with new positions needs more than low-rank updates of its attention. LoRA comes close to full fine-tuning
    if normalisation layers and embeddings are trained, too (Chen et al. 2024, LongLoRA, arXiv:2309.12307, table 2:
    perplexity 11.44 without them, 8.12 with them). Embeddings are a large part of many models. So by default they are
    trained only if the swap changes the vectors that are added to them.

    Args:
        model: a patched model.
        norms: train and save all weights of the normalisation layers.
        embeddings: train and save all token embeddings. None does so only if the swap needs it: if it removes the
            vectors that are added to them (the table of GPT-2 or OPT) or adds new ones (`learned`, `sinusoidal`). Tied
            output embeddings are trained with them, except on GPT-2, where PEFT cannot tie them.
        positions: train and save all parameters of the scheme.
        **options: options of `peft.LoraConfig`. `target_modules` defaults to the attention projections.
            `modules_to_save` are added to the modules above.

    Returns:
        The config, for `peft.get_peft_model`.

    Raises:
        NotPatchedError: if the model is not patched. For a stock model use `peft.LoraConfig`.
        UnsupportedModelError: if the model has an adapter already.
    """
    if patch_of(model) is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: use peft.LoraConfig")
    if without_adapter(model) is not model or adapted_parts(model):
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, which renames its layers: call lora_config before the "
            "first adapter is added, and pass this config to every adapter"
        )
    base = BaseModel.of(model)
    names = base.family.names
    table = base.modules.position_table
    table_removed = base.has_table and table is not None and not any(True for _ in table.parameters())
    if embeddings is None:
        embeddings = table_removed or any(isinstance(module, PositionEmbedding) for module in model.modules())
    modules_to_save = [*(options.pop("modules_to_save", None) or []), *_saved_whole(model, norms, positions)]
    if embeddings:
        modules_to_save.append(names.token_embedding)
    if table_removed:
        # The module has no parameters here, but it has some on a stock base. So PEFT refuses the adapter there.
        modules_to_save.append(str(names.position_table))
    # PEFT ties embeddings only under names that it lists. GPT-2's `wte` is not listed.
    tied = embeddings and model.config.tie_word_embeddings and names.token_embedding in EMBEDDING_LAYER_NAMES
    defaults = {**_targets(base), "ensure_weight_tying": tied, "task_type": "CAUSAL_LM"}
    config: LoraConfig = name_base(
        model, LoraConfig(modules_to_save=modules_to_save or None, **{**defaults, **options})
    )
    return config


def _saved_whole(model: PreTrainedModel, norms: bool, positions: bool) -> Iterator[str]:
    """Yield the names of the modules to train whole: normalisation layers if `norms`, the scheme's if `positions`."""
    of_schemes = modules_of_schemes(model)
    for name, module in model.named_modules():
        is_wanted = (norms and type(module).__name__.endswith("Norm")) or (positions and name in of_schemes)
        if is_wanted and any(True for _ in module.parameters(recurse=False)):
            yield name


def _targets(base: BaseModel) -> dict[str, object]:
    """Return the LoRA options for the attention projections: their names, and whether weights are transposed."""
    projections = {
        name: child
        for attention in base.modules.attentions
        for name, child in attention.named_children()
        if isinstance(child, (nn.Linear, Conv1D))
    }
    transposed = any(isinstance(child, Conv1D) for child in projections.values())
    return {"target_modules": sorted(projections), "fan_in_fan_out": transposed}


def load_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **kwargs: Any) -> PeftModel:
    """Load a PEFT adapter of any kind, but only onto the base that it was trained on.

    `load_adapter` identifies the base by the first of these that exists:

    1. the entry in the adapter's config, which `lora_config`, `name_base` and patched models with an adapter inside
       write;
    2. the config of the base that the adapter names, if that base is on this machine;
    3. the name of the base, if it is the name of this model.

    It refuses an adapter without any of them.

    Args:
        model: a patched model, or a stock model for an adapter that was trained on one.
        adapter: directory of the adapter, or a Hub id.
        **kwargs: options of `peft.PeftModel.from_pretrained`. The check uses `subfolder`, `revision`, `token`,
            `cache_dir` and the like, too.

    Returns:
        The model inside a `peft.PeftModel`.

    Raises:
        CheckpointError: if the model is not patched like the adapter's base, the adapter does not name its base's
            positions, or its adapter_config.json is malformed.
        UnsupportedModelError: if the model has an adapter already.
        OSError: if the adapter does not exist or cannot be read.
        TypeError: for an option that PEFT does not have.
    """
    if unknown := sorted(set(kwargs) - _PEFT_OPTIONS):
        raise TypeError(f"load_adapter and peft.PeftModel.from_pretrained have no option {', '.join(unknown)}")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, but load_adapter needs a model without one. To add another: "
            "hf_posenc.lora.check_adapter(model.get_base_model(), folder), then model.load_adapter(folder, name)"
        )
    where = {key: value for key, value in kwargs.items() if key in WHERE}
    raw = read_adapter_config(adapter, where)
    require_same_base(model, raw, adapter, where)
    if kwargs.get("config") is None:
        kwargs["config"] = _parse_config(raw, adapter)
    try:
        return PeftModel.from_pretrained(model, adapter, **kwargs)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"hf_posenc: PEFT cannot put the adapter {adapter} on this model: {type(error).__name__}: {error}"
        ) from error


_PEFT_OPTIONS = (
    WHERE
    | set(inspect.signature(PeftModel.from_pretrained).parameters)
    | set(inspect.signature(PeftModel.load_adapter).parameters)
    | {"device_map", "max_memory", "offload_folder", "offload_dir", "offload_index", "use_safetensors", "adapters"}
) - {"self", "model", "model_id", "kwargs"}


def _parse_config(raw: JsonObject, adapter: str | os.PathLike[str]) -> PeftConfig:
    """Return the PEFT config of an adapter; CheckpointError if it is malformed."""
    values = {key: value for key, value in raw.items() if key != "runtime_config"}
    try:
        if not isinstance(raw.get("peft_type"), str):
            raise TypeError(f"peft_type must be text, not {raw.get('peft_type')!r}")
        config = PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**values))
        hints = get_type_hints(type(config))
        if wrong := sorted(key for key in set(values) & set(hints) if not _is_a(values[key], hints[key])):
            raise TypeError(", ".join(f"{key} cannot be {values[key]!r:.80}" for key in wrong))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"hf_posenc: {CONFIG_NAME} of {adapter} makes no adapter: {type(error).__name__}: {error}"
        ) from error
    return config


def _is_a(value: object, hint: object) -> bool:
    """Return whether a JSON value has an annotated type; True for types that JSON does not have."""
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
