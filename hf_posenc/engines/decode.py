"""Few queries on many keys, as in a step of generation: keys and values are read once, as they lie in the cache.

Such a step costs what reading the cache costs. The reference engine repeats keys for every head of a group and copies
them to float32; here the queries of the heads that share a key are rows of one product, and only what has the size of
the scores, 1/D of the keys, is in float32. At that size a mask costs nothing, so padding, packing, sliding windows and
static caches are those of the reference engine.

What a scheme adds to the scores is a mask to the flash kernel of the CPU, if the scheme does nothing but add (all but
DA-Transformer) and nothing else is asked for (weights, soft cap, dropout). Otherwise, on other devices, and in bfloat16
on CPUs that have fast products of it but whose kernel has not (`products_are_faster`), there are two matrix products
with a softmax between them. Vectors that Shaw's scheme adds to values are weighted by the weights that near keys have,
which follow from the kernel's log-sum-exp where it is used; far ones share the rest.

Accuracy class: flash where the kernel is used, the reference's in float32 and float64; else "eager": in bfloat16 and
float16 products are rounded to the dtype of the inputs, as in transformers' eager attention. So are Transformer-XL's
products with positions in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Call
from ..forms import Bias, ClippedVectors, Factors, RelativeKeys, Slopes, at_distance
from ..positions import DensePositions
from . import cpu
from .base import Engine

QUERIES = 16
"""Most queries of a call: the mask is dense, and with more of them other engines read the keys in blocks."""


SHORT = 4096
"""Keys up to which vectors for values (Shaw) are cheaper by matrix products than by the kernel."""


class Decode(Engine):
    """A few queries on the keys of a cache, without gradients, for every form here, every device and dtype.

    With padding, weights, soft cap and dropout; while compiling, for one query.
    """

    name = "decode"
    traced = True
    sinks = True
    value_sizes = True
    forms = (Bias, Slopes, Factors, ClippedVectors, RelativeKeys)

    def considered(self, call: Call) -> bool:
        """Return whether this is a step of generation."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        return queries <= QUERIES and queries < keys and not torch.is_grad_enabled()

    def floor(self, call: Call) -> int:
        """Return 0 for relative keys: what is kept of them between steps is worth it at any length."""
        return 0 if isinstance(call.form, RelativeKeys) else super().floor(call)

    def why_not(self, call: Call) -> str | None:
        queries, keys = call.query.shape[2], call.key.shape[2]
        # A size of 1 is never dynamic: while compiling no other comparison leaves the graph open to other lengths.
        if queries > 1 and (torch.compiler.is_compiling() or queries > QUERIES):
            return f"it is for {1 if torch.compiler.is_compiling() else QUERIES} queries at most"
        if queries >= keys or torch.is_grad_enabled():
            return "it is for queries on the keys of a cache, without gradients"
        if isinstance(call.positions, DensePositions):
            return "the mask is given pair by pair"
        return None if isinstance(call.form, self.forms) else "the scheme has none of the forms it knows"

    def attend(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Attend without gradients, see `Engine.attend`."""
        query = call.query
        with torch.autocast(query.device.type, enabled=False):
            # Under autocast their dtypes may differ.
            key, value = call.key.to(query.dtype), call.value.to(query.dtype)
            # Negative only where the key is invisible. With a cache no distance is L or more, but between position ids
            # of the caller's own, which do not come with one while compiling.
            most = key.shape[2] - 1 if torch.compiler.is_compiling() else None
            distance, visible = call.positions.distance().clamp(0, most), call.positions.visible()
            terms = _terms(call, distance, visible)
            additive = terms.factors is None and call.softcap is None and call.dropout == 0
            # What the kernel hides has to be found again for vectors of values: many small operations.
            additive &= terms.value_table is None or key.shape[2] > SHORT
            additive &= key.shape[3] == value.shape[3]
            if (
                additive
                and not (call.weights or torch.compiler.is_compiling())
                and query.device.type == "cpu"
                and (query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and not products_are_faster()))
            ):
                output, found = _by_kernel(terms, call, key, value, distance, visible), None
            else:
                output, found = _by_products(terms, call, key, value, distance, visible)
        output = output.transpose(1, 2).to(query.dtype).contiguous()
        return output, found.to(query.dtype) if call.weights and found is not None else None


@dataclass
class Terms:
    """What a scheme does to scores: `factors * relu(cap(scaling * query . k + inside)) + outside`.

    Attributes:
        query: (B, H, Q, D), what meets the keys.
        outside: (B|1, H|1, Q, L), with what hides invisible keys.
        inside: (B, H, Q, L) or None.
        factors: (B|1, H, Q, L) or None.
        relu: whether negative scores are clipped.
        value_table: (m + 1, D) or (H, m + 1, D), added to values by distance clipped at m, or None.
    """

    query: Tensor
    outside: Tensor
    inside: Tensor | None = None
    factors: Tensor | None = None
    relu: bool = False
    value_table: Tensor | None = None


def products_are_faster() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices much faster than the flash kernel attends with few queries.

    Measured at 8192 keys: 4 to 10 times on a processor with AVX512-BF16 alone; with AMX the kernel is as fast.
    """
    return cpu.multiplies_bfloat16() and not cpu.has_amx()


def _terms(call: Call, distance: Tensor, visible: Tensor) -> Terms:
    query, scaling, form = call.query, call.scaling, call.form
    like = query.new_empty(0, dtype=torch.promote_types(query.dtype, torch.float32))
    # The minimum, not -inf: a row that sees nothing, which is padding, then sees everything, as in the reference.
    hidden = like.new_zeros(distance.shape).masked_fill_(~visible, torch.finfo(like.dtype).min)

    def by_pair(table: Tensor) -> Tensor:  # (H, distances) -> (B|1, H, Q, L)
        if _counts_down(distance):
            return table[:, : distance.shape[-1]].flip(1)[None, :, None]
        return at_distance(table, distance)

    if isinstance(form, Slopes):
        return Terms(query, torch.addcmul(hidden, form.slopes[:, None, None], distance.to(like.dtype), value=-1))
    if isinstance(form, ClippedVectors):
        by_label = (query.to(like.dtype) * scaling) @ form.keys.to(like.dtype).mT
        inside = by_label.gather(-1, _labels(distance, by_label))
        return Terms(query, hidden, inside, value_table=form.values)
    length = distance.shape[-1] if torch.compiler.is_compiling() else int(distance.amax()) + 1
    if isinstance(form, Bias):
        return Terms(query, by_pair(form.table(length)) + hidden)
    if isinstance(form, Factors):
        return Terms(query, hidden, factors=by_pair(form.table(length)), relu=form.relu)
    assert isinstance(form, RelativeKeys)
    table = form.table(length) if torch.compiler.is_compiling() else form.kept(length, query)
    r, u, v = (each.to(query.dtype) for each in (table, form.content_bias, form.position_bias))
    # Everything that contains the query is scaled by `scaling`, the rest by `vector_scaling`.
    by_distance = ((query + call.ratio * v[:, None]) @ r.mT).to(like.dtype) * scaling
    at = _labels(distance, by_distance)
    return Terms(query + call.ratio * u[:, None], hidden, by_distance.gather(-1, at))


def _counts_down(distance: Tensor) -> bool:
    """Return whether this is one query on all keys before it: distances L - 1, ..., 1, 0."""
    if torch.compiler.is_compiling() or distance.device.type != "cpu" or distance.numel() != distance.shape[-1]:
        return False
    return torch.equal(distance.flatten(), torch.arange(distance.numel(), dtype=distance.dtype).flip(0))


def _labels(distance: Tensor, by_label: Tensor) -> Tensor:
    """Return distances clipped to the last dimension of `by_label` (B, H, Q, m + 1): int64 (B, H, Q, L)."""
    clipped = distance.clamp(max=by_label.shape[-1] - 1).to(torch.int64)
    return clipped.expand(*by_label.shape[:-1], distance.shape[-1])


def _by_kernel(terms: Terms, call: Call, key: Tensor, value: Tensor, distance: Tensor, visible: Tensor) -> Tensor:
    """Return the output (B, H, Q, D) by the flash kernel of the CPU."""
    query, scaling = terms.query, call.scaling
    mask = terms.outside if terms.inside is None else terms.inside.add_(terms.outside)
    mask = mask.expand(*query.shape[:3], -1)
    output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _stacked(query, key), key, value, 0.0, False, attn_mask=_stacked(mask, key), scale=scaling
    )
    output, total = output.reshape(query.shape), total.reshape(query.shape[:3])
    held = torch.ones_like(total)
    if call.sinks is not None:  # one more score in the sum of each row, whose weight the keys do not hold
        sinks = call.sinks.to(total.dtype)[:, None]
        held = torch.sigmoid(total - sinks)
        output, total = output * held[..., None].to(output.dtype), torch.logaddexp(total, sinks)
    if terms.value_table is None:
        return output
    table = terms.value_table.to(total.dtype)
    near = _near(distance, visible, table)
    scores = _products(query.to(total.dtype), key[:, :, near].to(total.dtype)) * scaling + mask[..., near]
    weights = (scores - total[..., None]).exp()
    return output + _shares(weights, distance[..., near], table, held) @ table


