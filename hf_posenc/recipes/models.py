"""Loading and saving of models, and what the recipes have to know of one: its weights, its positions, its token ids."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

import hf_posenc

from ..checkpoints import files, hub
from ..errors import UnsupportedModelError
from ..families.base import base_model_type
from ..live.state import without_adapter
from ..registry import family_for
from .corpus import Document, stream
from .options import Checkpoint, Name, Options, UsageError, option
from .schemes import limit_of

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class ModelArguments(Options):
    """The model.

    Args:
        model: checkpoint folder or Hub id; `extend` without it takes the small byte-level GPT-2 of the package.
        revision: branch, tag or commit of --model, if it is on the Hub.
    """

    model: Checkpoint | None = None
    revision: Name | None = None


@dataclass
class DeviceArguments(Options):
    """Device and precision.

    Args:
        device: for instance cpu or cuda:1; by default an accelerator, where there is one.
        dtype: of the weights; auto is what they were saved in.
    """

    device: str | None = None
    dtype: Annotated[str, DTYPES] = "auto"


# ---------------------------------------------------------------------------------------------------------- checkpoints


def load(cls: Any, name: str, asked: str = "model", **arguments: Any) -> Any:
    """Load a checkpoint's tokenizer, config or weights.

    Args:
        cls: the Auto class of what is loaded.
        name: folder or Hub id.
        asked: the option that named it.
        **arguments: of `from_pretrained`.

    Raises:
        UsageError: if the checkpoint does not have it.
    """
    try:
        return cls.from_pretrained(hub.checkpoint_name(name), **arguments)
    except (OSError, ValueError, hf_posenc.HfPosencError) as error:
        raise UsageError(f"{option(asked)} {name}: {error}") from None


def check(arguments: ModelArguments) -> None:
    """Raise UsageError for options of the model that cannot work, without reading anything."""
    if arguments.revision is not None and (arguments.model is None or Path(arguments.model).is_dir()):
        what = "the embedded base is none" if arguments.model is None else f"{arguments.model} is a folder"
        raise UsageError(f"--revision is of a checkpoint on the Hub, and {what}: leave it out")


def load_named(cls: Any, arguments: ModelArguments, **more: Any) -> Any:
    """Load from the checkpoint that `--model` and `--revision` name: see `load`."""
    assert arguments.model is not None
    return load(cls, arguments.model, **revision_of(arguments), **more)


def load_patched(arguments: Any, scheme: hf_posenc.Scheme, seed: int) -> Any:
    """Load the stock checkpoint that `--model` names, in `--dtype`, and patch it; raise UsageError if it cannot be."""
    model = load_named(AutoModelForCausalLM, arguments, dtype=dtype_of(arguments))
    try:
        return hf_posenc.patch_model(model, scheme, seed=seed)
    except (ValueError, hf_posenc.HfPosencError) as error:
        raise UsageError(f"--model {arguments.model}: {str(error).removeprefix('hf_posenc: ')}") from None


def revision_of(arguments: ModelArguments) -> dict[str, str]:
    """Return the revision as a keyword of `from_pretrained`, if one was given."""
    return {} if arguments.revision is None else {"revision": arguments.revision}


def dtype_of(arguments: "DeviceArguments") -> Any:
    """Return `--dtype` as `from_pretrained` takes it."""
    return "auto" if arguments.dtype == "auto" else getattr(torch, arguments.dtype)


def placed(arguments: "DeviceArguments") -> tuple[Accelerator, torch.device]:
    """Return an accelerator and the device of this process, after a computation on it.

    Raises:
        UsageError: if the device cannot be used here, or several processes were told to share it.
    """
    name = arguments.device
    accelerator = Accelerator(cpu=name == "cpu" or not torch.accelerator.is_available())
    if name is None:
        return accelerator, accelerator.device
    if accelerator.num_processes > 1:
        raise UsageError(
            f"--device {name}: each of the {accelerator.num_processes} processes has its own, leave it out"
        )
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # what torch raises, by device and build
        raise UsageError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None
    return accelerator, device


def stock_config(arguments: ModelArguments) -> PretrainedConfig:
    """Return the config of the stock checkpoint that `--model` names; raise UsageError for a patched one."""
    config: PretrainedConfig = load_named(AutoConfig, arguments)
    if config.model_type != base_model_type(config):
        raise UsageError(f"--model {arguments.model} is patched already: give the stock checkpoint it was made from")
    return config


def load_base(arguments: ModelArguments) -> PreTrainedModel:
    """Load the stock model that `--model` names for training, in float32 whatever it was saved in."""
    return with_loss(load_named(AutoModelForCausalLM, arguments, dtype=torch.float32))


def load_trained_base(folder: Path) -> PreTrainedModel:
    """Load the embedded base from the folder that a run saved it in."""
    return with_loss(load(AutoModelForCausalLM, str(folder), dtype=torch.float32))


def with_loss(model: PreTrainedModel) -> PreTrainedModel:
    """Set `loss_type`, so that transformers does not warn."""
    # transformers reads it off the class name, and GPT-2's does not have it: it would warn and then take this.
    model.loss_type = "ForCausalLM"
    return model


@contextmanager
def loaded_whole(accelerator: Accelerator) -> Iterator[None]:
    """Keep ZeRO-3 from spreading weights while they are loaded: the base is measured and patched first."""
    config = getattr(accelerator.state.deepspeed_plugin, "dschf", None)
    if config is None:
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        set_hf_deepspeed_config(config)


def save(accelerator: Accelerator, wrapped: nn.Module, tokenizer: Any, output: Path) -> None:
    """Save weights and tokenizer in `output/model`, and a LoRA adapter alone in `output/adapter`."""
    model = accelerator.unwrap_model(wrapped)
    weights = accelerator.get_state_dict(wrapped)  # gathered, where processes hold parts
    if isinstance(model, peft.PeftModel):
        if accelerator.is_main_process:
            model.save_pretrained(str(output / "adapter"))
        model, weights = model.merge_and_unload(), None
    if not accelerator.is_main_process:
        accelerator.wait_for_everyone()
        return
    if hf_posenc.is_patched(model):
        model.save_pretrained(output / "model", state_dict=weights, tokenizer=tokenizer)
        accelerator.wait_for_everyone()
    else:
        save_stock(accelerator, model, tokenizer, output / "model")


def save_stock(accelerator: Accelerator, model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Save an unpatched model in place of the folder, whole or not at all."""
    if accelerator.is_main_process:
        with files.new_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
    accelerator.wait_for_everyone()


