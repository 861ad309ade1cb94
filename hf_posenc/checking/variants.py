"""What an engine may have made of a model's positions instead: the same weights with one fact about positions wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..api import patch_model
from ..checkpoints.config import stock_settings
from ..checkpoints.saving import position_keys
from ..checkpoints.wide_heads import stock_classes
from ..core.errors import HfPosencError
from ..model.base_model import BaseModel
from ..model.patch_record import patch_of
from ..transformers_glue.rotary import ORIGINAL_LENGTH

UNTURNED = 1e30
"""Factor of a scaling under which no pair turns."""

FACTORS = ("short_factor", "long_factor")


class Variant(NamedTuple):
    """A model with one fact about positions wrong.

    Attributes:
        about: the fact, a key of the report's advice.
        said: what an engine does that computes this, after "it".
        make: makes the model, with weights of its own or shared ones.
    """

    about: str
    said: str
    make: Callable[[], PreTrainedModel]


def variants(model: PreTrainedModel) -> Iterator[Variant]:
    """Yield the variants of a model, stock or patched."""
    patch = patch_of(model)
    if patch is None:
        yield from _of_stock(model)
        return
    stock = partial(_of_class, model, *stock_classes(model))
    yield Variant("patch ignored", "computes the positions of the base, as if nothing had been patched", stock)
    yield Variant("no positions", "computes no positions at all", lambda: patch_model(stock(), "nope"))
    defaults = [type(each)(layers=each.layers, window=each.window) for each in patch.schemes]
    yield Variant("parameters", "computes the scheme with its defaults", lambda: patch_model(stock(), defaults, seed=0))


def _of_class(model: PreTrainedModel, cls: Any, config_class: Any, **changes: Any) -> PreTrainedModel:
    """Return a model of a stock class with the weights of a model, and its config but for some changes."""
    made: PreTrainedModel = cls(config_class.from_dict(copy.deepcopy(stock_settings(model.config)) | changes))
    own_keys = position_keys(model)
    made.load_state_dict({key: value for key, value in model.state_dict().items() if key not in own_keys}, assign=True)
    made.tie_weights()
    return made.to(model.device).eval()


def _of_stock(model: PreTrainedModel) -> Iterator[Variant]:
    """Yield the variants of a stock model."""
    config: Any = model.config

    def changed(**changes: Any) -> Callable[[], PreTrainedModel]:
        return lambda: _of_class(model, type(model), type(config), **changes)

    rotation: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    if "rope_theta" in rotation:
        for about, said, changes in _rotations(rotation, config.max_position_embeddings):
            yield Variant(about, said, changed(rope_parameters=changes))
        yield from _orders(model, rotation.get("partial_rotary_factor") or 1.0)
    types = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if window is not None:
        everywhere = {"use_sliding_window": False, "layer_types": ["full_attention"] * len(types)} if types else {}
        yield Variant("window", "sees past the sliding window", changed(sliding_window=None, **everywhere))
        yield Variant(
            "window", "keeps every layer to the sliding window", lambda: patch_model(changed()(), "rope", window=window)
        )
    switches = getattr(config, "no_rope_layers", None)
    if switches is not None and not all(switches):
        said = "turns queries and keys of layers that are not to be turned"
        yield Variant("unrotated layer", said, changed(no_rope_layers=[1] * len(switches)))


def _rotations(rotation: dict[str, Any], length: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield changed `rope_parameters`, each with its fact and what an engine does that computes it."""
    kind = rotation.get("rope_type", "default")
    plain = {key: rotation[key] for key in ("rope_theta", "partial_rotary_factor") if key in rotation}
    original = rotation.get(ORIGINAL_LENGTH) or length
    if kind != "default":
        yield "scaling", f"drops the scaling {kind}", plain | {"rope_type": "default"}
    if kind in ("yarn", "longrope"):
        yield "factor", "drops the attention factor", rotation | {"attention_factor": 1.0}
        by_length = math.sqrt(1 + math.log(max(length / original, 1)) / math.log(original))
        if kind == "longrope":
            said = "computes the attention factor from lengths"
            yield "factor", said, rotation | {"attention_factor": by_length}
    if kind == "yarn" and original != length:
        said = "takes max_position_embeddings for the original length"
        yield "scaling", said, rotation | {ORIGINAL_LENGTH: length}
    if kind == "longrope" and rotation["short_factor"] != rotation["long_factor"]:
        for one, other in (FACTORS, FACTORS[::-1]):
            said = f"takes {one} at every length"
            yield "factors", said, rotation | {other: rotation[one]}
    if rotation["rope_theta"] != 10000:
        said = f"turns by the base 10,000 instead of {rotation['rope_theta']:,g}"
        yield "base", said, rotation | {"rope_theta": 10000.0}
        if kind != "default":
            yield "base", f"{said}, and drops the scaling {kind}", {"rope_type": "default", "rope_theta": 10000.0}
    if rotation.get("partial_rotary_factor", 1.0) != 1:
        yield "share", "turns whole heads", rotation | {"partial_rotary_factor": 1.0}
    yield "no positions", "turns nothing", plain | {"rope_type": "linear", "factor": UNTURNED}


def _orders(model: PreTrainedModel, share: float) -> Iterator[Variant]:
    """Yield models that turn other dimensions together, by rows of queries and keys in another order."""
    try:
        base = BaseModel.of(model)
    except HfPosencError:
        return
    attentions: list[Any] = list(base.modules.attentions)
    size = base.dims.head_dim
    turned, order = int(share * size), torch.arange(size)
    projections = [getattr(each, name, None) for each in attentions for name in ("q_proj", "k_proj")]
    if base.normed or not all(type(each) is nn.Linear for each in projections):
        return
    halves = order[:turned].view(-1, 2).T.flatten()  # first the even dimensions: pairs of neighbours become halves
    is_half = base.rotation.pairs == "half"
    pairs = halves if is_half else halves.argsort()
    said = "neighbouring dimensions" if is_half else "dimensions of the two halves"

    def reordered(places: torch.Tensor) -> PreTrainedModel:
        made = copy.deepcopy(model)
        for attention in BaseModel.of(made).modules.attentions:
            for name in ("q_proj", "k_proj"):
                for each in getattr(attention, name).parameters():
                    rows = each.data.view(-1, size, *each.shape[1:])
                    each.data = rows[:, places].reshape(each.shape)
        return made

    yield Variant("layout", f"turns {said} together", lambda: reordered(torch.cat([pairs, order[turned:]])))
    if turned < size:
        yield Variant("share", "turns the last dimensions of a head", lambda: reordered(order.roll(turned - size)))