def _near(distance: Tensor, visible: Tensor, table: Tensor) -> slice:
    """Return a stretch of slots that holds all keys that do not share the last vector, and beside them few others."""
    slots = ((distance < table.shape[-2] - 1) & visible).any(2).any(0)[0].nonzero()[:, 0]
    return slice(int(slots[0]), int(slots[-1]) + 1) if len(slots) else slice(0, 0)


def _shares(weights: Tensor, distance: Tensor, table: Tensor, total: Tensor) -> Tensor:
    """Return what each vector of a table (.., m + 1, D) weighs, (B, H, Q, m + 1), from the weights of near keys.

    Args:
        weights: (B, H, Q, near keys).
        distance: (B|1, 1, Q, near keys).
        table: the vectors.
        total: (B, H, Q), the weight of all keys.
    """
    shares = weights.new_zeros(*weights.shape[:-1], table.shape[-2])
    shares.scatter_add_(-1, _labels(distance, shares), weights)
    shares[..., -1] = total - shares[..., :-1].sum(-1)
    return shares


def _by_products(
    terms: Terms, call: Call, key: Tensor, value: Tensor, distance: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, Q, V) and the weights by matrix products."""
    wide = torch.promote_types(key.dtype, torch.float32)
    scores = _products(terms.query, key).to(wide).mul_(call.scaling)
    if terms.inside is not None:
        scores += terms.inside
    scores = call.cap(scores)
    if terms.factors is not None:
        scores = (scores.relu() if terms.relu else scores) * terms.factors
    weights = call.softmax(scores + terms.outside)
    weights = torch.nn.functional.dropout(weights, call.dropout, training=call.dropout > 0)
    output = _stacked(weights.to(value.dtype), value) @ value
    output = output.reshape(*terms.query.shape[:3], value.shape[-1])
    if terms.value_table is not None:
        table = terms.value_table.to(wide)
        everywhere = torch.compiler.is_compiling() or key.device.type != "cpu"  # where looking for keys is waiting
        near = slice(None) if everywhere else _near(distance, visible, table)
        output = output + _shares(weights[..., near], distance[..., near], table, weights.sum(-1)) @ table
    return output, weights


def _stacked(rows: Tensor, shared: Tensor) -> Tensor:
    """Return rows (B, H, Q, N) with those of the heads that share a key below each other, (B, K, H / K * Q, N)."""
    return rows.reshape(rows.shape[0], shared.shape[1], -1, rows.shape[-1])


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries (B, H, Q, D) and keys (B, K, L, D), (B, H, Q, L)."""
    return (_stacked(query, key) @ key.mT).view(*query.shape[:3], key.shape[2])
