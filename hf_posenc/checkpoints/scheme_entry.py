"""The entry `position_encoding` of a config. This file writes and reads all of its keys."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version
from transformers import PreTrainedConfig

from ..errors import CheckpointError, UnknownSchemeError
from ..registry import scheme_class
from ..schemes.base import EVERY_SCHEME, Scheme
from ..version import INSTALL, VERSION
from .headers import JsonObject

ENTRY = "position_encoding"
"""Key of the entry, in a config and in `auto_mapping` of an adapter_config.json."""

SCHEMES = "schemes"
"""Key of the list of schemes in the entry. An item holds the name, as `scheme`, and the hyper-parameters."""

VERSION_KEY = "hf_posenc_version"
"""Key of the version of hf_posenc that saved the entry."""

CALIBRATION = "calibration"
"""Key of the record of the model's last calibration in the entry. Entries of uncalibrated models lack it."""

STAGES = ("closed_form", "attention")
"""Possible values of `stage` in the record of a calibration."""

LOSSES = ("base", "swapped", "closed_form", "calibrated")
"""Possible keys of `held_out_loss` in the record of a calibration. The losses are in nats per token."""


def make_entry(schemes: Sequence[Scheme]) -> JsonObject:
    """Return the entry for resolved schemes."""
    return {
        SCHEMES: [{"scheme": scheme.name, **scheme.hyperparameters()} for scheme in schemes],
        VERSION_KEY: VERSION,
    }


def renew_entry(entry: JsonObject) -> JsonObject:
    """Return an entry of any version in the format of this version."""
    calibration = read_calibration(entry)
    calibrated = {CALIBRATION: calibration} if calibration else {}
    return {SCHEMES: read_schemes(entry), **calibrated, VERSION_KEY: VERSION}


def read_schemes(entry: object) -> list[JsonObject]:
    """Return the schemes of an entry, each a dict with its name, as `scheme`, and its hyper-parameters.

    Version 0.1 had one scheme for all layers, and wrote it without a list.

    Args:
        entry: entry of any version, from a config or an adapter. For any other value the list is empty.
    """
    if not isinstance(entry, dict):
        return []
    if isinstance(listed := entry.get(SCHEMES), list):
        named = [item for item in listed if isinstance(item, dict) and isinstance(item.get("scheme"), str)]
        return [_with_added(item) for item in named]
    if not isinstance(entry.get("scheme"), str):
        return []
    return [_with_added({**dict.fromkeys(EVERY_SCHEME), **{key: entry[key] for key in entry if key != VERSION_KEY}})]


def _with_added(item: JsonObject) -> JsonObject:
    """Return the item of a scheme with None for the hyper-parameters that its version did not have."""
    try:
        added = scheme_class(item["scheme"]).added
    except UnknownSchemeError:
        added = Scheme.added
    return {**item, **{key: None for key in added if key not in item}}


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
    listed = entry.get(SCHEMES) if isinstance(entry, dict) else None
    if not schemes or (listed is not None and (not isinstance(listed, list) or len(schemes) != len(listed))):
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
    try:
        cls = scheme_class(item["scheme"])
    except UnknownSchemeError as error:
        raise UnknownSchemeError(
            f"hf_posenc: {source}: {error}; to use a scheme of another package, install or import that package"
        ) from None
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
        entry: entry of a config, of any version.

    Returns:
        `stage`: one of `STAGES`; `tokens`: the number of tokens that were read; and, if it was measured,
        `held_out_loss`: a dict with keys of `LOSSES`, in nats per token.

    Raises:
        CheckpointError: if the record is malformed.
    """
    if not isinstance(entry, dict) or CALIBRATION not in entry:
        return None
    record = entry[CALIBRATION]
    if not isinstance(record, dict) or not {"stage", "tokens"} <= set(record) <= {"stage", "tokens", "held_out_loss"}:
        raise _malformed_calibration("must hold stage and tokens, and may hold held_out_loss", record)
    if record["stage"] not in STAGES:
        raise _malformed_calibration(f"stage must be one of {', '.join(STAGES)}", record["stage"])
    if type(record["tokens"]) is not int or record["tokens"] < 0:
        raise _malformed_calibration("tokens must be a whole number, 0 or more", record["tokens"])
    losses = record.get("held_out_loss", {})
    if not isinstance(losses, dict) or not set(losses) <= set(LOSSES):
        raise _malformed_calibration(f"held_out_loss can hold {', '.join(LOSSES)}", losses)
    for name, loss in losses.items():
        if type(loss) not in (int, float) or not math.isfinite(loss):
            raise _malformed_calibration(f"held_out_loss.{name} must be a finite number", loss)
    return dict(record)


def _malformed_calibration(rule: str, value: object) -> CheckpointError:
    return CheckpointError(f"hf_posenc: config.json: {ENTRY}.{CALIBRATION}: {rule}, not {value!r:.80}")


def version_of(config: PreTrainedConfig) -> Version:
    """Return the version of hf_posenc that saved a config of ours. Raise CheckpointError if it names no version."""
    version = (getattr(config, ENTRY, None) or {}).get(VERSION_KEY)
    try:
        return Version(str(version))
    except InvalidVersion:
        raise CheckpointError(f"hf_posenc: {ENTRY}.{VERSION_KEY} is {version!r}, which is no version") from None


def check_version(config: PreTrainedConfig) -> None:
    """Warn if a newer version of hf_posenc saved a config, and refuse a newer major version.

    Raises:
        CheckpointError: if the config names no version, or a newer major version.
    """
    saved_by, installed = version_of(config), Version(VERSION)
    if saved_by.major > installed.major:
        raise CheckpointError(
            f"this checkpoint was saved by hf_posenc {saved_by}, which {VERSION} cannot know: {INSTALL}"
        )
    if saved_by.release[:2] > installed.release[:2]:
        warnings.warn(
            f"this checkpoint was saved by hf_posenc {saved_by}, newer than this one ({VERSION})", stacklevel=3
        )
