"""Extends the context of a causal language model by another position encoding, and measures how far it reaches.

    accelerate launch recipes/extend_context.py                        # the embedded default, minutes on a laptop
    accelerate launch recipes/extend_context.py --model gpt2 --data book.txt --scheme alibi --output runs/gpt2-alibi

Measure, patch, fine-tune, measure again, save: OUTPUT/model (reload with `hf_posenc.from_pretrained`) and
OUTPUT/results.json. Plain `python` runs it in one process. Everything that can be wrong with the arguments is found
before anything long starts.
"""

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator, DistributedType
from accelerate.utils import GradientAccumulationPlugin, set_seed
from embedded import CONTEXT, byte_model, byte_tokenizer, standard_library, train_base
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    get_cosine_schedule_with_warmup,
)

import hf_posenc
from hf_posenc.evaluation import non_overlapping_perplexity, sliding_window_perplexity
from hf_posenc.patching import parse_scheme, patch_of
from hf_posenc.registry import adapter_for


@dataclass
class Arguments:
    """What to extend, how, and on which text."""

    model: str | None = field(
        default=None,
        metadata={"help": "checkpoint folder or Hub id; without it a small byte-level GPT-2 is trained first"},
    )
    data: list[str] = field(
        default_factory=list, metadata={"help": "UTF-8 text files; without --model: the standard library's sources"}
    )
    separator: str = field(
        default="",
        metadata={"help": r"what separates documents within a file, e.g. '\n\n'; by default a file is one document"},
    )
    output: str = field(default="runs/extend_context", metadata={"help": "folder to write; must be empty or absent"})
    overwrite: bool = field(default=False, metadata={"help": "write into a folder that is not empty"})

    scheme: str = field(default="alibi", metadata={"help": "position encoding to patch in"})
    scheme_args: list[str] = field(
        default_factory=list,
        metadata={"help": "its hyper-parameters as name=value, e.g. max_distance=64 share_heads=false"},
    )

    eval_lengths: list[int] = field(
        default_factory=lambda: [256, 512, 1024, 2048], metadata={"help": "context lengths to measure at, in tokens"}
    )
    eval_tokens: int = field(default=16384, metadata={"help": "held-out tokens to measure on"})
    stride: int | None = field(
        default=None, metadata={"help": "tokens between sliding windows; by default a quarter of each length"}
    )

    train_length: int = field(default=1024, metadata={"help": "context length to fine-tune at, in tokens"})
    steps: int = field(default=150, metadata={"help": "optimizer steps"})
    batch_size: int = field(default=1, metadata={"help": "sequences per forward and process"})
    gradient_accumulation: int = field(default=2, metadata={"help": "forwards per optimizer step"})
    learning_rate: float = field(default=1e-3, metadata={"help": "peak, after warm-up and before a cosine decay to 0"})
    warmup_steps: int = field(default=10, metadata={"help": "steps of linear warm-up"})
    weight_decay: float = field(
        default=0.01, metadata={"help": "on matrices; vectors and position parameters get none"}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})
    mixed_precision: str | None = field(
        default=None, metadata={"help": "no, bf16 or fp16; by default what accelerate launch says"}
    )
    base_steps: int = field(
        default=1200, metadata={"help": "optimizer steps of the embedded base model (without --model)"}
    )
    seed: int = field(default=0, metadata={"help": "seed of everything that is random"})


