"""Values in a saved config with which no stock class can be built."""

from __future__ import annotations

import json
from typing import Any

UNREGISTERED = "hf_posenc_patched"
"""`attn_implementation` of a saved config. Stock model classes refuse to be built with it because it is registered
nowhere, not even where hf_posenc was imported, unlike the name of our attention function."""

PREFIX = "hf_posenc:"
"""Prefix of values that stock classes look up or check, so that they find one that they do not know."""

ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""Attributes of configs that name an activation. Most stock models look it up when they are built, and fail."""

CHECKED = "tie_word_embeddings"
"""A setting that stock config classes of decoders declare as a bool, and check when a config is made. The class that
all derive from does not have it. Tokenizers and the Trainer read config.json by that class, and still can."""


def guarded(value: object) -> str:
    """Return a setting as a saved config holds it: the prefix, and a string unchanged or any other value as JSON.

    Args:
        value: of a config's attribute; JSON can hold it.
    """
    return PREFIX + (value if isinstance(value, str) else json.dumps(value))


def unguarded(name: str, value: object) -> Any:
    """Return the value of a config's attribute without its guard, if it has one.

    Args:
        name: of the attribute.
        value: guarded or not.
    """
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    if name == CHECKED:
        return json.loads(value.removeprefix(PREFIX))
    return value.removeprefix(PREFIX) if name in ACTIVATIONS else value
