"""Checkpoints and adapters of version 0.1, which go on loading.

Version 0.1 put a marker on the first layer only. Its hyper-parameters were not resolved: None stood for the base's own
value. Its `rope` had no scaling unless one was given, and rotated every layer. Its `sinusoidal` trained frequencies in
radians per token. Names of schemes are written here, and nowhere else outside `schemes/`, because their meaning in that
version is fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

from ..families.lookup import family_of
from ..registry import scheme_class
from .scheme_entry import ENTRY, SCHEMES, VERSION_KEY, read_schemes, version_of

Values = dict[str, Any]

_MEANING: dict[str, Callable[[Values], Values]] = {
    "rope": lambda values: {**values, "scaling": values.get("scaling") or "none"},
    "sinusoidal": lambda values: {**values, "trainable": "radians" if values.get("trainable") else False},
}
"""Scheme -> a function from the hyper-parameters that version 0.1 wrote to those that mean the same today."""


def was_saved_by_0_1(config: PreTrainedConfig) -> bool:
    """Return whether version 0.1 saved a config; CheckpointError if the config names no version."""
    return version_of(config).release[:2] < (0, 2)


def translate_scheme(scheme: Values) -> Values:
    """Return a scheme that version 0.1 wrote with the hyper-parameters that mean the same today.

    Args:
        scheme: name and hyper-parameters, as `read_schemes` returns them.
    """
    translate = _MEANING.get(scheme["scheme"])
    return scheme if translate is None else translate(scheme)


def translate_config(config: Any) -> None:
    """Replace the entry of a config, if it is of version 0.1, by one of today's that means the same."""
    entry = getattr(config, ENTRY)
    if SCHEMES in entry:
        return
    (scheme,) = read_schemes(entry)
    if was_saved_by_0_1(config):
        rotates = scheme_class(scheme["scheme"])().acts_on.needs_queries()
        scheme = translate_scheme(scheme)
        rotated_layers = family_of(config).rotation.config_switches
        if rotated_layers is not None and rotates:
            setattr(config, rotated_layers, [1] * config.num_hidden_layers)
    setattr(config, ENTRY, {SCHEMES: [scheme], VERSION_KEY: entry[VERSION_KEY]})


def mean_the_same(then: Values, now: Values) -> bool:
    """Return whether a scheme that an older version may have written means a resolved one.

    Args:
        then: name and hyper-parameters. None may stand for the base's own rotation.
        now: name and hyper-parameters of a resolved scheme.
    """
    return set(then) == set(now) and all(_means(key, value, now[key]) for key, value in then.items())


def _means(key: str, then: Any, now: Any) -> bool:
    if then == now:
        return True
    if key not in ("rope_theta", "partial_rotary_factor", "scaling"):
        return False
    by_layer_type = isinstance(now, dict) and "rope_type" not in now
    if by_layer_type and not (isinstance(then, dict) and set(then) == set(now)):
        return all(_means(key, then, each) for each in now.values())
    if key != "scaling":
        return then is None
    if then is None:
        return bool(now == "none")
    # The length that the base was trained for was filled in later.
    filled = isinstance(then, dict) and isinstance(now, dict) and {**now, **then} == now
    return filled and set(now) - set(then) <= {"original_max_position_embeddings"}
