"""Models and the schemes patched into them: options, loading, saving, and facts that the recipes need."""

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
from ..registry import family_for, scheme_class
from .corpus import Document, stream
from .embedded import with_loss_type
from .options import Checkpoint, Hyperparameter, Name, Options, UsageError, as_usage_error, option
from .results import Results

Schemes = tuple[hf_posenc.Scheme, ...]
"""Schemes to patch in together. No scheme stands for the unpatched base, a control."""
UNPATCHED = "unpatched"
"""Stands where a scheme's name would stand: the base model without a patch, as a control."""
SCHEME_METADATA = {"guesses": ("variants",)}
"""Metadata of the option `scheme`: a user who types --variants, or asks for it in a file, is told of --scheme."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass
class ModelArguments(Options):
    """The model.

    Args:
        model: checkpoint folder or Hub id; default of `extend`: a small GPT-2.
        revision: branch, tag or commit of --model, if it is on the Hub.
    """

    model: Checkpoint | None = None
    revision: Name | None = None


@dataclass
class SchemeArguments(Options):
    """The scheme.

    Args:
        scheme: position encoding to patch in (`hf-posenc schemes` lists them), or JSON: {"3::4": "nope", "_default":
            ["rope", "temperature"]}; `extend` also takes unpatched, a control.
        scheme_args: hyper-parameters of a scheme that is one name, e.g. max_distance=64 share_heads=false.
    """

    scheme: Name = field(default="alibi", metadata=SCHEME_METADATA)
    scheme_args: list[Hyperparameter] = field(default_factory=list)


@dataclass
class DeviceArguments(Options):
    """Device and precision.

    Args:
        device: for instance cpu or cuda:1; by default a GPU or another accelerator, if there is one.
        dtype: dtype of the weights; auto is the dtype they were saved in.
    """

    device: str | None = None
    dtype: Annotated[str, DTYPES] = "auto"


# ---------------------------------------------------------------------------------------------------------- checkpoints


def load(cls: Any, name: str, option_name: str = "model", **arguments: Any) -> Any:
    """Load a checkpoint's tokenizer, config or weights.

    Args:
        cls: AutoTokenizer, AutoConfig or an Auto class of models.
        name: folder or Hub id.
        option_name: command-line option that `name` was given with, for messages.
        **arguments: keyword arguments of `from_pretrained`.

    Raises:
        UsageError: if there is no such checkpoint, or nothing of this kind in it.
    """
    with as_usage_error(f"{option(option_name)} {name}: ", OSError, ValueError, hf_posenc.HfPosencError):
        return cls.from_pretrained(hub.checkpoint_name(name), **arguments)


def check(arguments: ModelArguments) -> None:
    """Raise UsageError for --revision without a checkpoint on the Hub. Nothing is downloaded for that."""
    if arguments.revision is not None and (arguments.model is None or Path(arguments.model).is_dir()):
        reason = "without --model there is none" if arguments.model is None else f"{arguments.model} is a folder"
        raise UsageError(f"--revision needs a checkpoint on the Hub, but {reason}: leave it out")


def load_named(cls: Any, arguments: ModelArguments, **keywords: Any) -> Any:
    """Load from the checkpoint that `--model` and `--revision` name: see `load`."""
    assert arguments.model is not None
    return load(cls, arguments.model, **revision_of(arguments), **keywords)


def revision_of(arguments: ModelArguments) -> dict[str, str]:
    """Return the revision as a keyword of `from_pretrained`, if one was given."""
    return {} if arguments.revision is None else {"revision": arguments.revision}


def dtype_of(arguments: "DeviceArguments") -> str | torch.dtype:
    """Return `--dtype` in the form that `from_pretrained` takes."""
    dtype: str | torch.dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    return dtype


def accelerator_and_device(arguments: "DeviceArguments") -> tuple[Accelerator, torch.device]:
    """Return an accelerator and the device of this process. A device named by `--device` is tried out first.

    Raises:
        UsageError: if this machine cannot use the device, or if `--device` would give it to several processes.
    """
    name = arguments.device
    accelerator = Accelerator(cpu=name == "cpu" or not torch.accelerator.is_available())
    if name is None:
        return accelerator, accelerator.device
    if accelerator.num_processes > 1:
        raise UsageError(
            f"--device {name}: each of the {accelerator.num_processes} processes has a device of its own: leave it out"
        )
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except (AssertionError, NotImplementedError, RuntimeError) as error:  # depends on the device
        raise UsageError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from None
    return accelerator, device


def stock_config(arguments: ModelArguments) -> PretrainedConfig:
    """Return the config of the stock checkpoint that `--model` names; raise UsageError for a patched one."""
    config: PretrainedConfig = load_named(AutoConfig, arguments)
    if config.model_type.startswith("posenc_"):
        raise UsageError(f"--model {arguments.model} is patched already: give the stock checkpoint it was made from")
    return config


def load_base(arguments: ModelArguments) -> PreTrainedModel:
    """Load the stock model of `--model` to train it: in float32, whatever dtype it was saved in."""
    return with_loss_type(load_named(AutoModelForCausalLM, arguments, dtype=torch.float32))


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


def save(accelerator: Accelerator, wrapped: nn.Module, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Save weights and tokenizer in `output/model`.

    A LoRA adapter is merged into the weights, and also saved by itself in `output/adapter`.
    """
    model = accelerator.unwrap_model(wrapped)
    weights = accelerator.get_state_dict(wrapped)  # gathered, if they are sharded
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
    """Save an unpatched model and its tokenizer, all files or none. What was in the folder before is removed."""
    if accelerator.is_main_process:
        with files.new_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
    accelerator.wait_for_everyone()