class UsageError(Exception):
    """The arguments or the text cannot work; the message says why and what would."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs the recipe and returns what it wrote to results.json."""
    parser = HfArgumentParser(
        Arguments,
        description=__doc__.split("\n")[0],
        usage="%(prog)s [options]   (--help lists them)",
        allow_abbrev=False,
    )
    arguments, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
    try:
        if unknown:
            raise UsageError(f"unknown option or stray value: {' '.join(unknown)}")
        return run(arguments)
    except (UsageError, hf_posenc.HfPosencError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nInterrupted before the fine-tuning had begun or after it had ended.", file=sys.stderr)
        raise SystemExit(130) from None


def run(arguments: Arguments) -> dict[str, Any]:
    """The recipe, top to bottom."""
    scheme = check_arguments(arguments)
    accelerator = Accelerator(
        mixed_precision=arguments.mixed_precision,
        # Batches are taken from the text without end, so the end of a pass over it must not cut an accumulation short.
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            arguments.gradient_accumulation, sync_with_dataloader=False
        ),
    )
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise UsageError(
            f"this recipe runs in one process or data-parallel, not under {accelerator.distributed_type.value}"
        )
    say = accelerator.print
    set_seed(arguments.seed)
    progress = accelerator.is_main_process

    say(f"Reading {describe_data(arguments)}")
    tokenizer = load(AutoTokenizer, arguments.model) if arguments.model else byte_tokenizer()
    documents = encode(tokenizer, read_documents(arguments))
    training, held_out = split(documents, arguments)
    check_lengths(training, held_out, arguments, accelerator.num_processes)
    say(f"  {len(documents):,} documents; {len(training):,} tokens to train on, {len(held_out):,} held out")

    model = (
        load(AutoModelForCausalLM, arguments.model, dtype=torch.float32) if arguments.model else byte_model(tokenizer)
    )
    # transformers reads it off the class name, and GPT-2's does not have it: it would warn and then take this.
    model.loss_type = "ForCausalLM"
    check_vocabulary(model, training, held_out)
    # Patched once on trial: whatever the scheme and this model cannot do together comes out now, not after the
    # measurement.
    with hf_posenc.patched(model, scheme, seed=arguments.seed):
        check_limit(model, arguments)
    model.to(accelerator.device)

    output = Path(arguments.output)
    results = {"arguments": asdict(arguments), "command": sys.argv, "seed": arguments.seed, **provenance(accelerator)}
    results["data"] = {"documents": len(documents), "training_tokens": len(training), "held_out_tokens": len(held_out)}
    results["seconds"] = seconds = {}
    if arguments.model is None:
        say(f"Training the embedded base: {count(model):,} weights, context {model.config.n_positions}")
        with stopwatch(seconds, "base"):
            train_base(model, training, steps=arguments.base_steps, progress=progress)
        save(accelerator, model, tokenizer, output / "base")

    say(f"Measuring {arguments.model or 'the embedded base'} as it is")
    with stopwatch(seconds, "before"):
        results["before"] = measure(model, held_out, arguments, position_limit(model), progress)

    hf_posenc.patch_model(model, scheme, seed=arguments.seed)
    say(f"Patched\n{hf_posenc.describe(model)}")
    if not (report := hf_posenc.verify(model)):
        raise RuntimeError(f"the patch does not do what it should:\n{report}")
    say(report)

    say(f"Fine-tuning: {arguments.steps} steps of {tokens_per_step(arguments, accelerator):,} tokens")
    with stopwatch(seconds, "training"):
        try:
            results["training"] = train(accelerator, model, training, arguments)
        except KeyboardInterrupt:
            save(accelerator, model, tokenizer, output / "interrupted")
            say(
                f"\nInterrupted. The weights so far are in {output / 'interrupted'}; "
                "hf_posenc.from_pretrained reads them."
            )
            raise SystemExit(130) from None

    say("Measuring the patched model")
    with stopwatch(seconds, "after"):
        results["after"] = measure(model, held_out, arguments, None, progress)
    save(accelerator, model, tokenizer, output / "model")
    if accelerator.is_main_process:
        write_json(output / "results.json", results)
    say(f"\n{table(results)}\n\ncheckpoint  {output / 'model'}\nresults     {output / 'results.json'}")
    return results


# --------------------------------------------------------------------------------------------------------------- checks


