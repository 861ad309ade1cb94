"""Attention of few queries to many keys, as in a decoding step. Keys and values are read once, from the cache.

Such a step costs as much as reading the cache. The reference engine repeats keys for every head of a group and copies
them to float32. Here the queries of the heads that share a key are rows of one product. Only tensors of the size of the
scores, 1/D of the keys, are in float32. At that size a mask costs nothing, so padding, packing, sliding windows and
static caches are those of the reference engine.

There are two ways: two matrix products with a softmax between them, and the flash kernel of the CPU, which takes
everything that is added to the scores as a mask. In float32 both take the same time. In bfloat16 the kernel is faster
on CPUs without AVX512-BF16 and on those with AMX, and takes the calls that it can.

Accuracy class: matrix products are as accurate as the reference in float32 and float64. In bfloat16 and float16 they
are "eager": rounded to the dtype of the inputs, as in transformers' eager attention. Products of Transformer-XL's waves
are in float32. The kernel's class is flash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.dtypes import waves
from ..core.forms import (
    Bias,
    ClippedVectors,
    Content,
    Curves,
    Factors,
    Form,
    RelativeKeys,
    Slopes,
    at_distance,
    for_form,
)
from ..core.positions import GAPPED_POSITIONS, DensePositions, can_read, ensure
from .base import Engine

QUERIES = 16
"""Largest number of queries of a call. The mask is dense, and for more queries other engines read keys in blocks."""


def products_are_faster() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices faster than its flash kernel attends with few queries.

    Measured at 8192 keys: 4 to 12 times on a processor with AVX512-BF16 alone; with AMX up to twice slower.
    """
    return torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()


# ------------------------------------------------------------------------------------------- the scores of each form


@dataclass
class Terms:
    """The parts of scores: `factors * content(cap(scaling * query . k + inside)) + outside`, see `Form.content`.

    Attributes:
        query: (B, H, Q, D), multiplied by the keys.
        outside: (B|1, H|1, Q, L), added after the cap. It also masks invisible keys.
        inside: (B, H, Q, L), added before the cap, or None.
        factors: (B|1, H, Q, L), or None.
    """

    query: Tensor
    outside: Tensor
    inside: Tensor | None = None
    factors: Tensor | None = None


