"""The entry `position_encoding` of a config. This file writes and reads all of its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version
from transformers import PreTrainedConfig

from ..core.errors import CheckpointError
from ..core.registry import scheme_class
from ..core.version import INSTALL, VERSION
from ..schemes.base import Scheme
from .files import JsonObject

ENTRY = "position_encoding"
"""Key of the entry, in a config and in `auto_mapping` of an adapter_config.json."""

SCHEMES = "schemes"
"""Key of the list of schemes in the entry. An item holds the name, as `scheme`, and the hyper-parameters."""

VERSION_KEY = "hf_posenc_version"
"""Key of the version of hf_posenc that saved the entry."""

CALIBRATION = "calibration"
"""Key of the record of the model's last calibration in the entry. Entries of uncalibrated models lack it."""

STAGES = ("closed_form", "matching")
"""Possible values of `stage` in the record of a calibration."""

LOSSES = ("base", "swapped", "closed_form", "calibrated")
"""Possible keys of `held_out_loss` in the record of a calibration. The losses are in nats per token."""


def make_entry(schemes: Sequence[Scheme]) -> JsonObject:
    """Return the entry for resolved schemes."""
    items = [{"scheme": scheme.name, **scheme.hyperparameters()} for scheme in schemes]
    return {SCHEMES: items, VERSION_KEY: VERSION}


def renew_entry(entry: JsonObject) -> JsonObject:
    """Return an entry with the version of this package."""
    calibrated = {CALIBRATION: entry[CALIBRATION]} if entry.get(CALIBRATION) else {}
    return {SCHEMES: read_schemes(entry), **calibrated, VERSION_KEY: VERSION}


def read_schemes(entry: object) -> list[JsonObject]:
    """Return the schemes of an entry, each a dict with its name, as `scheme`, and its hyper-parameters.

    Args:
        entry: entry of a config or an adapter. For any other value the list is empty.
    """
    listed = entry.get(SCHEMES) if isinstance(entry, dict) else None
    items = listed if isinstance(listed, list) else []
    return [item for item in items if isinstance(item, dict) and isinstance(item.get("scheme"), str)]


def schemes_of_config(config: PreTrainedConfig) -> tuple[Scheme, ...]:
    """Return the schemes that a config of ours names.

    Raises:
        CheckpointError: if the config names no schemes, if a scheme has other hyper-parameters, or if the record of the
            calibration is malformed.
        UnknownSchemeError: if a scheme is not registered. The message lists the registered ones.
    """
    entry = getattr(config, ENTRY, None)
    source = f"config.json of model type {config.model_type!r}"
    schemes = read_schemes(entry)
    if not isinstance(entry, dict) or not schemes or schemes != entry[SCHEMES]:
        raise CheckpointError(f"hf_posenc: {source} has no {ENTRY}.{SCHEMES} that name schemes")
    read_calibration(entry)
    return tuple(parse_scheme(item, source) for item in schemes)


def parse_scheme(item: JsonObject, source: str) -> Scheme:
    """Return the scheme of an item of `read_schemes`.

    Args:
        item: name and hyper-parameters.
        source: name of the config in messages.

    Raises:
        CheckpointError: if the scheme has other hyper-parameters.
        UnknownSchemeError: if the scheme is not registered.
    """
    values = {key: value for key, value in item.items() if key != "scheme"}
    cls = scheme_class(item["scheme"])
    if missing := sorted({field.name for field in dataclasses.fields(cls)} - set(values)):
        raise CheckpointError(
            f"hf_posenc: {source} lacks {', '.join(missing)} of {item['scheme']}: without it the model would not be "
            "the one that was saved"
        )
    try:
        return cls.parse(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"hf_posenc: {source}: {error}") from error


def read_calibration(entry: object) -> JsonObject | None:
    """Return the record of the model's last calibration, or None if an entry has no record.

    Args:
        entry: entry of a config.

    Returns:
        `stage`: one of `STAGES`; `tokens`: the number of tokens that were read; and, if it was measured,
        `held_out_loss`: a dict with keys of `LOSSES`, in nats per token.

    Raises:
        CheckpointError: if the record is malformed.
    """
    record = entry.get(CALIBRATION) if isinstance(entry, dict) else None
    if record is None:
        return None
    if not isinstance(record, dict) or record.get("stage") not in STAGES or type(record.get("tokens")) is not int:
        raise CheckpointError(
            f"hf_posenc: config.json: {ENTRY}.{CALIBRATION} must hold a stage ({', '.join(STAGES)}) and a number of "
            f"tokens, not {record!r:.200}"
        )
    return record


def check_version(config: PreTrainedConfig) -> None:
    """Refuse a config that a newer major version of hf_posenc saved. One of a newer minor version has the same meaning.

    Raises:
        CheckpointError: if the config names no version, or a newer major version.
    """
    version = (getattr(config, ENTRY, None) or {}).get(VERSION_KEY)
    try:
        is_newer = Version(str(version)).major > Version(VERSION).major
    except InvalidVersion:
        raise CheckpointError(f"hf_posenc: {ENTRY}.{VERSION_KEY} is {version!r}, which is no version") from None
    if is_newer:
        raise CheckpointError(
            f"this checkpoint was saved by hf_posenc {version}, which {VERSION} cannot know: {INSTALL}"
        )
