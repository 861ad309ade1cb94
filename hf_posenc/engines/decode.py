"""Attention of few queries to many keys, as in a decoding step. Keys and values are read once, from the cache.

Such a step costs as much as reading the cache. The reference engine repeats keys for every head of a group and copies
them to float32. Here the queries of the heads that share a key are rows of one product. Only tensors of the size of the
scores, 1/D of the keys, are in float32. At that size a mask costs nothing, so padding, packing, sliding windows and
static caches are those of the reference engine.

There are two ways. The first passes everything that is added to the scores as a mask to the flash kernel of the CPU. It
serves schemes that only add to scores, all but DA-Transformer, in calls without weights, soft cap and dropout. All
other calls and devices take the second way: two matrix products with a softmax between them. So does bfloat16 on CPUs
with fast bfloat16 products that their kernel does not use (`products_are_faster`).

The vectors that Shaw's scheme adds to the values of near keys are weighted like these keys. Where the kernel is used,
the weights follow from its log-sum-exp. Far keys share one vector, which gets the rest of the weight.

Accuracy class: flash where the kernel is used. Matrix products are as accurate as the reference in float32 and float64.
In bfloat16 and float16 they are "eager": rounded to the dtype of the inputs, as in transformers' eager attention.
Transformer-XL's products with positions are rounded like that on both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..attention_call import Call
from ..forms import (
    Bias,
    ClippedVectors,
    Curves,
    Factors,
    Form,
    RelativeKeys,
    Slopes,
    at_distance,
    for_form,
    is_one_of,
)
from ..positions import DensePositions
from . import cpu_features
from .base import Engine

QUERIES = 16
"""Largest number of queries of a call. The mask is dense, and for more queries other engines read keys in blocks."""

SHORT = 4096
"""Number of keys up to which vectors for values (Shaw) are cheaper by matrix products than by the kernel."""


def products_are_faster() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices much faster than the flash kernel attends with few queries.

    Measured at 8192 keys: 4 to 10 times on a processor with AVX512-BF16 alone; with AMX the kernel is as fast.
    """
    return cpu_features.multiplies_bfloat16() and not cpu_features.has_amx()


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