def _seen(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return distances >= 0 and the mask, as a function of `TERMS` takes them."""
    # Distances are negative only where the key is invisible. With a cache none is L or more, except between position
    # ids that the caller chose, and while compiling these do not come with a cache.
    distance, most = call.positions.distance(), None
    if not can_read(distance):
        most = call.key.shape[2] - 1
        if not torch.compiler.is_compiling():
            ensure((distance <= most).all(), GAPPED_POSITIONS)
    # The minimum instead of -inf, as in the reference: a row of padding, which sees no key, gets no NaN.
    hidden = call.query.new_zeros(distance.shape, dtype=dtype)
    return distance.clamp(0, most), hidden.masked_fill_(~call.positions.visible(), torch.finfo(dtype).min)


def _slopes(form: Slopes, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    def bias() -> Tensor:
        added = torch.addcmul(hidden, form.slopes[:, None, None], distance.to(hidden.dtype), value=-1)
        return form.hide(added, distance)

    if form.name is None:
        return Terms(call.query, bias())
    return Terms(call.query, call.positions.once((form.name, hidden.dtype), bias))


def _numbers(form: Curves, distance: Tensor) -> Tensor:
    """Return the numbers of a curve at each distance, (1|B, H, Q, L)."""
    return at_distance(form.curve(_count(distance)), distance)


def _count(distance: Tensor) -> int:
    """Return the length of a table that has an entry for every distance from 0 to the largest."""
    return int(distance.amax()) + 1 if can_read(distance) else distance.shape[-1]


def _clipped_vectors(form: ClippedVectors, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    by_label = (call.query.to(hidden.dtype) * call.scaling) @ form.keys.to(hidden.dtype).mT
    return Terms(call.query, hidden, by_label.gather(-1, _labels(distance, by_label)))


def _relative_keys(form: RelativeKeys, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    query, ratio = call.query, call.ratio
    # Everything that contains the query is scaled by `scaling`, the rest by `vector_scaling`.
    if (made := form.waves) is not None:
        u, v = (
            ratio * each[:, None] if ratio != 1 else each[:, None] for each in (form.content_bias, form.position_bias)
        )

        def of_pairs() -> Tensor:  # (B|1, Q, L, 2F)
            distances = torch.arange(_count(distance), device=query.device)
            return waves(distances, made.frequencies(), hidden.dtype)[distance[:, 0]]

        table = call.positions.once(("waves", made.name, hidden.dtype), of_pairs)
        of_query = ((query + v.to(hidden.dtype)) @ made.projection.to(hidden.dtype)).transpose(1, 2)
        first = (hidden if call.softcap is None else torch.zeros_like(hidden)).transpose(1, 2)
        first, table = first.expand(*of_query.shape[:3], -1), table.expand(len(query), -1, -1, -1)
        added = torch.baddbmm(*(each.flatten(0, 1) for each in (first, of_query, table.mT)), alpha=call.scaling)
        added, query = added.unflatten(0, of_query.shape[:2]).transpose(1, 2), (query + u).to(query.dtype)
        return Terms(query, added) if call.softcap is None else Terms(query, hidden, added)
    r, u, v = (each.to(query.dtype) for each in (form.table(_count(distance)), form.content_bias, form.position_bias))
    by_distance = ((query + ratio * v[:, None]) @ r.mT).to(hidden.dtype) * call.scaling
    at = _labels(distance, by_distance)
    return Terms(query + ratio * u[:, None], hidden, by_distance.gather(-1, at))


TERMS: Mapping[type[Form], Callable[[Any, Call, Tensor, Tensor], Terms]] = {
    Content: lambda form, call, distance, hidden: Terms(call.query, hidden),
    Bias: lambda form, call, distance, hidden: Terms(call.query, _numbers(form, distance) + hidden),
    Slopes: _slopes,
    Factors: lambda form, call, distance, hidden: Terms(call.query, hidden, factors=_numbers(form, distance)),
    ClippedVectors: _clipped_vectors,
    RelativeKeys: _relative_keys,
}
"""Form -> function (form, call, distances (B|1, 1, Q, L), mask of that shape, 0 where a key is visible) -> terms."""


def _labels(distance: Tensor, by_label: Tensor) -> Tensor:
    """Return distances clipped to `m`, int64 (B, H, Q, L), for `by_label` (B, H, Q, m + 1)."""
    clipped = distance.clamp(max=by_label.shape[-1] - 1).to(torch.int64)
    return clipped.expand(*by_label.shape[:-1], distance.shape[-1])


# ------------------------------------------------------------------------------------------------------- the two ways


def _kernel_takes(terms: Terms, call: Call, value: Tensor) -> bool:
    """Return whether the flash kernel of the CPU can compute the step, faster than matrix products."""
    query, other = call.query, (terms.factors, call.softcap, call.sinks, call.form.value_table)
    if torch.compiler.is_compiling() or query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return False
    if any(each is not None for each in other) or call.weights or call.dropout > 0 or products_are_faster():
        return False
    if call.changes_weights:
        return False
    return query.shape[3] == value.shape[3]


def _by_kernel(terms: Terms, call: Call, key: Tensor, value: Tensor) -> Tensor:
    """Return the output (B, H, Q, D) by the flash kernel of the CPU."""
    mask = terms.outside if terms.inside is None else terms.inside + terms.outside
    mask = _stacked(mask.expand(*terms.query.shape[:3], -1), key)
    output, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _stacked(terms.query, key), key, value, 0.0, False, attn_mask=mask, scale=call.scaling
    )
    return output.reshape(terms.query.shape)


def _by_products(terms: Terms, call: Call, key: Tensor, value: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Q, V) and the weights (B, H, Q, L)."""
    wide = torch.promote_types(key.dtype, torch.float32)
    scores = _products(terms.query, key)
    if terms.inside is None and terms.factors is None and call.softcap is None:
        scores = torch.add(terms.outside, scores, alpha=call.scaling)
    else:
        scores = scores.to(wide).mul_(call.scaling)
        if terms.inside is not None:
            scores += terms.inside
        scores = call.cap(scores)
        if terms.factors is not None:
            scores = call.form.content(scores) * terms.factors
        scores += terms.outside
    weights = call.weigh(scores)
    weights = torch.nn.functional.dropout(weights, call.dropout, training=call.dropout > 0)
    output = _stacked(weights.to(value.dtype), value) @ value
    output = output.reshape(*terms.query.shape[:3], value.shape[-1])
    if (table := call.form.value_table) is not None:  # keys with one label share one vector
        by_label = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
        output = output + by_label.scatter_add_(-1, _labels(distance, by_label), weights) @ table.to(wide)
    return output, weights


def _stacked(rows: Tensor, shared: Tensor) -> Tensor:
    """Return rows (B, H, Q, N) with the heads that share a key stacked, (B, K, H / K * Q, N)."""
    return rows.reshape(rows.shape[0], shared.shape[1], -1, rows.shape[-1])


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries (B, H, Q, D) and keys (B, K, L, D), (B, H, Q, L)."""
    return (_stacked(query, key) @ key.mT).view(*query.shape[:3], key.shape[2])


# --------------------------------------------------------------------------------------------------------- the engine


class Decode(Engine):
    """Attention of a few queries to the keys of a cache, without gradients, for every form, device and dtype.

    It takes padding, weights, soft cap and dropout. While torch compiles, it takes one query.
    """

    name = "decode"
    traced = True
    sinks = True
    token_bias = True
    weight_changes = True
    value_sizes = True
    few_kernels = True
    forms = tuple(TERMS)
    wrong_form = "the scheme has none of the forms that this engine computes"

    def considered(self, call: Call) -> bool:
        """Return whether this is a decoding step."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        return queries <= QUERIES and queries < keys and not torch.is_grad_enabled()

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        # torch.compile specialises a size of 1 anyway. A comparison with another size would fix the length.
        if queries > 1 and (torch.compiler.is_compiling() or queries > QUERIES):
            return f"it takes at most {1 if torch.compiler.is_compiling() else QUERIES} queries"
        if queries >= keys or torch.is_grad_enabled():
            return "it is for decoding steps: fewer queries than keys, without gradients"
        if isinstance(call.positions, DensePositions):
            return "the mask is given pair by pair"
        return self.why_not_form(call)

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Attend without gradients, see `Engine.attend`."""
        query = call.query
        with torch.autocast(query.device.type, enabled=False):
            # Under autocast their dtypes may differ.
            key, value = call.key.to(query.dtype), call.value.to(query.dtype)
            wide = torch.promote_types(query.dtype, torch.float32)
            distance, hidden = call.positions.once(("decode", wide), lambda: _seen(call, wide))
            terms = for_form(TERMS, call.form)(call.form, call, distance, hidden)
            if call.has_token_bias:
                terms.outside = terms.outside + call.token_bias()
            if _kernel_takes(terms, call, value):
                output, weights = _by_kernel(terms, call, key, value), None
            else:
                output, weights = _by_products(terms, call, key, value, distance)
        output = output.transpose(1, 2).to(query.dtype).contiguous()
        return output, weights.to(query.dtype) if call.weights and weights is not None else None
