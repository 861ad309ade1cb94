"""Where every query and key sits, and what it may see: the compact position channel.

The attention mask is the only argument that every transformers model hands from its top to each attention layer,
through checkpointing, device hooks, caches and `generate`. We use it to carry positions. The channel is one int32
tensor of shape (B|1, 1, ROWS, Q + L): the first Q columns describe the queries, the last L the keys. It grows linearly
with the sequence; nothing of shape (Q, L) exists until an engine asks for it.

Mask functions that no such description fits travel in a dense form, (B|1, 1, Q + 1, L + 1) int32. Each of Q rows holds
`(distance << 1) | visible` for the keys, then the position of the query. The last row of either form is a tag, which no
mask of a user's own has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ROWS = 7
"""Rows of the channel: position, validity, index (causal order), segment (packed sequence), window, resumed count, tag.
"""

TAG = int.from_bytes(b"PosE", "big")
"""What the last row holds."""

NO_WINDOW = torch.iinfo(torch.int32).max
"""Window of a layer without a sliding window: larger than any distance."""

GAPPED_POSITIONS = (
    "position_ids do not continue the positions of the cached keys, which cannot be recovered from the cache. Pass the "
    "position_ids that transformers would choose itself (or none), or run the whole sequence in one forward "
    "without a cache."
)

INTEGER_MASK = (
    "a 4-D attention mask of integers is no mask to any attention of transformers: pass a bool mask (True = visible) "
    "or a float mask (added to the scores)"
)

FRACTIONS = "position_ids count tokens, so they must be integers, not {dtype}"

SHOWS_FUTURE = (
    "the attention mask shows a query keys that come after it, and no scheme here defines distances to those: pass a "
    "causal mask (False, the dtype's minimum or -inf wherever the key comes later), or unpatch the model"
)


def ensure(holds: Tensor, message: str) -> None:
    """Raise an error unless something holds: ValueError, or RuntimeError, by the device, where waiting would stall it.

    Args:
        holds: one bool, on any device.
        message: of the error.
    """
    if torch.compiler.is_compiling() or holds.is_cuda:
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def _counts(position_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return position ids in another integer dtype; ValueError if they are no integers."""
    if position_ids.is_floating_point() or position_ids.is_complex() or position_ids.dtype == torch.bool:
        raise ValueError(FRACTIONS.format(dtype=position_ids.dtype))
    return position_ids.to(dtype)


@dataclass(frozen=True)
class Positions:
    """Positions, order and visibility of Q queries and L keys. Integer tensors; `key_valid` and `query_valid` are bool.

    Attributes:
        query_positions: (B|1, Q) positions that distances are measured between.
        key_positions: (B|1, L) likewise.
        query_index: (B|1, Q) slots in the sequence: the causal order, and what a sliding window counts.
        key_index: (B|1, L) likewise.
        query_valid: (B|1, Q) False for padding.
        key_valid: (B|1, L) False for padding: seen by nobody.
        query_segment: (B|1, Q) document number of packed sequences.
        key_segment: (B|1, L) likewise; keys of another segment are invisible.
        window: (B|1, 1) a key is visible while its index is less than `window` behind the query's.
        query_resumed: (B|1, Q) what `generate` counts where it goes on after padding: 1 at the first token behind the
            last padding. Before that padding, the position.
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

    @classmethod
    def causal(
        cls, query_length: int, key_length: int | None = None, device: torch.device | str | None = None
    ) -> Positions:
        """Plain causal attention of the last `query_length` of `key_length` tokens, without padding.

        Args:
            query_length: Q.
            key_length: L >= Q; None means Q.
            device: where the tensors are made.

        Returns:
            Positions with batch dimension 1.
        """
        key_length = query_length if key_length is None else key_length
        index = torch.arange(key_length, dtype=torch.int32, device=device)[None]
        return unpack(pack(index[:, key_length - query_length :], index), query_length)

    def distance(self) -> Tensor:
        """Return query position minus key position, (B|1, 1, Q, L) int32; meaningless where the key is invisible."""
        return (self.query_positions[:, :, None] - self.key_positions[:, None, :])[:, None]

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, (B|1, 1, Q, L) bool."""
        lag = self.query_index[:, :, None] - self.key_index[:, None, :]
        same_segment = self.query_segment[:, :, None] == self.key_segment[:, None, :]
        return ((lag >= 0) & (lag < self.window[:, :, None]) & same_segment & self.key_valid[:, None, :])[:, None]

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (B, H, Q, L) with invisible keys at the dtype's minimum."""
        return logits.masked_fill(~self.visible(), torch.finfo(logits.dtype).min)

    def within(self, window: int) -> Positions:
        """Return the same with a sliding window of at most this many tokens."""
        return replace(self, window=self.window.clamp(max=window))

    def divided_at(self, starts: Tensor) -> Tensor:
        """Return whether a new document starts at each of some tokens, one bool.

        Args:
            starts: (N,) integers that count the tokens of all rows, one row after the other.
        """
        rows, length = self.query_segment.shape
        segment, starts = self.query_segment.flatten(), starts.long()
        first = starts % length == 0  # of a row
        starts = starts % (rows * length)  # one row may stand for all
        return (first | (segment[starts] != segment[starts - 1])).all()

    def follow(self, position_ids: Tensor | None) -> Positions:
        """Let position ids that the caller chose himself (gapped, randomised) replace the counted ones.

        A row of ids changes nothing if the whole row equals the counted positions. Nor does it change anything if it
        equals the slot index, which a model fills in when it was given no ids, or the resumed count, which `generate`
        fills in behind a right-padded prompt. So a full forward, chunked prefill and decoding agree. Chosen ids are
        known for the queries only. They stand for the keys too as long as both are the same tokens (no cache yet).

        Args:
            position_ids: (B|1, Q) or None.

        Returns:
            Positions; `self` if there are no position ids.

        Raises:
            ValueError: for ids that are no integers; for chosen ids with a filled cache (`RuntimeError`, raised by the
                device, while compiling or on CUDA).
        """
        if position_ids is None:
            return self
        chosen = _counts(position_ids, self.query_positions.dtype)

        def other_than(candidate: Tensor) -> Tensor:
            return ((chosen != candidate) & self.query_valid).any(-1, keepdim=True)

        differs = other_than(self.query_positions) & other_than(self.query_index) & other_than(self.query_resumed)
        if self.query_index.shape[-1] == self.key_index.shape[-1]:
            return replace(
                self,
                query_positions=torch.where(differs, chosen, self.query_positions),
                key_positions=torch.where(differs, chosen, self.key_positions),
            )
        ensure(~differs.any(), GAPPED_POSITIONS)
        return self


