"""LoRA for patched models: which modules to adapt, and which to train and save whole."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from huggingface_hub import hf_hub_download
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.constants import CONFIG_NAME, EMBEDDING_LAYER_NAMES
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .errors import CheckpointError, NotPatchedError, UnsupportedModelError
from .model_types.entry import ENTRY, named_schemes
from .model_types.model import name_base
from .modules import PositionModule
from .patching.plan import BaseModel
from .patching.state import patch_of, without_adapter
from .registry import scheme_class


def lora_config(
    model: PreTrainedModel, *, norms: bool = True, embeddings: bool = True, positions: bool = True, **options: Any
) -> LoraConfig:
    """Return a LoRA config for a patched model.

    A model with new positions needs more than low-rank updates of its attention: with its normalisation layers and
    embeddings trained as well, LoRA comes close to full fine-tuning (Chen et al. 2024, LongLoRA, arXiv:2309.12307,
    table 2: perplexity 11.44 without, 8.12 with both).

    Args:
        model: patched.
        norms: train and save the normalisation layers whole.
        embeddings: train and save the token embeddings whole. Output embeddings that are tied to them follow where PEFT
            can tie them (not on GPT-2, where they stay as they were).
        positions: train and save the scheme's parameters whole.
        **options: of `peft.LoraConfig`. `target_modules` defaults to the attention projections, `modules_to_save` are
            added to those above.

    Returns:
        The config, for `peft.get_peft_model`.

    Raises:
        NotPatchedError: if the model is not patched: adapt a stock model with `peft.LoraConfig`.
    """
    if patch_of(model) is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: use peft.LoraConfig")
    base = BaseModel.of(model)
    family, found = base.family, base.found
    projections = {
        name: child
        for attention in found.attentions
        for name, child in attention.named_children()
        if isinstance(child, (nn.Linear, Conv1D))
    }
    whole = list(options.pop("modules_to_save", None) or [])
    for name, module in model.named_modules():
        own_parameters = any(True for _ in module.parameters(recurse=False))
        if not own_parameters:
            continue
        if (norms and type(module).__name__.endswith("Norm")) or (positions and isinstance(module, PositionModule)):
            whole.append(name)
    if embeddings:
        whole.append(family.token_embedding)
    table = found.position_table
    if family.position_table is not None and table is not None and not any(True for _ in table.parameters()):
        # It has nothing to save, but on a stock base it has: PEFT itself then refuses the adapter.
        whole.append(family.position_table)
    options.setdefault("target_modules", sorted(projections))
    options.setdefault("fan_in_fan_out", any(isinstance(child, Conv1D) for child in projections.values()))
    # PEFT keeps tied what it knows by name; GPT-2's `wte` it does not: its output embeddings then stay as they were.
    tied = embeddings and model.config.tie_word_embeddings and family.token_embedding in EMBEDDING_LAYER_NAMES
    options.setdefault("ensure_weight_tying", tied)
    options.setdefault("task_type", "CAUSAL_LM")
    config: LoraConfig = name_base(model, LoraConfig(modules_to_save=whole or None, **options))
    return config


def load_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **kwargs: Any) -> PeftModel:
    """Load an adapter of any kind of PEFT's onto the base that it was trained on, and onto no other.

    What counts is what the adapter says of its base: the entry that `lora_config` and `name_base` write, and patched
    models write for adapters that sit inside them; else the config of the base that it names, as far as that is on this
    machine; else the name itself, if it is this model's. An adapter that says nothing is refused.

    Args:
        model: patched, or stock for an adapter that was trained on a stock one.
        adapter: the adapter's directory, or a Hub id.
        **kwargs: of `peft.PeftModel.from_pretrained`; `subfolder`, `revision`, `token`, `cache_dir`, ... say where the
            adapter is for the check as well.

    Returns:
        The model, wrapped.

    Raises:
        CheckpointError: if the model is not patched as the adapter's base was, the adapter does not say how that was,
            or its adapter_config.json is none.
        UnsupportedModelError: if the model has an adapter already.
        OSError: if there is no such adapter, or it cannot be read.
        TypeError: for an option that PEFT does not have.
    """
    if unknown := sorted(set(kwargs) - _OPTIONS):
        raise TypeError(f"load_adapter and peft.PeftModel.from_pretrained have no option {', '.join(unknown)}")
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, and load_adapter takes a model without. To add another: "
            "hf_posenc.lora.check_adapter(model.get_base_model(), folder), then model.load_adapter(folder, name)"
        )
    source = {key: value for key, value in kwargs.items() if key in _WHERE}
    raw = _read(adapter, source)
    _check(model, raw, adapter, source)
    if kwargs.get("config") is None:
        kwargs["config"] = _config(raw, adapter)
    try:
        return PeftModel.from_pretrained(model, adapter, **kwargs)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"hf_posenc: PEFT cannot put the adapter {adapter} on this model: {type(error).__name__}: {error}"
        ) from error


_WHERE = frozenset(inspect.signature(hf_hub_download).parameters) - {"repo_id", "filename"}
_OPTIONS = (
    _WHERE
    | set(inspect.signature(PeftModel.from_pretrained).parameters)
    | set(inspect.signature(PeftModel.load_adapter).parameters)
    | {"device_map", "max_memory", "offload_folder", "offload_dir", "offload_index", "use_safetensors", "adapters"}
) - {"self", "model", "model_id", "kwargs"}


def check_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **where: Any) -> None:
    """Check that an adapter was trained on a base patched like this model.

    Args:
        model: patched or stock.
        adapter: the adapter's directory, or a Hub id.
        **where: `subfolder`, `revision`, `token`, `cache_dir`, ... as huggingface_hub has them.

    Raises:
        CheckpointError: if not, or if the adapter does not say.
        OSError: if there is no such adapter, or it cannot be read.
    """
    _check(model, _read(adapter, where), adapter, where)


def _check(
    model: PreTrainedModel, raw: dict[str, Any], adapter: str | os.PathLike[str], source: dict[str, Any]
) -> None:
    here = getattr(model.config, ENTRY, None)
    mapping, name = raw.get("auto_mapping") or {}, raw.get("base_model_name_or_path") or ""
    if not isinstance(mapping, dict) or not isinstance(name, str) or not isinstance(mapping.get(ENTRY, {}), dict):
        raise CheckpointError(
            f"hf_posenc: adapter_config.json of {adapter}: auto_mapping must be an object, and so must its {ENTRY}; "
            "base_model_name_or_path must be text"
        )
    cls = str(mapping.get("base_model_class") or "")
    if ENTRY in mapping:
        trained_on: Any = mapping[ENTRY]
    elif (config := _base_config(name, raw.get("revision"), source)) is not None:
        trained_on = config.get(ENTRY) if str(config.get("model_type")).startswith("posenc_") else None
    elif name and name == model.__dict__.get("name_or_path"):
        return
    elif cls and not cls.startswith("PosEnc"):
        trained_on = None
    else:
        said = f"the base {name!r}, which is not on this machine" if name else "no base"
        said += f", and only that it was a {cls}" if cls else ""
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} names {said}: it cannot be told whether it was trained on "
            f"{_said(here)}. Adapters name their base if their config has a task_type and they sit inside the model; "
            "for prompts and prefixes hf_posenc.lora.name_base(model, config) writes it. If you know that it fits, "
            "peft.PeftModel.from_pretrained(model, adapter) loads it unchecked"
        )
    if not _same(trained_on, here):
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} was trained on {_said(trained_on)}, this model has {_said(here)}"
        )


def _said(entry: Any) -> str:
    said = [{key: value for key, value in each.items() if value is not None} for each in named_schemes(entry)]
    return " and ".join(map(str, said)) or "stock positions"


def _same(trained_on: Any, here: Any) -> bool:
    """Return whether two entries, each None for stock positions, name the same schemes with the same values."""
    then, now = named_schemes(trained_on), named_schemes(here)
    if not then or not now:
        return not trained_on and not here
    of_0_1 = "schemes" not in trained_on
    return len(then) == len(now) and all(_same_scheme(*both, of_0_1) for both in zip(then, now, strict=True))


def _same_scheme(then: dict[str, Any], now: dict[str, Any], of_0_1: bool) -> bool:
    then, now = (json.loads(json.dumps(each)) for each in (then, now))
    if then["scheme"] != now["scheme"]:
        return False
    cls = scheme_class(now["scheme"])
    return cls.say_the_same(cls.meant_in_0_1(then) if of_0_1 else then, now)


def _base_config(name: str, revision: Any, source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config of the base that an adapter names, from a folder or the cache of downloads, or None."""
    if not name:
        return None
    path: str | None = str(Path(name) / "config.json")
    if not os.path.isfile(str(path)):
        try:
            cache, own = source.get("cache_dir"), revision if isinstance(revision, str) else None
            path = hf_hub_download(name, "config.json", revision=own, cache_dir=cache, local_files_only=True)
        except (OSError, ValueError):  # not there, or no name of a repository
            return None
    return _object(Path(str(path)))


