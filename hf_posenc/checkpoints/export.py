"""Export a patched model as a stock checkpoint, if a stock class can compute the same."""

from __future__ import annotations

import copy
import math
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..core.errors import NotPatchedError, UnsupportedModelError
from ..core.registry import family_for
from ..families.base import language_config
from ..model.base_model import BaseModel
from ..model.obstacles import check_unquantized
from ..model.patch_record import Patch, patch_of
from ..schemes.base import StockForm
from .class_names import STUB
from .config import stock_settings
from .saving import position_keys
from .wide_heads import stock_classes, widened_model

TABLE_LENGTH = 1024
"""Default number of rows of the table to which position vectors without a limit are exported."""


def export_stock(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_positions: int | None = None,
    head_dim: int | None = None,
    length: int | None = None,
    **kwargs: object,
) -> None:
    """Save a patched model as a stock checkpoint, if a stock class can compute the same.

    A stock class can compute

    - `rope`, its scalings and any frequencies on families that rotate by themselves;
    - `nope` in all or some layers of llama and smollm3, as a SmolLM3 that leaves these layers unrotated;
    - these with `window=`, one for all layers that have it, as a Mistral or a SmolLM3;
    - vectors at the input (`learned`, `sinusoidal`) of gpt2 and opt, as the table of the stock model;
    - `nope` in all or some layers of inkling_text, also beside `inkling` of the `rank` and `extent` of its own bias;
    - `transformer_xl`, in all layers or with `nope` or the base's rotation in the others, of families whose queries and
      keys are projections of hidden states that may have biases: as stock RoPE over wider heads. The cache of keys and
      values grows alike. A rotation that stays takes up to D further dimensions, less those whose frequencies
      `transformer_xl` has, too;
    - `alibi` without windows likewise, in float32 and within `length` tokens, to 0.001 nats of its bias.

    The config says a rotation in the words of transformers 5 and in those of transformers 4. A warning says if
    transformers 4 has no words for it.

    Args:
        model: a patched model; it stays unchanged.
        directory: folder of the stock checkpoint.
        tokenizer: tokenizer to save with the model.
        num_positions: rows of the table for position vectors without a limit (`sinusoidal`); None means 1024.
        head_dim: size of the wider heads of `transformer_xl` and `alibi`; None means the least that the kernels of
            servers take.
        length: the length to be served, for these: `max_position_embeddings` of the config. None keeps that of the
            patched model, 131,072 or more; `alibi` needs a length.
        **kwargs: options of `save_pretrained` in transformers.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if no stock class can compute the same, or the weights are quantised. The message says
            why.
        ValueError: if an option does not fit the scheme.
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
    form = stock_form(patch, base)
    if num_positions is not None and (form is None or not form.table):
        raise ValueError(f"num_positions is for vectors at the input, and {patch.name} adds none: leave it out")
    if (head_dim is not None or length is not None) and (form is None or not form.waves):
        raise ValueError(
            f"head_dim and length are for transformer_xl and alibi; {patch.name} needs no wider heads: leave them out"
        )
    if (Path(directory) / f"{STUB}.py").exists():
        raise FileExistsError(f"{directory} holds a patched checkpoint; export to another folder")
    check_unquantized(model, "export the model")
    if form is None:
        raise _nothing_fits(patch, base)
    if form.waves:
        stock = widened_model(model, patch, form, head_dim=head_dim, length=length)
    else:
        stock = _stock_model(model, patch, base, form, num_positions)
    if (said := _settings_for_4(stock.config)) is None:
        warnings.warn(
            f"hf_posenc: transformers 4 cannot read the rotation of {stock.config.model_type} in {directory} and would "
            "compute another one: load the checkpoint with transformers 5",
            stacklevel=2,
        )
    vars(stock.config).update(said or {})  # not by setattr, which transformers 5 gives another meaning
    stock.tie_weights()
    if model.can_generate():
        stock.generation_config = model.generation_config
    stock.save_pretrained(directory, **kwargs)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def stock_form(patch: Patch, base: BaseModel) -> StockForm | None:
    """Return what a stock checkpoint of a patched model would have to hold, or None if none can hold it."""
    form: StockForm | None = StockForm(tuple(base.rotated))
    for scheme in patch.schemes:
        form = None if form is None or scheme.sinks else scheme.stock_form(base, form)
        if form is not None and scheme.window is not None:
            form = replace(form, windows={**form.windows, **dict.fromkeys(base.layers_of(scheme), scheme.window)})
    return form


def _stock_model(
    model: PreTrainedModel, patch: Patch, base: BaseModel, form: StockForm, num_positions: int | None
) -> PreTrainedModel:
    """Return a stock model with the weights and positions of a patched one."""
    stock_model, stock_config = stock_classes(model)
    settings, own_keys = stock_settings(model.config), position_keys(model)
    weights = {key: value for key, value in model.state_dict().items() if key not in own_keys}
    stock_module = base.modules.position_table if form.table else base.modules.rotary
    has_both = base.has_table and base.modules.rotary is not None  # the stock model would bring the other one back
    has_bias = base.family.rotation.bias_parameters is not None and not form.table and not form.windows
    is_other = (patch.attends and not form.windows) or stock_module is None or has_both
    if not has_bias and (is_other or (form.windows and form.table)):
        raise _nothing_fits(patch, base)
    rotated = list(form.turned)
    if base.family.rotation.bias_parameters is not None:
        settings |= _write_biases(weights, patch, base, form)
    elif form.table:
        count = num_positions or patch.limit or TABLE_LENGTH
        if patch.limit is not None and count > patch.limit:
            raise ValueError(f"the table has {patch.limit} positions, not {count}")
        place = next(name for name, child in model.named_modules() if child is stock_module)
        weights[f"{place}.weight"] = _make_table(model, base, count)
        settings[model.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")] = count
    elif form.windows or rotated != list(base.modules.rotated) or not any(rotated):
        windows = set(form.windows.values())
        alike = len(form.windows) == len(rotated) and all(rotated) and base.family.rotation.windowed_twin
        if len(windows) > 1 or (form.windows and base.windows):
            raise _nothing_fits(patch, base)
        stock_model, stock_config = _twin(model, base, patch, alike or base.family.rotation.unrotated_twin)
        settings["sliding_window"] = windows.pop() if windows else getattr(base.config, "sliding_window", None)
        if not alike:
            # The interval is longer than the model: the list alone says which layers rotate.
            settings |= {"no_rope_layers": [int(each) for each in rotated], "no_rope_layer_interval": len(rotated) + 1}
            if not any(rotated):
                settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
            if form.windows or stock_config.model_type != base.name:
                kinds = ["sliding_attention" if i in form.windows else "full_attention" for i in range(len(rotated))]
                settings |= {"use_sliding_window": bool(form.windows), "layer_types": kinds}
    rotation = settings.get("rope_parameters") or {}
    if rotation.get("rope_type") == "yarn":  # by which servers know how long texts may be
        served = round(rotation["factor"] * rotation["original_max_position_embeddings"])
        settings["max_position_embeddings"] = max(served, settings["max_position_embeddings"])
    with torch.device("meta"):
        stock = stock_model(stock_config.from_dict(settings))
    stock.load_state_dict(weights, assign=True)
    return stock


def _write_biases(weights: dict[str, Any], patch: Patch, base: BaseModel, form: StockForm) -> dict[str, Any]:
    """Give the base's own bias by distance the schemes' parameters, or 0, where they replace it; return settings."""
    facts, replacing = base.family.rotation, [scheme for scheme in patch.schemes if not scheme.joins]
    replaced = {layer for scheme in replacing for layer in base.layers_of(scheme)}
    if form.biases.keys() - replaced or (base.scaled_by_position and replaced - base.windows.keys()):
        raise _nothing_fits(patch, base)  # layers with two biases, or a factor on the queries of some layers
    paths = {child: name for name, child in base.model.named_modules()}
    for layer in replaced:
        keys = [f"{paths[base.modules.attention_of[layer]]}.{name}" for name in facts.bias_parameters or ()]
        own = (weights[keys[0]], torch.zeros_like(weights[keys[1]]))
        weights.update(zip(keys, form.biases.get(layer, own), strict=True))
    return {} if base.scaled_by_position else dict(facts.config_temperature)


def _nothing_fits(patch: Patch, base: BaseModel) -> UnsupportedModelError:
    """Return an error that no stock class fits, and which schemes can be exported."""
    return UnsupportedModelError(
        f"no stock class computes {patch.name} on {base.name}: rope in every layer can be exported from families that "
        "rotate (but not rope on a part of each head where they rotate whole heads), nope in some or all layers from "
        "families with a twin that leaves layers unrotated (llama, smollm3), both also with one window, vectors at the "
        "input from families with a table (gpt2, opt), transformer_xl from families whose heads can be wider (llama, "
        "mistral, qwen2), nope with or without inkling from families with such a bias of their own (inkling_text)"
    )


def _twin(
    model: PreTrainedModel, base: BaseModel, patch: Patch, name: str | None
) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return the model and config class of the type that computes the same, with a window or unrotated layers."""
    if name is None:
        raise _nothing_fits(patch, base)
    return stock_classes(model, name)


