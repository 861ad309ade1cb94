"""The commands of `hf-posenc` that are not recipes. Their signatures and docstrings are what `cli` reads."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
import textwrap
from inspect import getdoc
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from . import loading
from .api import schemes_of_words
from .checking.catalogue import language_type, refused_types, served_type
from .checking.check import check as check_model
from .checking.describe import describe
from .checking.other_engines import OtherEngine
from .checking.verify import verify as verify_model
from .checkpoints import files, hub
from .checkpoints.export import engines_that_run, export_stock
from .checkpoints.gguf_export import export_gguf
from .core.command_arguments import Dtype, meanings
from .core.errors import PluginError, UnsupportedModelError
from .core.registry import available_schemes, scheme_class, supported_model_types
from .loading import from_pretrained
from .model.patch_record import keeps_positions
from .schemes.base import EVERY_SCHEME, Scheme

logging.set_verbosity_error()


def schemes(names: tuple[str, ...] = ()) -> int:
    """List all schemes with their hyper-parameters, or explain some: equation, options, paper.

    Examples:
      hf-posenc schemes
      hf-posenc schemes alibi

    Args:
        names: schemes to explain; without names all are listed.
    """
    for name in names:
        print(_explained(scheme_class(name)))
    for name in () if names else available_schemes():
        try:
            cls = scheme_class(name)
            print(f"{cls()}\n    {(cls.__doc__ or '').strip().splitlines()[0]}")
        except PluginError as error:  # a broken plugin must not keep the other schemes from being listed
            print(f"{name}\n    cannot be used: {error}")
    return 0


def _explained(cls: type[Scheme]) -> str:
    """Return a scheme's docstring and its hyper-parameters, with defaults and meanings."""
    about = (getdoc(cls) or "").partition("\n\nArgs:\n")[0]
    meaning_of = meanings(cls)
    lines = [cls.name, *("    " + line if line else "" for line in about.splitlines()), "", "    Hyper-parameters:"]
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.name in EVERY_SCHEME):
        text = f"{field.name}={field.default!r}: {meaning_of.get(field.name, '')}"
        lines += textwrap.wrap(text, 112, initial_indent=" " * 6, subsequent_indent=" " * 10)
    return "\n".join([*lines, ""])


def families(model_types: tuple[str, ...] = ()) -> int:
    """Describe model types: how they can be patched, or why they cannot.

    Examples:
      hf-posenc families
      hf-posenc families llama gpt2 mamba

    Args:
        model_types: model types to describe; by default all, first those that can be patched.
    """
    status = 0
    for model_type in model_types or supported_model_types():
        try:
            inner_type = language_type(model_type)
            text = "\n".join(served_type(inner_type))
            if inner_type != model_type:
                text = f"the language model inside is patched, as a rule a {inner_type}:\n{text}"
        except UnsupportedModelError as error:
            status, text = 1, str(error)
        except PluginError as error:  # a broken plugin must not keep the other types from being listed
            text = f"cannot be used: {error}"
        print("\n    ".join([model_type, *text.splitlines()]))
    for reason, types in ({} if model_types else refused_types()).items():
        print(f"{', '.join(types)}\n    cannot be patched: {reason}")
    return status


def inspect(checkpoint: str) -> int:
    """Describe a checkpoint, without reading its weights.

    Examples:
      hf-posenc inspect runs/gpt2-alibi/model
      hf-posenc inspect me/gpt2-alibi

    Args:
        checkpoint: directory or Hub id.
    """
    found = loading.inspect(hub.checkpoint_name(checkpoint))
    print(found)
    return 0 if found.problem is None else 1


