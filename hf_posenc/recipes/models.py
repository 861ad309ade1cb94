"""Models and the schemes patched into them: options, loading, saving, and facts that the recipes need."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

import hf_posenc

from ..api import schemes_of_words
from ..checkpoints import files, hub
from ..core.command_arguments import option
from ..core.registry import family_for
from ..families.base import family_of, language_config
from ..model.patch_record import patch_of, without_adapter
from .corpus import Document, stream
from .options import UsageError, as_usage_error

Schemes = tuple[hf_posenc.Scheme, ...]
"""Schemes to patch in together. No scheme stands for the unpatched base, a control."""
UNPATCHED = "unpatched"
"""Stands where a scheme's name would stand: the base model without a patch, as a control."""


@dataclass(kw_only=True)
class ModelArguments:
    """The model.

    Args:
        model: checkpoint folder or Hub id; default of `extend`: a small GPT-2.
    """

    model: str | None = None


@dataclass(kw_only=True)
class SchemeArguments:
    """The scheme.

    Args:
        scheme: position encoding to patch in (`hf-posenc schemes` lists them), or JSON: {"3::4": "nope", "_default":
            ["rope", "temperature"]}; `extend` also takes unpatched, a control.
        scheme_args: hyper-parameters of a scheme that is one name, e.g. max_distance=64 share_heads=false.
    """

    scheme: str = "transformer_xl"  # the scheme that calibration brings closest to its base
    scheme_args: list[str] | tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------- checkpoints


def load(cls: Any, name: str | None, option_name: str = "model", **keywords: Any) -> Any:
    """Load a checkpoint's tokenizer, config or weights.

    Args:
        cls: AutoTokenizer, AutoConfig or an Auto class of models.
        name: folder or Hub id.
        option_name: command-line option that `name` was given with, for messages.
        **keywords: keyword arguments of `from_pretrained`.

    Raises:
        UsageError: if there is no such checkpoint, or nothing of this kind in it.
    """
    with as_usage_error(f"{option(option_name)} {name}: ", OSError, ValueError, hf_posenc.HfPosencError):
        if cls is AutoTokenizer:
            hub.require_tokenizer(str(name))
        return cls.from_pretrained(hub.checkpoint_name(str(name)), **keywords)


def stock_config(model: str | None) -> PretrainedConfig:
    """Return the config of a stock checkpoint; raise UsageError for a patched one."""
    config: PretrainedConfig = load(AutoConfig, model)
    if config.model_type.startswith("posenc_"):
        raise UsageError(f"--model {model} is patched already: give the stock checkpoint it was made from")
    return config


def trained_length(model: str | None) -> int | None:
    """Return the length that the config of a stock checkpoint gives as the trained one, or None if it gives none."""
    config = stock_config(model)
    return getattr(language_config(config), family_of(config).names.config_length, None)


@contextmanager
def without_zero3_sharding(accelerator: Accelerator) -> Iterator[None]:
    """Keep ZeRO-3 from sharding weights while they are loaded: the base is measured and patched before that."""
    config = getattr(accelerator.state.deepspeed_plugin, "dschf", None)
    if config is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def save(
    accelerator: Accelerator,
    wrapped: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save weights, in this dtype, and tokenizer in `output/model`. The model itself has this dtype afterwards.

    A LoRA adapter is merged into the weights, and also saved by itself in `output/adapter`, as it was trained.
    """
    model = accelerator.unwrap_model(wrapped)
    weights = accelerator.get_state_dict(wrapped)  # gathered, if they are sharded
    if isinstance(model, peft.PeftModel):
        if accelerator.is_main_process:
            model.save_pretrained(str(output / "adapter"))
        model, weights = model.merge_and_unload(), None
    if dtype != model.dtype:
        model.to(dtype)
        weights = weights and in_dtype(weights, dtype)
    if accelerator.is_main_process:
        with files.new_folder(output / "model") as folder:
            if hf_posenc.is_patched(model):
                model.save_pretrained(folder, state_dict=weights, tokenizer=tokenizer)
            else:
                model.save_pretrained(folder, state_dict=weights)
                tokenizer.save_pretrained(folder)
            shutil.rmtree(output / "model", ignore_errors=True)  # of an attempt that was interrupted
    accelerator.wait_for_everyone()


def in_dtype(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return a state dict in another dtype; tied weights stay tied."""
    found: dict[int, torch.Tensor] = {}
    for weight in weights.values():
        if weight.is_floating_point() and weight.data_ptr() not in found:
            found[weight.data_ptr()] = weight.to(dtype)
    return {name: found.get(weight.data_ptr(), weight) for name, weight in weights.items()}


# ------------------------------------------------------------------------------------------------------ about a model


def position_table(model: nn.Module) -> nn.Module | None:
    """Return the table of learned positions, the base's or the scheme's that replaced it; None without a table."""
    stock = without_adapter(model)
    try:
        family = family_of(stock.config)
    except hf_posenc.UnsupportedModelError:  # a model that cannot be patched can still be measured
        return None
    if family.names.position_table is None:
        return None
    return stock.base_model.get_submodule(family.names.decoder).get_submodule(family.names.position_table)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the largest number of positions that a model can read; None if there is no limit.

    A scheme can set the limit, in a stock model the table of positions. PEFT may have wrapped the model.
    """
    if (patch := patch_of(model)) is not None:
        return patch.limit
    if (table := position_table(model)) is None:
        return None
    return len(table.get_parameter("weight")) - family_for(model.config.model_type).table_offset


def check_vocabulary(model: PreTrainedModel, *texts: list[Document]) -> None:
    """Raise UsageError if the texts contain token ids that the model does not embed.

    Otherwise the run would fail half-way, on a GPU without saying why.
    """
    largest_id = max(int(stream(text).tokens.max()) for text in texts)
    rows = model.get_input_embeddings().weight.shape[0]
    if largest_id >= rows:
        raise UsageError(
            f"the tokenizer gives ids up to {largest_id}, the model embeds {rows}: they do not belong together"
        )


def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether positions that start again begin a new document, which does not attend to the one before."""
    family, is_patched = family_of(model.config), patch_of(model) is not None
    return not family.hybrid and (not family.joins_documents or (is_patched and family.positions_in_mask))


# ------------------------------------------------------------------------------------------------------------- schemes


def read_schemes(option_name: str, scheme: str, scheme_args: list[str] | tuple[str, ...] = ()) -> Schemes:
    """Make schemes from the text of an option, see `schemes_of_words`.

    Raises:
        UsageError: if there are no such schemes. The message begins with the option.
    """
    with as_usage_error(f"{option(option_name)} {scheme}: ", TypeError, ValueError):
        return schemes_of_words(scheme, scheme_args)


def schemes_to_json(schemes: Schemes) -> dict[str, Any]:
    """Return schemes with all their hyper-parameters, ready for JSON. No scheme means the unpatched base."""
    entries = [{"name": scheme.name, **scheme.hyperparameters()} for scheme in schemes]
    if not entries:
        return {"name": UNPATCHED}
    combined = {"name": " + ".join(str(entry["name"]) for entry in entries), "schemes": entries}
    return dict(json.loads(json.dumps(entries[0] if len(entries) == 1 else combined)))