def _make_table(model: PreTrainedModel, base: BaseModel, count: int) -> torch.Tensor:
    """Return a table of positions with the scheme's vectors, (count + the family's offset, E)."""
    module: Any = base.modules.position_table
    device = next(base.modules.decoder.parameters()).device
    with torch.no_grad():
        rows = module.embed(torch.arange(count, device=device)[None])[0].to(model.dtype)
    offset_rows = torch.zeros(base.family.table_offset, rows.shape[-1], dtype=rows.dtype, device=device)
    return torch.cat([offset_rows, rows])


def _settings_for_4(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the settings that tell transformers 4 the rotation of a stock config, or None if there are none.

    transformers 5 reads them too, and must find the same rotation beside them.
    """
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return {}
    by_type = {key: value for key, value in parameters.items() if isinstance(value, dict)}
    everywhere = by_type.get("full_attention", parameters)
    windowed = by_type.get("sliding_attention", everywhere)
    scaling = _scaling(everywhere)
    values = {
        "rope_theta": everywhere.get("rope_theta"),
        "windowed_theta": windowed.get("rope_theta"),
        "partial_rotary_factor": everywhere.get("partial_rotary_factor"),
        "rope_scaling": scaling,
    }
    keys = family_for(config.model_type).rotation.keys_of_4
    unsaid = {name for name, value in values.items() if value is not None} - set(keys)
    if values["windowed_theta"] == values["rope_theta"]:
        unsaid.discard("windowed_theta")
    if unsaid or set(by_type) - {"full_attention", "sliding_attention"} or (by_type and _scaling(windowed)):
        return None
    said = {key: values[name] for name, key in keys.items() if values[name] is not None or name == "rope_scaling"}
    if scaling is not None and scaling["rope_type"] == "longrope":
        said["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    read = type(config).from_dict(copy.deepcopy(config.to_dict() | said))
    return said if read.rope_parameters == parameters else None


def _scaling(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `rope_parameters` of one type of layers say of a scaling, or None without one."""
    rest = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return None if rest in ({}, {"rope_type": "default"}) else rest


def engines_that_run(config: Any) -> str:
    """Return which engines run a stock checkpoint as transformers 5 does, and why others do not, for the user.

    Args:
        config: the config of `export_stock`'s checkpoint.
    """
    rotation = getattr(config, "rope_parameters", None) or {}
    kind, size = rotation.get("rope_type"), getattr(config, "head_dim", None)
    obstacle = ""
    if kind == "dynamic":
        obstacle = "its dynamic scaling gives NaN past the trained length: take yarn"
    elif kind == "longrope":
        original, served = rotation["original_max_position_embeddings"], config.max_position_embeddings
        own = math.sqrt(1 + math.log(max(served / original, 1)) / math.log(original))
        factor = rotation.get("attention_factor")
        if factor is not None and not math.isclose(factor, own, rel_tol=1e-6):
            obstacle = f"it computes an attention factor of {own:.4g}, not {factor:.4g}"
        elif rotation["short_factor"] != rotation["long_factor"] and served > original:
            obstacle = "it takes the factors of long texts for short ones, too"
    room = next((f"; head_dim={each} is for all" for each in (64, 128, 256) if size and size < each), "")
    kernels = "" if size in (None, 64, 128, 256) else f" (heads of {size}: not with FlashInfer{room})"
    of_4 = "transformers 5" if _settings_for_4(config) is None else "transformers 4 and 5"
    return f"runs in {of_4}" + (
        f"; not in vLLM: {obstacle}" if obstacle else f" and, if it has {config.model_type}, vLLM{kernels}"
    )
