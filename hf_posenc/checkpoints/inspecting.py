"""Look into a checkpoint without reading its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import CheckpointError, HfPosencError
from ..families.base import language_config
from ..patching.patched_layers import MARKER
from . import files
from .cards import describe_calibration
from .class_names import architecture
from .compat_0_1 import was_saved_by_0_1
from .digests import check_no_adapter, check_saved_weights
from .headers import JsonObject, json_object, read_tensor_headers
from .loading_weights import check_loaded, check_shapes, named_tensors, position_keys
from .markdown import one_line
from .model_classes import saved_class
from .scheme_entry import ENTRY, VERSION_KEY, parse_scheme, read_calibration, read_schemes, schemes_of_config
from .stock_checkpoints import check_checkpoint_served

_WHERE = ("revision", "token", "cache_dir", "subfolder", "force_download", "local_files_only", "proxies")
"""Options of transformers' from_pretrained that say where a checkpoint is."""


@dataclass(frozen=True)
class Inspection:
    """Facts about a checkpoint, read from its config alone.

    Attributes:
        source: the directory or Hub id.
        base: stock model type.
        architecture: name of the model class that saved it.
        schemes: a dict for each scheme: its name, as `scheme`, and its hyper-parameters. Empty for a stock checkpoint.
        calibration: the last calibration, or None: `stage`, `tokens`, and `held_out_loss` if it was measured.
        version: version of hf_posenc that saved it, or None.
        problem: why this installation cannot load it, or None if it can.
    """

    source: str
    base: str
    architecture: str
    schemes: tuple[JsonObject, ...]
    calibration: JsonObject | None
    version: str | None
    problem: str | None

    @property
    def scheme(self) -> str | None:
        """The schemes' names, or None for a stock checkpoint."""
        return " + ".join(scheme["scheme"] for scheme in self.schemes) or None

    def __str__(self) -> str:
        """Return a few readable lines. Unprintable characters are escaped: anybody may have written them."""
        positions = " + ".join(map(_describe_scheme, self.schemes)) or "stock positions"
        calibration = "no" if self.calibration is None else describe_calibration(self.calibration)
        rows = {
            "base": f"{self.base} ({self.architecture})",
            "calibrated": calibration if self.schemes else None,
            "saved by": f"hf_posenc {self.version}" if self.version else "no hf_posenc",
            "loadable": "yes" if self.problem is None else f"no: {self.problem}",
        }
        lines = [f"  {name:<12}{one_line(text)}" for name, text in rows.items() if text is not None]
        return "\n".join([f"{one_line(self.source)}: {one_line(positions)}", *lines])


def _describe_scheme(scheme: JsonObject) -> str:
    """Return a scheme as it prints itself, or as the config lists it if this installation cannot make it."""
    try:
        return str(parse_scheme(scheme, "config.json"))
    except HfPosencError:  # `problem` says it
        pass
    values = {key: value for key, value in scheme.items() if key != "scheme"}
    return f"{scheme['scheme']}({', '.join(f'{key}={value!r}' for key, value in values.items())})"


