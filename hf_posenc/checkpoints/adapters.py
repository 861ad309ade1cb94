"""PEFT adapters of patched models. An adapter names the base it was trained on, and loads on no other base."""

from __future__ import annotations

import copy
import inspect
import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from huggingface_hub import hf_hub_download
from peft import PeftConfig
from peft.utils.constants import CONFIG_NAME
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..live.patch_record import patch_of, patched_part
from ..live.undo import restored_after_failure
from .compat_0_1 import mean_the_same, translate_scheme
from .headers import JsonObject, json_object
from .scheme_entry import CALIBRATION, ENTRY, SCHEMES, read_schemes
from .stock_checkpoints import StockModel

WHERE = frozenset(inspect.signature(hf_hub_download).parameters) - {"repo_id", "filename"}
"""Options of `hf_hub_download` that say where an adapter is."""


class AdapterMixin(StockModel):
    """The part of our model classes that loads adapters and names their base."""

    def load_adapter(self, peft_model_id: str | None = None, *args: object, **kwargs: object) -> Any:
        """Load an adapter as transformers does, if it was trained on a base that is patched like this model.

        Args:
            peft_model_id: the adapter's directory, or a Hub id.
            *args: passed to the method of transformers.
            **kwargs: passed to the method of transformers.

        Returns:
            The value of transformers' method.

        Raises:
            CheckpointError: if the adapter was trained on another base, or does not name its base; if transformers has
                not loaded all of its weights, as 5.17 does with `modules_to_save`.
            OSError: if there is no such adapter, or it cannot be read.
        """
        load: Any = super().load_adapter
        arguments = inspect.signature(load).bind(peft_model_id, *args, **kwargs).arguments
        options, config = arguments.get("kwargs", {}), arguments.get("peft_config")
        load_config = vars(arguments.get("load_config") or SimpleNamespace())
        adapter = peft_model_id or load_config.get("pretrained_model_name_or_path")
        if config is not None:
            raw = config if isinstance(config, dict) else config.to_dict()
            if ENTRY in (raw.get("auto_mapping") or {}):
                require_same_base(self, raw, adapter or "peft_config", {})
        elif adapter is not None:
            source = {
                **(load_config.get("download_kwargs") or {}),
                **(options.get("download_kwargs") or {}),
                **(arguments.get("adapter_kwargs") or {}),
            }
            if arguments.get("local_files_only"):
                source["local_files_only"] = True
            check_adapter(self, adapter, **{key: value for key, value in source.items() if key in WHERE})
        name = arguments.get("adapter_name") or "default"

        def is_of_adapter(key: str) -> bool:  # transformers also reports the keys of other adapters
            return name in key.split(".")

        with restored_after_failure(self, is_of_adapter):
            loaded = load(peft_model_id, *args, **kwargs)
            if missing := sorted(filter(is_of_adapter, getattr(loaded, "missing_keys", ()))):
                raise CheckpointError(
                    f"hf_posenc: transformers {transformers.__version__} has left {len(missing)} weights of this "
                    f"adapter at the values that they started with, {missing[0]} among them. The model is as it was "
                    "before: load the adapter with hf_posenc.load_adapter"
                )
        return loaded

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. When PEFT sets the configs of its adapters, add the name of their base.

        Warn (UserWarning) if nothing has trained the position parameters, and an adapter neither trains nor saves them.
        """
        if name == "peft_config" and isinstance(value, dict):
            for adapter, config in value.items():
                _warn_of_frozen_positions(self, config)
                value[adapter] = name_base(self, config)
        super().__setattr__(name, value)


def _warn_of_frozen_positions(model: PreTrainedModel, config: PeftConfig) -> None:
    """Warn if an adapter leaves position parameters at their initial values.

    Args:
        model: a patched model with the adapter inside.
        config: the adapter's config. If it names its base, `lora_config` or `name_base` made it, and nobody is warned.
    """
    patch, calibrated = patch_of(model), CALIBRATION in model.config.position_encoding
    if patch is None or calibrated or config.inference_mode or ENTRY in (config.auto_mapping or {}):
        return
    saved_whole = tuple(getattr(config, "modules_to_save", None) or ())
    frozen = [
        name
        for name, parameter in patched_part(model).named_parameters()
        if patch.started.get(name) == parameter._version
        and not parameter.requires_grad
        and not _is_within(name, saved_whole)
    ]
    if frozen:
        owners = sorted({name.split(".")[-2] for name in frozen})
        warnings.warn(
            f"this adapter neither trains nor saves the position parameters of {patch.name} ({len(frozen)} tensors, "
            f"{frozen[0]} among them), which nothing has trained or calibrated yet: use hf_posenc.lora_config(model), "
            f"name modules_to_save={owners} in the config, or calibrate the model first",
            stacklevel=3,
        )


def _is_within(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter is inside a module whose name ends like one of `modules`, as PEFT matches them."""
    parts = parameter.split(".")[:-1]
    return bool(modules) and any(".".join(parts[:end]).endswith(modules) for end in range(1, len(parts) + 1))


