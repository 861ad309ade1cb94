"""Logits of a model in pieces, and losses of tokens, in memory that does not grow with vocabulary times length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

LOGIT_ROWS = 1024
"""Number of tokens whose logits exist at once. With a vocabulary of 128k they take half a gigabyte in float32."""
TRIAL_TOKENS = 8
"""Number of tokens in the trial that decides whether the language-model head can be called separately."""
IGNORED = -100
"""Label or target that no loss counts, as in transformers."""

LogitsOf = Callable[[Tensor, slice], Iterator[Tensor]]
"""Windows (B, T) and a slice of positions -> logits (R, V) in pieces, see `logits_function`."""


def token_losses(pieces: Iterable[Tensor], targets: Tensor) -> Iterator[Tensor]:
    """Yield the losses of targets (N,) piece by piece, in nats, float32 or float64; `pieces` are logits (R, V)."""
    done = 0
    for logits in pieces:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        yield F.cross_entropy(wide, targets[done : done + len(wide)], reduction="none", ignore_index=IGNORED)
        done += len(wide)


def logits_function(model: nn.Module, tokens: Tensor) -> LogitsOf:
    """Return a function from windows `(B, T)` and a slice of positions to logits in pieces.

    The pieces are rows `(R, V)`, position by position and window by window. The logits of a long window take far more
    memory than the rest of the forward pass. So the head is called separately, on `LOGIT_ROWS` positions at a time, if
    a short trial gives the logits of the model. It does not if a family scales or caps logits after the head. If FSDP
    or ZeRO-3 has sharded the model, all processes must call its parts equally often, although their windows can differ
    in length. Then the logits are computed at once and only yielded in pieces.

    Args:
        model: the model, in eval mode.
        tokens: `(N,)`; the first few are the text of the trial.
    """

    def whole(windows: Tensor, positions: slice) -> Iterator[Tensor]:
        logits = model(input_ids=windows, use_cache=False).logits
        yield from logits[:, positions].flatten(0, 1).split(LOGIT_ROWS)

    base, head = getattr(model, "base_model", None), getattr(model, "get_output_embeddings", lambda: None)()
    sharded = any(isinstance(weight, DTensor) or hasattr(weight, "ds_id") for weight in model.parameters())
    if base is None or base is model or head is None or sharded:
        return whole
    trial = tokens[:TRIAL_TOKENS].to(next(model.parameters()).device)[None]

    def hidden_states(windows: Tensor) -> Any:
        return getattr(base(input_ids=windows, use_cache=False), "last_hidden_state", None)

    def in_pieces(windows: Tensor, positions: slice) -> Iterator[Tensor]:
        hidden = hidden_states(windows)[:, positions]
        yield from (head(rows) for rows in hidden.flatten(0, 1).split(LOGIT_ROWS))

    hidden = hidden_states(trial)
    if hidden is None:
        return whole
    expected = model(input_ids=trial, use_cache=False).logits
    return in_pieces if torch.allclose(head(hidden), expected, rtol=1e-5, atol=1e-5) else whole