@dataclass(frozen=True)
class DensePositions:
    """Distances and visibility given pair by pair, for masks that have no compact description.

    Attributes:
        pairs: (B|1, 1, Q, L) distances, int32.
        seen: (B|1, 1|H, Q, L) bool, True where the key is visible; or a float mask that is added to the logits.
        query_positions: (B|1, Q) int32.
    """

    pairs: Tensor
    seen: Tensor
    query_positions: Tensor

    def distance(self) -> Tensor:
        """Return query position minus key position, (B|1, 1, Q, L) int32."""
        return self.pairs

    def visible(self) -> Tensor:
        """Return which keys each query may attend to, (B|1, 1|H, Q, L) bool."""
        return _seen(self.seen)

    def mask(self, logits: Tensor) -> Tensor:
        """Return the logits (B, H, Q, L) with the mask applied."""
        if self.seen.is_floating_point():
            return logits + self.seen
        return logits.masked_fill(~self.seen, torch.finfo(logits.dtype).min)

    def within(self, window: int) -> DensePositions:
        """Return the same with a sliding window of at most this many tokens, counted by the distances."""
        near = self.pairs < window
        if self.seen.is_floating_point():
            return replace(self, seen=self.seen.masked_fill(~near, torch.finfo(self.seen.dtype).min))
        return replace(self, seen=self.seen & near)

    def divided_at(self, starts: Tensor) -> Tensor:
        """Return True, (): a mask that is given pair by pair says all there is to say of documents."""
        return torch.ones((), dtype=torch.bool, device=starts.device)

    def follow(self, position_ids: Tensor | None) -> DensePositions:
        """Measure distances between the given position ids where queries and keys are the same tokens.

        Args:
            position_ids: (B|1, Q) or None.

        Returns:
            DensePositions. With a cache the distances stay those of the slots that the mask shows.

        Raises:
            ValueError: for ids that are no integers.
        """
        if position_ids is None:
            return self
        ids = _counts(position_ids, self.pairs.dtype)
        if self.pairs.shape[-2] != self.pairs.shape[-1]:
            return self
        return replace(self, pairs=(ids[:, :, None] - ids[:, None, :])[:, None], query_positions=ids)


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
) -> Tensor:
    """Write the compact channel.

    Args:
        query_index: (B|1, Q) integer slots; key_index: (B|1, L).
        key_index: (B|1, L) integer slots.
        query_positions: (B|1, Q), defaults to the index.
        key_positions: (B|1, L), defaults to the index.
        query_valid: (B|1, Q) bool, defaults to True.
        key_valid: (B|1, L) bool, defaults to True.
        query_segment: (B|1, Q), defaults to one segment.
        key_segment: (B|1, L), defaults to one segment.
        window: sliding window in tokens, a number or a tensor of one; None means none.
        query_resumed: (B|1, Q), defaults to the positions.

    Returns:
        int32 tensor (B|1, 1, ROWS, Q + L).
    """
    index = torch.cat([query_index, key_index], -1)

    def row(queries: Tensor | None, keys: Tensor | None, default: Tensor) -> Tensor:
        if queries is None or keys is None:
            return default
        batch = max(queries.shape[0], keys.shape[0])
        return torch.cat([queries.expand(batch, -1), keys.expand(batch, -1)], -1)

    places = row(query_positions, key_positions, index)
    rows = (
        places,
        row(query_valid, key_valid, torch.ones_like(index)),
        index,
        row(query_segment, key_segment, torch.zeros_like(index)),
        window.expand_as(index) if isinstance(window, Tensor) else torch.full_like(index, window or NO_WINDOW),
        row(query_resumed, key_index, places),
        torch.full_like(index, TAG),
    )
    return torch.stack(torch.broadcast_tensors(*(r.to(torch.int32) for r in rows)), 1)[:, None]


