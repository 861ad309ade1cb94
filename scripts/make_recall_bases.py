#!/usr/bin/env python3
"""Train two small bases that can recall: on text, and on tasks that ask for tokens of the context.

python scripts/make_recall_bases.py rotating        a LLaMA of two layers, into scripts/recall_bases/rotating
python scripts/make_recall_bases.py table           a GPT-2 of two layers with a table of 128 positions

They take about thirty and twenty minutes on one core. They read bytes of the Python standard library of this machine, and the
tasks of `hf_posenc.evaluation.TASKS`. A base passes if it gives at least 95 % of the right answers of each task at its
trained length (`GATE`); a base that does not pass is written nowhere, and the command ends with status 1.

Circuits that copy form sooner in short contexts: training begins with windows of 32 tokens and ends with 128.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_posenc.evaluation import TaskTokens, measure_recall, recall_examples
from hf_posenc.recipes.embedded import Orthogonalized, byte_tokenizer, library_parts, with_loss_type

FOLDER = Path(__file__).parent / "recall_bases"
WORDS = FOLDER / "words.json"
"""The words of `induction`. They are kept, because the standard library differs between versions of Python."""
KINDS = ("rotating", "table")
LENGTH = 128
WIDTH, LAYERS, HEADS = 128, 2, 4
ROPE_THETA = 500_000.0
"""With 10,000, most pairs of a head turn many times within 128 tokens, and keys are found ten times later."""
ITEMS = {
    "multi_query_recall": 8,
    "noisy_recall": 8,
    "selective_copy": 8,
    "string_copy": 32,
    "induction": 6,
}
"""Items of each task at the trained length. Training draws from 2 up to twice as many, if they fit."""
GATE = 0.95
STAGES = ((900, 32), (1350, 64))
"""Steps, and the length of their windows. All later windows have 128 tokens."""
STEPS = {"rotating": 6500, "table": 4500}
WARM_STEPS = 225
FIRST_STEPS = 1350
"""Steps with `FIRST_SHARES`."""
ROWS = 32
"""Windows of 128 tokens in a step, or as many tokens in shorter ones."""
TEXT = 0.25
"""Share of the rows that are text. A row of text has 127 scored tokens, a row of a task 2 to 64."""
FIRST_SHARES = {"string_copy": 4.0}
"""Weights of the tasks in the first steps: copies of strings have most answers, and start the circuits."""
LATER_SHARES = {"multi_query_recall": 1.5, "noisy_recall": 1.5, "selective_copy": 3.0, "induction": 1.5}
"""Weights afterwards. A task that is not named has 1."""
MATRIX_RATE, RATE = 0.02, 3e-3
"""Peak rates of Muon for matrices, and of AdamW for the rest; a linear decay to 0 over the last two fifths."""


def task_tokens() -> TaskTokens:
    """Return the ids of the tasks, behind those of the bytes."""
    tokenizer = byte_tokenizer()
    words = json.loads(WORDS.read_text(encoding="utf-8"))
    return TaskTokens(len(tokenizer), tuple(tuple(tokenizer(f" {word}").input_ids) for word in words))


def common_words(text: str, count: int = 400) -> list[str]:
    """Return the most common words of 3 to 6 small letters that stand between spaces."""
    return [word for word, _ in Counter(re.findall(r"(?<= )[a-z]{3,6}(?= )", text)).most_common(count)]


def library_tokens(held_out: bool = False) -> Tensor:
    """Return the standard library's modules to train on, or those to measure on, as one row of bytes (N,)."""
    tokenizer = byte_tokenizer()
    end = [tokenizer.eos_token_id]
    return torch.tensor(
        [token for path in library_parts()[held_out] for token in tokenizer(path.read_text("utf-8")).input_ids + end]
    )