def _read(adapter: str | os.PathLike[str], source: dict[str, Any]) -> dict[str, Any]:
    """Return what adapter_config.json holds; nothing that it names is imported."""
    path = Path(adapter) / (source.get("subfolder") or "") / CONFIG_NAME
    if not path.is_file():
        if os.path.isdir(adapter):
            raise FileNotFoundError(f"hf_posenc: {path.parent} has no {CONFIG_NAME}")
        path = Path(hf_hub_download(str(adapter), CONFIG_NAME, **source))
    raw = _object(path)
    if raw.get("megatron_config"):
        raise CheckpointError(f"hf_posenc: {path}: megatron_config would have PEFT import the module that it names")
    return raw


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"hf_posenc: {path} holds no JSON object")
    return found


def _config(raw: dict[str, Any], adapter: str | os.PathLike[str]) -> PeftConfig:
    """Return the config of an adapter, as PEFT makes it."""
    known = {key: value for key, value in raw.items() if key != "runtime_config"}
    try:
        if not isinstance(raw.get("peft_type"), str):
            raise TypeError(f"peft_type must be text, not {raw.get('peft_type')!r}")
        config = PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**known))
        hints = get_type_hints(type(config))
        if wrong := sorted(key for key in set(known) & set(hints) if not _is_a(known[key], hints[key])):
            raise TypeError(", ".join(f"{key} cannot be {known[key]!r:.80}" for key in wrong))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"hf_posenc: {CONFIG_NAME} of {adapter} makes no adapter: {type(error).__name__}: {error}"
        ) from error
    return config


def _is_a(value: Any, hint: Any) -> bool:
    """Return whether a value of JSON is of an annotated type; of types that JSON does not have, any value is."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_a(value, each) for each in inside)
    if origin is Literal:
        return value in inside
    if origin in (list, set, tuple):
        return isinstance(value, list) and all(_is_a(each, inside[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_is_a(each, inside[1]) for each in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, bool, list, dict, type(None)) else True
