"""What a config says of the schemes of its model, and by which version it was said."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

from packaging.version import InvalidVersion, Version
from transformers import PreTrainedConfig

from ..errors import CheckpointError, UnknownSchemeError, UnsupportedModelError
from ..families.base import base_model_type
from ..families.refused import DECODER_HALF, MULTIMODAL
from ..hub import calibration_of
from ..registry import family_for, reason_against, reason_around, scheme_class
from ..schemes.base import EVERY_SCHEME, Scheme
from ..version import INSTALL, VERSION

ENTRY = "position_encoding"
"""Key of a config, and of `auto_mapping` in an adapter_config.json, that holds the entry."""


def entry_of(schemes: Sequence[Scheme]) -> dict[str, Any]:
    """Return a config's `position_encoding` for resolved schemes."""
    return {
        "schemes": [{"scheme": scheme.name, **scheme.hyperparameters()} for scheme in schemes],
        "hf_posenc_version": VERSION,
    }


def named_schemes(entry: Any) -> list[dict[str, Any]]:
    """Return what an entry says of each scheme: `scheme`, its name, and its hyper-parameters by name.

    Version 0.1 had one scheme per model, for all layers, and wrote it without a list.

    Args:
        entry: of a config or an adapter, of any version; what is no entry names no scheme.
    """
    if not isinstance(entry, dict):
        return []
    if isinstance(listed := entry.get("schemes"), list):
        return [dict(each) for each in listed if isinstance(each, dict) and isinstance(each.get("scheme"), str)]
    if not isinstance(entry.get("scheme"), str):
        return []
    return [{**dict.fromkeys(EVERY_SCHEME), **{key: entry[key] for key in entry if key != "hf_posenc_version"}}]


def schemes_of_config(config: PreTrainedConfig) -> tuple[Scheme, ...]:
    """Return the schemes that a config of ours names.

    Raises:
        CheckpointError: if it names none, hyper-parameters are not exactly those of a scheme, or what it says of a
            calibration is malformed.
        UnknownSchemeError: if a scheme is not registered; the message lists those that are.
    """
    entry = getattr(config, ENTRY, None)
    source = f"config.json of model type {config.model_type!r}"
    named = named_schemes(entry)
    listed = entry.get("schemes") if isinstance(entry, dict) else None
    if not named or (listed is not None and (not isinstance(listed, list) or len(named) != len(listed))):
        raise CheckpointError(f"hf_posenc: {source} has no {ENTRY}.schemes that name schemes")
    calibration_of(entry)
    return tuple(_scheme(each, source) for each in named)


def _scheme(entry: dict[str, Any], source: str) -> Scheme:
    values = {key: value for key, value in entry.items() if key != "scheme"}
    try:
        cls = scheme_class(entry["scheme"])
    except UnknownSchemeError as error:
        raise UnknownSchemeError(
            f"hf_posenc: {source}: {error}; a scheme of another package is found once that is installed or imported"
        ) from None
    if missing := sorted({field.name for field in dataclasses.fields(cls)} - set(values)):
        raise CheckpointError(
            f"hf_posenc: {source} lacks {', '.join(missing)} of {entry['scheme']}: without it the model would not be "
            "the one that was saved"
        )
    try:
        return cls.parse(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"hf_posenc: {source}: {error}") from error


def check_version(config: PreTrainedConfig) -> None:
    """Compare the version that saved a config with this one: warn where that is newer, refuse a newer major version.

    Raises:
        CheckpointError: if there is no version, or a newer major one.
    """
    saved, own = version_of(config), Version(VERSION)
    if saved.major > own.major:
        raise CheckpointError(f"this checkpoint was saved by hf_posenc {saved}, which {VERSION} cannot know: {INSTALL}")
    if saved.release[:2] > own.release[:2]:
        warnings.warn(f"this checkpoint was saved by hf_posenc {saved}, newer than this one ({VERSION})", stacklevel=3)


def version_of(config: PreTrainedConfig) -> Version:
    """Return the version that saved a config of ours; CheckpointError if it names none."""
    stamp = (getattr(config, ENTRY, None) or {}).get("hf_posenc_version")
    try:
        return Version(str(stamp))
    except InvalidVersion:
        raise CheckpointError(
            f"hf_posenc: position_encoding.hf_posenc_version is {stamp!r}, which is no version"
        ) from None


def check_served(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if no family serves the models of a config; it names a language model inside.

    Args:
        config: stock or ours. What is inside differs between checkpoints of a type, so the config is asked for it.
    """
    model_type = base_model_type(config)
    try:
        family_for(model_type)
        return
    except UnsupportedModelError:
        inner = config.get_text_config(decoder=True)
        if reason_against(model_type) is not None or (inner is config and not config.is_encoder_decoder):
            raise
    reason = (
        f"it is an encoder-decoder, {DECODER_HALF.partition(', ')[2]}"
        if config.is_encoder_decoder
        else reason_around(MULTIMODAL, inner.model_type)
    )
    raise UnsupportedModelError(f"model type {model_type!r} cannot be patched: {reason}")


def write_out(config: Any) -> None:
    """Say in a config what version 0.1 left unsaid, in the form of this one.

    It had one scheme for all layers; its `rope` had no scaling unless given, and turned every layer.
    """
    entry = getattr(config, ENTRY)
    if "schemes" in entry:
        return
    (said,) = named_schemes(entry)
    cls = scheme_class(said["scheme"])
    if is_older(config):
        said = cls.meant_in_0_1(said)
        name = family_for(base_model_type(config)).rotation.config_switches
        if name is not None and cls().acts_on.needs_queries():
            setattr(config, name, [1] * config.num_hidden_layers)
    setattr(config, ENTRY, {"schemes": [said], "hf_posenc_version": entry["hf_posenc_version"]})


def is_older(config: PreTrainedConfig) -> bool:
    """Return whether a config was saved by version 0.1, which marked the first layer only."""
    return version_of(config).release[:2] < (0, 2)
