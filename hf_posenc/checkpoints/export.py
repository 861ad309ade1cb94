"""Export a patched model as a stock checkpoint, if a stock class can compute the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..errors import NotPatchedError, UnsupportedModelError
from ..families.base import language_config
from ..live.base_model import BaseModel
from ..live.obstacles import check_unquantized
from ..live.patch_record import Patch, patch_of
from ..placement import StockForm
from ..upstream.derived_classes import stock_class
from .class_names import STUB
from .guards import unguarded
from .loading_weights import position_keys
from .model_classes import PosEncConfigMixin, PosEncMixin
from .scheme_entry import ENTRY

TABLE_LENGTH = 1024
"""Default number of rows of the table to which position vectors without a limit are exported."""


def export_stock(
    model: PreTrainedModel, directory: str | os.PathLike[str], *, num_positions: int | None = None, **kwargs: object
) -> None:
    """Save a patched model as a stock checkpoint, if a stock class can compute the same.

    A stock class can compute

    - `rope`, its scalings and any frequencies on families that rotate by themselves;
    - `nope` in all or some layers of llama and smollm3, as a SmolLM3 that leaves these layers unrotated;
    - vectors at the input (`learned`, `sinusoidal`) of gpt2 and opt, as the table of the stock model.

    Args:
        model: a patched model; it stays unchanged.
        directory: folder of the stock checkpoint.
        num_positions: rows of the table for position vectors without a limit (`sinusoidal`); None means 1024.
        **kwargs: options of `save_pretrained` in transformers.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if no stock class can compute the same, or the weights are quantised. The message says
            why.
        ValueError: if `num_positions` exceeds the scheme's limit, or the scheme needs no table.
        FileExistsError: if the directory holds a patched checkpoint, which would lose its guards.
    """
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: save it with save_pretrained")
    if language_config(model.config) is not model.config:
        raise UnsupportedModelError(
            f"{type(model).__name__} is multimodal, and no stock config says which positions its language model has"
        )
    base = BaseModel.of(model)
    form = _stock_form(patch, base)
    if num_positions is not None and (form is None or not form.table):
        raise ValueError(
            f"num_positions is for vectors that are added at the input, and {patch.name} adds none: leave it out"
        )
    if (Path(directory) / f"{STUB}.py").exists():
        raise FileExistsError(f"{directory} holds a patched checkpoint; export to another folder")
    check_unquantized(model, "export the model")
    stock_model = stock_class(type(model), PosEncMixin)
    stock_config: type[PreTrainedConfig] = stock_class(type(model.config), PosEncConfigMixin)
    settings = _stock_settings(model)
    own_keys = position_keys(model)
    weights = {key: value for key, value in model.state_dict().items() if key not in own_keys}
    stock_module = None if form is None else base.modules.position_table if form.table else base.modules.rotary
    if patch.attends or form is None or stock_module is None:
        raise UnsupportedModelError(_nothing_fits(patch, base))
    rotated = list(form.turned)
    if form.table:
        count = _table_length(patch, num_positions)
        key, table = _make_table(model, base, count)
        weights[key] = table
        settings[model.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")] = count
    elif rotated != list(base.modules.rotated) or not any(rotated):
        stock_model, stock_config = _unrotated_twin(base, stock_model, patch)
        settings |= _unrotated_settings(rotated, is_other_type=stock_config.model_type != base.name)
    with torch.device("meta"):
        stock = stock_model(stock_config.from_dict(settings))
    stock.load_state_dict(weights, assign=True)
    stock.tie_weights()
    if model.can_generate():
        stock.generation_config = model.generation_config
    stock.save_pretrained(directory, **kwargs)


def _table_length(patch: Patch, wanted: int | None) -> int:
    """Return the number of positions of the exported table."""
    count = wanted or patch.limit or TABLE_LENGTH
    if patch.limit is not None and count > patch.limit:
        raise ValueError(f"the table has {patch.limit} positions, not {count}")
    return count


def _stock_form(patch: Patch, base: BaseModel) -> StockForm | None:
    """Return what a stock checkpoint would have to hold, or None if no stock class computes one of the schemes."""
    form: StockForm | None = StockForm(tuple(base.rotated))
    for scheme in patch.schemes:
        form = None if form is None else scheme.acts_on.stock_form(scheme, base, form)
    return form


def _nothing_fits(patch: Patch, base: BaseModel) -> str:
    """Return a message that no stock class fits, and which schemes can be exported."""
    return (
        f"no stock class computes {patch.name} on {base.name}: rope in every layer can be exported from families that "
        "rotate (but not rope on a part of each head where they rotate whole heads), nope in some or all layers from "
        "families with a twin that leaves layers unrotated (llama, smollm3), vectors at the input from families with a "
        "table (gpt2, opt)"
    )


def _stock_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config of a model as a dict for a stock class, without our entry and guards."""
    settings: dict[str, Any] = model.config.to_dict()
    for key in (ENTRY, "auto_map", "attn_implementation", "model_type", "architectures"):
        settings.pop(key, None)
    return {key: unguarded(key, value) for key, value in settings.items()}


def _unrotated_twin(
    base: BaseModel, stock: type[PreTrainedModel], patch: Patch
) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return the model and config class of the family that computes the same and can leave layers unrotated."""
    if base.family.rotation.unrotated_twin is None:
        raise UnsupportedModelError(_nothing_fits(patch, base))
    base_class, twin = CONFIG_MAPPING[base.name], CONFIG_MAPPING[base.family.rotation.unrotated_twin]
    if base_class is twin:
        return stock, twin
    twin_model = getattr(transformers, stock.__name__.replace(_stem(base_class), _stem(twin)), None)
    if twin_model is None:
        raise UnsupportedModelError(f"{twin.model_type} has no {stock.__name__}")
    config = base.config
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        raise UnsupportedModelError(
            f"{twin.model_type} has heads of hidden_size / num_attention_heads, not of {config.head_dim}"
        )
    return twin_model, twin


def _unrotated_settings(rotated: list[bool], *, is_other_type: bool) -> dict[str, Any]:
    """Return config settings that leave layers unrotated.

    Args:
        rotated: for each layer, whether it is rotated.
        is_other_type: whether the exported model has another model type than the base.
    """
    settings: dict[str, Any] = {
        "no_rope_layers": [int(is_rotated) for is_rotated in rotated],
        "no_rope_layer_interval": len(rotated) + 1,
    }
    if not any(rotated):
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if is_other_type:
        settings |= {"use_sliding_window": False, "layer_types": ["full_attention"] * len(rotated)}
    return settings


def _stem(config: type[PreTrainedConfig]) -> str:
    """Return the prefix of a family's class names, as in `Llama` for LlamaConfig."""
    return config.__name__.removesuffix("Config")


def _make_table(model: PreTrainedModel, base: BaseModel, count: int) -> tuple[str, torch.Tensor]:
    """Return the state-dict key of the base's table of positions, and a table with the scheme's vectors."""
    module: Any = base.modules.position_table
    name = next(name for name, child in model.named_modules() if child is module)
    device = next(base.modules.decoder.parameters()).device
    with torch.no_grad():
        rows = module.embed(torch.arange(count, device=device)[None])[0].to(model.dtype)
    offset_rows = torch.zeros(base.family.table_offset, rows.shape[-1], dtype=rows.dtype, device=device)
    return f"{name}.weight", torch.cat([offset_rows, rows])