def name_base(model: PreTrainedModel, config: PeftConfig) -> PeftConfig:
    """Return a PEFT config that names the patched base of its adapter. `load_adapter` compares the name.

    PEFT keeps the name in configs with a `task_type`, and drops it from other configs. Adapters inside the model, such
    as LoRA's, are named without this function. For prompts and prefixes, pass `get_peft_model` the config it returns.

    Args:
        model: a patched model.
        config: a config of any PEFT class; it stays unchanged. If it already names a base, the copy names the same.

    Returns:
        A copy of the config.
    """
    mapping = config.auto_mapping or {}
    config = copy.copy(config)
    config.auto_mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
        ENTRY: dict(model.config.position_encoding),
        **mapping,
    }
    return config


def check_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **where: object) -> None:
    """Check that an adapter was trained on a base that was patched like this model.

    Args:
        model: a patched or stock model.
        adapter: the adapter's directory, or a Hub id.
        **where: `subfolder`, `revision`, `token`, `cache_dir`, ... of `hf_hub_download`.

    Raises:
        CheckpointError: if the adapter was trained on another base, or does not name its base.
        OSError: if there is no such adapter, or it cannot be read.
    """
    require_same_base(model, read_adapter_config(adapter, where), adapter, where)


def require_same_base(
    model: PreTrainedModel, raw: JsonObject, adapter: str | os.PathLike[str], source: dict[str, object]
) -> None:
    """Raise CheckpointError unless an adapter names a base that was patched like a model.

    Args:
        model: a patched or stock model.
        raw: contents of the adapter's adapter_config.json.
        adapter: name of the adapter in messages.
        source: options of `hf_hub_download` for the adapter. Its `cache_dir` may also hold the base's config.
    """
    own_entry = getattr(model.config, ENTRY, None)
    mapping, name = raw.get("auto_mapping") or {}, raw.get("base_model_name_or_path") or ""
    if not isinstance(mapping, dict) or not isinstance(name, str) or not isinstance(mapping.get(ENTRY, {}), dict):
        raise CheckpointError(
            f"hf_posenc: adapter_config.json of {adapter}: auto_mapping must be an object, and so must its {ENTRY}; "
            "base_model_name_or_path must be text"
        )
    base_class = str(mapping.get("base_model_class") or "")
    if ENTRY in mapping:
        trained_on: Any = mapping[ENTRY]
    elif (config := _base_config(name, raw.get("revision"), source)) is not None:
        trained_on = config.get(ENTRY) if str(config.get("model_type")).startswith("posenc_") else None
    elif name and name == model.__dict__.get("name_or_path"):
        return
    elif base_class and not base_class.startswith("PosEnc"):
        trained_on = None
    else:
        base = f"the base {name!r}, which is not on this machine" if name else "no base"
        base += f", and only that it was a {base_class}" if base_class else ""
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} names {base}: it cannot be told whether it was trained on "
            f"{_describe(own_entry)}. An adapter names its base if its config has a task_type and it sits inside the "
            "model; for prompts and prefixes train with the config that hf_posenc.lora.name_base(model, config) "
            "returns. If you know that the adapter fits, peft.PeftModel.from_pretrained(model, adapter) loads it "
            "unchecked"
        )
    if not _are_the_same(trained_on, own_entry):
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} was trained on {_describe(trained_on)}, this model has "
            f"{_describe(own_entry)}"
        )


def _describe(entry: object) -> str:
    """Return the schemes of an entry in words."""
    schemes = [{key: value for key, value in scheme.items() if value is not None} for scheme in read_schemes(entry)]
    return " and ".join(map(str, schemes)) or "stock positions"


def _are_the_same(trained_on: Any, own_entry: Any) -> bool:
    """Return whether two entries name the same schemes with the same values. None stands for stock positions."""
    then, now = (json.loads(json.dumps(read_schemes(entry))) for entry in (trained_on, own_entry))
    if not then or not now:
        return not trained_on and not own_entry
    if SCHEMES not in trained_on:  # of version 0.1
        then = list(map(translate_scheme, then))
    return len(then) == len(now) and all(map(mean_the_same, then, now))


def _base_config(name: str, revision: object, source: dict[str, Any]) -> JsonObject | None:
    """Return the config of the base that an adapter names, from a folder or the Hub cache, or None."""
    if not name:
        return None
    path = Path(name) / "config.json"
    if not os.path.isfile(path):
        cache, revision = source.get("cache_dir"), revision if isinstance(revision, str) else None
        try:
            path = Path(hf_hub_download(name, "config.json", revision=revision, cache_dir=cache, local_files_only=True))
        except (OSError, ValueError):  # not in the cache, or no name of a repository
            return None
    return json_object(path)


def read_adapter_config(adapter: str | os.PathLike[str], source: dict[str, Any]) -> JsonObject:
    """Return the contents of an adapter's adapter_config.json, without importing modules that it names.

    Args:
        adapter: the adapter's directory, or a Hub id.
        source: options of `hf_hub_download` that say where the adapter is.

    Raises:
        CheckpointError: if the file holds no JSON object, or would make PEFT import a module.
        OSError: if there is no such file, or it cannot be read.
    """
    path = Path(adapter) / (source.get("subfolder") or "") / CONFIG_NAME
    if not path.is_file():
        if os.path.isdir(adapter):
            raise FileNotFoundError(f"hf_posenc: {path.parent} has no {CONFIG_NAME}")
        path = Path(hf_hub_download(str(adapter), CONFIG_NAME, **source))
    raw = json_object(path)
    if raw.get("megatron_config"):
        raise CheckpointError(f"hf_posenc: {path}: megatron_config would make PEFT import the module that it names")
    return raw