# ------------------------------------------------------------------------------------------------------------ questions


def count(model: nn.Module, trained: bool = False) -> int:
    """Return the number of weights, or of those that are trained. Tied weights count once."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad or not trained)


def describe(model: PreTrainedModel, trained_length: int) -> dict[str, str | int]:
    """Return what results.json says of a base, beside its name."""
    return {"model_type": model.config.model_type, "parameters": count(model), "trained_length": trained_length}


def position_table(model: nn.Module) -> nn.Module | None:
    """Return the table of learned positions, the base's own or the scheme's in its place; None without one."""
    stock = without_adapter(model)
    try:
        family = family_for(base_model_type(stock.config))
    except UnsupportedModelError:  # a model that cannot be patched can still be measured
        return None
    if family.names.position_table is None:
        return None
    return stock.base_model.get_submodule(family.names.decoder).get_submodule(family.names.position_table)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of positions of the scheme or, in a stock model, of its table; None if there is no limit."""
    if hf_posenc.is_patched(model):
        return limit_of(model)
    if (table := position_table(model)) is None:
        return None
    rows: Any = table.num_embeddings
    return int(rows) - family_for(model.config.model_type).table_offset


def check_vocabulary(model: PreTrainedModel, *texts: list[Document]) -> None:
    """Raise UsageError if the texts hold ids that the model does not embed.

    Otherwise it would fail in the middle of a run, on a GPU without saying why.
    """
    largest = max(int(stream(text).tokens.max()) for text in texts)
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise UsageError(
            f"the tokenizer gives ids up to {largest}, the model embeds {rows}: they do not belong together"
        )


def keeps_documents_apart(model: PreTrainedModel) -> bool:
    """Return whether attention stays inside a document where positions start again.

    It is measured: two tokens after two others must not depend on these. Models that do not hand their positions to
    the mask fail.
    """
    tokens = torch.tensor([[0, 1, 4, 5], [2, 3, 4, 5]], device=model.device)
    positions = torch.tensor([[0, 1, 0, 1]], device=model.device).expand(2, -1)
    with torch.no_grad():
        one, other = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 2:]
    return torch.allclose(one, other, atol=1e-5)
