"""Loading patched checkpoints, and stock ones straight into a patched model; looking into one; stock export."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from . import files, surgery
from .attention import check_engine, stock_class
from .classes import (
    PosEncConfigMixin,
    PosEncMixin,
    check_version,
    model_class,
    position_keys,
    scheme_of,
)
from .errors import CheckpointError, HfPosencError, NotPatchedError, UnsupportedModelError
from .patching import parse_scheme, patch_model, patch_of
from .registry import adapter_for, scheme_class
from .schemes.base import Scheme
from .schemes.learned import Learned
from .schemes.rope import Rope
from .schemes.sinusoidal import Sinusoidal

# Options of transformers' from_pretrained that say where a checkpoint is; its config is found with the same.
_WHERE = ("revision", "token", "cache_dir", "subfolder", "force_download", "local_files_only", "proxies")


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    scheme: str | Scheme | None = None,
    attention: str = "auto",
    seed: int | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a patched checkpoint, or a stock one and patch it.

    A stock checkpoint is loaded once and patched in place. With a `device_map` of several places it is first loaded to
    the CPU, patched, and then dispatched, so that new modules are placed like the rest.

    Args:
        name_or_path: a directory or a Hub id.
        scheme: for a stock checkpoint, what to patch it with: a name or an instance; None for a patched one.
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
        wanted = parse_scheme(scheme, {field.name: kwargs.pop(field.name) for field in named if field.name in kwargs})
        adapter_for(model_type)  # before the weights are read
        return _load_and_patch(name_or_path, raw, wanted, attention, seed, kwargs)
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
    if attention != "auto":
        surgery.make_plan(model, patch.scheme, attention)  # raises where the scheme has no engines
    patch.attention = attention
    for module in model.modules():
        if "posenc_engine" in module.__dict__:
            module.posenc_engine = attention


def _raw_config(name_or_path: str | os.PathLike[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint's config.json holds; of a directory also where a save was interrupted."""
    directory = Path(name_or_path) / (kwargs.get("subfolder") or "")
    if directory.is_dir():
        return files.read(directory, _config_in)
    where = {key: kwargs[key] for key in _WHERE if key in kwargs}
    try:
        raw, _ = PreTrainedConfig.get_config_dict(name_or_path, **where)
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
    adapter_for(base)
    name = _architecture(raw)
    stock = _stock_model(base, name.removeprefix("PosEnc"))
    if not name.startswith("PosEnc") or stock is None:
        raise CheckpointError(f"hf_posenc: architectures is {raw.get('architectures')!r}, which is no {base} of ours")
    return model_class(stock)


def _stock_model(base: str, name: str) -> type[PreTrainedModel] | None:
    """Return the model class of transformers with this name if it is of this family: no other class is ever called."""
    stock = getattr(transformers, name, None)
    is_model = isinstance(stock, type) and issubclass(stock, PreTrainedModel)
    return stock if is_model and getattr(stock, "config_class", None) is CONFIG_MAPPING[base] else None


