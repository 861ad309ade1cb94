"""Loading patched checkpoints, and stock ones straight into a patched model; looking into one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from . import files
from .api import parse_schemes, patch_model
from .errors import CheckpointError, HfPosencError, UnsupportedModelError
from .families.base import base_model_type
from .hub import calibration_of, calibration_words, one_line
from .live.state import patch_of, without_adapter
from .model_types.config import heads_of, name_of
from .model_types.digests import check_no_adapter, check_saved_weights
from .model_types.entry import ENTRY, check_served, named_schemes, schemes_of_config
from .model_types.model import check_sizes, model_class
from .modules import WithoutPositions
from .registry import family_for, scheme_class
from .schemes.base import EVERY_SCHEME, Scheme
from .upstream.attention import check_engine

logger = logging.get_logger(f"transformers.{__name__}")  # below transformers' own: its verbosity decides

UNCALIBRATED = (
    "This model is patched, not calibrated: most schemes make it predict badly until hf_posenc.calibrate(model, "
    "windows) has fitted them to what the base's positions did."
)

# Options of transformers' from_pretrained that say where a checkpoint is; its config is found with the same.
_WHERE = ("revision", "token", "cache_dir", "subfolder", "force_download", "local_files_only", "proxies")


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    scheme: str | Scheme | Sequence[Scheme] | None = None,
    attention: str = "auto",
    seed: int | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a patched checkpoint, or a stock one and patch it.

    A stock checkpoint is loaded once and patched in place. It is not calibrated then, which transformers' logger says
    once. With a `device_map` of several places it is first loaded to
    the CPU, patched, and then dispatched, so that new modules are placed like the rest.

    Args:
        name_or_path: a directory or a Hub id.
        scheme: for a stock checkpoint, what to patch it with, as for `patch_model`; None for a patched one.
        attention: as for `patch_model`.
        seed: as for `patch_model`; only where there is something to draw.
        **kwargs: of `from_pretrained` in transformers: dtype, device_map, revision, ...; and, where `scheme` is a name,
            its hyper-parameters.

    Returns:
        The model, in eval mode: of the class that the checkpoint names, a causal language model if it names none.

    Raises:
        CheckpointError: if a stock checkpoint is loaded without a scheme, or a patched one with a scheme or a seed; if
            a patched one's entry or weights are not exactly what its scheme needs, or not what was saved.
        UnknownSchemeError: if there is no such scheme.
        UnsupportedModelError: if the base family is not supported.
        OSError: if there is no such checkpoint, or it cannot be read.
        ValueError: for an unknown `attention`, or one that the scheme does not have.
    """
    check_engine(attention)
    raw = _raw_config(name_or_path, kwargs)
    model_type = str(raw.get("model_type", ""))
    if not model_type.startswith("posenc_"):
        if scheme is None:
            raise CheckpointError(
                f"hf_posenc: {name_or_path} is a stock {model_type} checkpoint: say which scheme to patch it with"
            )
        named = dataclasses.fields(scheme_class(scheme)) if isinstance(scheme, str) else ()
        wanted = parse_schemes(scheme, {field.name: kwargs.pop(field.name) for field in named if field.name in kwargs})
        _check_stock(raw)  # before the weights are read
        model = _load_and_patch(name_or_path, raw, wanted, attention, seed, kwargs)
        logger.warning_once(UNCALIBRATED)
        return model
    if scheme is not None:
        raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: load it without scheme")
    if seed is not None:
        raise CheckpointError(f"hf_posenc: {name_or_path} is patched already: seed={seed} would draw nothing")
    model = _saved_class(raw).from_pretrained(name_or_path, **kwargs)
    choose_engine(model, attention)
    return model


def choose_engine(model: PreTrainedModel, attention: str) -> None:
    """Have a patched model compute its attention by an engine.

    Raises:
        ValueError: if the scheme keeps the model's own attention and this is not `auto`.
    """
    patch = patch_of(model)
    assert patch is not None
    if attention == "auto":
        return
    if not patch.attends:
        raise ValueError(
            f"{patch.name} keeps the model's own attention; attention={attention!r} can be chosen for schemes that "
            "change scores only"
        )
    patch.attention = attention
    replaced = family_for(base_model_type(without_adapter(model).config)).always_replaced
    for module in model.modules():
        chosen = replaced or "posenc_window" in module.__dict__
        if "posenc_engine" in module.__dict__ and (chosen or not isinstance(module.posenc, WithoutPositions)):
            module.posenc_engine = attention