def inspect(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Inspection:
    """Describe a checkpoint without reading its weights. A checkpoint in a directory needs no network.

    Args:
        name_or_path: a directory or a Hub id.
        **kwargs: `revision`, `token`, `cache_dir`, ... as for `from_pretrained`.

    Returns:
        The facts in its config.

    Raises:
        CheckpointError: if config.json holds no JSON object.
        OSError: if there is no config.json.
        TypeError: for an option that does not say where the checkpoint is.
    """
    if unknown := sorted(set(kwargs) - set(_WHERE)):
        raise TypeError(f"inspect takes {', '.join(_WHERE)}, not {', '.join(unknown)}")
    directory = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if directory.is_dir():
        raw, problem = files.read(directory, lambda folder: _examine_folder(folder, directory))
    else:
        raw = read_config(name_or_path, kwargs)
        problem = _problem_of(raw, None, name_or_path)
    model_type = str(raw.get("model_type", "unknown"))
    entry = raw.get(ENTRY) if model_type.startswith("posenc_") else None
    version = entry.get(VERSION_KEY) if isinstance(entry, dict) else None
    try:
        calibration = read_calibration(entry)
    except CheckpointError:  # `problem` says it
        calibration = None
    return Inspection(
        source=str(name_or_path),
        base=model_type.removeprefix("posenc_"),
        architecture=architecture(raw) or "?",
        schemes=tuple(read_schemes(entry)),
        calibration=calibration,
        version=version if isinstance(version, str) else None,
        problem=problem,
    )


def read_config(name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> JsonObject:
    """Return the contents of a checkpoint's config.json, also after an interrupted save.

    Args:
        name_or_path: a directory or a Hub id.
        options: options of `from_pretrained`. Those that do not say where the checkpoint is are ignored.

    Raises:
        CheckpointError: if config.json holds no JSON object.
        OSError: if there is no config.json, or it cannot be read.
    """
    directory = Path(name_or_path) / (options.get("subfolder") or "")
    if directory.is_dir():
        return files.read(directory, _config_in)
    try:
        raw: JsonObject
        raw, _ = PreTrainedConfig.get_config_dict(
            name_or_path, **{key: options[key] for key in _WHERE if key in options}
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"hf_posenc: config.json of {name_or_path} holds no JSON object") from error
    if not raw:
        raise OSError(f"hf_posenc: {name_or_path} has no config.json")
    return raw


def _config_in(folder: Path) -> JsonObject:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"hf_posenc: {folder} has no config.json")
    return json_object(path)


def _examine_folder(folder: Path, directory: Path) -> tuple[dict[str, Any], str | None]:
    raw = _config_in(folder)
    return raw, _problem_of(raw, folder, directory)


def _problem_of(raw: JsonObject, folder: Path | None, source: str | os.PathLike[str]) -> str | None:
    """Return why a checkpoint cannot be loaded, or None. No weight is read or allocated.

    Args:
        raw: contents of the checkpoint's config.json.
        folder: the checkpoint's folder. None checks the config only, for a checkpoint on the Hub.
        source: name of the checkpoint in messages.
    """
    try:
        if not str(raw.get("model_type")).startswith("posenc_"):
            check_checkpoint_served(raw)
            return None
        cls = saved_class(raw)
        config = cls.config_class.from_dict(raw)
        schemes_of_config(config)
        if folder is not None:
            check_no_adapter(folder, Path(source))
            check_saved_weights(raw, folder, Path(source))
        _check_sizes(cls, config, {} if folder is None else read_tensor_headers(folder), source)
    except HfPosencError as error:
        return str(error)
    return None


def _check_sizes(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    headers: dict[str, JsonObject],
    source: str | os.PathLike[str],
) -> None:
    """Check that a config makes a model, and that the weights have the model's names and shapes. No weight is read.

    Args:
        cls: our model class that the config names.
        config: the checkpoint's config.
        headers: the weights' headers, of `read_tensor_headers`. If empty, only the config is checked.
        source: name of the checkpoint in messages.

    Raises:
        CheckpointError: if the config makes no model, or position parameters are missing or unexpected.
        WeightShapeError: if weights have other shapes than the config asks for.
    """
    layers = language_config(config).num_hidden_layers
    marked_layers = {name.split(f".{MARKER}")[0] for name in headers if f".{MARKER}" in name}
    # Checked first, because building as many layers as a config asks for might never end.
    if headers and not was_saved_by_0_1(config) and len(marked_layers) != layers:
        raise CheckpointError(
            f"hf_posenc: config.json of {source} says {layers} layers, its weights have {len(marked_layers)}"
        )
    try:
        with torch.device("meta"):
            model = cls(config)
    except HfPosencError:
        raise
    except Exception as error:  # stock classes raise exceptions of any type
        raise CheckpointError(
            f"hf_posenc: config.json of {source} makes no {cls.__name__}: {type(error).__name__}: {error}"
        ) from error
    if not headers:
        return
    shapes = {name: list(tensor.shape) for name, tensor in named_tensors(model)}
    check_shapes(
        model,
        [
            (name, header["shape"], shapes[name])
            for name, header in headers.items()
            if shapes.get(name, header["shape"]) != header["shape"]
        ],
        source,
    )
    missing, unexpected = position_keys(model) - set(headers), set(headers) - set(shapes)
    check_loaded(model, {"missing_keys": missing, "mismatched_keys": (), "unexpected_keys": unexpected}, source)
