"""A model whose scores are waves of the distance, as a stock model with wider heads.

By the addition theorem `a . [cos w(i - j) | -sin w(i - j)]` is the product of `a`, rotated by `w i`, and `(1, 0)`,
rotated by `w j`. So stock RoPE computes it, in pairs of their own where keys are biases. The content does not
turn. In layers that keep the base's rotation it takes further pairs, which turn as the base's do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from ..core.dims import Dims
from ..core.errors import UnsupportedModelError
from ..core.modules import owner_of
from ..core.registry import family_for
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.patch_record import Patch
from ..schemes.base import StockForm
from ..transformers_glue.derived_classes import stock_class
from ..transformers_glue.rotary import by_pair, steady_rotation
from .config import stock_settings
from .line_in_waves import LONGEST, fit_lines
from .model_classes import PosEncConfigMixin, PosEncMixin

UNTURNED = 1e30
"""Factor of a pair that does not turn: its angle is divided by this number."""

THETA = 10000.0
"""`rope_theta` of the stock config. Each pair has a factor of its own, so that any number would do."""

BEYOND = 20.0
"""How far below the highest score a key is that has no weight in float32, in nats."""

SAME = 1e-6
"""Relative difference of two frequencies that share a pair: ten float32 roundings."""

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 256)
"""Head sizes that the kernels of servers take."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def stock_classes(
    model: PreTrainedModel, twin: str | None = None
) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Return the stock class of a patched model and of its config, or those of another model type with the same head.

    Raises:
        UnsupportedModelError: if the other type has no such class.
    """
    own_model = stock_class(type(model), PosEncMixin)
    own_config: type[PreTrainedConfig] = stock_class(type(model.config), PosEncConfigMixin)
    if twin in (None, own_config.model_type):
        return own_model, own_config
    config = CONFIG_MAPPING[twin]
    old, new = (each.__name__.removesuffix("Config") for each in (own_config, config))
    found = getattr(transformers, own_model.__name__.replace(old, new), None)
    if found is None:
        raise UnsupportedModelError(f"{twin} has no class that computes what {own_model.__name__} does")
    return found, config


def widened_model(
    model: PreTrainedModel,
    patch: Patch,
    form: StockForm,
    *,
    head_dim: int | None = None,
    length: int | None = None,
    for_gguf: bool = False,
) -> PreTrainedModel:
    """Return a stock model that computes what a patched model does, with its weights in wider heads.

    Args:
        model: a patched model whose layers add waves of the distance, rotate, or have no positions; it stays unchanged.
        patch: its patch.
        form: what a stock checkpoint would have to hold.
        head_dim: size of the new heads; None means the least of `HEAD_DIMS` that holds all dimensions.
        length: `max_position_embeddings` of the new config; None means the patched model's.
        for_gguf: whether the new model must be of a type that a GGUF file can hold.

    Raises:
        UnsupportedModelError: if no stock class computes the same. The message says why.
        ValueError: if `head_dim` is too small or odd, or `length` is not positive.
    """
    base = BaseModel.of(model)
    if length is not None and length < 1:
        raise ValueError(f"length must be positive, not {length}")
    size, forms = base.dims.head_dim, _forms(patch, base)
    kept, strength = _kept_rotation(patch, base, forms) if any(form.turned) else (torch.empty(0), 1.0)
    if _are_lines(forms):
        sizes = [each for each in HEAD_DIMS if size < each <= 128] if head_dim is None else [head_dim]
        added = _of_lines(model, patch, base, forms, [(each - size) // 2 for each in sizes], length)
    else:
        added = _of_waves(forms)
    waves = next(iter(added.values())).frequencies.double().cpu()
    same = (kept[:, None] / waves - 1).abs() < SAME
    shared = same.any(1)
    pair_of_kept = torch.where(shared, same.byte().argmax(1), len(waves) - 1 + (~shared).cumsum(0))
    frequencies = torch.cat([waves, kept[~shared]]).clamp(min=1 / UNTURNED)
    least = size + 2 * len(frequencies)
    wide = next((each for each in HEAD_DIMS if each >= least), least) if head_dim is None else head_dim
    if wide < least or wide % 2:
        raise ValueError(f"head_dim must be even and at least {least} = {size} + 2 * {len(frequencies)}, not {wide}")
    turning = slice(size // 2, least // 2)
    factors = torch.ones(wide // 2, dtype=torch.float64)
    factors[: size // 2] = UNTURNED
    factors[turning] = THETA ** (-torch.arange(0, wide, 2, dtype=torch.float64) / wide)[turning] / frequencies
    stock, new = _empty_model(model, patch, base, factors, length, for_gguf=for_gguf)
    pairs, old = (
        torch.arange(each).view(-1, 2) if new.rotation.pairs == "interleaved" else torch.arange(each).view(2, -1).T
        for each in (wide, 2 * len(kept))
    )
    content, (cosines, sines) = pairs[: size // 2].flatten(), pairs[turning][: len(waves)].T
    rotated = content.index_put((old,), pairs[turning][pair_of_kept])
    places = _Places(wide, content, cosines, sines, -1.0 if new.family.rotation.backwards else 1.0)
    names = {id(module): name for name, module in model.named_modules()}
    weights = model.state_dict()
    attentions: dict[int, Any] = base.modules.attention_of
    for index, attention in attentions.items():
        target: Any = new.modules.attention_of[index]
        ratio, own = attention.scaling / target.scaling, places
        if form.turned[index]:
            ratio, own = ratio * strength**2, places._replace(content=rotated)
        for key, value in _projections(attention, added.get(index), base.sizes[index], ratio, own).items():
            weights[f"{names[id(attention)]}.{key}"] = value
    stock.load_state_dict({key: weights[key] for key in stock.state_dict()}, assign=True)
    stock.tie_weights()
    return stock


def _kept_rotation(patch: Patch, base: BaseModel, forms: dict[int, Any]) -> tuple[Tensor, float]:
    """Return the frequencies (D / 2,) of the layers that rotate, and their factor on cosines and sines."""
    if base.rotation.coordinates or _are_lines(forms):
        where = "of one coordinate" if base.rotation.coordinates else "beside transformer_xl"
        raise _nothing_fits(patch, base, f"some layers keep a rotation, which can be written only {where}")
    rotary: Any = base.modules.rotary
    try:
        return steady_rotation(rotary, base.family.rotation.angles, base.length, base.dims.head_dim)
    except ValueError as error:
        raise _nothing_fits(patch, base, f"some layers keep a rotation, and {error}") from error


class _Waves(NamedTuple):
    """What the scores of one layer add: `a . cos(w d) + b . sin(w d)`, with `a` and `b` linear in the queries.

    Attributes:
        frequencies: `w`, (F,).
        cosines: (H, F, D + 1): queries, and 1, to `a`.
        sines: the same for `b`.
        content_bias: (H, D), or one number, added to the queries of the content.
    """

    frequencies: Tensor
    cosines: Tensor
    sines: Tensor
    content_bias: Tensor


def _of_waves(forms: dict[int, Any]) -> dict[int, _Waves]:
    """Return what layers of Transformer-XL add: `W^T (q + v)` by sines and cosines."""
    made = {}
    for layer, form in forms.items():
        projection = form.waves.projection.detach().double()
        turned = torch.cat([projection, (form.position_bias.double()[:, None] @ projection)], 1).detach().mT
        sines, cosines = turned.chunk(2, 1)  # (H, F, D + 1) each
        made[layer] = _Waves(form.waves.frequencies(), cosines, sines, form.content_bias.detach().double())
    return made


def _are_lines(forms: dict[int, Any]) -> bool:
    return all(form.line is not None for form in forms.values())


def _of_lines(
    model: PreTrainedModel, patch: Patch, base: BaseModel, forms: dict[int, Any], counts: list[int], length: int | None
) -> dict[int, _Waves]:
    """Return what layers of ALiBi add within a length, as the first number of waves that do, see `line_in_waves`."""
    if length is None:
        raise ValueError(f"{patch.name} becomes waves within a length: give length=, the tokens that are to be served")
    if model.dtype.itemsize < 4:
        raise _nothing_fits(patch, base, f"{model.dtype} is too coarse for ALiBi as waves: model.float() first")
    by_layer = torch.stack([form.line.detach().double() for form in forms.values()])
    slopes, which = torch.unique(by_layer, return_inverse=True)
    if length > LONGEST:
        raise _nothing_fits(patch, base, f"waves hold its slopes within {LONGEST} tokens at most, not {length}")
    bound = BEYOND + 1.25 * _spread(model, base)
    fits = (fit_lines(slopes.cpu(), length, bound, count) for count in counts if count > 0)
    if (lines := next((each for each in fits if each is not None), None)) is None:
        advice = "a shorter length, or a larger head_dim, may"
        raise _nothing_fits(patch, base, f"{max(counts)} waves do not hold its slopes within {length} tokens; {advice}")
    made, attentions = {}, dict[int, Any](base.modules.attention_of)
    for layer, heads in zip(forms, which, strict=True):
        rows = [each.to(heads.device)[heads] / attentions[layer].scaling for each in (lines.cosines, lines.sines)]
        cosines, sines = (nn.functional.pad(each[..., None], (base.dims.head_dim, 0)) for each in rows)
        made[layer] = _Waves(lines.frequencies, cosines, sines, cosines.new_zeros(()))
    return made


@torch.no_grad()
def _spread(model: PreTrainedModel, base: BaseModel) -> float:
    """Return how far a score without positions is above that of the query's own token, on tokens drawn at random."""
    found: list[float] = []

    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        call = args[0].widened()
        scores = call.query @ call.key.mT * call.scaling
        above = scores - scores.diagonal(dim1=-2, dim2=-1)[..., None]
        found.append(above.masked_fill(~call.visible(), 0).amax().item())

    attentions: dict[int, Any] = base.modules.attention_of
    handles = [attentions[n].posenc.register_forward_pre_hook(watch) for n in base.layers_with_scores()]
    try:
        with evaluation(model):
            ids = torch.randint(base.config.vocab_size, (1, 512), generator=torch.Generator().manual_seed(0))
            model(ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return max(found)


class _Places(NamedTuple):
    """Where the dimensions of a head go in a wider one.

    Attributes:
        wide: size X of the new heads.
        content: places of the old dimensions, (D,); in layers that rotate these are pairs that turn.
        cosines: first dimensions of the pairs that turn, (F,).
        sines: their second dimensions, (F,).
        sign: -1 where pairs turn by minus their angles, otherwise 1.
    """

    wide: int
    content: Tensor
    cosines: Tensor
    sines: Tensor
    sign: float


def _projections(attention: Any, added: _Waves | None, sizes: Dims, ratio: float, places: _Places) -> dict[str, Tensor]:
    """Return the weights and biases of the new projections of one layer.

    Args:
        attention: the old attention.
        added: what its scores add, in float64; None in a layer without positions.
        sizes: its sizes.
        ratio: factor of the queries, because scores are scaled by the size of heads.
        places: the dimensions of the new heads.
    """
    rows = {}
    counts = {"q_proj": sizes.num_heads, "k_proj": sizes.num_key_value_heads, "v_proj": sizes.num_key_value_heads}
    for name, count in counts.items():
        linear = getattr(attention, name)
        bias = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
        affine = torch.cat([linear.weight, bias[:, None]], -1).detach().double()  # the bias is the last column
        old = affine.view(count, sizes.head_dim, -1)
        rows[name] = old.new_zeros(count, places.wide, old.shape[-1])
        rows[name][:, torch.arange(sizes.head_dim) if name == "v_proj" else places.content] = old
    if added is not None:
        queries, keys = rows["q_proj"], rows["k_proj"]
        plain = queries[:, places.content]
        one = nn.functional.pad(plain.new_zeros(len(plain), 1, plain.shape[-1] - 1), (0, 1), value=1.0)
        plain = torch.cat([plain, one], 1)
        queries[:, places.cosines], queries[:, places.sines] = added.cosines @ plain, -places.sign * added.sines @ plain
        queries[:, places.content, -1] += added.content_bias
        keys[:, places.cosines, -1] = 1.0
    rows["q_proj"] *= ratio
    output = attention.o_proj.weight.detach()
    narrow = output.view(len(output), sizes.num_heads, sizes.head_dim)
    found = {
        "o_proj.weight": nn.functional.pad(narrow, (0, places.wide - sizes.head_dim)).flatten(1),
        "o_proj.bias": output.new_zeros(len(output)) if attention.o_proj.bias is None else attention.o_proj.bias,
    }
    for name, each in rows.items():
        flat = each.flatten(0, 1).to(output.dtype)
        found |= {f"{name}.weight": flat[:, :-1].contiguous(), f"{name}.bias": flat[:, -1].contiguous()}
    return found


def _forms(patch: Patch, base: BaseModel) -> dict[int, Any]:
    """Return the form of each layer with scores, in float64: all of them waves with one ladder, or lines.

    Raises:
        UnsupportedModelError: if there is more between hidden states and scores than wider heads can hold.
    """
    attentions: dict[int, Any] = base.modules.attention_of
    parts = {name.split(".")[0] for each in attentions.values() for name, _ in each.named_parameters()} - {"posenc"}
    linear = all(type(getattr(each, name, None)) is nn.Linear for each in attentions.values() for name in PROJECTIONS)
    reasons = {
        "its scheme has a window, or keeps first tokens": any(each.window or each.sinks for each in patch.schemes),
        f"its attention has other parts than four linear projections: {', '.join(sorted(parts))}": not linear
        or parts != {*PROJECTIONS},
        "its heads differ in size": len({*base.sizes.values()}) > 1
        or base.dims.value_dim not in (None, base.dims.head_dim),
        "its stock class adds vectors at the input": base.has_table,
        "it norms queries and keys": bool(base.normed) or base.family.rotation.norms_after is not None,
        "it scales queries by their position": bool(base.scaled_by_position),
        "it clips queries and keys": getattr(base.config, "clip_qkv", None) is not None,
    }
    if found := [reason for reason, applies in reasons.items() if applies]:
        raise _nothing_fits(patch, base, found[0])
    layers = base.layers_with_scores()
    like = torch.empty(0, dtype=torch.float64, device=attentions[layers[0]].q_proj.weight.device)
    forms = {layer: owner_of(attentions[layer].get_submodule("posenc")).form(like) for layer in layers}
    if _are_lines(forms):
        if getattr(base.config, "attn_logit_softcapping", None) is not None:
            raise _nothing_fits(patch, base, "its soft cap would bend the bias too")
        return forms
    if any(form.line is not None for form in forms.values()):
        raise _nothing_fits(patch, base, "its layers have different schemes")
    frequencies = [form.waves.frequencies() for form in forms.values()]
    if any(not torch.equal(each, frequencies[0]) for each in frequencies):
        raise _nothing_fits(patch, base, "its layers of transformer_xl have different frequencies")
    return forms


def _empty_model(
    model: PreTrainedModel, patch: Patch, base: BaseModel, factors: Tensor, length: int | None, *, for_gguf: bool
) -> tuple[PreTrainedModel, BaseModel]:
    """Return a stock model on the meta device whose heads have one pair for each factor, as it is and described."""
    wide, settings = 2 * len(factors), stock_settings(model.config)
    if (served := length or settings.get("max_position_embeddings")) is None:
        raise _nothing_fits(patch, base, "its config has no max_position_embeddings")
    settings |= {"head_dim": wide, "attention_bias": True, "max_position_embeddings": served}
    settings["rope_parameters"] = {
        "rope_type": "longrope",
        "rope_theta": THETA,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": served,  # vLLM computes the attention factor from these two lengths
        "short_factor": factors.tolist(),
        "long_factor": factors.tolist(),
    }
    for name in dict.fromkeys((base.name, base.family.rotation.wide_twin)):
        if name is None or (for_gguf and family_for(name).gguf is None):
            continue
        if name != base.name and base.windows:
            raise _nothing_fits(patch, base, f"its layers have a sliding window, and {name} has none")
        stock_model, stock_config = stock_classes(model, name)
        known = {} if name == base.name else stock_config().to_dict()
        try:
            with torch.device("meta"):
                stock = stock_model(
                    stock_config.from_dict({k: v for k, v in settings.items() if k in (known or settings)})
                )
            new = BaseModel.of(stock)
            rotary: Any = type(new.modules.rotary)
            new.modules.decoder.set_submodule(str(new.family.rotation.rotary), rotary(config=new.config))
            new = BaseModel.of(stock)
            fits = all(new.rotated) and _has_heads(new, wide) and _turns(new, factors)
        except Exception as error:  # classes refuse a config in many ways, and by any exception
            raise _nothing_fits(
                patch, base, f"{name} does not take such heads ({type(error).__name__}: {error})"
            ) from error
        if fits:
            return stock, new
    raise _nothing_fits(patch, base, "its class has no biases of queries and keys, or no factor for each pair")


def _has_heads(new: BaseModel, wide: int) -> bool:
    """Return whether a stock model has heads of a size everywhere, and biases of queries and keys."""
    sizes = new.dims
    rows = wide * sizes.num_heads, wide * sizes.num_key_value_heads, wide * sizes.num_key_value_heads
    shapes = [(count, sizes.hidden_size) for count in rows] + [(sizes.hidden_size, rows[0])]
    projections = [[getattr(each, name) for name in PROJECTIONS] for each in new.modules.attentions]
    return all(
        [p.weight.shape for p in each] == shapes and each[0].bias is not None and each[1].bias is not None
        for each in projections
    )


def _turns(new: BaseModel, factors: Tensor) -> bool:
    """Return whether a stock model turns each pair by its angle over its factor."""
    rotary: Any = new.modules.rotary
    cos, sin = by_pair(rotary(torch.zeros(1), torch.ones(1, 1, dtype=torch.int64)), new.family.rotation.angles)
    expected = THETA ** (-torch.arange(len(factors), dtype=torch.float64) / len(factors)) / factors
    found = torch.atan2(sin, cos).flatten().double()
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-12)


def _nothing_fits(patch: Patch, base: BaseModel, reason: str) -> UnsupportedModelError:
    """Return an error that no stock class has such heads, with the reason."""
    return UnsupportedModelError(
        f"no stock class computes {patch.name} on {base.name}: {reason}. transformer_xl, also beside nope or the "
        "base's rotation, and alibi within a length, also beside nope, can be exported from llama, mistral, qwen2 and "
        "other families whose queries and keys are projections of hidden states that may have biases"
    )
