"""The entry `position_encoding` of a config. Every key of it is written and read here."""

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
"""Key of a config, and of `auto_mapping` in an adapter_config.json, that holds the entry."""

SCHEMES = "schemes"
"""Key of the entry that holds a list: for each scheme `scheme`, its name, and its hyper-parameters."""

VERSION_KEY = "hf_posenc_version"
"""Key of the entry that holds the version which saved it."""

CALIBRATION = "calibration"
"""Key of the entry that holds what is known of the model's last calibration. It is absent without one."""

STAGES = ("closed_form", "attention")
"""Values of `stage` of a calibration."""

LOSSES = ("base", "swapped", "closed_form", "calibrated")
"""Keys of `held_out_loss` of a calibration, in nats per token."""


def make_entry(schemes: Sequence[Scheme]) -> JsonObject:
    """Return the entry of resolved schemes."""
    return {
        SCHEMES: [{"scheme": scheme.name, **scheme.hyperparameters()} for scheme in schemes],
        VERSION_KEY: VERSION,
    }


def renew_entry(entry: JsonObject) -> JsonObject:
    """Return an entry of any version in the form of this one."""
    calibration = read_calibration(entry)
    calibrated = {CALIBRATION: calibration} if calibration else {}
    return {SCHEMES: read_schemes(entry), **calibrated, VERSION_KEY: VERSION}


def read_schemes(entry: object) -> list[JsonObject]:
    """Return each scheme of an entry: `scheme`, its name, and its hyper-parameters by name.

    Version 0.1 had one scheme for all layers, and wrote it without a list.

    Args:
        entry: of a config or an adapter, of any version. Anything that is no entry has no schemes.
    """
    if not isinstance(entry, dict):
        return []
    if isinstance(listed := entry.get(SCHEMES), list):
        return [dict(each) for each in listed if isinstance(each, dict) and isinstance(each.get("scheme"), str)]
    if not isinstance(entry.get("scheme"), str):
        return []
    return [{**dict.fromkeys(EVERY_SCHEME), **{key: entry[key] for key in entry if key != VERSION_KEY}}]


def schemes_of_config(config: PreTrainedConfig) -> tuple[Scheme, ...]:
    """Return the schemes of a config of ours.

    Raises:
        CheckpointError: if there are none, hyper-parameters are not exactly those of a scheme, or the record of a
            calibration is malformed.
        UnknownSchemeError: if a scheme is not registered; the message lists those that are.
    """
    entry = getattr(config, ENTRY, None)
    source = f"config.json of model type {config.model_type!r}"
    schemes = read_schemes(entry)
    listed = entry.get(SCHEMES) if isinstance(entry, dict) else None
    if not schemes or (listed is not None and (not isinstance(listed, list) or len(schemes) != len(listed))):
        raise CheckpointError(f"hf_posenc: {source} has no {ENTRY}.{SCHEMES} that name schemes")
    read_calibration(entry)
    return tuple(_parse_scheme(each, source) for each in schemes)


def _parse_scheme(entry: JsonObject, source: str) -> Scheme:
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


def read_calibration(entry: object) -> JsonObject | None:
    """Return what an entry records of the model's last calibration, or None without a record.

    Args:
        entry: of a config of any version.

    Returns:
        `stage`, one of `STAGES`; `tokens`, how many were read; and `held_out_loss` where it was measured, some of
        `LOSSES` in nats per token.

    Raises:
        CheckpointError: if the record holds anything else.
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
    """Return the version that saved a config of ours; CheckpointError if there is none."""
    version = (getattr(config, ENTRY, None) or {}).get(VERSION_KEY)
    try:
        return Version(str(version))
    except InvalidVersion:
        raise CheckpointError(f"hf_posenc: {ENTRY}.{VERSION_KEY} is {version!r}, which is no version") from None


def check_version(config: PreTrainedConfig) -> None:
    """Compare the version that saved a config with this one: warn if it is newer, refuse a newer major version.

    Raises:
        CheckpointError: if there is no version, or a newer major one.
    """
    saved, own = version_of(config), Version(VERSION)
    if saved.major > own.major:
        raise CheckpointError(f"this checkpoint was saved by hf_posenc {saved}, which {VERSION} cannot know: {INSTALL}")
    if saved.release[:2] > own.release[:2]:
        warnings.warn(f"this checkpoint was saved by hf_posenc {saved}, newer than this one ({VERSION})", stacklevel=3)
