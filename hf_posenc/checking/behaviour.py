"""Numbers, masks, padding, packing, caches, far positions and windows: each by the change that it must not make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from ..model.watch import LayerCall, recorded
from .report import Outcome, in_words, joined
from .runner import NotMeasuredError, again, cache_of, change
from .subject import Subject

LENGTH = 20
"""Number of tokens."""

CUT = 12
"""Number of tokens in the first part: of the past, of the first document, of the prompt."""

PADDING = 4
"""Number of padding tokens."""

CHUNK = 4
"""Number of tokens of a cached step that has several."""

STEPS = (LENGTH - 3, 1, 1, 1)
"""Numbers of tokens of a prompt and a few cached steps."""

LONGEST_WINDOW = 592
"""Longest sliding window in tokens that a run goes past."""

LOUD = 100.0
"""Factor of the hidden states of a token that must be seen, or must not, so that little attention is enough."""

SEEN = 1e-5
"""Relative change of what an attention returns from which it has seen a token."""


def number_outcomes(runner: Subject) -> Iterator[Outcome]:
    """Yield whether all weights and buffers are numbers, and whether all logits are."""
    weights, buffers = dict(runner.model.named_parameters()), dict(runner.model.named_buffers())
    wrong = [name for name, weight in weights.items() if weight.is_floating_point() and not weight.isfinite().all()]
    wrong += [name for name, buffer in buffers.items() if buffer.isnan().any()]  # masks hold infinities
    of = f"of {len(weights) + len(buffers)} tensors"
    some = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    found = f"{len(wrong)} {of} hold NaN or infinite values: {some}" if wrong else f"all values {of} are numbers"
    yield Outcome("weights", not wrong, found, float(len(wrong)))
    logits = runner.logits(runner.tokens(LENGTH))
    count = int(logits.isnan().sum())
    found = f"{count} of {logits.numel()} logits are NaN" if count else "all logits are numbers"
    yield Outcome("logits", not count, found, float(count))


def mask_outcome(runner: Subject, about: str) -> Outcome:
    """Change tokens of the future, and compare the logits of the past."""
    tokens = runner.tokens(LENGTH)
    logits = runner.logits(tokens)
    off = 0.0
    for cut in (7, LENGTH - 1):  # primes, because a block of tokens that see each other may end at one of them
        other = torch.cat([tokens[:, :cut], runner.tokens(LENGTH - cut)], 1)
        off = max(off, change(runner.logits(other)[:, :cut], logits[:, :cut]))
    return runner.judged(about, "other tokens of the future change logits of the past by {}", off)


def padding_outcome(runner: Subject, about: str) -> Outcome:
    """Put padding on the left of a row, and compare the logits with those of the row alone.

    This is `left padding` for a single row, `batch` for two, `padded cache` for two whose last tokens are computed one
    by one, with a cache.
    """
    alone, excuse, base = about == "left padding", None, runner.base
    if alone and base is not None and base.scaled_by_position and not base.has_temperature:
        excuse = "the queries of this model type grow with the slot, which counts padding"
    short, long = runner.tokens(LENGTH if alone else LENGTH - PADDING), runner.tokens(LENGTH)
    is_token = torch.nn.functional.pad(torch.ones_like(short), (PADDING, 0))
    padded = torch.nn.functional.pad(short, (PADDING, 0)), is_token, (is_token.cumsum(-1) - 1).clamp(min=0)
    # The padded row comes first, because with its mask or positions the distances in the other row change.
    rows = [padded, (long, torch.ones_like(long), runner.positions(LENGTH))][: 1 if alone else 2]
    tokens, mask, positions = (torch.cat(each) for each in zip(*rows, strict=True))
    if about == "padded cache":
        logits = runner.in_steps(tokens, STEPS, positions, mask)
    else:
        logits = runner.logits(tokens, position_ids=positions, attention_mask=mask)
    off = change(logits[:1, PADDING:], runner.logits(short))
    found = f"{PADDING} padding tokens on the left, with mask and position ids, change logits by {{}}"
    if not alone:
        where = "in cached steps" if about == "padded cache" else "in one run"
        found = f"two rows, one with {PADDING} padding tokens, {where}, differ from each row alone by {{}}"
        off = max(off, change(logits[1:], runner.logits(long)))
    return runner.judged(about, found, off, excuse)


def packing_outcome(runner: Subject, about: str) -> Outcome:
    """Change the first of two documents in a row, and compare the logits of the second one."""
    excuse = None
    if runner.base is None:
        excuse = "no family says whether this model type parts documents by position_ids"
    elif runner.base.family.hybrid or runner.base.family.joins_documents:
        excuse = "this model type does not part documents by position_ids"
    documents, second = [runner.tokens(CUT), runner.tokens(CUT)], runner.tokens(LENGTH - CUT)
    positions = torch.cat([runner.positions(CUT), runner.positions(LENGTH - CUT)], 1)
    ids = positions.expand(4, 1, -1) if runner.coordinates else positions  # of the text first
    one, other = (runner.logits(torch.cat([each, second], 1), position_ids=ids)[:, CUT:] for each in documents)
    found = "another first document, parted by position_ids, changes logits of the second one by {}"
    return runner.judged(about, found, change(other, one), excuse)


def default_outcome(runner: Subject, about: str) -> Outcome:
    """Leave out position ids and mask, and compare the logits with those of a run that gets them."""
    tokens = runner.tokens(LENGTH)
    expected = runner.at(tokens, runner.positions(LENGTH))
    where, off = "", change(runner.logits(tokens), expected)
    if runner.answers["cache"] and off <= runner.tolerance:
        where, off = " of cached steps", change(runner.in_steps(tokens, STEPS), expected)
    return runner.judged(about, f"without position ids and mask, logits{where} differ by {{}}", off)


def cache_outcome(runner: Subject, about: str) -> Outcome:
    """Compute tokens in steps with a cache, and compare with a run without a cache.

    This is `cache` for steps of one token, `chunk` for a step of several, `stale keys` for steps of one token that
    cross the length from which a scaling changes.
    """
    sizes, start, excuse = (CUT, *[1] * (LENGTH - CUT)), 0, None
    if about == "chunk":
        windows = () if runner.base is None else runner.base.windows.values()
        sizes = max(CUT, 1 + max((each for each in windows if each <= longest_window(runner)), default=0)), CHUNK
        if runner.base is not None and runner.base.family.hybrid:
            excuse = "layers with a state may be made to go on by single tokens"
    elif about == "stale keys":
        start = max(0, runner.changing.original_length - 16) if runner.changing else 0
        prepares = getattr(type(runner.model), "prepare_inputs_for_generation", None)
        if prepares is not getattr(GenerationMixin, "prepare_inputs_for_generation", None):
            excuse = "generate of this class prepares its inputs itself and may drop the cache there; if it is kept"
    prompt, tokens, positions = sizes[0], runner.tokens(sum(sizes)), runner.positions(sum(sizes), start)
    steps = runner.in_steps(tokens, sizes, positions, torch.ones_like(tokens))
    off = change(steps[:, prompt:], runner.at(tokens, positions)[:, prompt:])
    found = f"steps of {sizes[1]} behind {prompt} cached tokens change their logits by {{}}"
    where = f" at positions {start + prompt} to {start + sum(sizes) - 1}" if start else ""
    return runner.judged(about, found + where, off, excuse)


def crop_outcome(runner: Subject, about: str) -> Outcome:
    """Remove the last tokens from a cache, go on with others, and compare with a run without a cache."""
    prompt, removed = 6, 2  # few, because a cache that has lost tokens behind its window cannot be cropped
    kept, tokens = prompt - removed, runner.tokens(CUT)
    cache = cache_of(runner.output(torch.cat([tokens[:, :kept], runner.tokens(removed)], 1), use_cache=True))
    if not hasattr(cache, "crop"):
        raise NotMeasuredError(f"a {type(cache).__name__} has no crop")
    cache.crop(-removed)
    # Without position ids, because with them a counter of the model's own may not show.
    steps = runner.in_steps(tokens[:, kept:], [1] * (CUT - kept), cache=cache)
    found = f"after removing {removed} of {prompt} tokens from the cache, logits of cached steps differ by {{}}"
    return runner.judged(about, found, change(steps, runner.logits(tokens)[:, kept:]))


def position_outcomes(runner: Subject, about: str) -> Iterator[Outcome]:
    """Compare runs at position ids that end at the trained length, and go past it, with others.

    Position ids from some position on must not act as if they were clamped there. And where a shift of all positions by
    one changes no logits, one to the trained length must not either.
    """
    length, base = runner.length, runner.base
    # No scheme, temperature or scaling is meant to change logits at far positions; then only queries and keys turn.
    steady = base is not None and not runner.patch and not base.scaled_by_position and runner.changing is None
    relative = base is not None and steady and not base.has_table and base.family.rotation.norms_after is None
    if length is None:
        raise NotMeasuredError("the config does not say the trained length")
    tokens, ids = runner.tokens(LENGTH), runner.positions(LENGTH)
    begin = runner.at(tokens, ids)
    counts = base is not None and base.family.convolves_keys and bool(base.scaled_by_position)
    if counts or change(runner.at(tokens, torch.zeros_like(ids)), begin) <= runner.tolerance:
        raise NotMeasuredError("position_ids change no logits: there are none, or the model counts tokens itself")
    by_one = change(runner.at(tokens, ids + 1), begin)
    if relative and runner.answers["rotation"] and by_one > runner.tolerance:
        found = f"a shift of all positions by 1 changes logits by {by_one:.1%}, though queries and keys turn rightly"
        yield Outcome(about, False, found, by_one)
        return
    for start in (max(0, length - LENGTH), max(0, length - LENGTH // 2)):
        past, positions = start + LENGTH > length, start + ids
        where = f"positions {start} to {start + LENGTH - 1}"
        if past and runner.ends_at_length:
            raise NotMeasuredError(f"{where}: a table that ends before would end a process on CUDA, so use the CPU")
        try:
            logits = runner.at(tokens, positions)
        except (IndexError, RuntimeError, ValueError) as error:
            found = f"the model raises {type(error).__name__} at {where}, and its trained length is {length:,}"
            yield Outcome(about, None if past else False, found, float(length))
            return
        last = length - 1 if past else start
        if change(runner.at(tokens, positions.clamp(max=last)), logits) <= runner.tolerance:
            found = f"{where} act as {last} or less would: position ids are clamped, or a table of angles ends"
            yield Outcome(about, False, found, float(last))
            return
        if steady and by_one <= runner.tolerance:
            off, rounding = change(logits, begin), length * torch.finfo(torch.float32).eps  # of angles
            if off > runner.tolerance + rounding:  # by which a token may have gone to another expert
                others = runner.tokens(LENGTH)
                off = min(off, change(runner.at(others, positions), runner.at(others, ids)))
            found = f"a shift of all positions by {start:,} changes logits by {{}}"
            yield runner.judged(about, found, off, rounding=rounding)
        else:
            yield Outcome(about, True, f"position ids change logits at {where}")


def longest_window(runner: Subject) -> int:
    """Return the longest sliding window in tokens that a run may go past."""
    if runner.length is None or not (runner.ends_at_length or (runner.base and runner.base.has_table)):
        return LONGEST_WINDOW
    return min(LONGEST_WINDOW, runner.length - CHUNK - 1)


def window_outcomes(runner: Subject, about: str) -> Iterator[Outcome]:
    """Change hidden states of tokens that a layer's window hides, and of the farthest one that it shows."""
    base, longest, hides = runner.base, longest_window(runner), runner.patch is not None  # by a scheme's bias
    if base is None:
        if getattr(runner.config, "sliding_window", None) is not None:
            raise NotMeasuredError("no family says which layers of this model type have the window")
        return
    if base.family.convolves_keys:
        raise NotMeasuredError("a key also holds the tokens before it, which a layer convolves")
    windows = base.windows
    long = [layer for layer, window in windows.items() if window > longest]
    if long:
        reason = f"a short run does not go past a window of more than {longest} tokens"
        yield Outcome(about, None, f"{in_words(long)}: {reason}")
    apart = {*long, *base.lenders, *(base.layers_that_forget - windows.keys())}  # those that forget by chunks
    attentions = {layer: attention for layer, attention in base.modules.attention_of.items() if layer not in apart}
    if not attentions or (hides and not windows):
        return
    count = max((windows[layer] for layer in attentions if layer in windows), default=LENGTH - CHUNK) + CHUNK
    with recorded(list(attentions.values())) as calls:
        runner.at(runner.tokens(count), runner.positions(count))
    wrong = []
    for (layer, attention), call in zip(attentions.items(), calls, strict=True):
        edge = count - windows.get(layer, count)  # the first slot that the last token sees
        window = windows.get(layer, "no limit")
        if edge and (leak := _effect(attention, call, slice(0, edge))) > SEEN:
            found = f"tokens before the sliding window of {window} change what attention returns"
            wrong.append((layer, Outcome(about, False, found, leak)))
        if not hides and (seen := _effect(attention, call, slice(edge, edge + 1))) <= SEEN:
            found = f"a token does not reach attention, though the config has a window of {window} there"
            wrong.append((layer, Outcome(about, False, found, seen)))
    yield from joined(wrong)
    if not wrong:
        how_far = "no further than" if hides else "back as far as"
        yield Outcome(about, True, f"layers see {how_far} the config says ({count} tokens)", 0.0)