def _load_and_patch(
    name_or_path: str | os.PathLike[str],
    raw: dict[str, Any],
    scheme: Scheme,
    attention: str,
    seed: int | None,
    kwargs: dict[str, Any],
) -> PreTrainedModel:
    loader = _stock_model(str(raw["model_type"]), _architecture(raw)) or transformers.AutoModelForCausalLM
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
        scheme: name, or None for a stock checkpoint.
        hyperparameters: of the scheme.
        version: of hf_posenc that saved it, or None.
        problem: why this installation cannot load it, or None if it can.
    """

    source: str
    base: str
    architecture: str
    scheme: str | None
    hyperparameters: dict[str, Any]
    version: str | None
    problem: str | None

    def __str__(self) -> str:
        """Return a few readable lines."""
        what = self.scheme or "stock positions"
        if self.hyperparameters:
            what += "(" + ", ".join(f"{key}={value!r}" for key, value in self.hyperparameters.items()) + ")"
        lines = [
            f"{self.source}: {what}",
            f"  base        {self.base} ({self.architecture})",
            f"  saved by    {'hf_posenc ' + self.version if self.version else 'no hf_posenc'}",
            f"  loadable    {'yes' if self.problem is None else 'no: ' + self.problem}",
        ]
        return "\n".join(lines)


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
    raw = _raw_config(name_or_path, kwargs)
    model_type = str(raw.get("model_type", "unknown"))
    entry = raw.get("position_encoding") if model_type.startswith("posenc_") else None
    entry = dict(entry) if isinstance(entry, dict) else {}
    scheme, version = entry.pop("scheme", None), entry.pop("hf_posenc_version", None)
    problem = None
    try:
        if model_type.startswith("posenc_"):
            cls = _saved_class(raw)
            config = cls.config_class.from_dict(raw)
            scheme_of(config)
            check_version(config)
        else:
            adapter_for(model_type)
    except HfPosencError as error:
        problem = str(error)
    return Inspection(
        source=str(name_or_path),
        base=model_type.removeprefix("posenc_"),
        architecture=_architecture(raw) or "?",
        scheme=scheme if isinstance(scheme, str) else None,
        version=version if isinstance(version, str) else None,
        hyperparameters=entry,
        problem=problem,
    )


def export_stock(
    model: PreTrainedModel, directory: str | os.PathLike[str], *, num_positions: int | None = None, **kwargs: Any
) -> None:
    """Save a patched model as a stock checkpoint that computes the same, where a stock class can.

    - `rope` and its scalings on families that rotate by themselves;
    - `nope` on llama and smollm3, as a SmolLM3 without rotated layers;
    - `learned` and `sinusoidal` at the input of gpt2 and opt, as their own table.

    Args:
        model: patched; it is left as it is.
        directory: where to.
        num_positions: rows of the table that `sinusoidal` becomes, which has no limit of its own; None means as many
            as the model's config had words for before it was patched, 1024 if that is unknown.
        **kwargs: of `save_pretrained` in transformers.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if no stock class represents it; the message says why.
        ValueError: if the table has fewer positions than were asked for, or the scheme has no table.
        FileExistsError: if the directory holds a patched checkpoint, whose wires would be lost.
    """
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: save it with save_pretrained")
    if num_positions is not None and not isinstance(patch.scheme, (Learned, Sinusoidal)):
        raise ValueError(f"num_positions is for tables of positions, and {patch.scheme.name} has none: leave it out")
    if (Path(directory) / "modeling_hf_posenc.py").exists():
        raise FileExistsError(f"{directory} holds a patched checkpoint; export to another folder")
    stock_model, stock_config = (
        stock_class(type(model), PosEncMixin),
        stock_class(type(model.config), PosEncConfigMixin),
    )
    family = stock_config.model_type
    settings = _stock_settings(model)
    own = position_keys(model)
    weights = {key: value for key, value in model.state_dict().items() if key not in own}
    scheme = patch.scheme
    adapter = adapter_for(family)
    if isinstance(scheme, Rope) and adapter.rotary is not None:
        if scheme.leaves_dimensions and not adapter.slices_rotary:
            raise UnsupportedModelError(f"{family} rotates whole heads, so no stock class has partial_rotary_factor")
    elif scheme.name == "nope" and family in ("llama", "smollm3"):
        stock_model, stock_config = _smollm3(model, stock_model)
        count = model.config.num_hidden_layers
        settings |= {"no_rope_layers": [0] * count, "no_rope_layer_interval": count + 1, "use_sliding_window": False}
        settings["layer_types"] = ["full_attention"] * count
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    elif isinstance(scheme, (Learned, Sinusoidal)) and scheme.placement == "input" and adapter.position_table:
        count = num_positions or scheme.limit or 1024
        if scheme.limit is not None and count > scheme.limit:
            raise ValueError(f"the table has {scheme.limit} positions, not {count}")
        key, table = _baked(model, adapter, count)
        weights[key] = table
        settings[model.config.attribute_map.get("max_position_embeddings", "max_position_embeddings")] = count
    else:
        raise UnsupportedModelError(
            f"no stock class computes {scheme.name} on {family}: rope can be exported from families that rotate, "
            "nope from llama and smollm3, learned and sinusoidal at the input from gpt2 and opt"
        )
    with torch.device("meta"):
        stock = stock_model(stock_config.from_dict(settings))
    stock.load_state_dict(weights, assign=True)
    stock.tie_weights()
    if model.can_generate():
        stock.generation_config = model.generation_config
    stock.save_pretrained(directory, **kwargs)


def _stock_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the config as a stock class takes it, without our entry and wires."""
    settings = model.config.to_dict()
    for key in ("position_encoding", "auto_map", "attn_implementation", "model_type", "architectures"):
        settings.pop(key, None)
    for key in settings:
        if isinstance(settings[key], str) and settings[key].startswith("hf_posenc:"):
            settings[key] = settings[key].removeprefix("hf_posenc:")
    return settings


def _smollm3(model: PreTrainedModel, stock: type[PreTrainedModel]) -> tuple[type[PreTrainedModel], Any]:
    config = model.config
    if stock.__name__.startswith("SmolLM3"):
        return stock, transformers.SmolLM3Config
    head = getattr(transformers, stock.__name__.replace("Llama", "SmolLM3"), None)
    if head is None:
        raise UnsupportedModelError(f"SmolLM3 has no {stock.__name__}")
    if config.head_dim != config.hidden_size // config.num_attention_heads:
        raise UnsupportedModelError(f"SmolLM3 has heads of hidden_size / num_attention_heads, not of {config.head_dim}")
    return head, transformers.SmolLM3Config


def _baked(model: PreTrainedModel, adapter: Any, count: int) -> tuple[str, torch.Tensor]:
    """Return the key of the base's own table, and the vectors that the scheme adds."""
    decoder = model.base_model.get_submodule(adapter.decoder)
    module = decoder.get_submodule(adapter.position_table)
    name = next(name for name, child in model.named_modules() if child is module)
    place = next(decoder.parameters()).device
    with torch.no_grad():
        rows = module.embed(torch.arange(count, device=place)[None])[0].to(model.dtype)
    before = torch.zeros(adapter.table_offset, rows.shape[-1], dtype=rows.dtype, device=place)
    return f"{name}.weight", torch.cat([before, rows])
