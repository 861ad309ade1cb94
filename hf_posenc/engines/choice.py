"""Which engine computes a call: the first, fastest first, that can carry it exactly; and why.

- `decode`: a few queries on the keys of a cache, without gradients, for every scheme here, device and dtype, with
  padding, weights, soft cap and dropout; also while compiling, for one query.
- `banded`: a linear penalty per head (ALiBi), on a CPU, in float32 or bfloat16, without weights, soft cap or dropout;
  sliding windows; padding and packed documents where queries and keys are the same tokens. O(L) memory.
- `toeplitz`: the same for any additive bias of distance. O(L) memory.
- `clipped`: the same, but for sliding windows, for vectors of clipped distances (Shaw). O(L) memory.
- `rescaled`: the same for factors of distance on the scores (DA-Transformer). O(L) memory.
- `skewed`: the same for products of queries with vectors of distance (Transformer-XL). O(L) memory.
- `rounded`: only if asked for: it trades accuracy for speed. ALiBi, DA-Transformer and Transformer-XL in bfloat16 on a
  CPU, as the engines above, with products rounded to bfloat16 like those of transformers' eager attention. O(L) memory.
- `flex`: compiles kernels for CUDA, and has to pass a trial on the device before `auto` takes it (`trial`). ALiBi,
  DA-Transformer and Shaw without vectors for values; soft cap, every mask but a user's own 4-D one; no weights or
  dropout. O(L) memory. On a CPU only if asked for, with a C++ compiler and without gradients.
- `chunked`: every scheme, and every mask but a user's own 4-D one; no weights; not while compiling. O(L) memory.
- `reference`: everything. O(Q L) memory.

`auto` passes over an engine for calls so short that the next one is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..positions import DensePositions, Positions
from . import banded, blocks, chunked, clipped, decode, flex, processor, reference, rescaled, skewed, toeplitz, trial

EXACT_BY_SPANS = ("banded", "toeplitz", "clipped", "rescaled", "skewed")

BY_SPANS = (*EXACT_BY_SPANS, "rounded")
"""Engines that compute plain causal attention of one document."""

AUTO = ("decode", *EXACT_BY_SPANS, "flex", "chunked", "reference")
"""Engines that `auto` chooses from, fastest first."""

NAMES = (*AUTO, "rounded")
"""All engines."""

FLOORS: dict[str, dict[torch.dtype | None, int]] = {
    "decode": {None: 1024},
    "banded": {torch.float32: 1024**2, torch.bfloat16: (4096 if processor.has_amx() else 1024) ** 2},
    "toeplitz": {None: 128**2},
    "clipped": {None: 256**2},
    "rescaled": {None: 256**2},
    "skewed": {None: 256**2},
    "flex": {None: 1024**2},
    "chunked": {None: 512**2},
}
"""Scores per head (Q times L) below which `auto` passes an engine over, by dtype (None: any): the next one is faster.

Where they cross was measured by scripts/benchmark_attention.py on two cores of a Xeon with AMX and of a Zen 5 EPYC;
not so `flex`, whose kernels take seconds to compile, which short calls do not pay back.
Steps of Transformer-XL have no floor: what `decode` keeps for them is worth it at any length.
"""


class Formula(reference.Formula, Protocol):
    """What choosing needs of a scheme's module, see `hf_posenc.schemes.base.ScoreModule`."""

    def penalty(self, like: Tensor) -> Tensor | None:
        """Return the slopes (H,) if all the scheme does is `- slope * distance`."""

    def bias(self, length: int, like: Tensor) -> Tensor | None:
        """Return the biases (H, length) if all the scheme does is to add one per distance."""

    def clipped_vectors(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the tables for keys and values if all the scheme does is to add vectors of clipped distances."""

    def factors(self, length: int, like: Tensor) -> tuple[Tensor, bool] | None:
        """Return factors (H, length) if all the scheme does is to rescale scores, and whether it clips them at 0."""

    def relative_keys(self, length: int, like: Tensor, *, keep: bool = False) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return `r` (H, length, D), `u`, `v` (H, D) if the scores are `(q + u) . k + (q + v) . r_d`."""


@dataclass(frozen=True)
class Choice:
    """An engine and why it was chosen.

    Attributes:
        engine: its name.
        reason: what kept the faster ones from it, in words.
    """

    engine: str
    reason: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.engine}: {self.reason}"


