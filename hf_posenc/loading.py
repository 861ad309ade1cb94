"""`from_pretrained`: load a patched checkpoint, or load a stock one and patch it. `inspect`: look into a checkpoint."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file, logging

from .api import Schemes, parse_schemes, patch_model
from .checkpoints import files
from .checkpoints.cards import describe_calibration, one_line
from .checkpoints.class_names import architecture, check_checkpoint_served, stock_loader
from .checkpoints.files import JsonObject, json_object
from .checkpoints.model_classes import saved_class
from .checkpoints.scheme_entry import ENTRY, VERSION_KEY, parse_scheme, read_calibration, read_schemes
from .core.errors import CheckpointError, HfPosencError
from .core.registry import scheme_class
from .engines.dispatch import find_engine
from .model.base_model import BaseModel
from .model.patch_record import keeps_positions, patch_of
from .model.undo import Undo
from .patching.changes import AttendThroughUs

logger = logging.get_logger(f"transformers.{__name__}")  # a child of transformers' logger, which sets its verbosity

_WHERE = ("revision", "token", "cache_dir", "subfolder", "force_download", "local_files_only", "proxies")
"""Options of transformers' from_pretrained that say where a checkpoint is."""

_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` for which accelerate chooses the device of each module."""


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    scheme: Schemes | None = None,
    attention: str = "auto",
    seed: int | None = None,
    **kwargs: object,
) -> PreTrainedModel:
    """Load a patched checkpoint, or load a stock checkpoint and patch the model in place.

    A stock checkpoint is not calibrated then. If positions were replaced, transformers' logger warns of that once. With
    a `device_map` of several devices, the model is loaded to the CPU, patched, and then dispatched. So new modules get
    devices like all other modules.

    Args:
        name_or_path: a directory or a Hub id.
        scheme: the scheme for a stock checkpoint, as for `patch_model`; None for a patched checkpoint.
        attention: as for `patch_model`.
        seed: as for `patch_model`; None for a patched checkpoint.
        **kwargs: options of `from_pretrained` in transformers (dtype, device_map, revision, gguf_file, ...), and the
            hyper-parameters if `scheme` is a name.

    Returns:
        The model in eval mode, of the class that the checkpoint names. Without a name it is a causal language model.

    Raises:
        CheckpointError: if a stock checkpoint is loaded without a scheme, or a patched checkpoint with a scheme or a
            seed; if the entry or the weights of a patched checkpoint do not fit its scheme.
        UnknownSchemeError: if there is no such scheme.
        UnsupportedModelError: if the base family is not supported.
        OSError: if the checkpoint does not exist or cannot be read.
        ValueError: for an unknown `attention`, or an engine that does not take the scheme.
    """
    if attention != "auto":
        find_engine(attention)
    raw = read_config(name_or_path, kwargs)
    model_type = str(raw.get("model_type", ""))
    if model_type.startswith("posenc_"):
        if scheme is not None or seed is not None:
            raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: load it without scheme and seed")
        model: PreTrainedModel = saved_class(raw).from_pretrained(name_or_path, **kwargs)
        if attention != "auto":
            _choose_engine(model, attention)
        return model
    if scheme is None:
        raise CheckpointError(
            f"hf_posenc: {name_or_path} is a stock {model_type} checkpoint: say which scheme to patch it with"
        )
    fields = dataclasses.fields(scheme_class(scheme)) if isinstance(scheme, str) else ()
    hyperparameters = {field.name: kwargs.pop(field.name) for field in fields if field.name in kwargs}
    schemes = parse_schemes(scheme, hyperparameters)
    loader = stock_loader(raw)  # refuses unsupported models before it reads weights
    if (gguf_file := kwargs.get("gguf_file")) is not None:
        import gguf  # transformers has read the file's config by it

        path = cached_file(str(name_or_path), gguf_file, **{key: kwargs[key] for key in _WHERE if key in kwargs})
        if any(tensor.name == "rope_freqs.weight" for tensor in gguf.GGUFReader(path).tensors):
            warnings.warn(
                f"hf_posenc: {gguf_file} holds a part of its rotation in rope_freqs.weight (LLaMA 3.1's files do), "
                "which transformers does not read, so the base turns by rope_theta alone: load its stock checkpoint, "
                "or pass scheme='rope' with its scaling",
                stacklevel=2,
            )
    dispatch_options = _take_dispatch_options(kwargs)
    model = patch_model(loader.from_pretrained(name_or_path, **kwargs), schemes, attention=attention, seed=seed)
    if dispatch_options:
        model = _dispatch(model, **dispatch_options)
    if not keeps_positions(model):
        logger.warning_once(
            "This model is patched, not calibrated: as a rule it predicts badly until hf_posenc.calibrate(model, "
            "windows) has fitted it to the attention of the base."
        )
    return model


def _choose_engine(model: PreTrainedModel, attention: str) -> None:
    """Set the engine of a patched model; ValueError if its schemes keep its own attention, or flash attention."""
    patch = patch_of(model)
    assert patch is not None
    if not patch.attends or patch.backend:
        kept = patch.backend or "the model's own attention"
        instead = ": load it with attn_implementation='sdpa'" if patch.backend else ""
        raise ValueError(
            f"{patch.name} keeps {kept}; attention={attention!r} can be chosen for schemes that attend through "
            f"hf_posenc{instead}"
        )
    patch.attention = attention
    Undo().apply(AttendThroughUs(BaseModel.of(model), attention))


def _take_dispatch_options(options: dict[str, object]) -> dict[str, Any]:
    """Remove and return the options that spread a model over several devices; none for a model on one device.

    transformers would use them while it loads, before patching adds modules.

    Args:
        options: options of `from_pretrained`. The returned ones are removed from it.
    """
    device_map = options.get("device_map")
    several = isinstance(device_map, dict) and len(set(device_map.values())) > 1
    if not several and not (isinstance(device_map, str) and device_map in _AUTOMATIC):
        return {}
    names = ("device_map", "max_memory", "offload_folder", "offload_buffers")
    return {name: options.pop(name) for name in names if name in options}


def _dispatch(
    model: PreTrainedModel, device_map: Any, max_memory: Any = None, offload_folder: Any = None, **options: Any
) -> PreTrainedModel:
    """Spread a patched model over several devices, with options of `from_pretrained`."""
    if isinstance(device_map, str):
        unsplit = list(model._no_split_modules or [])
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = accelerate.utils.get_balanced_memory(model, max_memory, unsplit, low_zero=low_zero)
        device_map = accelerate.infer_auto_device_map(model, max_memory, unsplit)
    return accelerate.dispatch_model(model, device_map, offload_dir=offload_folder, **options)


@dataclasses.dataclass(frozen=True)
class Inspection:
    """Facts about a checkpoint, read from its config alone.

    Attributes:
        source: the directory or Hub id.
        base: stock model type.
        architecture: name of the model class that saved it.
        schemes: a dict for each scheme: its name, as `scheme`, and its hyper-parameters. Empty for a stock checkpoint.
        calibration: the last calibration, or None: `stage`, `tokens`, and `held_out_loss` if it was measured.
        version: version of hf_posenc that saved it, or None.
        problem: why this installation cannot make its model, or None if it can.
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
            "calibrated": calibration if self.schemes and self.problem is None else None,
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
        return f"{scheme['scheme']}({', '.join(f'{key}={scheme[key]!r}' for key in scheme if key != 'scheme')})"


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
    raw = read_config(name_or_path, kwargs)
    model_type = str(raw.get("model_type", "unknown"))
    entry = raw.get(ENTRY) if model_type.startswith("posenc_") else None
    problem = None
    try:
        if model_type.startswith("posenc_"):
            cls = saved_class(raw)
            with torch.device("meta"):
                cls(cls.config_class.from_dict(raw))
        else:
            check_checkpoint_served(raw)
    except Exception as error:  # stock classes raise exceptions of any type
        problem = str(error) if isinstance(error, HfPosencError) else f"{type(error).__name__}: {error}"
    version = entry.get(VERSION_KEY) if isinstance(entry, dict) else None
    return Inspection(
        source=str(name_or_path),
        base=model_type.removeprefix("posenc_"),
        architecture=architecture(raw) or "?",
        schemes=tuple(read_schemes(entry)),
        calibration=read_calibration(entry) if problem is None else None,
        version=version,
        problem=problem,
    )


def read_config(name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> JsonObject:
    """Return the contents of a checkpoint's config.json, also after an interrupted save.

    Args:
        name_or_path: a directory or a Hub id.
        options: options of `from_pretrained`. Those that do not say where the checkpoint is are ignored. With
            `gguf_file`, the config is what transformers reads in that file.

    Raises:
        CheckpointError: if config.json holds no JSON object.
        OSError: if there is no config.json, or it cannot be read.
    """
    directory = Path(name_or_path) / (options.get("subfolder") or "")
    if directory.is_dir() and options.get("gguf_file") is None:
        return json_object(files.current(directory) / "config.json")
    where = {key: options[key] for key in (*_WHERE, "gguf_file") if key in options}
    raw: JsonObject = PreTrainedConfig.get_config_dict(name_or_path, **where)[0]
    if not raw:
        raise OSError(f"hf_posenc: {name_or_path} has no config.json")
    return raw