def verify(checkpoint: str, *, dtype: Dtype = "auto") -> int:
    """Load a patched checkpoint and check that every layer responds to positions.

    Examples:
      hf-posenc verify runs/gpt2-alibi/model
      hf-posenc verify me/gpt2-alibi --dtype float32

    Args:
        checkpoint: directory or Hub id of a patched checkpoint.
        dtype: dtype of the weights; auto is the dtype they were saved in.
    """
    found = loading.inspect(hub.checkpoint_name(checkpoint))
    if found.scheme is None:
        raise ValueError(
            f"{checkpoint} is a stock {found.base} checkpoint, so there is no patch to verify: "
            f"`hf-posenc patch {checkpoint} SCHEME OUTPUT` makes one"
        )
    _print_loading(checkpoint)
    model = from_pretrained(checkpoint, dtype=dtype)
    report = verify_model(model)
    print(f"{describe(model)}\n{report}")
    return 0 if report.ok else 1


def check(
    checkpoint: str,
    served: str | None = None,
    *,
    json: Path | None = None,
    trust_remote_code: bool = False,
    dtype: Dtype = "auto",
    engine: Literal["vllm", "llama.cpp", "transformers"] | None = None,
    python: str = sys.executable,
    length: int | None = None,
) -> int:
    """Run a checkpoint on short random tokens, and report what its positions do and what is wrong.

    With --engine: does another engine compute the same? If not, which fact about positions does it get wrong?

    The report says which part of each head turns and how fast, and is about scaling, the causal mask, left
    padding, packing and the cache. Exit status: 0 if nothing wrong was found, 1 if something was, 2 if the checkpoint
    could not be checked.

    Examples:
      hf-posenc check runs/yarn/checkpoint-500
      hf-posenc check me/fork --trust-remote-code --json check.json
      hf-posenc check runs/xl/model runs/xl/stock --engine vllm --python ~/vllm/bin/python
      hf-posenc check runs/xl/model xl.gguf --engine llama.cpp
      hf-posenc check runs/xl/model http://localhost:8000 --engine vllm

    Args:
        checkpoint: directory or Hub id of any causal language model.
        served: what the engine runs: a directory, a GGUF file, or the address of a server; by default the checkpoint.
        json: JSON file to write, with all outcomes and numbers.
        trust_remote_code: run the code that lies beside the weights; read it first.
        dtype: dtype of the weights; auto is the dtype they were saved in. With --engine that of the engine, float32.
        engine: compare with this engine, by log-probabilities of the same tokens.
        python: the Python in which the engine is installed.
        length: most tokens of a prompt for the engine, 4,096 by default.
    """
    target = None
    if engine is not None:
        target = OtherEngine(engine, served or checkpoint, python, "float32" if dtype == "auto" else dtype)
    elif served is not None or length is not None:
        raise ValueError("what an engine serves, and --length, go with --engine")
    _print_loading(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        hub.checkpoint_name(checkpoint), dtype="float32" if target else dtype, trust_remote_code=trust_remote_code
    )
    if target is not None:
        print(f"asking {engine} for log-probabilities of {target.served} ...", file=sys.stderr, flush=True)
    report = check_model(model, engine=target, length=length)
    print(report)
    if json:
        with files.replaced(json) as partial:
            partial.write_text(json_format.dumps(report.to_dict(), indent=1))
        print(f"numbers in {json}")
    return 0 if report.ok else 1


