"""A patched LLaMA or Mistral as a LLaMA whose layers have slopes, a rotation or no positions, for engines that do."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from ..checkpoints.config import stock_settings
from ..checkpoints.export import stock_form
from ..checkpoints.saving import position_keys
from ..checkpoints.wide_heads import widened_model
from ..core.errors import UnsupportedModelError
from ..core.modules import owner_of
from ..model.base_model import BaseModel
from ..model.patch_record import patch_of


class Layer(NamedTuple):
    """The positions of a layer: ALiBi's slopes (H,) or None, whether it rotates, and its window in tokens or None."""

    slopes: list[float] | None
    turned: bool
    window: int | None


class AsLlama(NamedTuple):
    """A LLaMA that computes what a patched model does, layer by layer with these positions."""

    config: LlamaConfig
    weights: dict[str, Tensor]
    layers: list[Layer]


def as_llama(model: PreTrainedModel) -> AsLlama:
    """Return a patched LLaMA or Mistral for an engine that has slopes, rotations and windows by layer.

    Raises:
        UnsupportedModelError: if it has other positions. The message says what to do.
    """
    patch = patch_of(model)
    assert patch is not None
    base = BaseModel.of(model)
    form, attentions = stock_form(patch, base), dict[int, Any](base.modules.attention_of)
    forms = {i: owner_of(attentions[i].get_submodule("posenc")).form(torch.empty(0)) for i in base.layers_with_scores()}
    are_lines = form is not None and all(each.line is not None for each in forms.values())
    if form is None or form.table or (form.within_length and not are_lines):
        raise UnsupportedModelError(
            f"vLLM cannot compute {patch.name}: alibi, transformer_xl, rope and nope can be served; run other schemes "
            "in transformers, or swap to one of these"
        )
    windows = {**base.windows, **form.windows}
    if are_lines:
        slopes = {i: each.line.detach().float().tolist() for i, each in forms.items()}
        layers = [Layer(slopes.get(i), turned, windows.get(i)) for i, turned in enumerate(form.turned)]
    else:
        model = widened_model(model, patch, form)
        layers = [Layer(None, True, None)] * base.num_layers
    own = position_keys(model)
    weights = {key: value for key, value in model.state_dict().items() if key not in own}
    settings = {key: value for key, value in stock_settings(model.config).items() if key != "layer_types"}
    return AsLlama(LlamaConfig(**settings | {"architectures": ["LlamaForCausalLM"]}), weights, layers)