def check_arguments(arguments: Arguments) -> hf_posenc.Scheme:
    """Everything that can be known without reading the text or the weights. Returns the scheme."""
    for name in ("eval_tokens", "train_length", "steps", "batch_size", "gradient_accumulation", "base_steps"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"{option(name)} must be at least 1, not {getattr(arguments, name)}")
    for name in ("learning_rate", "max_grad_norm"):
        if not getattr(arguments, name) > 0:
            raise UsageError(f"{option(name)} must be positive, not {getattr(arguments, name)}")
    for name in ("warmup_steps", "weight_decay"):
        if not getattr(arguments, name) >= 0:
            raise UsageError(f"{option(name)} must not be negative, not {getattr(arguments, name)}")
    if arguments.mixed_precision not in (None, "no", "bf16", "fp16"):
        raise UsageError(f"--mixed-precision must be no, bf16 or fp16, not {arguments.mixed_precision}")
    if not arguments.eval_lengths or min(arguments.eval_lengths) < 2 or arguments.train_length < 2:
        raise UsageError(
            "--eval-lengths and --train-length must be at least 2 tokens: one token alone predicts nothing"
        )
    arguments.eval_lengths = sorted(set(arguments.eval_lengths))
    if arguments.stride is not None and not 1 <= arguments.stride < arguments.eval_lengths[0]:
        raise UsageError(
            f"--stride {arguments.stride} must be at least 1 and below the shortest of --eval-lengths, "
            f"{arguments.eval_lengths[0]}"
        )
    if arguments.eval_tokens < arguments.eval_lengths[-1]:
        raise UsageError(
            f"--eval-tokens {arguments.eval_tokens} is less than the longest of --eval-lengths, "
            f"{arguments.eval_lengths[-1]}"
        )

    pairs = [pair.partition("=") for pair in arguments.scheme_args]
    if bare := [name for name, equals, _ in pairs if not equals]:
        raise UsageError(f"--scheme-args takes name=value, not {' '.join(bare)}")
    try:
        scheme = parse_scheme(arguments.scheme, {name: parsed(value) for name, _, value in pairs})
    except (TypeError, ValueError) as error:
        raise UsageError(f"--scheme {arguments.scheme}: {error}") from None

    for path in map(Path, arguments.data):
        if not path.is_file():
            raise UsageError(f"--data {path}: no such file")
    if arguments.model is not None:
        if not arguments.data:
            raise UsageError("--model needs --data FILE..., text to fine-tune and measure on")
        config = load(AutoConfig, arguments.model)
        if config.model_type.startswith("posenc_"):
            raise UsageError(
                f"--model {arguments.model} is patched already: give the stock checkpoint it was made from"
            )
        adapter_for(config.model_type)  # says which families there are

    output = Path(arguments.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output} is a file")
    if output.is_dir() and any(output.iterdir()) and not arguments.overwrite:
        raise UsageError(f"--output {output} is not empty: choose another folder, or --overwrite")
    return scheme


def check_lengths(training: Tensor, held_out: Tensor, arguments: Arguments, processes: int) -> None:
    """The text must suffice for one pass of one batch, and for one window of every length."""
    if len(held_out) < arguments.eval_lengths[-1]:
        raise UsageError(
            f"the held-out text has {len(held_out):,} tokens, the longest of --eval-lengths needs "
            f"{arguments.eval_lengths[-1]:,}: give more text or shorter lengths"
        )
    if arguments.model is None and len(training) <= CONTEXT:
        raise UsageError(f"the training text has {len(training):,} tokens, the embedded base needs over {CONTEXT}")
    needed = arguments.train_length * arguments.batch_size * processes
    if len(training) < needed:
        raise UsageError(
            f"the training text has {len(training):,} tokens, one batch needs {needed:,} "
            f"({processes} x --batch-size {arguments.batch_size} x --train-length {arguments.train_length}): "
            "give more text"
        )


def check_vocabulary(model: nn.Module, *texts: Tensor) -> None:
    """A tokenizer that is not the model's own would fail in the middle, on a GPU without saying why."""
    largest, rows = max(int(text.max()) for text in texts), model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise UsageError(
            f"the tokenizer gives ids up to {largest}, the model embeds {rows}: they do not belong together"
        )


def check_limit(model: nn.Module, arguments: Arguments) -> None:
    """A patched model's scheme must reach as far as it is asked to."""
    longest = max(arguments.train_length, arguments.eval_lengths[-1])
    limit = patch_of(model).scheme.limit
    if limit is not None and limit < longest:
        raise UsageError(
            f"--scheme {arguments.scheme} ends at {limit} positions, --train-length and --eval-lengths go to "
            f"{longest}: for instance --scheme-args num_positions={longest}"
        )