def _slopes(form: Slopes, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    bias = torch.addcmul(hidden, form.slopes[:, None, None], distance.to(hidden.dtype), value=-1)
    return Terms(call.query, form.hide(bias, distance))


def _bias(form: Bias, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    return Terms(call.query, _numbers(form, distance) + hidden)


def _factors(form: Factors, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    return Terms(call.query, hidden, factors=_numbers(form, distance))


def _numbers(form: Curves, distance: Tensor) -> Tensor:
    """Return the numbers of a curve at each distance, (1|B, H, Q, L)."""
    table = form.table(_length(distance))
    if _counts_down(distance):
        return table[:, : distance.shape[-1]].flip(1)[None, :, None]
    return at_distance(table, distance)


def _clipped_vectors(form: ClippedVectors, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    by_label = (call.query.to(hidden.dtype) * call.scaling) @ form.keys.to(hidden.dtype).mT
    return Terms(call.query, hidden, by_label.gather(-1, _labels(distance, by_label)))


def _relative_keys(form: RelativeKeys, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    query, ratio, length = call.query, call.ratio, _length(distance)
    table = form.table(length) if torch.compiler.is_compiling() else form.kept(length, query)
    r, u, v = (each.to(query.dtype) for each in (table, form.content_bias, form.position_bias))
    # Everything that contains the query is scaled by `scaling`, the rest by `vector_scaling`.
    by_distance = ((query + ratio * v[:, None]) @ r.mT).to(hidden.dtype) * call.scaling
    at = _labels(distance, by_distance)
    return Terms(query + ratio * u[:, None], hidden, by_distance.gather(-1, at))


TERMS: Mapping[type[Form], Callable[[Any, Call, Tensor, Tensor], Terms]] = {
    Bias: _bias,
    Slopes: _slopes,
    Factors: _factors,
    ClippedVectors: _clipped_vectors,
    RelativeKeys: _relative_keys,
}
"""Form -> function (form, call, distances (B|1, 1, Q, L), mask of that shape, 0 where a key is visible) -> terms."""

CACHED = (RelativeKeys,)
"""Forms whose table is cached between decoding steps."""


def _length(distance: Tensor) -> int:
    """Return the length of a table that has an entry for every distance from 0 to the largest."""
    return distance.shape[-1] if torch.compiler.is_compiling() else int(distance.amax()) + 1


def _counts_down(distance: Tensor) -> bool:
    """Return whether this is one query on all keys before it: distances L - 1, ..., 1, 0."""
    if torch.compiler.is_compiling() or distance.device.type != "cpu" or distance.numel() != distance.shape[-1]:
        return False
    return torch.equal(distance.flatten(), torch.arange(distance.numel(), dtype=distance.dtype).flip(0))


def _labels(distance: Tensor, by_label: Tensor) -> Tensor:
    """Return distances clipped to `m`, int64 (B, H, Q, L), for `by_label` (B, H, Q, m + 1)."""
    clipped = distance.clamp(max=by_label.shape[-1] - 1).to(torch.int64)
    return clipped.expand(*by_label.shape[:-1], distance.shape[-1])


# ------------------------------------------------------------------------------------------------------- the two ways


def _by_kernel(terms: Terms, call: Call, key: Tensor, value: Tensor, distance: Tensor, visible: Tensor) -> Tensor:
    """Return the output (B, H, Q, D) by the flash kernel of the CPU."""
    query, scaling = terms.query, call.scaling
    mask = terms.outside if terms.inside is None else terms.inside.add_(terms.outside)
    mask = mask.expand(*query.shape[:3], -1)
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _stacked(query, key), key, value, 0.0, False, attn_mask=_stacked(mask, key), scale=scaling
    )
    output, log_sum = output.reshape(query.shape), log_sum.reshape(query.shape[:3])
    key_weight = torch.ones_like(log_sum)
    if call.sinks is not None:  # one more score in the softmax of each row; its weight goes to no key
        sinks = call.sinks.to(log_sum.dtype)[:, None]
        key_weight = torch.sigmoid(log_sum - sinks)
        output, log_sum = output * key_weight[..., None].to(output.dtype), torch.logaddexp(log_sum, sinks)
    if call.form.value_table is None:
        return output
    table = call.form.value_table.to(log_sum.dtype)
    near = _near(distance, visible, table)
    scores = _products(query.to(log_sum.dtype), key[:, :, near].to(log_sum.dtype)) * scaling + mask[..., near]
    weights = (scores - log_sum[..., None]).exp()
    return output + _shares(weights, distance[..., near], table, key_weight) @ table


def _near(distance: Tensor, visible: Tensor, table: Tensor) -> slice:
    """Return a slice of slots that contains every key nearer than `m`. Keys from `m` on share the last vector."""
    slots = ((distance < table.shape[-2] - 1) & visible).any(2).any(0)[0].nonzero()[:, 0]
    return slice(int(slots[0]), int(slots[-1]) + 1) if len(slots) else slice(0, 0)


def _shares(weights: Tensor, distance: Tensor, table: Tensor, total: Tensor) -> Tensor:
    """Return the weight of every vector for values, (B, H, Q, m + 1).

    Args:
        weights: weights of the near keys, (B, H, Q, near keys).
        distance: their distances, (B|1, 1, Q, near keys).
        table: the vectors, (.., m + 1, D).
        total: weight of all keys, (B, H, Q).
    """
    shares = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
    shares.scatter_add_(-1, _labels(distance, shares), weights)
    shares[..., -1] = total - shares[..., :-1].sum(-1)
    return shares


def _by_products(
    terms: Terms, call: Call, key: Tensor, value: Tensor, distance: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Q, V) and the weights (B, H, Q, L), by matrix products."""
    wide = torch.promote_types(key.dtype, torch.float32)
    scores = _products(terms.query, key).to(wide).mul_(call.scaling)
    if terms.inside is not None:
        scores += terms.inside
    scores = call.cap(scores)
    if terms.factors is not None:
        scores = call.form.content(scores) * terms.factors
    weights = call.softmax(scores + terms.outside)
    weights = torch.nn.functional.dropout(weights, call.dropout, training=call.dropout > 0)
    output = _stacked(weights.to(value.dtype), value) @ value
    output = output.reshape(*terms.query.shape[:3], value.shape[-1])
    if call.form.value_table is not None:
        table = call.form.value_table.to(wide)
        cannot_look = torch.compiler.is_compiling() or key.device.type != "cpu"  # finding near keys reads values
        near = slice(None) if cannot_look else _near(distance, visible, table)
        output = output + _shares(weights[..., near], distance[..., near], table, weights.sum(-1)) @ table
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
    value_sizes = True
    forms = tuple(TERMS)
    wrong_form = "the scheme has none of the forms that this engine computes"

    def considered(self, call: Call) -> bool:
        """Return whether this is a decoding step."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        return queries <= QUERIES and queries < keys and not torch.is_grad_enabled()

    def floor(self, call: Call) -> int:
        """Return 0 for forms whose table is cached between steps: for them the engine pays at any length."""
        return 0 if is_one_of(call.form, CACHED) else super().floor(call)

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
            # Distances are negative only where the key is invisible. With a cache none is L or more, except between
            # position ids that the caller chose, and while compiling these do not come with a cache.
            most = key.shape[2] - 1 if torch.compiler.is_compiling() else None
            distance, visible = call.positions.distance().clamp(0, most), call.positions.visible()
            wide = torch.promote_types(query.dtype, torch.float32)
            # The minimum instead of -inf, as in the reference: a row of padding, which sees no key, gets no NaN.
            hidden = query.new_zeros(distance.shape, dtype=wide).masked_fill_(~visible, torch.finfo(wide).min)
            terms = for_form(TERMS, call.form)(call.form, call, distance, hidden)
            weights = None
            if _kernel_takes(terms, call, value):
                output = _by_kernel(terms, call, key, value, distance, visible)
            else:
                output, weights = _by_products(terms, call, key, value, distance, visible)
        output = output.transpose(1, 2).to(query.dtype).contiguous()
        return output, weights.to(query.dtype) if call.weights and weights is not None else None


def _kernel_takes(terms: Terms, call: Call, value: Tensor) -> bool:
    """Return whether the flash kernel of the CPU can compute the step, and does it faster than matrix products."""
    query, keys = call.query, call.key.shape[2]
    if torch.compiler.is_compiling() or query.device.type != "cpu" or query.shape[3] != value.shape[3]:
        return False
    if terms.factors is not None or call.softcap is not None or call.dropout > 0 or call.weights:
        return False
    # The kernel returns no weights. Vectors for values need those of near keys again, by many small operations.
    if call.form.value_table is not None and keys <= SHORT:
        return False
    return query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and not products_are_faster())
