"""The causal mask, left padding, packing and the cache, each measured by the change that it must not make."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .report import Outcome
from .runs import Runner, change, logits_of, tolerance

LENGTH = 20
"""Number of tokens."""

CUT = 12
"""Number of tokens in the first part: of the past, of the first document, of the prompt."""

PADDING = 4
"""Number of padding tokens."""


def mask_outcome(runner: Runner) -> Outcome:
    """Change tokens of the future, and compare the logits of the past."""
    tokens = runner.tokens(LENGTH)
    other = torch.cat([tokens[:, :CUT], runner.tokens(LENGTH - CUT)], 1)
    leak = change(runner.logits(other)[:, :CUT], runner.logits(tokens)[:, :CUT])
    if leak <= tolerance(runner.model.dtype):
        return Outcome("causal mask", True, f"other tokens of the future change logits of the past by {leak:.1e}", leak)
    return Outcome(
        "causal mask",
        False,
        f"other tokens of the future change logits of the past by {leak:.1%}: queries see later tokens",
        leak,
        "make the causal mask and hand it to every attention, or keep is_causal=True where the mask is left to the "
        "kernel; loss and perplexity of this model mean nothing until then",
    )


def padding_outcome(runner: Runner, counts_slots: bool) -> Outcome:
    """Put padding on the left, with a mask and matching position ids, and compare the logits of the tokens.

    Args:
        runner: runs the model.
        counts_slots: whether the family is known to count padding as tokens.
    """
    tokens = runner.tokens(LENGTH)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (PADDING, 0))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = torch.nn.functional.pad(tokens, (PADDING, 0))
    logits = runner.logits(padded, attention_mask=mask, position_ids=positions)[:, PADDING:]
    off = change(logits, runner.logits(tokens))
    if off <= tolerance(runner.model.dtype):
        return Outcome("left padding", True, f"{PADDING} padding tokens change logits by {off:.1e}", off)
    if counts_slots:
        reason = f"the queries of this model type grow with the slot, which counts padding; logits change by {off:.1%}"
        return Outcome("left padding", None, reason, off)
    return Outcome(
        "left padding",
        False,
        f"{PADDING} padding tokens on the left change logits by {off:.1%}, with attention_mask and position_ids given",
        off,
        "hand attention_mask and position_ids on to the layers; until then generate in batches of equal length",
    )


def packing_outcome(runner: Runner, reason_against: str | None) -> Outcome:
    """Change the first of two documents in a row, and compare the logits of the second one.

    Args:
        runner: runs the model.
        reason_against: why the model does not claim to part documents; None if it does.
    """
    first, second = runner.tokens(CUT), runner.tokens(LENGTH - CUT)
    positions = torch.cat([torch.arange(CUT), torch.arange(LENGTH - CUT)]).to(first.device)[None]
    ids = positions.expand(4, 1, -1) if runner.coordinates else positions  # of the text first

    def second_after(document: Tensor) -> Tensor:
        return runner.logits(torch.cat([document, second], 1), position_ids=ids)[:, CUT:]

    leak = change(second_after(runner.tokens(CUT)), second_after(first))
    if leak <= tolerance(runner.model.dtype):
        found = f"another first document changes logits of the second one by {leak:.1e}"
        return Outcome("packing", True, found, leak)
    if reason_against is not None:
        reason = f"{reason_against}: another first document changes logits of the second one by {leak:.1%}"
        return Outcome("packing", None, reason, leak)
    return Outcome(
        "packing",
        False,
        f"documents that are packed by position_ids see each other: another first document changes logits of the "
        f"second one by {leak:.1%}",
        leak,
        "hand position_ids to create_causal_mask and to the attention, without an attention_mask; until then do not "
        "pack (packing=False, padding_free=False)",
    )


def cache_outcome(runner: Runner, border: int | None = None, recomputes: bool = False) -> Outcome:
    """Compute tokens one by one with a cache, and compare with a run without a cache.

    Args:
        runner: runs the model.
        border: length in tokens at which a scaling changes, which the steps cross; None begins at position 0.
        recomputes: whether `generate` of the model may drop the cache by itself.
    """
    # The prompt ends before the border.
    start, about = (0, "cache") if border is None else (max(0, border - 16), "stale keys")
    tokens = runner.tokens(LENGTH)
    positions = start + torch.arange(LENGTH, device=tokens.device)[None]
    output, logits = _step(runner, tokens, positions, slice(0, CUT), None)
    if getattr(output, "past_key_values", None) is None:
        return Outcome(about, None, "the model returns no cache (past_key_values)")
    steps = [logits]
    for n in range(CUT, LENGTH):
        output, logits = _step(runner, tokens, positions, slice(n, n + 1), output.past_key_values)
        steps.append(logits)
    off = change(torch.cat(steps, 1)[:, CUT:], runner.at(tokens, positions)[:, CUT:])
    where = f" at positions {start + CUT} to {start + LENGTH - 1}" if border else ""
    if off <= tolerance(runner.model.dtype):
        return Outcome(about, True, f"cached and recomputed logits differ by {off:.1e}{where}", off)
    if recomputes:
        reason = (
            f"generate of this class prepares its inputs itself and may drop the cache there; kept, it is {off:.1%} off"
        )
        return Outcome(about, None, reason, off)
    if border:
        found = f"cached and recomputed logits differ by {off:.1%}{where}: cached keys were turned by other frequencies"
        advice = (
            "keys are stale once the scaling changes with the length: use a scaling that does not (yarn, linear), "
            "generate with use_cache=False across this length, or fix the length beforehand"
        )
    else:
        found = f"cached and recomputed logits differ by {off:.1%}"
        advice = "generate with use_cache=False, and compare positions and masks of a step with those of a whole run"
    return Outcome(about, False, found, off, advice)


def _step(runner: Runner, tokens: Tensor, positions: Tensor, part: slice, cache: object) -> tuple[Any, Tensor]:
    mask = torch.ones_like(tokens[:, : part.stop])
    output = runner.output(
        tokens[:, part],
        position_ids=positions[:, part],
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
    )
    return output, logits_of(output)


def weights_outcomes(runner: Runner) -> Iterator[Outcome]:
    """Yield whether all weights and buffers are numbers, and whether all logits are."""
    weights, buffers = list(runner.model.named_parameters()), list(runner.model.named_buffers())
    tensors = weights + buffers
    wrong = [name for name, weight in weights if weight.is_floating_point() and not torch.isfinite(weight).all()]
    wrong += [name for name, buffer in buffers if buffer.isnan().any()]  # masks hold infinities
    if wrong:
        some = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        yield Outcome(
            "weights",
            False,
            f"{len(wrong)} of {len(tensors)} tensors have values that are NaN or infinite: {some}",
            float(len(wrong)),
            "load the checkpoint again, and look for missing weights, or an overflow in half precision when it was "
            "saved or trained",
        )
    else:
        yield Outcome("weights", True, f"all values of {len(tensors)} tensors are numbers", 0.0)
    logits = runner.logits(runner.tokens(LENGTH))
    count = int(logits.isnan().sum())
    if count:
        yield Outcome(
            "logits",
            False,
            f"{count} of {logits.numel()} logits are NaN",
            float(count),
            "repair the weights first" if wrong else "run in float32 or bfloat16: float16 overflows in some models",
        )
    else:
        yield Outcome("logits", True, "all logits are numbers", 0.0)
