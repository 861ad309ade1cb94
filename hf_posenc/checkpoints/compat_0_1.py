"""Load checkpoints and adapters of version 0.1.

Version 0.1 put a marker on the first layer only. It did not resolve hyper-parameters: None stood for the base's value.
Its `rope` had no scaling by default, and rotated every layer. Its `sinusoidal` had frequencies in radians per token.
Outside `schemes/` only this file names schemes, because what they meant in version 0.1 is fixed.
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
"""Scheme -> function that translates its hyper-parameters of version 0.1 into today's."""


def was_saved_by_0_1(config: PreTrainedConfig) -> bool:
    """Return whether version 0.1 saved a config. Raise CheckpointError if the config names no version."""
    return version_of(config).release[:2] < (0, 2)


def translate_scheme(scheme: Values) -> Values:
    """Return a scheme of version 0.1 with today's hyper-parameters.

    Args:
        scheme: name and hyper-parameters, as an item of `read_schemes`.
    """
    translate = _MEANING.get(scheme["scheme"])
    return scheme if translate is None else translate(scheme)


def translate_config(config: Any) -> None:
    """Translate a config's entry of version 0.1 into today's format. Other configs stay unchanged."""
    entry = getattr(config, ENTRY)
    if SCHEMES in entry:
        return
    (scheme,) = read_schemes(entry)
    if was_saved_by_0_1(config):
        rotates = scheme_class(scheme["scheme"])().acts_on.needs_queries()
        scheme = translate_scheme(scheme)
        switches_attribute = family_of(config).rotation.config_switches
        if switches_attribute is not None and rotates:
            setattr(config, switches_attribute, [1] * config.num_hidden_layers)
    setattr(config, ENTRY, {SCHEMES: [scheme], VERSION_KEY: entry[VERSION_KEY]})


def mean_the_same(then: Values, now: Values) -> bool:
    """Return whether a saved scheme, maybe of an older version, equals a resolved one.

    Args:
        then: name and hyper-parameters of the saved scheme. None may stand for the base's rotation.
        now: name and hyper-parameters of the resolved scheme.
    """
    return set(then) == set(now) and all(_means(key, value, now[key]) for key, value in then.items())


def _means(key: str, then: Any, now: Any) -> bool:
    if then == now:
        return True
    if key not in ("rope_theta", "partial_rotary_factor", "scaling"):
        return False
    by_layer_type = isinstance(now, dict) and "rope_type" not in now
    if by_layer_type and not (isinstance(then, dict) and set(then) == set(now)):
        return all(_means(key, then, value) for value in now.values())
    if key != "scaling":
        return then is None
    if then is None:
        return bool(now == "none")
    # Resolving may have filled in the length that the base was trained at.
    extends = isinstance(then, dict) and isinstance(now, dict) and {**now, **then} == now
    return extends and set(now) - set(then) <= {"original_max_position_embeddings"}