def unpack(channel: Tensor, query_length: int) -> Positions:
    """Read the compact channel.

    Args:
        channel: int32 (B|1, 1, ROWS, Q + L) made by `pack`.
        query_length: Q.

    Returns:
        Positions whose tensors are views of the channel.
    """
    positions, valid, index, segment, window, resumed, _ = channel[:, 0].unbind(1)
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
    )


def pack_dense(query_positions: Tensor, key_positions: Tensor, visible: Tensor) -> Tensor:
    """Write the dense form, int32 (B|1, 1, Q + 1, L + 1).

    Args:
        query_positions: (B|1, Q) integers.
        key_positions: (B|1, L) integers.
        visible: (B|1, 1, Q, L) bool.
    """
    own, others = (each.to(torch.int32)[:, None] for each in (query_positions, key_positions))
    pairs = ((own[..., None] - others[..., None, :]) << 1) | visible.to(torch.int32)
    rows = torch.cat([pairs, own[..., None].expand(*pairs.shape[:-1], 1)], -1)
    return torch.nn.functional.pad(rows, (0, 0, 0, 1), value=TAG)


def check(mask: Tensor, before: int | Tensor) -> None:
    """Refuse a user's 4-D mask that is not what it looks like; call it once per forward.

    Args:
        mask: our channel, or a user's own 4-D mask (B|1, 1|H, Q, L).
        before: number of tokens before the first query.

    Raises:
        ValueError: for integers that are no channel of ours, and if a query sees a key that comes after it
            (`RuntimeError`, raised by the device, while compiling or on CUDA).
    """
    if mask.dtype == torch.int32:
        ensure((mask[:, :, -1] == TAG).all(), INTEGER_MASK)
    elif mask.dtype == torch.bool or mask.is_floating_point():
        queries, keys = mask.shape[-2:]
        slots = torch.arange(queries, device=mask.device) + before
        own = slots - (slots[-1:] + 1 - keys).clamp(min=0)  # a sliding cache has the last keys only
        later = torch.arange(keys, device=mask.device) > own[:, None]
        ensure(~(_seen(mask) & later).any(), SHOWS_FUTURE)


def _seen(mask: Tensor) -> Tensor:
    """Return which keys a user's own mask shows, bool."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min


def read(mask: Tensor, query_length: int, key_length: int) -> Positions | DensePositions:
    """Read whatever arrived in place of an attention mask.

    Args:
        mask: our compact channel, our dense form, or a user's own 4-D mask (B|1, 1|H, Q, L): bool (True = visible) or
            float (added to the logits). A 4-D mask of the user's says nothing about positions, so a query sits in the
            slot of the last key that it sees.
        query_length: Q.
        key_length: L.

    Returns:
        Positions or DensePositions.

    Raises:
        ValueError: if the shape fits none of these.
    """
    if mask.ndim == 4 and mask.dtype == torch.int32:
        if mask.shape[-2:] == (ROWS, query_length + key_length):
            return unpack(mask, query_length)
        if mask.shape[-2:] == (query_length + 1, key_length + 1):
            pairs = mask[:, :, :-1, :-1]
            return DensePositions(pairs >> 1, (pairs & 1).bool(), mask[:, 0, :-1, -1])
    if mask.ndim == 4 and mask.shape[-2] == query_length and mask.shape[-1] >= key_length:
        mask = mask[..., :key_length]
        if mask.dtype == torch.bool or mask.is_floating_point():
            seen = _seen(mask)
            slots = torch.arange(key_length, dtype=torch.int32, device=mask.device)
            last_seen = torch.where(seen.any(1, keepdim=True), slots, -1).amax(-1, keepdim=True)
            return DensePositions(last_seen - slots, mask, last_seen[:, 0, :, 0])
    raise ValueError(
        f"an attention mask of shape {tuple(mask.shape)} and dtype {mask.dtype} does not fit {query_length} "
        "queries and "
        f"{key_length} keys: pass a 2-D mask (batch, keys), or a 4-D bool or float mask (batch, 1, queries, keys)"
    )
