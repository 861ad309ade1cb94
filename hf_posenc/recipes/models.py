"""Models and the schemes patched into them: options, loading, saving, and what the recipes have to know of one."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

import hf_posenc

from .. import command_arguments as command_line
from ..api import parse_schemes
from ..checkpoints import files, hub
from ..families.lookup import family_of
from ..live.patch_record import patch_of, without_adapter
from ..registry import family_for
from .corpus import Document, stream
from .embedded import with_loss
from .options import Checkpoint, Hyperparameter, Name, Options, UsageError, as_usage_error, option
from .results import Results

UNPATCHED = "unpatched"
"""In the place of a scheme's name: the base as it is, as a control."""
GUESSED = {"guesses": ("variants",)}
"""Metadata of the option `scheme`."""

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
class SchemeArguments(Options):
    """The scheme.

    Args:
        scheme: position encoding to patch in (`hf-posenc schemes` lists them); `extend` also takes unpatched: the base
            as it is, as a control.
        scheme_args: its hyper-parameters, e.g. max_distance=64 share_heads=false; see `hf-posenc schemes NAME`.
    """

    scheme: Name = field(default="alibi", metadata=GUESSED)
    scheme_args: list[Hyperparameter] = field(default_factory=list)


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
    with as_usage_error(f"{option(asked)} {name}: ", OSError, ValueError, hf_posenc.HfPosencError):
        return cls.from_pretrained(hub.checkpoint_name(name), **arguments)


def check(arguments: ModelArguments) -> None:
    """Raise UsageError for options of the model that cannot work, without reading anything."""
    if arguments.revision is not None and (arguments.model is None or Path(arguments.model).is_dir()):
        what = "the embedded base is none" if arguments.model is None else f"{arguments.model} is a folder"
        raise UsageError(f"--revision is of a checkpoint on the Hub, and {what}: leave it out")


def load_named(cls: Any, arguments: ModelArguments, **more: Any) -> Any:
    """Load from the checkpoint that `--model` and `--revision` name: see `load`."""
    assert arguments.model is not None
    return load(cls, arguments.model, **revision_of(arguments), **more)


def revision_of(arguments: ModelArguments) -> dict[str, str]:
    """Return the revision as a keyword of `from_pretrained`, if one was given."""
    return {} if arguments.revision is None else {"revision": arguments.revision}


def dtype_of(arguments: "DeviceArguments") -> str | torch.dtype:
    """Return `--dtype` as `from_pretrained` takes it."""
    dtype: str | torch.dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    return dtype


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
    if config.model_type.startswith("posenc_"):
        raise UsageError(f"--model {arguments.model} is patched already: give the stock checkpoint it was made from")
    return config


def load_base(arguments: ModelArguments) -> PreTrainedModel:
    """Load the stock model that `--model` names for training, in float32 whatever it was saved in."""
    return with_loss(load_named(AutoModelForCausalLM, arguments, dtype=torch.float32))


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


def save(accelerator: Accelerator, wrapped: nn.Module, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Save weights and tokenizer in `output/model`, and a LoRA adapter alone in `output/adapter`."""
    model = accelerator.unwrap_model(wrapped)
    weights = accelerator.get_state_dict(wrapped)  # gathered, where processes hold parts
    if isinstance(model, peft.PeftModel):
        if accelerator.is_main_process:
            model.save_pretrained(str(output / "adapter"))
        model, weights = model.merge_and_unload(), None
    if not hf_posenc.is_patched(model):
        save_stock(accelerator, model, tokenizer, output / "model")
        return
    if accelerator.is_main_process:
        model.save_pretrained(output / "model", state_dict=weights, tokenizer=tokenizer)
    accelerator.wait_for_everyone()


def save_stock(
    accelerator: Accelerator, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
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
        family = family_of(stock.config)
    except hf_posenc.UnsupportedModelError:  # a model that cannot be patched can still be measured
        return None
    if family.names.position_table is None:
        return None
    return stock.base_model.get_submodule(family.names.decoder).get_submodule(family.names.position_table)


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the number of positions of the scheme or, in a stock model, of its table; None if there is no limit.

    It looks below an adapter of PEFT.
    """
    if (patch := patch_of(model)) is not None:
        return patch.limit
    if (table := position_table(model)) is None:
        return None
    return len(table.get_parameter("weight")) - family_for(model.config.model_type).table_offset


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


# ------------------------------------------------------------------------------------------------------------- schemes


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """Return `name=value` words as a scheme's keyword arguments; raise UsageError if one is not of that form."""
    with as_usage_error("", ValueError):
        return command_line.hyperparameters(pairs)


def named_scheme(asked: str, name: str, given: dict[str, Any]) -> hf_posenc.Scheme:
    """Return a scheme by name and hyper-parameters; raise UsageError, naming the option, if there is no such scheme."""
    with as_usage_error(f"{option(asked)} {name}: ", TypeError, ValueError):
        (scheme,) = parse_schemes(name, given)
        return scheme


def patch_and_verify(model: nn.Module, scheme: hf_posenc.Scheme, seed: int) -> str:
    """Patch a model in place and return the report of `verify`.

    Raises:
        RuntimeError: if a layer does not respond to its positions.
    """
    hf_posenc.patch_model(model, scheme, seed=seed)
    if not (report := hf_posenc.verify(model)):
        raise RuntimeError(f"the patch does not do what it should:\n{report}")
    return str(report)


def scheme_to_json(*schemes: hf_posenc.Scheme | None) -> Results:
    """Return schemes with all their hyper-parameters as JSON holds them; None, or no scheme at all, is the base."""
    entries = [{"name": scheme.name, **scheme.hyperparameters()} for scheme in schemes if scheme is not None]
    if not entries:
        return {"name": UNPATCHED}
    both = {"name": " + ".join(str(entry["name"]) for entry in entries), "schemes": entries}
    return dict(json.loads(json.dumps(entries[0] if len(entries) == 1 else both)))