def _raw_config(name_or_path: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's config.json holds; of a directory also where a save was interrupted."""
    directory = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if directory.is_dir():
        return files.read(directory, _config_in)
    source = {key: kwargs[key] for key in _WHERE if key in kwargs}
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name_or_path, **source)
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"hf_posenc: config.json of {name_or_path} holds no JSON object") from error
    if not raw:
        raise OSError(f"hf_posenc: {name_or_path} has no config.json")
    return raw


def _config_in(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"hf_posenc: {folder} has no config.json")
    return files.json_object(path)


def _architecture(raw: dict[str, Any]) -> str:
    """Return the class name that a config names, or an empty string."""
    named = raw.get("architectures")
    return named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""


def _saved_class(raw: dict[str, Any]) -> type[PreTrainedModel]:
    """Return our class that a patched checkpoint's config names; runs nothing of the checkpoint."""
    base = str(raw["model_type"]).removeprefix("posenc_")
    family_for(base)
    config, name = CONFIG_MAPPING[base], _architecture(raw)
    stem = config.__name__.removesuffix("Config")
    stock = _stock_model(base, name.removeprefix(f"PosEnc{stem}As").removeprefix("PosEnc"))
    if stock is None or name != name_of(stock, config):
        raise CheckpointError(f"hf_posenc: architectures is {raw.get('architectures')!r}, which is no {base} of ours")
    return model_class(stock, config)


def _stock_model(base: str, name: str) -> type[PreTrainedModel] | None:
    """Return the model class of transformers with this name if it is of this family: no other class is ever called."""
    stock, config = getattr(transformers, name, None), CONFIG_MAPPING[base]
    if not isinstance(stock, type) or not issubclass(stock, PreTrainedModel):
        return None
    return stock if getattr(stock, "config_class", None) is config or name in heads_of(config).values() else None


def _language_type(model_type: str) -> str:
    """Return the model type of what `AutoModelForCausalLM` makes of a stock checkpoint.

    It is that of the language model inside for a few multimodal types, and for a few that are another name of one.
    """
    if model_type not in CONFIG_MAPPING:
        return model_type
    config: Any = CONFIG_MAPPING[model_type]
    head = getattr(transformers, heads_of(config).get("AutoModelForCausalLM", ""), None)
    inner = getattr(head, "config_class", None)
    return str(inner.model_type if inner in config.sub_configs.values() else config.model_type)