def parsed(value: str) -> Any:
    """A hyper-parameter from the command line: JSON where it is JSON, text otherwise."""
    try:
        value = json.loads(value)
    except json.JSONDecodeError:
        pass
    return tuple(value) if isinstance(value, list) else value


def option(name: str) -> str:
    """The command-line spelling of an argument."""
    return "--" + name.replace("_", "-")


# ----------------------------------------------------------------------------------------------------------------- text


def describe_data(arguments: Arguments) -> str:
    """What is read, in words."""
    return ", ".join(arguments.data) if arguments.data else "the sources of the Python standard library"


def read_documents(arguments: Arguments) -> list[str]:
    """The documents in order, each only once: a repeated one could end up on both sides of the split."""
    separator = arguments.separator.encode().decode("unicode_escape")
    texts = []
    for path in map(Path, arguments.data) if arguments.data else standard_library():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if arguments.data:
                raise UsageError(f"--data {path}: not readable as UTF-8 text ({error})") from None
            continue  # a few test data modules of the standard library are in other encodings
        texts += text.split(separator) if separator else [text]
    return list(dict.fromkeys(text.strip("\n") for text in texts if text.strip()))


def encode(tokenizer: Any, documents: list[str]) -> list[Tensor]:
    """Token ids of each document, between the marks the tokenizer adds; if it adds none, each ends with its end-of-text
    token."""
    end = [] if tokenizer("").input_ids or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # The tokenizer would warn that a whole book is longer than the model's context, which is the point.
    encoded = tokenizer(documents, return_attention_mask=False, verbose=False).input_ids
    return [torch.tensor(ids + end, dtype=torch.long) for ids in encoded]


def split(documents: list[Tensor], arguments: Arguments) -> tuple[Tensor, Tensor]:
    """Training and held-out tokens, `(N,)` each. Whole documents are held out, so no text is on both sides.

    They are drawn at random until --eval-tokens are reached (what is beyond that is left unused). Of a single document
    the end is held out.
    """
    wanted = arguments.eval_tokens
    if len(documents) == 1:
        return documents[0][:-wanted], documents[0][-wanted:]
    order = list(range(len(documents)))
    random.Random(arguments.seed).shuffle(order)
    held_out: list[int] = []
    while order and sum(len(documents[index]) for index in held_out) < wanted:
        held_out.append(order.pop())
    return (
        torch.cat([documents[index] for index in sorted(order)]) if order else torch.empty(0, dtype=torch.long),
        torch.cat([documents[index] for index in sorted(held_out)])[:wanted]
        if held_out
        else torch.empty(0, dtype=torch.long),
    )


# ----------------------------------------------------------------------------------------------- measuring and training


def load(cls: Any, name: str, **arguments: Any) -> Any:
    """What the checkpoint holds of this class: its tokenizer, its weights."""
    try:
        return cls.from_pretrained(name, **arguments)
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {error}") from None


def position_limit(model: nn.Module) -> int | None:
    """Number of positions in a stock model's own learned table, None if it has none."""
    adapter = adapter_for(model.config.model_type)
    if adapter.position_table is None:
        return None
    table = model.base_model.get_submodule(adapter.decoder).get_submodule(adapter.position_table)
    return table.num_embeddings - adapter.table_offset


