"""Export a patched model as a stock checkpoint that computes the same, where a stock class can."""

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
from .building import PosEncConfigMixin, PosEncMixin
from .class_names import STUB
from .guards import unguarded
from .scheme_entry import ENTRY
from .weights import position_keys

TABLE_LENGTH = 1024
"""Rows of the table that vectors without a limit become, unless another number is asked for."""


def export_stock(
    model: PreTrainedModel, directory: str | os.PathLike[str], *, num_positions: int | None = None, **kwargs: Any
) -> None:
    """Save a patched model as a stock checkpoint that computes the same, where a stock class can.

    It can be done for

    - `rope` and its scalings on families that rotate by themselves;
    - `nope` in all or some of the layers of llama and smollm3, as a SmolLM3 that leaves those layers unrotated;
    - vectors at the input (`learned`, `sinusoidal`) of gpt2 and opt, as their own table.

    Args:
        model: patched; it is left as it is.
        directory: where to.
        num_positions: rows of the table that vectors without a limit of their own (`sinusoidal`) become; None means
            1024.
        **kwargs: of `save_pretrained` in transformers.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if no stock class represents it, or its weights are quantised; the message says why.
        ValueError: if the table has fewer positions than were asked for, or the scheme has no table.
        FileExistsError: if the directory holds a patched checkpoint, whose guards would be lost.
    """
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: save it with save_pretrained")
    if language_config(model.config) is not model.config:
        raise UnsupportedModelError(
            f"{type(model).__name__} is multimodal, and no stock config says which positions the model in it has"
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
    positions = position_keys(model)
    weights = {key: value for key, value in model.state_dict().items() if key not in positions}
    place = None if form is None else base.found.position_table if form.table else base.found.rotary
    if patch.attends or form is None or place is None:
        raise UnsupportedModelError(_nothing_fits(patch, base))
    turned = list(form.turned)
    if form.table:
        count = _table_length(patch, num_positions)
        key, table = _make_table(model, base, count)
        weights[key] = table
        settings[model.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")] = count
    elif turned != list(base.found.rotated) or not any(turned):
        stock_model, stock_config = _unrotated_twin(base, stock_model, patch)
        settings |= _unrotated_settings(turned, of_another_type=stock_config.model_type != base.name)
    with torch.device("meta"):
        stock = stock_model(stock_config.from_dict(settings))
    stock.load_state_dict(weights, assign=True)
    stock.tie_weights()
    if model.can_generate():
        stock.generation_config = model.generation_config
    stock.save_pretrained(directory, **kwargs)


def _table_length(patch: Patch, wanted: int | None) -> int:
    """Return the number of positions that the base's own table gets."""
    count = wanted or patch.limit or TABLE_LENGTH
    if patch.limit is not None and count > patch.limit:
        raise ValueError(f"the table has {patch.limit} positions, not {count}")
    return count


def _stock_form(patch: Patch, base: BaseModel) -> StockForm | None:
    """Return what a stock checkpoint would have to hold; None if no stock class computes a scheme."""
    form: StockForm | None = StockForm(tuple(base.rotated))
    for scheme in patch.schemes:
        form = None if form is None else scheme.acts_on.stock_form(scheme, base, form)
    return form


def _nothing_fits(patch: Patch, base: BaseModel) -> str:
    return (
        f"no stock class computes {patch.name} on {base.name}: rope in every layer can be exported from families that "
        "rotate (unless it turns a part of each head where they turn whole heads), nope in some or all layers from "
        "families with a twin that leaves layers unrotated (llama, smollm3), vectors at the input from families with a "
        "table (gpt2, opt)"
    )


def _stock_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of a config for a stock class, without our entry and guards."""
    settings: dict[str, Any] = model.config.to_dict()
    for key in (ENTRY, "auto_map", "attn_implementation", "model_type", "architectures"):
        settings.pop(key, None)
    return {key: unguarded(key, value) for key, value in settings.items()}


def _unrotated_twin(
    base: BaseModel, stock: type[PreTrainedModel], patch: Patch
) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return model and config class of the family that computes the same and can leave layers unrotated."""
    if base.family.rotation.unrotated_twin is None:
        raise UnsupportedModelError(_nothing_fits(patch, base))
    own, twin = CONFIG_MAPPING[base.name], CONFIG_MAPPING[base.family.rotation.unrotated_twin]
    if own is twin:
        return stock, twin
    head = getattr(transformers, stock.__name__.replace(_stem(own), _stem(twin)), None)
    if head is None:
        raise UnsupportedModelError(f"{twin.model_type} has no {stock.__name__}")
    sizes = base.config
    if sizes.head_dim != sizes.hidden_size // sizes.num_attention_heads:
        raise UnsupportedModelError(
            f"{twin.model_type} has heads of hidden_size / num_attention_heads, not of {sizes.head_dim}"
        )
    return head, twin


def _unrotated_settings(turned: list[bool], *, of_another_type: bool) -> dict[str, Any]:
    """Return the settings of a class that leaves layers unrotated.

    Args:
        turned: for each layer whether it is rotated.
        of_another_type: whether the class is of another model type than the base.
    """
    settings: dict[str, Any] = {
        "no_rope_layers": [int(each) for each in turned],
        "no_rope_layer_interval": len(turned) + 1,
    }
    if not any(turned):
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    if of_another_type:
        settings |= {"use_sliding_window": False, "layer_types": ["full_attention"] * len(turned)}
    return settings


def _stem(config: type[PreTrainedConfig]) -> str:
    """Return the beginning of the names of a family's classes."""
    return config.__name__.removesuffix("Config")


def _make_table(model: PreTrainedModel, base: BaseModel, count: int) -> tuple[str, torch.Tensor]:
    """Return the key of the base's own table, and the vectors that stand in for its rows."""
    module: Any = base.found.position_table
    name = next(name for name, child in model.named_modules() if child is module)
    device = next(base.found.decoder.parameters()).device
    with torch.no_grad():
        rows = module.embed(torch.arange(count, device=device)[None])[0].to(model.dtype)
    before = torch.zeros(base.family.table_offset, rows.shape[-1], dtype=rows.dtype, device=device)
    return f"{name}.weight", torch.cat([before, rows])