@dataclass(frozen=True)
class Call:
    """What is known of a call before it is computed.

    Attributes:
        module: the scheme's module.
        query: (B, H, Q, D).
        key: (B, K, L, D).
        positions: of these queries and keys.
        softcap: cap on the scores or None.
        dropout: probability that a weight is dropped.
        weights: whether the caller wants the attention weights.
    """

    module: Formula
    query: Tensor
    key: Tensor
    positions: Positions | DensePositions
    softcap: float | None = None
    dropout: float = 0.0
    weights: bool = False


def why_not(engine: str, call: Call) -> str | None:
    """Return why an engine cannot carry a call, or None if it can.

    Args:
        engine: one of `NAMES`.
        call: the call.
    """
    if engine == "reference":
        return None
    if engine == "decode":
        return _why_not_decode(call)
    if torch.compiler.is_compiling():
        return "torch.compile traces the reference engine"
    if call.weights:
        return "attention weights were asked for, which only the reference engine has"
    if isinstance(call.positions, DensePositions):
        return "the mask is given pair by pair"
    if engine == "chunked":
        return None
    if engine == "flex":
        if call.dropout > 0:
            return "attention dropout needs the weights"
        return flex.why_not(call.module, call.query, call.softcap)
    if call.query.device.type != "cpu":
        return f"it is written for CPUs, the tensors are on {call.query.device.type}"
    if call.query.dtype not in (torch.float32, torch.bfloat16):
        return f"the kernel takes float32 and bfloat16, not {call.query.dtype}"
    if call.softcap is not None:
        return "the kernel has no soft cap on scores"
    if call.dropout > 0:
        return "attention dropout needs the weights"
    like = call.query
    if engine == "rounded":
        if like.dtype != torch.bfloat16:
            return f"it rounds products to bfloat16, the tensors are {like.dtype}"
        if call.module.clipped_vectors() is not None:
            return "it does not know vectors of clipped distances"
    if engine == "banded" and call.module.penalty(like) is None:
        return "the scheme is no linear penalty per head"
    if engine == "toeplitz" and call.module.bias(1, like) is None:
        return "the scheme is no additive bias of distance"
    if engine == "rescaled" and call.module.factors(1, like) is None:
        return "the scheme does not rescale scores by distance"
    if engine == "skewed" and call.module.relative_keys(0, like) is None:
        return "the scheme has no products of queries with vectors of distance"
    if engine == "clipped":
        if call.module.clipped_vectors() is None:
            return "the scheme has no vectors of clipped distances"
        if int(call.positions.window.min()) < call.key.shape[2]:
            return "it has no sliding windows"
    if spans(call.positions) is None:
        return "padded keys in a cache, padding inside a document, or position_ids with gaps"
    return None


def _why_not_decode(call: Call) -> str | None:
    queries, keys = call.query.shape[2], call.key.shape[2]
    # A size of 1 is never dynamic: while compiling no other comparison leaves the graph open to other lengths.
    if queries > 1 and (torch.compiler.is_compiling() or queries > decode.QUERIES):
        return f"it is for {1 if torch.compiler.is_compiling() else decode.QUERIES} queries at most"
    if queries >= keys or torch.is_grad_enabled():
        return "it is for queries on the keys of a cache, without gradients"
    if isinstance(call.positions, DensePositions):
        return "the mask is given pair by pair"
    like = call.query
    forms = (call.module.bias(1, like), call.module.factors(1, like), call.module.clipped_vectors())
    if all(form is None for form in forms) and call.module.relative_keys(0, like) is None:
        return "the scheme has none of the forms it knows"
    return None