def _check_stock(raw: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if what `AutoModelForCausalLM` makes of a stock checkpoint is not served."""
    model_type = str(raw.get("model_type", "unknown"))
    try:
        family_for(_language_type(model_type))
    except UnsupportedModelError:
        if model_type not in CONFIG_MAPPING:
            raise
        check_served(CONFIG_MAPPING[model_type].from_dict(raw))
        raise


def _stock_loader(base: str, name: str) -> Any:
    """Return the class of transformers that loads a stock checkpoint, of the name that its config has or an Auto class.

    A model class that is shared with another model type would read the config as one of that type; its Auto class does
    not.
    """
    stock, config = _stock_model(base, name), CONFIG_MAPPING[base]
    if _language_type(base) != config.model_type:
        return transformers.AutoModelForCausalLM
    if stock is not None and stock.config_class is config:
        return stock
    autos = (auto for auto, head in heads_of(config).items() if head == name)
    return getattr(transformers, next(autos, "AutoModelForCausalLM"))


def _load_and_patch(
    name_or_path: str | os.PathLike[str],
    raw: dict[str, Any],
    scheme: Sequence[Scheme],
    attention: str,
    seed: int | None,
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    loader = _stock_loader(str(raw["model_type"]), _architecture(raw))
    device_map = kwargs.pop("device_map", None)
    several = isinstance(device_map, str) and device_map in ("auto", "balanced", "balanced_low_0", "sequential")
    if several or (isinstance(device_map, dict) and len(set(device_map.values())) > 1):
        names = {"offload_folder": "offload_dir", "offload_buffers": "offload_buffers"}
        dispatch = {names[key]: kwargs.pop(key) for key in names if key in kwargs}
        max_memory = kwargs.pop("max_memory", None)
        model = patch_model(loader.from_pretrained(name_or_path, **kwargs), scheme, attention=attention, seed=seed)
        if several:
            whole = model._no_split_modules or []
            if device_map != "sequential":
                max_memory = accelerate.utils.get_balanced_memory(
                    model, max_memory, list(whole), low_zero=device_map == "balanced_low_0"
                )
            device_map = accelerate.infer_auto_device_map(model, max_memory, list(whole))
        return accelerate.dispatch_model(model, device_map, **dispatch)
    if device_map is not None:
        kwargs["device_map"] = device_map
    return patch_model(loader.from_pretrained(name_or_path, **kwargs), scheme, attention=attention, seed=seed)


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint is, read from its config alone.

    Attributes:
        source: the directory or Hub id.
        base: model type of the stock family.
        architecture: class that it was saved from.
        schemes: what the config says of each, `scheme` being its name; none for a stock checkpoint.
        calibration: `stage` and `tokens` of its last calibration, and `held_out_loss` where it was measured; or None.
        version: of hf_posenc that saved it, or None.
        problem: why this installation cannot load it, or None if it can.
    """

    source: str
    base: str
    architecture: str
    schemes: tuple[dict[str, Any], ...]
    calibration: dict[str, Any] | None
    version: str | None
    problem: str | None

    @property
    def scheme(self) -> str | None:
        """The schemes' names, or None for a stock checkpoint."""
        return " + ".join(each["scheme"] for each in self.schemes) or None

    def __str__(self) -> str:
        """Return a few readable lines; what cannot be printed is shown as escapes, since a config may be anybody's."""
        what = " + ".join(map(_said, self.schemes)) or "stock positions"
        calibration = "no" if self.calibration is None else calibration_words(self.calibration)
        rows = {
            "base": f"{self.base} ({self.architecture})",
            "calibrated": calibration if self.schemes else None,
            "saved by": f"hf_posenc {self.version}" if self.version else "no hf_posenc",
            "loadable": "yes" if self.problem is None else f"no: {self.problem}",
        }
        lines = [f"  {name:<12}{one_line(text)}" for name, text in rows.items() if text is not None]
        return "\n".join([f"{one_line(self.source)}: {one_line(what)}", *lines])


def _said(scheme: dict[str, Any]) -> str:
    """Return a scheme and its hyper-parameters; those that every scheme has only where they are given."""
    values = {key: value for key, value in scheme.items() if key != "scheme"}
    shown = {key: value for key, value in values.items() if key not in EVERY_SCHEME or value is not None}
    return f"{scheme['scheme']}({', '.join(f'{key}={value!r}' for key, value in shown.items())})"


def inspect(name_or_path: str | os.PathLike[str], **kwargs: Any) -> Inspection:
    """Say what a checkpoint is without reading its weights; of a directory also without a network.

    Args:
        name_or_path: a directory or a Hub id.
        **kwargs: `revision`, `token`, `cache_dir`, ... as for `from_pretrained`.

    Returns:
        What its config says.

    Raises:
        CheckpointError: if config.json holds no JSON object.
        OSError: if there is no config.json.
        TypeError: for an option that says nothing of where the checkpoint is.
    """
    if unknown := sorted(set(kwargs) - set(_WHERE)):
        raise TypeError(f"inspect takes {', '.join(_WHERE)}, not {', '.join(unknown)}")
    directory = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if directory.is_dir():
        raw, problem = files.read(directory, lambda folder: _examined(folder, directory))
    else:
        raw = _raw_config(name_or_path, kwargs)
        problem = _problem(raw, None, name_or_path)
    model_type = str(raw.get("model_type", "unknown"))
    entry = raw.get(ENTRY) if model_type.startswith("posenc_") else None
    version = entry.get("hf_posenc_version") if isinstance(entry, dict) else None
    try:
        calibration = calibration_of(entry)
    except CheckpointError:  # named by `problem`
        calibration = None
    return Inspection(
        source=str(name_or_path),
        base=model_type.removeprefix("posenc_"),
        architecture=_architecture(raw) or "?",
        schemes=tuple(named_schemes(entry)),
        calibration=calibration,
        version=version if isinstance(version, str) else None,
        problem=problem,
    )


def _examined(folder: Path, directory: Path) -> tuple[dict[str, Any], str | None]:
    raw = _config_in(folder)
    return raw, _problem(raw, folder, directory)


def _problem(raw: dict[str, Any], folder: Path | None, source: Any) -> str | None:
    """Return why a checkpoint cannot be loaded, or None; no weight is read or allocated.

    Args:
        raw: its config.json.
        folder: that it lies in, or None for one on the Hub, of which only the config is looked at.
        source: how to call it.
    """
    model_type = str(raw.get("model_type", "unknown"))
    try:
        if not model_type.startswith("posenc_"):
            _check_stock(raw)
            return None
        cls = _saved_class(raw)
        config = cls.config_class.from_dict(raw)
        schemes_of_config(config)
        if folder is not None:
            check_no_adapter(folder, Path(source))
            check_saved_weights(raw, folder, Path(source))
        check_sizes(cls, config, {} if folder is None else files.tensors(folder), source)
    except HfPosencError as error:
        return str(error)
    return None
