"""A small trained byte-level GPT-2 and a text for it, so that a recipe needs no download.

The weights are in the package, in `embedded_base/`. The text consists of the sources of the Python standard library on
this machine. The model reads bytes and has a table of 256 learned positions. It cannot read longer texts until a recipe
gives it another scheme.
"""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

FOLDER = Path(__file__).parent / "embedded_base"
"""The checkpoint: float16 weights, config, tokenizer. `scripts/make_embedded_base.py` writes it."""
HELD_OUT = (
    *("bisect", "calendar", "cmd", "colorsys", "csv", "filecmp", "fileinput", "fractions", "graphlib", "heapq"),
    *("netrc", "quopri", "reprlib", "sched", "shelve", "shlex", "statistics", "textwrap", "timeit", "trace"),
)
"""Modules of the standard library that the base was not trained on. Recipes measure on them under every Python version.

They share almost no code with other modules of Python 3.11 to 3.13: 0.9 % of their 50-byte strings are in the training
text.
"""
CONTEXT = 256
MATRIX_RATE = 0.02
END_OF_TEXT = "<|endoftext|>"
PROMPT = "    def get_"


def standard_library() -> list[Path]:
    """Return the top-level modules of this Python's standard library, sorted by name: about 170 files, 5 MB.

    `_sysconfigdata` is left out, because it contains paths of the machine that built this Python.

    Raises:
        FileNotFoundError: if the installation has no sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if not path.name.startswith("_sysconfigdata"))
    if not files:
        raise FileNotFoundError(
            f"no Python sources in {folder} (a zipped or stripped installation?): give --data FILE... instead"
        )
    return files


def library_parts() -> tuple[list[Path], list[Path]]:
    """Return the modules of the standard library to train on, and the modules to measure on (`HELD_OUT`)."""
    files = standard_library()
    held_out = [path for path in files if path.stem in HELD_OUT]
    return [path for path in files if path not in held_out], held_out


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 257 tokens: GPT-2's byte alphabet, one token per UTF-8 byte, and `<|endoftext|>`."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )


def decoder(
    tokenizer: PreTrainedTokenizerFast, *, positions: int, width: int, layers: int, heads: int, initializer_range: float
) -> GPT2LMHeadModel:
    """Return an untrained decoder of GPT-2's architecture, without dropout, because it is less than one epoch.

    Args:
        tokenizer: tokenizer of the decoder.
        positions: rows of the table of learned positions.
        width: hidden size.
        layers: decoder layers.
        heads: attention heads.
        initializer_range: standard deviation of the initial weights.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        initializer_range=initializer_range,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return with_loss_type(GPT2LMHeadModel(config))


def byte_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Return an untrained decoder of four layers of width 128.

    With only 0.9 million weights it learns something within a minute.
    """
    # GPT-2's 0.02 is for width 768 and more. A narrow model would start to learn much later with it.
    model = decoder(tokenizer, positions=CONTEXT, width=128, layers=4, heads=4, initializer_range=0.06)
    # In a table of sinusoids a linear map leads to the token before. Starting there saves half of the training time.
    width = model.config.n_embd
    rates = 10000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(CONTEXT)[:, None] * rates
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(0.1 * torch.cat([angles.sin(), angles.cos()], dim=1))
    return model


def trained_base(folder: Path = FOLDER) -> GPT2LMHeadModel:
    """Load the trained base from a folder, in float32 and eval mode."""
    return with_loss_type(GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32))


def with_loss_type(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Set `loss_type`, so that transformers does not warn."""
    # transformers derives it from the class name. For GPT-2 that fails: it warns, and uses this value.
    model.loss_type = "ForCausalLM"
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
    progress: bool = True,
) -> list[float]:
    """Train a model in place on random windows as long as its context, in float32. Afterwards it is in eval mode.

    Args:
        model: untrained model, on the device to train on.
        tokens: `(N,)` int64 training text.
        steps: optimizer steps of `batch_size` windows each.
        batch_size: windows per step.
        learning_rate: peak for embeddings and vectors. The schedule is a warm-up of 5 % and a cosine decay to 0.
        progress: show a progress bar with the loss.

    Returns:
        The losses of the steps, in nats per token.

    Raises:
        ValueError: if the text is not longer than the context.
    """
    context = model.config.n_positions
    if len(tokens) < context + 1:
        raise ValueError(f"the training text has {len(tokens)} tokens, the base model's context needs {context + 1}")
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
    with tqdm(total=steps, desc="training the base", unit="step", disable=not progress) as bar:
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


def sample(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, tokens: int = 120) -> str:
    """Return a text that a trained base generates from `PROMPT`, with a fixed seed."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    rng_state = torch.get_rng_state()
    torch.manual_seed(0)
    generated = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=True, temperature=0.8, pad_token_id=tokenizer.eos_token_id
    )
    torch.set_rng_state(rng_state)
    return tokenizer.decode(generated[0], skip_special_tokens=True)
