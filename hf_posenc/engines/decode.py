"""Few queries on many keys, as in a decoding step: keys and values are read once, as they lie in the cache.

Such a step costs as much as reading the cache. The reference engine repeats keys for every head of a group and copies
them to float32. Here the queries of the heads that share a key are rows of one product. Only tensors of the size of the
scores, 1/D of the keys, are in float32. At that size a mask costs nothing, so padding, packing, sliding windows and
static caches are those of the reference engine.

There are two ways. In the first, the sum of what is added to the scores is a mask to the flash kernel of the CPU. The
scheme must only add to scores, as all but DA-Transformer do, and weights, soft cap and dropout must not be asked for.
The second is two matrix products with a softmax between them. It is taken otherwise, on other devices, and in bfloat16
on CPUs that have fast products of it but whose kernel does not use them (`products_are_faster`).

Vectors that Shaw's scheme adds to values are weighted by the weights of near keys. Where the kernel is used, these
follow from its log-sum-exp. Far keys share the rest.

Accuracy class: flash where the kernel is used, and that of the reference in float32 and float64. In bfloat16 and
float16 "eager": products are rounded to the dtype of the inputs, as in transformers' eager attention. So are
Transformer-XL's products with positions in any case.
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
from . import cpu
from .base import Engine

QUERIES = 16
"""Most queries of a call: the mask is dense, and with more of them other engines read the keys in blocks."""


SHORT = 4096
"""Keys up to which vectors for values (Shaw) are cheaper by matrix products than by the kernel."""


def products_are_faster() -> bool:
    """Return whether this CPU multiplies bfloat16 matrices much faster than the flash kernel attends with few queries.

    Measured at 8192 keys: 4 to 10 times on a processor with AVX512-BF16 alone; with AMX the kernel is as fast.
    """
    return cpu.multiplies_bfloat16() and not cpu.has_amx()


# ------------------------------------------------------------------------------------------- the scores of each form


@dataclass
class Terms:
    """The parts of scores: `factors * content(cap(scaling * query . k + inside)) + outside`, see `Form.content`.

    Attributes:
        query: (B, H, Q, D), multiplied by the keys.
        outside: (B|1, H|1, Q, L); it hides invisible keys, too.
        inside: (B, H, Q, L) or None.
        factors: (B|1, H, Q, L) or None.
    """

    query: Tensor
    outside: Tensor
    inside: Tensor | None = None
    factors: Tensor | None = None


def _slopes(form: Slopes, call: Call, distance: Tensor, hidden: Tensor) -> Terms:
    bias = torch.addcmul(hidden, form.slopes[:, None, None], distance.to(hidden.dtype), value=-1)
    return Terms(call.query, bias)


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
"""Functions of a form, a call, its distances (B|1, 1, Q, L), and a mask of that shape, 0 where a key is visible."""


CACHED = (RelativeKeys,)
"""Forms whose table is cached between decoding steps."""


def _length(distance: Tensor) -> int:
    """Return how many distances, counted from 0, contain all that occur."""
    return distance.shape[-1] if torch.compiler.is_compiling() else int(distance.amax()) + 1


def _counts_down(distance: Tensor) -> bool:
    """Return whether this is one query on all keys before it: distances L - 1, ..., 1, 0."""
    if torch.compiler.is_compiling() or distance.device.type != "cpu" or distance.numel() != distance.shape[-1]:
        return False
    return torch.equal(distance.flatten(), torch.arange(distance.numel(), dtype=distance.dtype).flip(0))


def _labels(distance: Tensor, by_label: Tensor) -> Tensor:
    """Return distances clipped to the last dimension of `by_label` (B, H, Q, m + 1): int64 (B, H, Q, L)."""
    clipped = distance.clamp(max=by_label.shape[-1] - 1).to(torch.int64)
    return clipped.expand(*by_label.shape[:-1], distance.shape[-1])


# ------------------------------------------------------------------------------------------------------- the two ways


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
    if call.sinks is not None:  # one more score in the sum of each row, whose weight belongs to no key
        sinks = call.sinks.to(total.dtype)[:, None]
        held = torch.sigmoid(total - sinks)
        output, total = output * held[..., None].to(output.dtype), torch.logaddexp(total, sinks)
    if call.form.value_table is None:
        return output
    table = call.form.value_table.to(total.dtype)
    near = _near(distance, visible, table)
    scores = _products(query.to(total.dtype), key[:, :, near].to(total.dtype)) * scaling + mask[..., near]
    weights = (scores - total[..., None]).exp()
    return output + _shares(weights, distance[..., near], table, held) @ table


def _near(distance: Tensor, visible: Tensor, table: Tensor) -> slice:
    """Return consecutive slots that contain all keys that do not share the last vector, and few others."""
    slots = ((distance < table.shape[-2] - 1) & visible).any(2).any(0)[0].nonzero()[:, 0]
    return slice(int(slots[0]), int(slots[-1]) + 1) if len(slots) else slice(0, 0)


def _shares(weights: Tensor, distance: Tensor, table: Tensor, total: Tensor) -> Tensor:
    """Return the weight of each vector of a table (.., m + 1, D), (B, H, Q, m + 1), from the weights of near keys.

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
        scores = call.form.content(scores) * terms.factors
    weights = call.softmax(scores + terms.outside)
    weights = torch.nn.functional.dropout(weights, call.dropout, training=call.dropout > 0)
    output = _stacked(weights.to(value.dtype), value) @ value
    output = output.reshape(*terms.query.shape[:3], value.shape[-1])
    if call.form.value_table is not None:
        table = call.form.value_table.to(wide)
        everywhere = torch.compiler.is_compiling() or key.device.type != "cpu"  # where looking for keys is waiting
        near = slice(None) if everywhere else _near(distance, visible, table)
        output = output + _shares(weights[..., near], distance[..., near], table, weights.sum(-1)) @ table
    return output, weights


