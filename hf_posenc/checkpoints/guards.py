"""What a saved config says so that no stock class can be built with it."""

import json
from typing import Any

UNREGISTERED = "hf_posenc_patched"
"""`attn_implementation` of a saved config. Stock model classes refuse to be built with it, as it is registered nowhere:
not even where hf_posenc was imported, unlike the name of our attention function."""

PREFIX = "hf_posenc:"
"""Put in front of what stock classes look up or check, so that they find something that they do not know."""

ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""Attributes of configs that name an activation. Most stock models look it up when they are built, and find nothing."""

CHECKED = "tie_word_embeddings"
"""A setting that stock config classes of decoders declare as a bool, and check when a config is made. The class that
all derive from does not have it: tokenizers and the Trainer read config.json by that one, and still can."""


def guarded(value: Any) -> str:
    """Return a setting as a saved config has it: a string is kept, any other value becomes its JSON.

    Args:
        value: of a config's attribute, what JSON can hold.
    """
    return PREFIX + (value if isinstance(value, str) else json.dumps(value))


def unguarded(name: str, value: Any) -> Any:
    """Return what a config's attribute is meant to be, of what a saved config has; anything else as it is.

    Args:
        name: of the attribute.
        value: guarded or not.
    """
    if not isinstance(value, str) or not value.startswith(PREFIX):
        return value
    if name == CHECKED:
        return json.loads(value.removeprefix(PREFIX))
    return value.removeprefix(PREFIX) if name in ACTIVATIONS else value