def untrained(kind: str, vocabulary: int) -> PreTrainedModel:
    """Return a base with random weights whose first layer already tells neighbours apart.

    A head of the rotating base begins with a preference for one distance, 0 to 3 (biases of queries and keys whose
    difference in angle is that distance). The table begins with sinusoids, from which a linear map leads to the token
    before. Without that, circuits that copy need several times as long to form.
    """
    if kind == "rotating":
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=LENGTH,
            attention_bias=True,
            initializer_range=0.06,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        )
        model = LlamaForCausalLM(config)
        size = WIDTH // HEADS
        rates = ROPE_THETA ** (-torch.arange(0, size, 2) / size)
        attention = model.model.layers[0].self_attn
        with torch.no_grad():
            queries = [torch.cat([(rates * head).cos(), -(rates * head).sin()]) for head in range(HEADS)]
            attention.q_proj.bias.copy_(1.2 * torch.cat(queries))
            attention.k_proj.bias.copy_(1.2 * torch.cat([torch.ones(size // 2), torch.zeros(size // 2)]).repeat(HEADS))
        return model
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=3 * WIDTH,
        initializer_range=0.06,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = with_loss_type(GPT2LMHeadModel(config))
    rates = 10_000 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    angles = torch.arange(LENGTH)[:, None] * rates
    with torch.no_grad():
        model.transformer.wpe.weight.copy_(0.1 * torch.cat([angles.sin(), angles.cos()], dim=1))
    return model


def draw_rows(
    text: Tensor, tokens: TaskTokens, length: int, rows: int, shares: dict[str, float], draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw rows of text and of each task.

    Args:
        text: (N,) tokens.
        tokens: the ids of the tasks.
        length: T.
        rows: number of rows B, about.
        shares: task -> its share of the rows that are not text.
        draw: source of chance.

    Returns:
        Rows (B, T), and which of their tokens are trained on, (B, T) bool: all of a text but the first, and answers.
    """
    starts = torch.randint(len(text) - length, (round(rows * TEXT),), generator=draw)
    found = [text[starts[:, None] + torch.arange(length)]]
    scored = [torch.ones(found[0].shape, dtype=torch.bool)]
    scored[0][:, 0] = False
    for task, items in ITEMS.items():
        most = max(2, min(round(2 * items * length / LENGTH), (length - 2) // 2))
        count = round(rows * (1 - TEXT) * shares[task])
        if count:
            drawn = int(torch.randint(2, most + 1, (), generator=draw))
            row, answers = recall_examples(task, tokens, count=count, items=drawn, length=length, generator=draw)
            found.append(row)
            scored.append(answers)
    return torch.cat(found), torch.cat(scored)


def train(model: PreTrainedModel, tokens: TaskTokens, text: Tensor, *, steps: int, seed: int) -> None:
    """Train a model in place, with a line of accuracies every twentieth of the steps. It ends in eval mode.

    The loss is the mean over rows of the mean over a row's scored tokens.
    """
    names = {name for name, weight in model.named_parameters() if weight.dim() == 2 and re.search(r"\.\d+\.", name)}
    matrices = [weight for name, weight in model.named_parameters() if name in names]
    others = [weight for name, weight in model.named_parameters() if name not in names]
    optimizers = [
        Orthogonalized(matrices, lr=MATRIX_RATE, weight_decay=0.01),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    decay = 0.4 * steps
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: min((step + 1) / WARM_STEPS, 1.0, (steps - step) / decay))
        for each in optimizers
    ]
    draw, began = torch.Generator().manual_seed(seed), time.perf_counter()
    for step in range(steps):
        length = length_at(step)
        rows, shares = ROWS * LENGTH // length, shares_of(FIRST_SHARES if step < FIRST_STEPS else LATER_SHARES)
        model.train()
        recall_loss(model, *draw_rows(text, tokens, length, rows, shares, draw)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if (step + 1) % max(1, steps // 20) == 0:
            found = accuracies(model, tokens, examples=32)
            said = " ".join(f"{task} {share:.3f}" for task, share in found.items())
            print(f"step {step + 1:,} of {steps:,}, {time.perf_counter() - began:.0f} s: {said}", flush=True)
    model.eval()


def shares_of(weights: dict[str, float]) -> dict[str, float]:
    """Return task -> its share of the rows that are not text."""
    total = sum(weights.get(task, 1.0) for task in ITEMS)
    return {task: weights.get(task, 1.0) / total for task in ITEMS}


def length_at(step: int) -> int:
    """Return the length of the windows in a step."""
    ends = itertools.accumulate(steps for steps, _ in STAGES)
    return next((length for end, (_, length) in zip(ends, STAGES, strict=True) if step < end), LENGTH)


def recall_loss(model: PreTrainedModel, rows: Tensor, scored: Tensor) -> Tensor:
    """Return the mean over rows (B, T) of the mean loss of a row's scored tokens, in nats."""
    logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2).float(), rows[:, 1:], reduction="none")
    scored = scored[:, 1:]
    return ((losses * scored).sum(1) / scored.sum(1)).mean()


def accuracies(model: PreTrainedModel, tokens: TaskTokens, *, examples: int, seed: int = 0) -> dict[str, float]:
    """Return the share of right answers of each task, at the trained length."""
    cells = [(task, items, LENGTH) for task, items in ITEMS.items()]
    return {
        cell.task: cell.accuracy for cell in measure_recall(model, tokens, cells=cells, examples=examples, seed=seed)
    }


def main() -> int:
    """Train a base, and write it if it passes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="default: 6500 for the rotating base, 4500 for the other one")
    parser.add_argument("--out", type=Path, help="folder (default: scripts/recall_bases/KIND)")
    options = parser.parse_args()
    steps = options.steps or STEPS[options.kind]
    text = library_tokens()
    if not WORDS.exists():
        WORDS.parent.mkdir(exist_ok=True)
        WORDS.write_text(json.dumps(common_words(byte_tokenizer().decode(text.tolist()))) + "\n", encoding="utf-8")
    tokens = task_tokens()
    torch.manual_seed(options.seed)
    model = untrained(options.kind, len(tokens))
    began = time.process_time()
    train(model, tokens, text, steps=steps, seed=options.seed)
    found = accuracies(model, tokens, examples=256, seed=1)
    report = {"seed": options.seed, "steps": steps, "cpu_seconds": round(time.process_time() - began)}
    report |= {"torch": torch.__version__, "python": sys.version.split()[0], "accuracy": found}
    print(json.dumps(report, indent=1))
    if min(found.values()) < GATE:
        print(f"not written: below {GATE:.0%}")
        return 1
    folder = options.out or FOLDER / options.kind
    model.half().save_pretrained(folder)
    (folder / "made.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