# ------------------------------------------------------------------------------------------------------ about a model


def count_weights(model: nn.Module, trained: bool = False) -> int:
    """Return the number of weights, or of trained weights. Tied weights count once."""
    return sum(weight.numel() for weight in model.parameters() if weight.requires_grad or not trained)


def describe(model: PreTrainedModel, trained_length: int) -> dict[str, str | int]:
    """Return the facts about a base model that results.json gives beside its name."""
    return {"model_type": model.config.model_type, "parameters": count_weights(model), "trained_length": trained_length}


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
    """Return whether positions that start again begin a new document, which does not attend to the one before.

    This is measured: the last two of four tokens must not depend on the first two. False for models whose attention
    mask does not take positions into account.
    """
    tokens = torch.tensor([[0, 1, 4, 5], [2, 3, 4, 5]], device=model.device)
    positions = torch.tensor([[0, 1, 0, 1]], device=model.device).expand(2, -1)
    with torch.no_grad():
        logits_1, logits_2 = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 2:]
    return torch.allclose(logits_1, logits_2, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- schemes


def hyperparameters(pairs: list[str]) -> dict[str, Any]:
    """Parse `name=value` words into a scheme's keyword arguments; UsageError for a word of another form."""
    with as_usage_error("", ValueError):
        return command_line.hyperparameters(pairs)


def is_mixture(scheme: str) -> bool:
    """Return whether the text of an option is JSON, a mixture of schemes, instead of one name."""
    return scheme.lstrip()[:1] in ("{", "[")


def read_schemes(option_name: str, scheme: str, keywords: dict[str, object]) -> Schemes:
    """Make schemes from the text of an option.

    Args:
        option_name: name of the option, for messages.
        scheme: a name; or JSON of a mapping of layers to schemes, or of a list of schemes, as `patch_model` takes them.
            In JSON a scheme is a name, or an object with the name as `scheme` and hyper-parameters, as in config.json.
        keywords: hyper-parameters of a single name.

    Raises:
        UsageError: if there are no such schemes. The message begins with the option.
    """
    with as_usage_error(f"{option(option_name)} {scheme}: ", TypeError, ValueError):
        if not is_mixture(scheme):
            return parse_schemes(scheme, keywords)
        if keywords:
            raise TypeError(
                f"--scheme-args {', '.join(keywords)} cannot go with JSON: write hyper-parameters into it, as in "
                '{"scheme": "shaw", "max_distance": 64}'
            )
        try:
            content = json.loads(scheme, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no JSON, {error}") from None
        if isinstance(content, dict) and "scheme" not in content:
            by_layers = {int(key) if key.removeprefix("-").isdecimal() else key: content[key] for key in content}
            return parse_schemes({key: _instances(value) for key, value in by_layers.items()}, {})
        return parse_schemes(_instances(content), {})


def _unique(pairs: list[tuple[str, object]]) -> dict[str, Any]:
    """Return a JSON object; ValueError for a repeated key, of which `json` would silently use the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key is there twice")
    return content


def _instances(content: object) -> list[Any]:
    """Return the schemes that JSON lists: names, and instances instead of objects with hyper-parameters."""
    return [
        scheme_class(item["scheme"]).parse({key: value for key, value in item.items() if key != "scheme"})
        if isinstance(item, dict) and isinstance(item.get("scheme"), str)
        else item
        for item in (content if isinstance(content, list) else [content])
    ]


def label_of(schemes: Schemes) -> str:
    """Return a short name of a mixture, which is also the name of a folder: `nope@3::4,rope@rest`."""
    return ",".join(map(_label, schemes))


def _label(scheme: hf_posenc.Scheme) -> str:
    values, defaults = scheme.hyperparameters(), type(scheme)().hyperparameters()
    layers = values.pop("layers")
    chosen = ",".join(f"{key}={value}".replace("/", "-") for key, value in values.items() if value != defaults[key])
    where = "-".join(map(str, layers)) if isinstance(layers, list) else layers
    return scheme.name + f"({chosen})" * bool(chosen) + ("" if where is None else f"@{where}")


def patch_and_verify(model: nn.Module, schemes: Schemes, seed: int) -> str:
    """Patch a model in place and return the report of `verify`.

    Raises:
        RuntimeError: if a layer does not respond to its positions.
    """
    hf_posenc.patch_model(model, schemes, seed=seed)
    if not (report := hf_posenc.verify(model)):
        raise RuntimeError(f"the patch does not do what it should:\n{report}")
    return str(report)


def schemes_to_json(schemes: Schemes) -> Results:
    """Return schemes with all their hyper-parameters, ready for JSON. No scheme means the unpatched base."""
    entries = [{"name": scheme.name, **scheme.hyperparameters()} for scheme in schemes]
    if not entries:
        return {"name": UNPATCHED}
    combined = {"name": " + ".join(str(entry["name"]) for entry in entries), "schemes": entries}
    return dict(json.loads(json.dumps(entries[0] if len(entries) == 1 else combined)))