def choose(wanted: str, call: Call) -> Choice:
    """Return the engine for a call.

    Args:
        wanted: `auto` or one of `NAMES`.
        call: the call.

    Raises:
        ValueError: if a wanted engine cannot carry the call; the message says why.
    """
    if wanted != "auto":
        if reason := why_not(wanted, call):
            raise ValueError(f"attention={wanted!r} cannot compute this call: {reason}; use attention='auto'")
        return Choice(wanted, "asked for")
    if torch.compiler.is_compiling():  # before sizes are compared, which would fix them in the graph
        one = call.query.shape[2] == 1 and not call.weights and _why_not_decode(call) is None
        return Choice("decode" if one else "reference", "torch.compile traces it")
    queries, keys = call.query.shape[2], call.key.shape[2]
    reasons: list[str] = []
    step = queries <= decode.QUERIES and queries < keys and not torch.is_grad_enabled()
    for engine in AUTO if step else AUTO[1:]:  # why a whole sequence is no step of generation needs no words
        if engine == "flex" and call.query.device.type != "cuda":
            continue
        floors = FLOORS.get(engine, {})
        if engine == "decode" and call.module.relative_keys(0, call.query) is not None:
            floors = {}
        if queries * keys < floors.get(call.query.dtype, floors.get(None, 0)):
            reasons.append(f"not {engine}: {queries} queries and {keys} keys are too few to gain by it")
            continue
        reason = why_not(engine, call)
        if reason is None and engine == "flex":
            reason = trial.fault(trial.kind_of(call.module, call.query, call.key, call.softcap))
        if reason is None:
            return Choice(engine, "; ".join(reasons) or "the fastest")
        reasons.append(f"not {engine}: {reason}")
    raise AssertionError("the reference engine carries everything")


def run(
    choice: Choice, call: Call, value: Tensor, *, scaling: float, vector_scaling: float
) -> tuple[Tensor, Tensor | None]:
    """Compute a call.

    Args:
        choice: from `choose`.
        call: the call.
        value: (B, K, L, D).
        scaling: factor of terms that contain the query.
        vector_scaling: factor of terms that do not.

    Returns:
        output (B, Q, H, D) in the query's dtype, and the weights (B, H, Q, L) or None.
    """
    if choice.engine in BY_SPANS:
        with torch.autocast(call.query.device.type, enabled=False):  # the bounds need float32
            return _by_spans(choice.engine, call, value, scaling, vector_scaling), None
    if choice.engine == "flex":
        assert isinstance(call.positions, Positions)
        with torch.autocast(call.query.device.type, enabled=False):
            out = flex.attend(
                call.module, call.query, call.key, value, call.positions, scaling=scaling, softcap=call.softcap
            )
        return out.transpose(1, 2), None
    attend: Callable[..., Any] = chunked.attend if choice.engine == "chunked" else reference.attend
    if choice.engine == "decode":
        attend = partial(decode.attend, weights=call.weights)
    output: tuple[Tensor, Tensor | None] = attend(
        call.module,
        call.query,
        call.key,
        value,
        call.positions,
        scaling=scaling,
        vector_scaling=vector_scaling,
        softcap=call.softcap,
        dropout=call.dropout,
    )
    return output


Span = tuple[slice, slice, slice]
"""Batch rows, queries and keys that are plain causal attention among themselves: the last query on the last key."""


