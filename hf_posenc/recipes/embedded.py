"""A small trained byte-level GPT-2 and a text for it, so that a recipe needs no download.

The weights are in the package, in `embedded_base/`. The text is the sources of the Python standard library on this
machine. The model reads bytes and has a table of 256 learned positions. It cannot run beyond them, and a recipe changes
that.
"""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

FOLDER = Path(__file__).parent / "embedded_base"
"""The checkpoint: float16 weights, their config, the tokenizer. `scripts/make_embedded_base.py` writes it."""
HELD_OUT = (
    *("bisect", "calendar", "cmd", "colorsys", "csv", "filecmp", "fileinput", "fractions", "graphlib", "heapq"),
    *("netrc", "quopri", "reprlib", "sched", "shelve", "shlex", "statistics", "textwrap", "timeit", "trace"),
)
"""Modules of the standard library that the base has not seen and that recipes measure on, in every version of Python.

No other module of Python 3.11 to 3.13 shares code with them: of their 50-byte strings the training text has 0.9 %.
"""
CONTEXT = 256
MATRIX_RATE = 0.02
END_OF_TEXT = "<|endoftext|>"
PROMPT = "    def get_"


def standard_library() -> list[Path]:
    """Return the top-level modules of the standard library that runs this, sorted by name: about 170 files, 5 MB.

    `_sysconfigdata` is left out. It holds the paths of the machine that built this Python.

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
    """Return the modules of the standard library to train on, and those of `HELD_OUT` to measure on."""
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
    tokenizer: PreTrainedTokenizerFast, *, positions: int, width: int, layers: int, heads: int, initial: float
) -> GPT2LMHeadModel:
    """Return an untrained decoder of GPT-2's shape, without dropout: it is for less than one pass over a text.

    Args:
        tokenizer: whose ids it reads.
        positions: rows of its table of learned positions.
        width: hidden size.
        layers: decoder layers.
        heads: attention heads.
        initial: standard deviation of its weights.
    """
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        initializer_range=initial,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return with_loss_type(GPT2LMHeadModel(config))


def byte_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Return an untrained decoder of four layers of width 128.

    Its 0.9 million weights are few enough to learn something in a minute.
    """
    # GPT-2's own deviation, 0.02, is for width 768 and up; a narrow model starts to learn much later from it.
    model = decoder(tokenizer, positions=CONTEXT, width=128, layers=4, heads=4, initial=0.06)
    # A table that starts at sinusoids makes "the token before" a linear map, and saves half of the minute.
    width = model.config.n_embd
    rates = 10000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(CONTEXT)[:, None] * rates
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(0.1 * torch.cat([angles.sin(), angles.cos()], dim=1))
    return model


def trained_base(folder: Path = FOLDER) -> GPT2LMHeadModel:
    """Return the trained base from a folder, in float32, in eval mode: ready to patch, train and measure."""
    return with_loss_type(GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32))


def with_loss_type(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    """Set `loss_type`, so that transformers does not warn."""
    # transformers reads it off the class name, and GPT-2's does not have it: it would warn and then take this.
    model.loss_type = "ForCausalLM"
    return model


class Orthogonalized(torch.optim.Optimizer):
    """Muon in the dtype of the weights: momentum whose singular values are made about equal, for matrices.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. `torch.optim.Muon` computes the same in
    bfloat16, which takes tens of times as long on a CPU without bfloat16 instructions.

    Args:
        matrices: two-dimensional weights.
        lr: learning rate.
        weight_decay: share of `lr` by which a step shrinks the weights.
    """

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float):
        """Begin without momentum."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every matrix by its orthogonalised momentum."""
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonalize(weight.grad.lerp(momentum, 0.95))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return the matrix (N, M) with singular values near 1, by five Newton-Schulz steps in its own dtype."""
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
    """Train a model in place on random windows of its whole context, in float32. It ends in eval mode.

    Args:
        model: fresh, on the device to train on.
        tokens: `(N,)` int64 training text; the caller keeps the held-out part back.
        steps: optimizer steps of `batch_size` windows each.
        batch_size: windows per step.
        learning_rate: peak for embeddings and vectors, after a warm-up of 5 % and before a cosine decay to 0.
        progress: show a progress bar with the loss.

    Returns:
        The loss of every step in nats per token.

    Raises:
        ValueError: if the text is not longer than the context.
    """
    context = model.config.n_positions
    if len(tokens) < context + 1:
        raise ValueError(f"the training text has {len(tokens)} tokens, the base model's context needs {context + 1}")
    model.train()
    # With AdamW alone 800 steps end at a held-out loss of 2.09 after 120 s of one core, with this at 1.85 after 151 s.
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
            for stepping in (*optimizers, *schedules):
                stepping.step()
            model.zero_grad()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
    model.eval()
    return losses


def sample(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, tokens: int = 120) -> str:
    """Return what a trained base writes after `PROMPT`, drawn with a fixed seed, inside its context."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    written = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=True, temperature=0.8, pad_token_id=tokenizer.eos_token_id
    )
    torch.set_rng_state(state)
    return tokenizer.decode(written[0], skip_special_tokens=True)