def patch(
    checkpoint: str, scheme: str, output: Path, *, scheme_args: tuple[str, ...] = (), seed: int | None = None
) -> int:
    """Patch a stock checkpoint and save it.

    Examples:
      hf-posenc patch gpt2 alibi runs/gpt2-alibi
      hf-posenc patch gpt2 shaw runs/gpt2-shaw --scheme-args max_distance=64 share_heads=false --seed 1

    Args:
        checkpoint: directory or Hub id of a stock checkpoint.
        scheme: name of the scheme (`hf-posenc schemes` lists them), or JSON of several, as in `hf-posenc extend`.
        output: directory that does not exist yet.
        scheme_args: hyper-parameters, e.g. max_distance=64; `hf-posenc schemes NAME` explains them.
        seed: seed of parameters that start at random.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists already")
    # Fails on wrong hyper-parameters before anything is loaded.
    parsed = schemes_of_words(scheme, scheme_args)
    if loading.inspect(hub.checkpoint_name(checkpoint)).scheme is not None:
        raise ValueError(f"{checkpoint} is patched already: name the stock checkpoint it was made from")
    _print_loading(checkpoint)
    model = from_pretrained(checkpoint, scheme=parsed, seed=seed)
    tokenizer = _tokenizer(checkpoint)
    with files.new_folder(output) as folder:
        model.save_pretrained(folder, tokenizer=tokenizer)
    print(describe(model))
    print(f"saved in {output}" + ("" if tokenizer else ", without a tokenizer: the checkpoint has none"))
    if keeps_positions(model):
        print("It keeps the positions of its base, so it needs no calibration")
    else:
        print("It is not calibrated, and as a rule predicts badly: `hf-posenc calibrate` patches and calibrates")
    return 0


def export(
    checkpoint: str,
    output: Path,
    *,
    dtype: Literal["float32", "float16", "q8_0"] | None = None,
    no_tokenizer: bool = False,
    length: int | None = None,
    head_dim: int | None = None,
) -> int:
    """Write a patched checkpoint for other engines: a stock checkpoint, or a GGUF file for llama.cpp.

    Examples:
      hf-posenc export runs/llama-alibi/model llama-alibi.gguf --dtype q8_0
      hf-posenc export runs/llama-yarn/model runs/llama-yarn/stock
      hf-posenc export runs/llama-txl/model runs/llama-txl/stock --length 8192

    Args:
        checkpoint: directory or Hub id of a patched checkpoint.
        output: directory, or file that ends in .gguf; neither may exist yet.
        dtype: dtype of a GGUF file's matrices, float32 by default.
        no_tokenizer: write no tokenizer: the file takes token ids.
        length: tokens that a server shall take, `max_position_embeddings` of the config: for transformer_xl and alibi.
        head_dim: size of the wider heads of transformer_xl and alibi; 128 and 256 suit all kernels.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists already")
    is_gguf = output.suffix == ".gguf"
    if dtype is not None and not is_gguf:
        raise ValueError("--dtype is for GGUF files: a stock checkpoint keeps the dtype of its weights")
    if is_gguf and not length is head_dim is None:
        raise ValueError("--length and --head-dim are for stock checkpoints: llama.cpp takes -c")
    if loading.inspect(hub.checkpoint_name(checkpoint)).scheme is None:
        raise ValueError(f"{checkpoint} is a stock checkpoint already: use it, or llama.cpp's own converter, as it is")
    _print_loading(checkpoint)
    model = from_pretrained(checkpoint)
    tokenizer = None if no_tokenizer else _tokenizer(checkpoint)
    if is_gguf:
        export_gguf(model, output, tokenizer=tokenizer, dtype=dtype or "float32")
        runs = "runs in llama.cpp"
    else:
        with files.new_folder(output) as folder:
            export_stock(model, folder, tokenizer=tokenizer, length=length, head_dim=head_dim)
            runs = engines_that_run(AutoConfig.from_pretrained(folder))
    lacks = "" if tokenizer or no_tokenizer else ": the checkpoint has none"
    print(f"saved in {output}" + ("" if tokenizer else f", without a tokenizer{lacks}"))
    print(f"it {runs}: `hf-posenc check {checkpoint} {output} --engine ...` compares")
    return 0


def push(directory: Path, repo_id: str, *, private: bool | None = None, revision: str | None = None) -> int:
    """Upload a patched checkpoint to the Hub, in one commit.

    Examples:
      hf-posenc push runs/gpt2-alibi/model me/gpt2-alibi --private

    Args:
        directory: directory of a patched checkpoint.
        repo_id: repository: NAME or ORGANIZATION/NAME.
        private: make the repository private, if it is new.
        revision: branch, made if it does not exist.
    """
    print(hub.push(directory, repo_id, private=private, revision=revision).commit_url)
    return 0


def _tokenizer(checkpoint: str) -> Any:
    """Return the tokenizer of a checkpoint, or None if it has none."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError):
        return None


def _print_loading(checkpoint: str) -> None:
    """Print a line before loading, which can take long."""
    print(f"loading {checkpoint} ...", file=sys.stderr, flush=True)