def spans(positions: Positions) -> list[Span] | None:
    """Split a call into pieces of plain causal attention: the documents of each row, without the padding.

    Args:
        positions: on a CPU.

    Returns:
        The pieces, covering every query that is no padding; None if positions do not count up by one, if there is
        padding inside a document, or if queries and keys are different tokens and not all keys are valid and of one
        document.
    """
    index, key_index = positions.query_index, positions.key_index
    queries, keys = index.shape[-1], key_index.shape[-1]
    if not (_counts_up(index) and _counts_up(key_index)) or bool((index[:, -1] != index[0, -1]).any()):
        return None
    if bool((key_index[:, 0] != key_index[0, 0]).any()):
        return None
    everything = slice(None)
    end = int(index[0, -1] - key_index[0, 0]) + 1  # a static cache is longer than what is in it
    one = bool(positions.key_valid[:, :end].all()) and bool(
        (positions.key_segment[:, :end] == positions.query_segment[:, :1]).all()
    )
    if end > keys or end < queries:
        return None
    if one:
        lag = positions.query_positions - index
        same = (positions.key_positions - key_index)[:, :end] == lag[:, :1]
        return [(everything, everything, slice(0, end))] if bool((lag == lag[:, :1]).all() and same.all()) else None
    if end != queries or end != keys:
        return None
    found: list[Span] = []
    shape = (max(t.shape[0] for t in (positions.key_valid, positions.key_segment, positions.key_positions)), keys)
    valid, segment, place = (
        each.expand(shape) for each in (positions.key_valid, positions.key_segment, positions.key_positions)
    )
    joined = (valid[:, 1:] == valid[:, :-1]) & (segment[:, 1:] == segment[:, :-1])
    if not bool(((place[:, 1:] - place[:, :-1] == 1) | ~joined | ~valid[:, 1:]).all()):
        return None
    for row in range(shape[0]):
        edges = [0, *((~joined[row]).nonzero()[:, 0] + 1).tolist(), keys]
        part = slice(row, row + 1) if shape[0] > 1 else everything
        documents: set[int] = set()
        for start, stop in pairwise(edges):
            if bool(valid[row, start]):
                document = int(segment[row, start])
                if document in documents:  # padding inside a document: what is after it sees what is before it
                    return None
                documents.add(document)
                found.append((part, slice(start, stop), slice(start, stop)))
    return found


def _counts_up(index: Tensor) -> bool:
    return bool((index[:, 1:] - index[:, :-1] == 1).all())


def _by_spans(engine: str, call: Call, value: Tensor, scaling: float, vector_scaling: float) -> Tensor:
    positions = call.positions
    assert isinstance(positions, Positions)
    pieces = spans(positions)
    assert pieces is not None
    groups = call.query.shape[1] // call.key.shape[1]
    key = call.key.repeat_interleave(groups, 1) if groups > 1 else call.key
    value = value.repeat_interleave(groups, 1) if groups > 1 else value
    window = int(positions.window.min())

    def part(rows: slice, queries: slice, keys: slice) -> Tensor:
        q, k, v = call.query[rows, :, queries], key[rows, :, keys], value[rows, :, keys]
        k, v = k.to(q.dtype), v.to(q.dtype)  # under autocast they may differ
        if engine == "banded":
            slopes = call.module.penalty(q)
            assert slopes is not None
            return banded.attend(q, k, v, slopes, scaling=scaling, window=window)
        if engine == "clipped":
            tables = call.module.clipped_vectors()
            assert tables is not None
            return clipped.attend(q, k, v, *tables, scaling=scaling)
        rounded = engine == "rounded"
        if (rescaling := call.module.factors(k.shape[2], q)) is not None:
            factors, relu = rescaling
            return rescaled.attend(q, k, v, factors, None, scaling=scaling, relu=relu, window=window, rounded=rounded)
        if (relative := call.module.relative_keys(k.shape[2], q)) is not None:
            return skewed.attend(
                q, k, v, *relative, scaling=scaling, vector_scaling=vector_scaling, window=window, rounded=rounded
            )
        table = call.module.bias(k.shape[2], q)
        assert table is not None
        if rounded:
            slopes = call.module.penalty(q)
            reach = None if slopes is None else banded.reaches(q, k, slopes, scaling, rescaled.rows_of(k.shape[2]))
            return rescaled.attend(
                q, k, v, None, table, scaling=scaling, relu=False, window=window, reach=reach, rounded=True
            )
        return toeplitz.attend(q, k, v, blocks.windowed(table, window), scaling=scaling)

    if len(pieces) == 1 and pieces[0][1] == slice(None):
        return part(*pieces[0]).transpose(1, 2)
    output = torch.zeros_like(call.query)
    for rows, queries, keys in pieces:
        output[rows, :, queries] = part(rows, queries, keys)
    return output.transpose(1, 2)
