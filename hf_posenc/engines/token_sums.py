"""Forget gates and biases of keys as one number for each query and one for each key."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.attention_call import Call
from ..core.positions import DensePositions


def why_no_sums(call: Call) -> str | None:
    """Return why the numbers of a call's tokens are no `sums`, or None if they are."""
    if call.log_gates is None:
        return None
    if isinstance(call.positions, DensePositions) or call.positions.key_kept is not None:
        return "a query may see tokens before some that it does not see, and forget gates count those it sees"
    return None


def sums(call: Call) -> tuple[Tensor | None, Tensor]:
    """Return a number for each query and one for each key, whose sum is what tokens add to a score.

    The bias of gates is `G_i - G_j`, with sums `G` over tokens. They are counted from the last query, in float64.

    Args:
        call: a call with such numbers.

    Returns:
        Numbers of the queries (B, H, Q), without gradients, because they change no weight; None where there are none,
        or where they are those of the keys, negated. And numbers of the keys (B, H, L).
    """
    positions, own = call.positions, None
    if call.log_gates is None:
        assert call.key_bias is not None
        return None, call.key_bias
    assert not isinstance(positions, DensePositions)
    gates = call.log_gates if positions.aligned else call.log_gates.masked_fill(~positions.key_valid[:, None], 0)
    added = gates.cumsum(-1, dtype=torch.float64)
    if positions.aligned:
        of_keys = added[..., -1:] - added
        if call.key_bias is not None:
            own = -of_keys.detach()
    else:
        slots = torch.searchsorted(positions.key_index.contiguous(), positions.query_index.contiguous(), right=True)
        slots = (slots - 1).clamp(min=0)[:, None].expand(*call.query.shape[:3])
        of_keys = added.gather(-1, slots[..., -1:]) - added
        own = -of_keys.detach().gather(-1, slots)
    return own, of_keys if call.key_bias is None else of_keys + call.key_bias
