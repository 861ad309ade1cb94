"""Trains the small GPT-2 that comes with the package and writes it, with its README.md, into `embedded_base/`.

    python scripts/make_embedded_base.py

It reads the sources of the Python that runs it, without the modules of `HELD_OUT`. It runs in float32 and takes minutes.
"""

import argparse
import platform
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from hf_posenc.evaluation import non_overlapping_perplexity
from hf_posenc.recipes.embedded import CONTEXT, FOLDER, HELD_OUT, byte_tokenizer, library_parts

MATRIX_RATE = 0.02

README = """\
# The embedded base

A GPT-2 that reads bytes: {weights:,} weights, four layers of width 128, a table of {context} learned positions.
`hf-posenc extend` takes it where no `--model` is given. It is there to have its positions swapped, and good for nothing else.

`model.safetensors` holds float16; `config.json` says float32, and that is what it is loaded in.

| | |
| --- | --- |
| made by | `python scripts/make_embedded_base.py --steps {steps} --batch-size {batch_size} --seed {seed}` |
| training | {steps:,} steps of {batch_size} random windows of {context} bytes, in float32: {bytes_read:,} bytes, {passes:.1f} times the text |
| loss at the end, in nats per byte | {train_loss:.3f} on the training text (mean of the last 100 steps), {held_out_loss:.3f} on the held-out text (windows of {context}; float16 weights) |
| time | {seconds:,.0f} s of one core ({capability}) |
| versions | Python {python}, torch {torch}, transformers {transformers} |

## Its text

The training text is {training_bytes:,} bytes: the top-level modules of the standard library of Python {python} (`Lib/*.py`), each from its beginning to its end.
The [license of Python](https://docs.python.org/3/license.html) covers them (PSF License Agreement; copyright © 2001 Python
Software Foundation, all rights reserved). No text of it is in this folder; the model can write short pieces of it.

Left out, in every version of Python, are the modules that recipes measure on:
{held_out}.
Of their strings of 50 bytes, {shared:.1%} are somewhere in the training text too.
"""


def encode(files: list[Path]) -> torch.Tensor:
    """Return the tokens of files, each followed by the end of text, in a row."""
    tokenizer = byte_tokenizer()
    texts = [path.read_text(encoding="utf-8").strip("\n") for path in files]
    return torch.tensor([token for ids in tokenizer(texts).input_ids for token in [*ids, tokenizer.eos_token_id]])


def shared(training: list[Path], held_out: list[Path], length: int = 50) -> float:
    """Return the share of the held-out strings of a length, in bytes, that the training files have too."""

    def strings(path: Path) -> list[bytes]:
        text = path.read_bytes()
        return [text[start : start + length] for start in range(len(text) - length)]

    known = {string for path in training for string in strings(path)}
    found = [string in known for path in held_out for string in strings(path)]
    return sum(found) / len(found)


def byte_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Return an untrained decoder of four layers of width 128, without dropout, because it is less than one epoch.

    With only 0.9 million weights it learns something within a minute.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        initializer_range=0.06,  # GPT-2's 0.02 is for width 768 and more: a narrow model would learn much later with it
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    # In a table of sinusoids a linear map leads to the token before. Starting there saves half of the training time.
    width = model.config.n_embd
    rates = 10000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(CONTEXT)[:, None] * rates
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(0.1 * torch.cat([angles.sin(), angles.cos()], dim=1))
    return model


class Orthogonalized(torch.optim.Optimizer):
    """Muon in the dtype of the weights: steps by a momentum whose singular values are made about equal.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. `torch.optim.Muon` computes in
    bfloat16, which takes tens of times longer on a CPU without bfloat16 instructions.

    Args:
        matrices: two-dimensional weights.
        lr: learning rate.
        weight_decay: a step multiplies the weights by 1 - `lr` * `weight_decay`.
    """

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float):
        """Begin without momentum."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Add the orthogonalised momentum to every matrix."""
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonalize(weight.grad.lerp(momentum, 0.95))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix (N, M) with its singular values moved close to 1, by five Newton-Schulz steps."""
    tall = matrix.shape[0] > matrix.shape[1]
    result = matrix.T if tall else matrix
    result = result / result.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = result @ result.T
        result = 3.4445 * result + (-4.7750 * gram + 2.0315 * gram @ gram) @ result
    return result.T if tall else result


def train_base(
    model: GPT2LMHeadModel,
    tokens: Tensor,
    *,
    steps: int,
    batch_size: int = 4,
    learning_rate: float = 3e-3,
) -> list[float]:
    """Train a model in place on random windows as long as its context, in float32. Afterwards it is in eval mode.

    Args:
        model: untrained model, .
        tokens: `(N,)` int64 training text.
        steps: optimizer steps of `batch_size` windows each.
        batch_size: windows per step.
        learning_rate: peak for embeddings and vectors. The schedule is a warm-up of 5 % and a cosine decay to 0.

    Returns:
        The losses of the steps, in nats per token.
    """
    context = model.config.n_positions
    model.train()
    # Held-out loss after 800 steps on one core: 2.09 with AdamW alone (120 s), 1.85 with this (151 s).
    matrices = [weight for name, weight in model.named_parameters() if ".h." in name and weight.dim() == 2]
    others = [weight for name, weight in model.named_parameters() if ".h." not in name or weight.dim() != 2]
    optimizers = [
        Orthogonalized(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    schedules = [get_cosine_schedule_with_warmup(optimizer, max(1, steps // 20), steps) for optimizer in optimizers]
    offsets, losses = torch.arange(context), []
    with tqdm(total=steps, desc="training the base", unit="step") as bar:
        for _ in range(steps):
            starts = torch.randint(0, len(tokens) - context, (batch_size, 1))
            batch = tokens[starts + offsets].to(model.device)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer_or_schedule in (*optimizers, *schedules):
                optimizer_or_schedule.step()
            model.zero_grad()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    model.eval()
    return losses


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args()
    training, held_out = library_parts()
    tokens = encode(training)
    torch.manual_seed(options.seed)
    model, start = byte_model(byte_tokenizer()), time.process_time()
    losses = train_base(model, tokens, steps=options.steps, batch_size=options.batch_size)
    seconds = time.process_time() - start

    model.save_pretrained(options.output)
    byte_tokenizer().save_pretrained(options.output)
    weights = options.output / "model.safetensors"
    halved = {name: weight.half() for name, weight in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    stored = type(model).from_pretrained(options.output, dtype=torch.float32)
    stored.loss_type = "ForCausalLM"
    read = options.steps * options.batch_size * CONTEXT
    (options.output / "README.md").write_text(
        README.format(
            weights=sum(weight.numel() for weight in model.parameters()),
            context=CONTEXT,
            **vars(options),
            bytes_read=read,
            passes=read / len(tokens),
            train_loss=sum(losses[-100:]) / len(losses[-100:]),
            held_out_loss=non_overlapping_perplexity(stored, encode(held_out), length=CONTEXT).loss,
            seconds=seconds,
            capability=torch.backends.cpu.get_cpu_capability(),
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            training_bytes=len(tokens),
            held_out=", ".join(HELD_OUT),
            shared=shared(training, held_out),
        ),
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
