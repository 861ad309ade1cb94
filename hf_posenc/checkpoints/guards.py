"""Values in a saved config with which no stock class can be built."""

from __future__ import annotations

import json
from typing import Any

UNREGISTERED = "hf_posenc_patched"
"""`attn_implementation` of a saved config. It is registered nowhere, so stock model classes cannot be built with it.

The name of our attention function would not do, because importing hf_posenc registers it."""

PREFIX = "hf_posenc:"
"""Prefix of guarded values. Stock classes look these values up or check them, and fail."""

ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""Attributes of configs that name an activation. Most stock models look up its name when they are built."""

NUMBER = "initializer_range"
"""A number that the stock config classes check. Those of OPT and XGLM lack it, but their models look up an activation.

Unlike `CHECKED` it is guarded in every dict: nobody reads it there."""

CHECKED = "tie_word_embeddings"
"""A setting that the stock config classes of decoders check to be a bool. Their base class PreTrainedConfig lacks it,
so tokenizers and the Trainer, which read config.json with the base class, still can."""


def guarded(value: object) -> str:
    """Return the guarded form of a config's value: the prefix, and then the string, or any other value as JSON."""
    return PREFIX + (value if isinstance(value, str) else json.dumps(value))


def unguarded(name: str, value: object) -> Any:
    """Return the value of a config's attribute without its guard.

    Args:
        name: name of the attribute.
        value: its value, guarded or not.
    """
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    if name in (CHECKED, NUMBER):
        return json.loads(value.removeprefix(PREFIX))
    return value.removeprefix(PREFIX) if name in ACTIVATIONS else value
