"""PEFT adapters of patched models: a LoRA config, and the check of the base that an adapter was trained on."""

from __future__ import annotations

import copy
import inspect
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import transformers
from huggingface_hub import hf_hub_download
from peft import LoraConfig, PeftConfig, PeftModel
from peft.utils.constants import CONFIG_NAME, EMBEDDING_LAYER_NAMES
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..core.errors import CheckpointError, NotPatchedError, UnsupportedModelError
from ..core.modules import PositionEmbedding, modules_of_schemes
from ..model.base_model import BaseModel
from ..model.patch_record import adapted_parts, patch_of, patched_part, without_adapter
from .class_names import StockModel
from .files import JsonObject, json_object
from .scheme_entry import CALIBRATION, ENTRY, read_schemes

Config = TypeVar("Config", bound=PeftConfig)

WHERE = frozenset(inspect.signature(hf_hub_download).parameters) - {"repo_id", "filename"}
"""Options of `hf_hub_download` that say where an adapter is."""


class AdapterMixin(StockModel):
    """The part of our model classes that loads adapters and names their base."""

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether activations are checkpointed. PEFT reads this; transformers' own warns, and is gone in version 6."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.modules())

    def load_adapter(
        self, peft_model_id: str | None = None, adapter_name: str | None = None, *args: object, **kwargs: Any
    ) -> Any:
        """Load an adapter as transformers does, if it was trained on a base that is patched like this model.

        Args:
            peft_model_id: the adapter's directory, or a Hub id.
            adapter_name: name that the adapter gets.
            *args: passed to the method of transformers.
            **kwargs: passed to the method of transformers.

        Returns:
            The value of transformers' method.

        Raises:
            CheckpointError: if the adapter was trained on another base, or does not name its base; if transformers has
                not loaded all of its weights, as 5.17 does with `modules_to_save`.
            OSError: if there is no such adapter, or it cannot be read.
        """
        if peft_model_id is not None:
            source = {**kwargs, **(kwargs.get("download_kwargs") or {}), **(kwargs.get("adapter_kwargs") or {})}
            check_adapter(self, peft_model_id, **source)
        loaded: Any = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
        name = adapter_name or "default"  # transformers also reports the keys of other adapters
        if missing := sorted(key for key in getattr(loaded, "missing_keys", ()) if name in key.split(".")):
            raise CheckpointError(
                f"hf_posenc: transformers {transformers.__version__} has left {len(missing)} weights of this adapter "
                f"at the values that they started with, {missing[0]} among them: load the model again, and the adapter "
                "with hf_posenc.load_adapter"
            )
        return loaded

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. When PEFT sets the configs of its adapters, add the name of their base.

        Warn (UserWarning) if nothing has trained the position parameters, and an adapter neither trains nor saves them.

        Raises:
            CheckpointError: if a config already names another base. PEFT has put the adapter inside the model by then.
        """
        if name == "peft_config" and isinstance(value, dict):
            for adapter, config in value.items():
                if ENTRY in (mapping := config.auto_mapping or {}):
                    _require_same(mapping[ENTRY], self.config.position_encoding, repr(adapter))
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
    saved_whole = set(getattr(config, "modules_to_save", None) or ())
    for name, parameter in patched_part(model).named_parameters():
        is_untrained = patch.started.get(name) == parameter._version and not parameter.requires_grad
        if is_untrained and not saved_whole & set(name.split(".")):
            warnings.warn(
                f"this adapter neither trains nor saves the position parameters of {patch.name} ({name} is one), which "
                "nothing has trained or calibrated yet: use hf_posenc.lora_config(model), or calibrate the model first",
                stacklevel=3,
            )
            return


def name_base(model: PreTrainedModel, config: Config) -> Config:
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


def check_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **where: Any) -> None:
    """Check that an adapter was trained on a base that was patched like this model.

    Args:
        model: a patched or stock model.
        adapter: the adapter's directory, or a Hub id.
        **where: `subfolder`, `revision`, `token`, `cache_dir`, ... of `hf_hub_download`; other options are ignored.

    Raises:
        CheckpointError: if the adapter was trained on another base, or does not name its base.
        OSError: if there is no such adapter, or it cannot be read.
    """
    where = {key: value for key, value in where.items() if key in WHERE}
    raw, own_entry = _read_json(adapter, CONFIG_NAME, **where), getattr(model.config, ENTRY, None)
    mapping, name = raw.get("auto_mapping") or {}, raw.get("base_model_name_or_path") or ""
    base_class = str(mapping.get("base_model_class") or "")
    of_base = {"revision": raw.get("revision"), "cache_dir": where.get("cache_dir"), "local_files_only": True}
    config: JsonObject | None = None
    with suppress(OSError, ValueError):  # not on this machine, or no name of a repository
        config = _read_json(name, "config.json", **of_base) if name else None
    if ENTRY in mapping:
        trained_on: Any = mapping[ENTRY]
    elif config is not None:
        trained_on = config.get(ENTRY)
    elif name and name == model.__dict__.get("name_or_path"):
        return
    elif base_class and not base_class.startswith("PosEnc"):
        trained_on = None
    else:
        base = f"the base {name!r}, which is not on this machine" if name else "no base"
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} names {base}: it cannot be told whether it was trained on "
            f"{_describe(own_entry)}. Give its config a task_type, or for prompts and prefixes train with what "
            "hf_posenc.checkpoints.lora.name_base(model, config) returns"
        )
    _require_same(trained_on, own_entry, adapter)


def _require_same(trained_on: Any, own_entry: Any, adapter: str | os.PathLike[str]) -> None:
    """Raise CheckpointError unless the base of an adapter and a model have entries that mean the same."""
    then, now = (json.loads(json.dumps(read_schemes(entry))) for entry in (trained_on, own_entry))
    if then != now or bool(then) != bool(trained_on) or bool(now) != bool(own_entry):
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} was trained on {_describe(trained_on)}, this model has "
            f"{_describe(own_entry)}: load a fresh model with the positions that the adapter was trained on. A new "
            "adapter needs a config of its own: hf_posenc.lora_config(model)"
        )


def _describe(entry: object) -> str:
    """Return the schemes of an entry in words."""
    schemes = [{key: value for key, value in scheme.items() if value is not None} for scheme in read_schemes(entry)]
    return " and ".join(map(str, schemes)) or "stock positions"


def _read_json(source: str | os.PathLike[str], filename: str, **where: Any) -> JsonObject:
    """Return the contents of a JSON file in a folder or a repository."""
    path = Path(source) / (where.get("subfolder") or "") / filename
    return json_object(path if Path(source).is_dir() else Path(hf_hub_download(str(source), filename, **where)))


def lora_config(
    model: PreTrainedModel,
    *,
    norms: bool = True,
    embeddings: bool | None = None,
    positions: bool = True,
    **options: Any,
) -> LoraConfig:
    """Return a LoRA config for a patched model.

    A model with new positions needs more than low-rank updates of its attention. LoRA comes close to full fine-tuning
    if normalisation layers and embeddings are trained, too (Chen et al. 2024, LongLoRA, arXiv:2309.12307, table 2:
    perplexity 11.44 without them, 8.12 with them). Embeddings are a large part of many models. So by default they are
    trained only if the swap changes the vectors that are added to them.

    Args:
        model: a patched model.
        norms: train and save all weights of the normalisation layers.
        embeddings: train and save all token embeddings. None does so only if the swap needs it: if it removes the
            vectors that are added to them (the table of GPT-2 or OPT) or adds new ones (`learned`, `sinusoidal`). Tied
            output embeddings are trained with them, except on GPT-2, where PEFT cannot tie them.
        positions: train and save all parameters of the scheme.
        **options: options of `peft.LoraConfig`. `target_modules` defaults to the attention projections.
            `modules_to_save` are added to the modules above.

    Returns:
        The config, for `peft.get_peft_model`.

    Raises:
        NotPatchedError: if the model is not patched. For a stock model use `peft.LoraConfig`.
        UnsupportedModelError: if the model has an adapter already.
    """
    if patch_of(model) is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: use peft.LoraConfig")
    if without_adapter(model) is not model or adapted_parts(model):
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, which renames its layers: call lora_config before the "
            "first adapter is added, and pass this config to every adapter"
        )
    base = BaseModel.of(model)
    names, table = base.family.names, base.modules.position_table
    table_removed = base.has_table and table is not None and not list(table.parameters())
    if embeddings is None:
        embeddings = table_removed or any(isinstance(module, PositionEmbedding) for module in model.modules())
    of_schemes = modules_of_schemes(model)
    modules_to_save = list(options.pop("modules_to_save", None) or [])
    for name, module in model.named_modules():
        is_wanted = (norms and type(module).__name__.endswith("Norm")) or (positions and name in of_schemes)
        inside = any(name.startswith(f"{outer}.") for outer in modules_to_save)  # PEFT cannot wrap what it has wrapped
        if is_wanted and not inside and list(module.parameters(recurse=False)):
            modules_to_save.append(name)
    if embeddings:
        modules_to_save.append(names.token_embedding)
    if table_removed:
        # The module has no parameters here, but it has some on a stock base. So PEFT refuses the adapter there.
        modules_to_save.append(str(names.position_table))
    # PEFT ties embeddings only under names that it lists. GPT-2's `wte` is not listed.
    tied = getattr(model.config, "tie_word_embeddings", False) and names.token_embedding in EMBEDDING_LAYER_NAMES
    children = {name: child for attention in base.modules.attentions for name, child in attention.named_children()}
    defaults = {
        "target_modules": sorted(name for name in children if isinstance(children[name], (nn.Linear, Conv1D))),
        "fan_in_fan_out": any(isinstance(child, Conv1D) for child in children.values()),
        "ensure_weight_tying": embeddings and tied,
        "task_type": "CAUSAL_LM",
    }
    return name_base(model, LoraConfig(modules_to_save=modules_to_save or None, **{**defaults, **options}))


def load_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **kwargs: Any) -> PeftModel:
    """Load a PEFT adapter of any kind, but only onto the base that it was trained on.

    `load_adapter` identifies the base by the first of these that exists:

    1. the entry in the adapter's config, which `lora_config`, `name_base` and patched models with an adapter inside
       write;
    2. the config of the base that the adapter names, if that base is on this machine;
    3. the name of the base, if it is the name of this model.

    It refuses an adapter without any of them.

    Args:
        model: a patched model, or a stock model for an adapter that was trained on one.
        adapter: directory of the adapter, or a Hub id.
        **kwargs: options of `peft.PeftModel.from_pretrained`. The check uses `subfolder`, `revision`, `token`,
            `cache_dir` and the like, too.

    Returns:
        The model inside a `peft.PeftModel`.

    Raises:
        CheckpointError: if the model is not patched like the adapter's base, or the adapter does not name its base's
            positions.
        UnsupportedModelError: if the model has an adapter already.
        OSError: if the adapter does not exist or cannot be read.
    """
    if without_adapter(model) is not model:
        raise UnsupportedModelError(
            f"this {type(model).__name__} has an adapter, but load_adapter needs a model without one. To add another: "
            "hf_posenc.checkpoints.lora.check_adapter(model.get_base_model(), folder), then "
            "model.load_adapter(folder, name)"
        )
    check_adapter(model, adapter, **kwargs)
    loaded: PeftModel = PeftModel.from_pretrained(model, adapter, **kwargs)
    return loaded