def _stacked(rows: Tensor, shared: Tensor) -> Tensor:
    """Return rows (B, H, Q, N) stacked over the heads that share a key, (B, K, H / K * Q, N)."""
    return rows.reshape(rows.shape[0], shared.shape[1], -1, rows.shape[-1])


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Return the products of queries (B, H, Q, D) and keys (B, K, L, D), (B, H, Q, L)."""
    return (_stacked(query, key) @ key.mT).view(*query.shape[:3], key.shape[2])


# --------------------------------------------------------------------------------------------------------- the engine


class Decode(Engine):
    """A few queries on the keys of a cache, without gradients, for every form here, every device and dtype.

    With padding, weights, soft cap and dropout; while compiling, for one query.
    """

    name = "decode"
    traced = True
    sinks = True
    value_sizes = True
    forms = tuple(TERMS)
    wrong_form = "the scheme has none of the forms it knows"

    def considered(self, call: Call) -> bool:
        """Return whether this is a decoding step."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        return queries <= QUERIES and queries < keys and not torch.is_grad_enabled()

    def floor(self, call: Call) -> int:
        """Return 0 for a form whose table is cached between steps, which pays at any length."""
        return 0 if is_one_of(call.form, CACHED) else super().floor(call)

    def why_not(self, call: Call) -> str | None:
        """Return why the engine cannot carry a call, or None if it can."""
        queries, keys = call.query.shape[2], call.key.shape[2]
        # A size of 1 is never dynamic: while compiling no other comparison leaves the graph open to other lengths.
        if queries > 1 and (torch.compiler.is_compiling() or queries > QUERIES):
            return f"it is for {1 if torch.compiler.is_compiling() else QUERIES} queries at most"
        if queries >= keys or torch.is_grad_enabled():
            return "it is for queries on the keys of a cache, without gradients"
        if isinstance(call.positions, DensePositions):
            return "the mask is given pair by pair"
        return self.why_not_form(call)

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
            wide = torch.promote_types(query.dtype, torch.float32)
            # The minimum, not -inf: as in the reference, a row that sees nothing, which is padding, sees everything.
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
    """Return whether the flash kernel of the CPU computes the step, and faster than matrix products do."""
    query, keys = call.query, call.key.shape[2]
    if torch.compiler.is_compiling() or query.device.type != "cpu" or query.shape[3] != value.shape[3]:
        return False
    if terms.factors is not None or call.softcap is not None or call.dropout > 0 or call.weights:
        return False
    # The kernel hides the weights: those of vectors for values are computed again, by many small operations.
    if call.form.value_table is not None and keys <= SHORT:
        return False
    return query.dtype == torch.float32 or (query.dtype == torch.bfloat16 and not products_are_faster())
