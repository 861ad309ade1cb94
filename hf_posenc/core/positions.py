"""Positions and visibility of queries and keys, carried to attention in the compact position channel.

Every transformers model hands its attention mask from its top to each attention layer, through checkpointing, device
hooks, caches and `generate`. It does so with no other argument. We use the mask to carry positions. The channel is one
int32 tensor of shape (B|1, 1, ROWS, Q + L): the first Q columns describe the queries, the last L the keys. It grows
linearly with the sequence; no tensor of shape (Q, L) exists until an engine makes one.

A mask function that does not fit this description becomes a dense channel, (B|1, 1, Q + 1, L + 1) int32. Each of Q rows
holds `(distance << 1) | visible` for the keys, then the position of the query. The last row of either channel is a tag,
so that a user's own mask is never taken for a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

T = TypeVar("T")

ROWS = 7
"""Rows of the channel: position, validity, index (causal order), segment (packed sequence), window, resumed count, tag.
"""

ALIGNED_ROWS, PLAIN_ROWS = ROWS + 1, ROWS + 2
"""Rows of channels with the tag twice or three times: their shape tells what `Positions` says, to a compiler too."""

MADE = "posenc_positions"
"""Attribute of a channel: the positions that were read from it, for all layers of this forward pass."""

TAG = int.from_bytes(b"PosE", "big")
"""Number in the last row of a channel. It marks the tensor as ours."""

NO_WINDOW = torch.iinfo(torch.int32).max
"""Window that stands for none: larger than any distance."""

GAPPED_POSITIONS = (
    "position_ids do not continue the positions of the cached keys: pass none, or run all tokens without a cache"
)

INTEGER_MASK = (
    "a 4-D attention mask cannot hold integers: pass a bool mask (True = visible) or a float mask (added to the scores)"
)

RESTARTS = (
    "position_ids fall inside a document, so a query would see a later key. If they start again at each packed "
    "document, pass them without attention_mask and with use_cache=False, or pass a 4-D mask that parts the documents"
)

NUMBERED = (
    "attention_mask numbers documents (1, 1, 2, 2), but transformers reads it as True and False: pass position_ids "
    "that start again at each document, without attention_mask and with use_cache=False; or a 4-D attention_mask"
)

AMBIGUOUS = (
    "position_ids skip positions and also fall, so it is unclear which tokens are one document: pass position_ids that "
    "count by one inside each document, or a 4-D attention_mask that keeps the documents apart"
)


UNKNOWN_FIRST = (
    "a 4-D attention mask does not say which tokens are the first of a sequence, and the scheme keeps them visible "
    "(sinks): pass a 2-D mask (batch, keys), or position_ids that start again at each packed document"
)

SHOWS_FUTURE = (
    "the attention mask shows a query keys that come after it, but schemes define only distances to earlier keys: pass "
    "a causal mask, or unpatch the model"
)


def ensure(holds: Tensor, message: str) -> None:
    """Raise an error unless a condition holds.

    It is a ValueError. Where `holds` cannot be read (see `can_read`), it is a RuntimeError of the device.

    Args:
        holds: the condition, one bool on any device.
        message: message of the error.
    """
    if not can_read(holds):
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def is_tracing() -> bool:
    """Return whether torch.compile or torch.jit.trace makes a graph, in which comparing sizes or values fixes them."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def can_read(value: Tensor, *, waiting: bool = False) -> bool:
    """Return whether a value is there to be read: not while compiling, nor in tensors without numbers.

    Args:
        value: the value.
        waiting: whether one on CUDA is to be read too, which waits for the device.
    """
    if torch.compiler.is_compiling() or value.is_meta or isinstance(value, FakeTensor):
        return False
    return not value.is_cuda or (waiting and not torch.cuda.is_current_stream_capturing())


def require_numbers(position_ids: Tensor) -> None:
    """Raise ValueError unless position ids are integers, float32 or float64."""
    dtype = position_ids.dtype
    if dtype == torch.bool or dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 4):
        raise ValueError(f"position_ids must be integers, or real numbers in float32 or float64, not {dtype}")