def measure(
    model: nn.Module, held_out: Tensor, arguments: Arguments, limit: int | None, progress: bool
) -> list[dict[str, Any]]:
    """One row per length: both perplexities, or why there is none."""
    rows = []
    for length in arguments.eval_lengths:
        if limit is not None and length > limit:
            rows.append({"length": length, "impossible": f"its table ends at {limit} positions"})
            continue
        stride = arguments.stride or max(1, length // 4)
        sliding = sliding_window_perplexity(model, held_out, length=length, stride=stride, progress=progress)
        fresh = non_overlapping_perplexity(model, held_out, length=length, progress=progress)
        rows.append({"length": length, "sliding": sliding.to_dict(), "non_overlapping": fresh.to_dict()})
    return rows


def train(accelerator: Accelerator, model: nn.Module, tokens: Tensor, arguments: Arguments) -> dict[str, Any]:
    """Fine-tunes in place on windows of the text in random order; returns the loss curve and the speed."""
    windows = tokens[: len(tokens) // arguments.train_length * arguments.train_length].view(-1, arguments.train_length)
    loader = DataLoader(windows, batch_size=arguments.batch_size, shuffle=True, drop_last=True)  # type: ignore[arg-type]
    matrices = [weight for name, weight in model.named_parameters() if weight.dim() > 1 and ".posenc." not in name]
    decayed = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in decayed]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": arguments.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, min(arguments.warmup_steps, arguments.steps), arguments.steps)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, per_step = endless(loader), tokens_per_step(arguments, accelerator)
    wrapped.train()
    losses: list[float] = []
    start = time.perf_counter()
    with tqdm(total=arguments.steps, desc="fine-tuning", unit="step", disable=not accelerator.is_main_process) as bar:
        for step in range(1, arguments.steps + 1):
            parts = []
            for _ in range(arguments.gradient_accumulation):
                with accelerator.accumulate(wrapped):
                    batch = next(batches)
                    loss = wrapped(input_ids=batch, labels=batch, use_cache=False).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(wrapped.parameters(), arguments.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                    parts.append(loss.detach())
            schedule.step()
            losses.append(accelerator.reduce(torch.stack(parts).mean(), "mean").item())
            if losses[-1] != losses[-1] or abs(losses[-1]) == float("inf"):
                raise SystemExit(
                    f"the loss became {losses[-1]} at step {step}: try a lower --learning-rate, more --warmup-steps"
                )
            speed = step * per_step / (time.perf_counter() - start)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", tokens_per_s=f"{speed:,.0f}", refresh=False)
            bar.update()
    model.eval()
    return {
        "steps": arguments.steps,
        "tokens": arguments.steps * per_step,
        "passes_over_the_text": arguments.steps * per_step / len(tokens),
        "tokens_per_second": speed,
        "loss": losses,
    }


def endless(loader: DataLoader) -> Iterator[Tensor]:
    """Batches, pass after pass."""
    while True:
        yield from loader


def tokens_per_step(arguments: Arguments, accelerator: Accelerator) -> int:
    """Tokens of all processes in one optimizer step."""
    sequences = arguments.batch_size * arguments.gradient_accumulation * accelerator.num_processes
    return sequences * arguments.train_length


# -------------------------------------------------------------------------------------------------------------- results


def save(accelerator: Accelerator, model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Weights and tokenizer, from the main process."""
    if accelerator.is_main_process:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    accelerator.wait_for_everyone()


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: an interrupted write leaves what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def provenance(accelerator: Accelerator) -> dict[str, Any]:
    """What somebody needs to run the same again."""
    here = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(
                ["git", "-C", here, *words], capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": {
            "commit": git("rev-parse", "HEAD"),
            "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        },
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (hf_posenc, torch, transformers, accelerate)},
        },
        "hardware": {
            "device": str(accelerator.device),
            "name": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else platform.processor(),
            "processes": accelerator.num_processes,
            "threads": torch.get_num_threads(),
        },
    }


def table(results: dict[str, Any]) -> str:
    """Lengths x before and after, both perplexities; lower is better."""
    lines = [
        "held-out perplexity     sliding window          non-overlapping",
        f"{'context':>10}  {'before':>12} {'after':>9}  {'before':>14} {'after':>9}",
    ]
    reasons = []
    for before, after in zip(results["before"], results["after"], strict=True):
        cells = []
        for method in ("sliding", "non_overlapping"):
            cells += [f"{row[method]['perplexity']:.3f}" if method in row else "-" for row in (before, after)]
        lines.append(f"{before['length']:>10}  {cells[0]:>12} {cells[1]:>9}  {cells[2]:>14} {cells[3]:>9}")
        reasons += [before["impossible"]] if "impossible" in before else []
    return "\n".join(lines + [f"\n-: the model before cannot run there: {reason}" for reason in reasons[:1]])


class stopwatch:
    """Context manager: `seconds[name]` is the time spent inside."""

    def __init__(self, seconds: dict[str, float], name: str):
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = round(time.perf_counter() - self.start, 1)


def count(model: nn.Module) -> int:
    """Number of weights, tied ones once."""
    return sum(weight.numel() for weight in model.parameters())


if __name__ == "__main__":
    main()
