"""A small byte-level GPT-2 trained on the spot, so that a recipe has a real checkpoint and real text on every machine.

The text is the Python standard library's own sources. The model reads bytes, so no vocabulary has to be downloaded, and
it has a table of 256 learned positions: past it the model cannot run at all, which is what the recipe then changes.
"""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

CONTEXT = 256
MUON_RATE = 0.02
END_OF_TEXT = "<|endoftext|>"
PROMPT = "    def get_"


def standard_library() -> list[Path]:
    """The top-level modules of the standard library that runs this, sorted by name: about 170 files, 5 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"no Python sources in {folder} (a zipped or stripped installation?): give --data FILE... instead"
        )
    return files


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's byte alphabet with no merges (one token per UTF-8 byte) and `<|endoftext|>`: 257 tokens."""
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
    """An untrained decoder of GPT-2's shape without dropout: it is for runs of less than one pass over the text.

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
    model = GPT2LMHeadModel(config)
    # transformers reads it off the class name, and GPT-2's does not have it: it would warn and then take this.
    model.loss_type = "ForCausalLM"
    return model


def byte_model(tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    """Four layers of width 128, untrained: 0.9 million weights, small enough to learn something in a minute."""
    # GPT-2's own deviation, 0.02, is for width 768 and up; a narrow model starts to learn much later from it.
    model = decoder(tokenizer, positions=CONTEXT, width=128, layers=4, heads=4, initial=0.06)
    # A table that starts at sinusoids makes "the token before" a linear map, and saves half of the minute.
    width = model.config.n_embd
    rates = 10000 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(CONTEXT)[:, None] * rates
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(0.1 * torch.cat([angles.sin(), angles.cos()], dim=1))
    return model


def train_base(
    model: GPT2LMHeadModel,
    tokens: Tensor,
    *,
    steps: int,
    batch_size: int = 4,
    learning_rate: float = 3e-3,
    progress: bool = True,
) -> None:
    """Trains the model in place on random windows of its whole context; it ends in eval mode.

    Args:
        model: fresh, on the device to train on.
        tokens: `(N,)` int64 training text; the caller keeps the held-out part back.
        steps: optimizer steps of `batch_size` windows each.
        batch_size: windows per step.
        learning_rate: peak for embeddings and vectors, after a warm-up of 5 % and before a cosine decay to 0.
        progress: show a progress bar with the loss.

    Raises:
        ValueError: if the text is not longer than the context.
    """
    context = model.config.n_positions
    if len(tokens) < context + 1:
        raise ValueError(f"the training text has {len(tokens)} tokens, the base model's context needs {context + 1}")
    model.train()
    # Muon on the layers' matrices: for the same loss AdamW alone needs about three times as many tokens.
    matrices = [weight for name, weight in model.named_parameters() if ".h." in name and weight.dim() == 2]
    others = [weight for name, weight in model.named_parameters() if ".h." not in name or weight.dim() != 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    schedules = [get_cosine_schedule_with_warmup(optimizer, max(1, steps // 20), steps) for optimizer in optimizers]
    offsets = torch.arange(context)
    with tqdm(total=steps, desc="training the base", unit="step", disable=not progress) as bar:
        for _ in range(steps):
            starts = torch.randint(0, len(tokens) - context, (batch_size, 1))
            batch = tokens[starts + offsets].to(model.device)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for part in (*optimizers, *schedules):
                part.step()
            model.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
            bar.update()
    model.eval()


def sample(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, tokens: int = 120) -> str:
    """What a trained base writes after `PROMPT`: its likeliest bytes, drawn with a seed, inside its context."""
    inputs = tokenizer(PROMPT, return_tensors="pt").to(model.device)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    written = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=True, temperature=0.8, pad_token_id=tokenizer.eos_token_id
    )
    torch.set_rng_state(state)
    return tokenizer.decode(written[0], skip_special_tokens=True)
