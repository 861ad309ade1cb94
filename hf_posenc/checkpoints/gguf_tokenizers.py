"""Write a tokenizer into a GGUF file, if llama.cpp's own tokenizers compute the same."""

from __future__ import annotations

import json
from typing import Any

from ..errors import UnsupportedModelError
from ..families.gguf_blocks import BYTE_LEVEL_BPE, SENTENCEPIECE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's types of tokens."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space


def tokenizer_facts(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what a GGUF file says of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of rows of the model's token embedding.

    Returns:
        Name of a key after `tokenizer.` -> value. Tokens that the tokenizer lacks are marked as unused.

    Raises:
        UnsupportedModelError: if llama.cpp would split text differently, or the model has too few rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refusal(f"{type(tokenizer).__name__} has no tokenizer.json")
    facts = json.loads(backend.to_str())
    model = facts["model"]
    if model.get("type") != "BPE":
        raise _refusal(f"it is a {model.get('type')} tokenizer")
    if any(model.get(option) for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise _refusal("its merges have a prefix, a suffix or dropout")
    tokens = tokenizer.get_vocab()
    if tokens and max(tokens.values()) >= vocab_size:
        raise _refusal(f"it has token {max(tokens.values())}, and the model only {vocab_size} rows")
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    written: dict[str, Any]
    if not merges:
        raise _refusal("it has no merges, and llama.cpp loads none without")
    if _is_byte_level(facts):
        written = {"ggml.model": BYTE_LEVEL_BPE, "ggml.pre": "gpt-2", "ggml.merges": [" ".join(m) for m in merges]}
    elif _is_sentencepiece(facts):
        scores = _scores(model["vocab"], merges)
        by_id = {index: token for token, index in tokens.items()}
        listed = [float(scores.get(by_id.get(index, ""), 0.0)) for index in range(vocab_size)]
        written = {"ggml.model": SENTENCEPIECE, "ggml.scores": listed, "ggml.add_space_prefix": True}
    else:
        raise _refusal("its normalizer or its pre-tokenizer is another one")
    is_byte = bool(model.get("byte_fallback"))
    special = {token["content"]: token["special"] for token in facts["added_tokens"]}
    names, types = [f"[UNUSED{index}]" for index in range(vocab_size)], [UNUSED] * vocab_size
    for token, index in tokens.items():
        names[index], types[index] = token, _type_of(token, special, tokenizer.unk_token, is_byte)
    written |= {"ggml.tokens": names, "ggml.token_type": types}
    for role in ("bos", "eos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{role}_token_id")) is not None:
            written[f"ggml.{'unknown' if role == 'unk' else 'padding' if role == 'pad' else role}_token_id"] = int(
                index
            )
    begins, ends = _added_around(tokenizer)
    written |= {"ggml.add_bos_token": begins, "ggml.add_eos_token": ends}
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        written["chat_template"] = tokenizer.chat_template
    return written


def _added_around(tokenizer: Any) -> tuple[bool, bool]:
    """Return whether a tokenizer puts its token of the beginning before a text, and its token of the end after it."""
    whole, text = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    begins, ends = whole[:1] == [tokenizer.bos_token_id], whole[-1:] == [tokenizer.eos_token_id]
    if whole != [tokenizer.bos_token_id] * begins + text + [tokenizer.eos_token_id] * ends:
        raise _refusal("it puts other tokens around a text than those of its beginning and its end")
    return begins, ends


def _refusal(reason: str) -> UnsupportedModelError:
    """Return an error about a tokenizer."""
    return UnsupportedModelError(
        f"this tokenizer cannot be written to a GGUF file: {reason}. Two kinds can: byte-level BPE that splits text as "
        "GPT-2's, and BPE with SentencePiece's spaces and bytes, as LLaMA 2's. With tokenizer=None the file has none"
    )


def _is_byte_level(facts: dict[str, Any]) -> bool:
    """Return whether a tokenizer splits text as GPT-2's."""
    before = facts["pre_tokenizer"] or {}
    model = facts["model"]
    return (
        before.get("type") == "ByteLevel"
        and bool(before.get("use_regex", True))
        and not before.get("add_prefix_space")
        and facts["normalizer"] is None
        and not model.get("byte_fallback")
        and not model.get("ignore_merges")
    )


def _is_sentencepiece(facts: dict[str, Any]) -> bool:
    """Return whether a tokenizer replaces spaces, puts one before the text, and falls back to bytes."""
    normalizer, before, model = facts["normalizer"] or {}, facts["pre_tokenizer"], facts["model"]
    expected = [
        {"type": "Prepend", "prepend": _SPACE},
        {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    ]
    if before is None:
        spaced = normalizer.get("normalizers") == expected
    else:  # it puts no space before a text that begins with one, and llama.cpp does
        metaspace = (before.get("type"), before.get("replacement"), before.get("split"))
        spaced = not normalizer and metaspace == ("Metaspace", _SPACE, False) and before["prepend_scheme"] != "never"
    return spaced and bool(model.get("byte_fallback")) and not model.get("ignore_merges")


def _scores(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> dict[str, float]:
    """Return the score of each merged token: the later it is merged, the lower.

    llama.cpp merges any two neighbours that make a token, the one with the highest score first. So each way to split a
    token into two must be a merge, and the merges of one token must follow each other.

    Raises:
        UnsupportedModelError: if that is not so.
    """
    scores: dict[str, float] = {}
    last = ""
    for left, right in merges:
        token = left + right
        if token != last and token in scores:
            raise _refusal(f"its merges of {token!r} do not follow each other")
        scores.setdefault(token, -float(len(scores) + 1))
        last = token
    known = set(merges)
    for token in vocabulary:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in known:
                raise _refusal(f"{pair[0]!r} and {pair[1]!r} are not merged to {token!r}")
    return scores


def _type_of(token: str, special: dict[str, bool], unknown: str | None, is_byte: bool) -> int:
    """Return llama.cpp's type of a token."""
    if token == unknown and is_byte:
        return UNKNOWN
    if token in special:
        return CONTROL if special[token] else USER_DEFINED
    if is_byte and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return BYTE
    return NORMAL