def _as_numbers(position_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return position ids in this integer dtype, or as they are if they are real numbers; ValueError if neither."""
    require_numbers(position_ids)
    return position_ids if position_ids.is_floating_point() else position_ids.to(dtype)


def require_whole(position_ids: Tensor, where: str) -> None:
    """Raise ValueError if position ids are real numbers.

    Args:
        position_ids: the ids.
        where: what takes integers only, for the message.
    """
    if position_ids.is_floating_point():
        raise ValueError(
            f"{where} takes whole position_ids only, and these are real numbers ({position_ids.dtype}): pass integers"
        )


@dataclass(frozen=True)
class Positions:
    """Positions, order and visibility of Q queries and L keys. Integer tensors; `key_valid` and `query_valid` are bool.

    Positions that the caller chose (`follow`) may be real numbers, float32 or float64. Causal order, windows and
    documents count slots all the same.

    Attributes:
        query_positions: (B|1, Q) positions of the queries; distances are measured between positions.
        key_positions: (B|1, L) positions of the keys.
        query_index: (B|1, Q) slots of the queries in the sequence. Causal order and sliding windows count slots.
        key_index: (B|1, L) slots of the keys.
        query_valid: (B|1, Q) False for padding.
        key_valid: (B|1, L) False for padding, which no query sees.
        query_segment: (B|1, Q) document numbers of the queries, in packed sequences.
        key_segment: (B|1, L) document numbers of the keys; a query sees only keys of its own document.
        window: (B|1, 1) sliding window: a query sees a key if its slot is less than `window` behind the query's.
        query_resumed: (B|1, Q) positions as `generate` counts them after a right-padded prompt: tokens after the
            padding count from 1. All others, also under left padding, have their position.
        distance_cap: (B|1, L) what `distance()` reports at most, for the first tokens of each document that stay
            visible outside the window; `NO_WINDOW` for all other keys. None means no such keys.
        aligned: whether queries and keys are known to be the same tokens, without padding, and their distances those of
            slots wherever one sees the other.
        plain: whether each token is also known to see all up to itself.
        memo: what one layer computes of the positions, and the next layers take. None where nothing is kept.
    """

    query_positions: Tensor
    key_positions: Tensor
    query_index: Tensor
    key_index: Tensor
    query_valid: Tensor
    key_valid: Tensor
    query_segment: Tensor
    key_segment: Tensor
    window: Tensor
    query_resumed: Tensor
    distance_cap: Tensor | None = None
    aligned: bool = False
    plain: bool = False
    memo: dict[Hashable, Any] | None = None

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what depends on the positions and the key alone, computed once in a forward pass.

        It must not hold a view of the channel, nor these positions: either would keep itself alive.
        """
        if self.memo is None:
            return compute()
        if key not in self.memo:
            self.memo[key] = compute()
        found: T = self.memo[key]
        return found

    @property
    def real(self) -> bool:
        """Whether positions, and so distances, are real numbers."""
        return self.query_positions.is_floating_point()

    @property
    def key_kept(self) -> Tensor | None:
        """True for keys that stay visible outside the window, (B|1, L); None means no such keys."""
        return None if self.distance_cap is None else self.distance_cap < NO_WINDOW

    @classmethod
    def causal(
        cls, query_length: int, key_length: int | None = None, device: torch.device | str | None = None
    ) -> Positions:
        """Return the positions of the last `query_length` of `key_length` tokens, causal and without padding.

        Args:
            query_length: Q.
            key_length: L >= Q; None means Q.
            device: device of the tensors.

        Returns:
            Positions with batch dimension 1.
        """
        index = torch.arange(key_length or query_length, dtype=torch.int32, device=device)[None]
        whole = query_length == index.shape[-1]
        return unpack(pack(index[:, -query_length:], index, aligned=whole, plain=whole), query_length)

    def distance(self) -> Tensor:
        """Return query position minus key position, (B|1, 1, Q, L); meaningless for invisible keys.

        Keys that stay visible outside the window are no further than their `distance_cap`.
        """
        distance = self.query_positions[:, :, None] - self.key_positions[:, None, :]
        if self.distance_cap is not None:
            distance = distance.minimum(self.distance_cap[:, None, :])
        return distance[:, None]

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, (B|1, 1, Q, L) bool."""
        lag = self.query_index[:, :, None] - self.key_index[:, None, :]
        same_segment = self.query_segment[:, :, None] == self.key_segment[:, None, :]
        near = lag < self.window[:, :, None]
        if self.key_kept is not None:
            near |= self.key_kept[:, None, :]
        return ((lag >= 0) & near & same_segment & self.key_valid[:, None, :])[:, None]

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (B, H, Q, L) with invisible keys at the dtype's minimum."""
        return logits.masked_fill(~self.visible(), torch.finfo(logits.dtype).min)

    def within(self, window: int, kept_first: int = 0) -> Positions:
        """Return these positions with a sliding window of at most this many tokens.

        The distance to a token that stays visible is counted as if these tokens came directly before the window. So
        distances are those inside a cache of both, as in StreamingLLM (Xiao et al. 2023, section 3.2).

        Args:
            window: number of tokens.
            kept_first: number of tokens at the start of each document that stay visible. Padding does not count.
        """
        if self.aligned and not is_tracing() and self.key_index.shape[-1] <= window:
            return self  # no key is outside the window
        key = ("within", window, kept_first)
        memo: dict[Hashable, Any] | None = None if self.memo is None else self.once(("memo", *key), dict)
        return replace(self.once(key, lambda: self._within(window, kept_first)), memo=memo)

    def _within(self, window: int, kept_first: int) -> Positions:
        inside = replace(self, window=self.window.clamp(max=window), plain=False, memo=None)
        if kept_first == 0:
            return inside
        count = self.key_valid.cumsum(-1)
        starts = torch.nn.functional.pad(self.key_segment[:, 1:] != self.key_segment[:, :-1], (1, 0), value=True)
        # 1 at the first token of a document, int64: without the tokens of other documents
        rank = count - torch.where(starts, count - self.key_valid.long(), 0).cummax(-1).values
        cap = (inside.window + (kept_first - rank)).clamp(max=NO_WINDOW - 1).to(self.key_positions.dtype)
        return replace(inside, distance_cap=cap.where(self.key_valid & (rank <= kept_first), NO_WINDOW), aligned=False)

    def cut(self, queries: slice | Tensor, keys: slice | Tensor) -> Positions:
        """Return the positions of some of the queries and keys, given as slices or indices (N,)."""
        parts: dict[str, Any] = {
            f"{of}_{name}": getattr(self, f"{of}_{name}")[:, chosen]
            for of, chosen in (("query", queries), ("key", keys))
            for name in ("positions", "index", "valid", "segment")
        }
        cap = None if self.distance_cap is None else self.distance_cap[:, keys]
        return replace(self, **parts, distance_cap=cap, aligned=False, plain=False, memo=None)

    def divided_at(self, starts: Tensor) -> Tensor:
        """Return whether a new document starts at every one of these tokens, as a bool tensor ().

        Args:
            starts: (N,) indices of tokens, counted through all rows, one row after the other.
        """
        rows, length = self.query_segment.shape
        segment, starts = self.query_segment.flatten(), starts.long()
        starts_row = starts % length == 0
        starts = starts % (rows * length)  # one row may stand for all
        return (starts_row | (segment[starts] != segment[starts - 1])).all()

    def follow(self, position_ids: Tensor | None, *, check: bool = True) -> Positions:
        """Replace the counted positions by position ids of the caller's own choice (gapped, randomised).

        A row of ids changes nothing if it equals one of three counts: the counted positions, the slots, which a model
        fills in without ids, or the resumed count, which `generate` fills in after a right-padded prompt. So a full
        forward, chunked prefill and decoding agree. Chosen ids are those of the queries. Without a cache the keys are
        the same tokens, so they get the same ids.

        Args:
            position_ids: (B|1, Q) or None; integers or real numbers.
            check: whether to check the values of the ids.

        Returns:
            Positions; `self` if there are no position ids, or none that are known to change anything.

        Raises:
            ValueError: if the ids are no such numbers; if a filled cache comes with chosen ids, or these fall inside a
                document (see `ensure`).
        """
        has_cache = self.query_index.shape[-1] != self.key_index.shape[-1]
        if position_ids is None or (has_cache and not check):
            return self
        chosen = _as_numbers(position_ids, self.query_positions.dtype)

        def differs_from(count: Tensor) -> Tensor:
            return ((chosen != count) & self.query_valid).any(-1, keepdim=True)

        differs = differs_from(self.query_positions) & differs_from(self.query_index) & differs_from(self.query_resumed)
        if has_cache:
            ensure(~differs.any(), GAPPED_POSITIONS)
            return self
        # On CUDA to read waits, once in a forward pass. It is worth it where to know nothing costs more.
        if can_read(differs, waiting=self.aligned) and not differs.any():
            return self
        if check:
            ensure(~(self._falls(chosen) & differs).any(), RESTARTS)
        return replace(
            self,
            query_positions=torch.where(differs, chosen, self.query_positions),
            key_positions=torch.where(differs, chosen, self.key_positions),
            aligned=False,
            memo=None,
        )

    def _falls(self, chosen: Tensor) -> Tensor:
        """Return which tokens but the first have a lower id than the token before in their document, (B, Q - 1) bool.

        Args:
            chosen: position ids (B|1, Q). Those of padding do not count.
        """
        chosen, valid, segment = torch.broadcast_tensors(chosen, self.query_valid, self.query_segment)
        slots = torch.arange(chosen.shape[-1], device=chosen.device)
        before = torch.where(valid, slots, -1).cummax(-1).values[:, :-1]  # slot of the last token; -1 is padding
        lower = chosen[:, 1:] < chosen.gather(-1, before.clamp(min=0))
        same = segment[:, 1:] == segment.gather(-1, before.clamp(min=0))
        return lower & same & valid[:, 1:] & (before >= 0)


@dataclass(frozen=True)
class DensePositions:
    """Distances and visibility of each query and key, for masks that have no compact description.

    Attributes:
        pairs: (B|1, 1, Q, L) distances, int32.
        seen: (B|1, 1|H, Q, L) bool, True where the key is visible; or a float mask that is added to the logits.
        query_positions: (B|1, Q) positions of the queries, int32.
    """

    pairs: Tensor
    seen: Tensor
    query_positions: Tensor
    aligned: ClassVar[bool] = False

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Compute it: a mask may come again after it was changed."""
        return compute()

    @property
    def real(self) -> bool:
        """Whether positions, and so distances, are real numbers."""
        return self.pairs.is_floating_point()

    def distance(self) -> Tensor:
        """Return query position minus key position, (B|1, 1, Q, L)."""
        return self.pairs

    @property
    def key_positions(self) -> Tensor:
        """The positions of the keys, (B|1, L) int32."""
        return self.query_positions[:, :1] - self.pairs[:, 0, 0]

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, (B|1, 1|H, Q, L) bool."""
        return _visible(self.seen)

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (B, H, Q, L) with the mask applied."""
        if self.seen.is_floating_point():
            return logits + self.seen
        return logits.masked_fill(~self.seen, torch.finfo(logits.dtype).min)

    def within(self, window: int, kept_first: int = 0) -> DensePositions:
        """Return these positions with a sliding window of at most this many tokens, by distance.

        Raises:
            ValueError: if tokens at the start are to stay visible. The mask does not say where documents start.
        """
        if kept_first:
            raise ValueError(UNKNOWN_FIRST)
        near = self.pairs < window
        if self.seen.is_floating_point():
            return replace(self, seen=self.seen.masked_fill(~near, torch.finfo(self.seen.dtype).min))
        return replace(self, seen=self.seen & near)

    def cut(self, queries: slice | Tensor, keys: slice | Tensor) -> DensePositions:
        """Return the positions of some of the queries and keys, given as slices or indices (N,)."""
        return DensePositions(
            self.pairs[:, :, queries][..., keys], self.seen[:, :, queries][..., keys], self.query_positions[:, queries]
        )

    def divided_at(self, starts: Tensor) -> Tensor:
        """Return True, as a bool tensor (): the mask itself divides the documents."""
        return torch.ones((), dtype=torch.bool, device=starts.device)

    def follow(self, position_ids: Tensor | None, *, check: bool = True) -> DensePositions:
        """Take distances from position ids, if queries and keys are the same tokens (no cache).

        Args:
            position_ids: (B|1, Q) or None; integers or real numbers.
            check: whether to check the values of the ids.

        Returns:
            DensePositions; with a cache `self`, whose distances are those of the slots in the mask.

        Raises:
            ValueError: if the ids are no such numbers, or show a query a key at a later position (see `ensure`).
        """
        if position_ids is None:
            return self
        ids = _as_numbers(position_ids, self.pairs.dtype)
        if self.pairs.shape[-2] != self.pairs.shape[-1]:
            return self
        pairs = (ids[:, :, None] - ids[:, None, :])[:, None]
        if check:
            ensure(~((pairs < 0) & self.visible()).any(), RESTARTS)
        return replace(self, pairs=pairs, query_positions=ids)


def pack(
    query_index: Tensor,
    key_index: Tensor,
    *,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    query_valid: Tensor | None = None,
    key_valid: Tensor | None = None,
    query_segment: Tensor | None = None,
    key_segment: Tensor | None = None,
    window: int | Tensor | None = None,
    query_resumed: Tensor | None = None,
    aligned: bool = False,
    plain: bool = False,
) -> Tensor:
    """Write the compact channel, see `Positions` for its rows.

    Args:
        query_index: (B|1, Q) integer slots.
        key_index: (B|1, L) integer slots.
        query_positions: (B|1, Q), defaults to the index.
        key_positions: (B|1, L), defaults to the index.
        query_valid: (B|1, Q) bool, defaults to True.
        key_valid: (B|1, L) bool, defaults to True.
        query_segment: (B|1, Q), defaults to one segment.
        key_segment: (B|1, L), defaults to one segment.
        window: sliding window in tokens, an int or a tensor with one number; None means no window.
        query_resumed: (B|1, Q), defaults to the positions.
        aligned: see `Positions.aligned`.
        plain: see `Positions.plain`; only with `aligned`.

    Returns:
        int32 tensor (B|1, 1, ROWS, Q + L), or with ALIGNED_ROWS or PLAIN_ROWS.
    """
    index = torch.cat([query_index, key_index], -1)

    def row(queries: Tensor | None, keys: Tensor | None, default: Tensor) -> Tensor:
        if queries is None or keys is None:
            return default
        batch = max(queries.shape[0], keys.shape[0])
        return torch.cat([queries.expand(batch, -1), keys.expand(batch, -1)], -1)

    position = row(query_positions, key_positions, index)
    rows = (
        position,
        row(query_valid, key_valid, torch.ones_like(index)),
        index,
        row(query_segment, key_segment, torch.zeros_like(index)),
        window.expand_as(index) if isinstance(window, Tensor) else torch.full_like(index, window or NO_WINDOW),
        row(query_resumed, key_index, position),
        *([torch.full_like(index, TAG)] * (1 + aligned + plain)),
    )
    return torch.stack(torch.broadcast_tensors(*(r.to(torch.int32) for r in rows)), 1)[:, None]


def is_compact(mask: Tensor) -> bool:
    """Return whether a mask has the dtype and the rows of the compact channel."""
    return mask.dtype == torch.int32 and mask.ndim == 4 and mask.shape[-2] in (ROWS, ALIGNED_ROWS, PLAIN_ROWS)


def unpack(channel: Tensor, query_length: int) -> Positions:
    """Read the compact channel.

    Args:
        channel: int32 made by `pack`.
        query_length: Q.

    Returns:
        Positions whose tensors, apart from the two bool ones, are views of the channel.
    """
    positions, valid, index, segment, window, resumed, *tags = channel[:, 0].unbind(1)
    q = query_length
    return Positions(
        query_positions=positions[:, :q],
        key_positions=positions[:, q:],
        query_index=index[:, :q],
        key_index=index[:, q:],
        query_valid=valid[:, :q].bool(),
        key_valid=valid[:, q:].bool(),
        query_segment=segment[:, :q],
        key_segment=segment[:, q:],
        window=window[:, :1],
        query_resumed=resumed[:, :q],
        aligned=len(tags) > 1,
        plain=len(tags) > 2,
    )


def pack_dense(query_positions: Tensor, key_positions: Tensor, visible: Tensor) -> Tensor:
    """Write the dense channel, int32 (B|1, 1, Q + 1, L + 1).

    Args:
        query_positions: (B|1, Q) integers.
        key_positions: (B|1, L) integers.
        visible: (B|1, 1, Q, L) bool.
    """
    queries = query_positions.to(torch.int32)[:, None, :, None]
    keys = key_positions.to(torch.int32)[:, None, None]
    pairs = ((queries - keys) << 1) | visible.to(torch.int32)
    rows = torch.cat([pairs, queries.expand(*pairs.shape[:-1], 1)], -1)
    return torch.nn.functional.pad(rows, (0, 0, 0, 1), value=TAG)


def check_padding(mask: object) -> None:
    """Raise ValueError if a 2-D mask numbers documents (see `ensure`). Call it once per forward."""
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.dtype != torch.bool:
        ensure((mask <= 1).all(), NUMBERED)


def check(mask: Tensor, before: int | Tensor) -> None:
    """Refuse a 4-D mask of integers, and a 4-D mask that is not causal. Call it once per forward.

    Args:
        mask: our channel, or a user's own 4-D mask (B|1, 1|H, Q, L).
        before: number of tokens before the first query.

    Raises:
        ValueError: if an integer mask is not a channel, or a query sees a key that comes after it (see `ensure`).
    """
    if mask.dtype == torch.int32:
        ensure((mask[:, :, -1] == TAG).all(), INTEGER_MASK)
    elif mask.dtype == torch.bool or mask.is_floating_point():
        queries, keys = mask.shape[-2:]
        slots = torch.arange(queries, device=mask.device) + before
        own_keys = slots - (slots[-1:] + 1 - keys).clamp(min=0)  # a sliding cache has the last keys only
        later = torch.arange(keys, device=mask.device) > own_keys[:, None]
        ensure(~(_visible(mask) & later).any(), SHOWS_FUTURE)


def _visible(mask: Tensor) -> Tensor:
    """Return which keys are visible in a bool or float mask, as bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def read(mask: Tensor, query_length: int, key_length: int) -> Positions | DensePositions:
    """Read positions from the attention mask.

    Args:
        mask: our compact channel, our dense channel, or a user's own 4-D mask (B|1, 1|H, Q, L): bool (True = visible)
            or float (added to the logits). A user's mask holds no positions, so the slot of the last key that a query
            sees is taken for its position.
        query_length: Q.
        key_length: L.

    Returns:
        Positions or DensePositions.

    Raises:
        ValueError: if the shape or the dtype fits none of these masks.
    """
    if mask.ndim == 4 and mask.dtype == torch.int32:
        if is_compact(mask) and mask.shape[-1] == query_length + key_length:
            if torch.compiler.is_compiling():
                return unpack(mask, query_length)
            state = (query_length, None if mask.is_inference() else mask._version)
            made: tuple[Any, Positions] | None = getattr(mask, MADE, None)
            if made is None or made[0] != state:
                # Of a copy: views of the channel would keep it alive, and it them.
                made = state, replace(unpack(mask.clone(), query_length), memo={})
                setattr(mask, MADE, made)
            return made[1]
        if mask.shape[-2:] == (query_length + 1, key_length + 1):
            pairs = mask[:, :, :-1, :-1]
            return DensePositions(pairs >> 1, (pairs & 1).bool(), mask[:, 0, :-1, -1])
    if mask.ndim == 4 and mask.shape[-2] == query_length and mask.shape[-1] >= key_length:
        mask = mask[..., :key_length]
        if mask.dtype == torch.bool or mask.is_floating_point():
            visible = _visible(mask)
            slots = torch.arange(key_length, dtype=torch.int32, device=mask.device)
            last_seen = torch.where(visible.any(1, keepdim=True), slots, -1).amax(-1, keepdim=True)
            return DensePositions(last_seen - slots, mask, last_seen[:, 0, :, 0])
    raise ValueError(
        f"an attention mask of shape {tuple(mask.shape)} and dtype {mask.dtype} does not fit {query_length} "
        f"queries and {key_length} keys: pass a 2-D mask (batch, keys), or a 4-D bool or float mask (batch, 1, "
        "queries, keys)"
    )