def _effect(attention: nn.Module, call: LayerCall, slots: slice) -> float:
    """Return how much other hidden states at some slots change what an attention returns for the last token."""

    def last(factor: float | None = None) -> Tensor:
        states = call.hidden_states.clone()
        if factor is not None:
            states[:, slots] = factor * states[:, slots].flip(-1)
        return again(attention, call, states)[:, -1]

    original = last()
    # A score as large as that is 0 in the softmax where it is negative, so it is tried with both signs.
    return max(change(last(factor), original) for factor in (LOUD, -LOUD))


QUESTIONS: dict[str, tuple[Callable[[Subject, str], Outcome | Iterator[Outcome]], tuple[str, ...]]] = {
    "causal mask": (mask_outcome, ()),
    "positions": (position_outcomes, ()),
    "window": (window_outcomes, ()),
    "left padding": (padding_outcome, ()),
    "batch": (padding_outcome, ("left padding",)),
    "packing": (packing_outcome, ()),
    "cache": (cache_outcome, ()),
    "default ids": (default_outcome, ()),
    "chunk": (cache_outcome, ("cache",)),
    "padded cache": (padding_outcome, ("batch", "cache")),
    "crop": (crop_outcome, ("cache", "default ids")),
}
"""Question -> how to answer it, and the questions that must have the answer yes before.

Only a model with numbers for logits can answer them, and only one with a causal mask the others.
"""
