"""Retrieval tests: can a model find information far back in its context?

Perplexity hardly shows this, because most tokens need little context.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..core.measurement import Result
from ..model.logits import LogitsOf, token_losses
from .batches import reading


@dataclass(frozen=True, kw_only=True)
class Cell(Result):
    """Result of all trials of a test with the same length and depth.

    Attributes:
        task: name of the test.
        length: number of tokens in a context, with the answer.
        depth: position of the information in the context: 0 at the start, 1 right before the question.
        trials: number of contexts.
        tokens: number of scored answer tokens in all contexts.
        accuracy: share of answer tokens that the model ranks first, after the true tokens before them.
        exact: share of trials in which the model ranks all answer tokens first, so that greedy decoding is right.
        loss: mean loss of an answer token, in nats.
        chance: accuracy of a random guess among the possible answers.
    """

    task: str
    length: int
    depth: float
    trials: int
    tokens: int
    accuracy: float
    exact: float
    loss: float
    chance: float


def induction_copy(
    model: nn.Module,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.5, 0.9),
    trials: int = 8,
    passage: int = 16,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Repeat a passage of random tokens at the end of a random context, and score all but its first two tokens.

    The test needs no instructions and no language. The first two tokens say which passage is meant. The rest must be
    copied from its first occurrence (induction heads, Olsson et al. 2022, arXiv:2209.11895).

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        lengths: lengths of contexts in tokens, at least twice the passage.
        depths: positions of the passage's first occurrence, between 0 (start) and 1.
        trials: number of contexts per length and depth.
        passage: length of the passage in tokens, at least 3.
        seed: seed of the contexts. A context depends only on the seed, the length, the depth and the trial's number.
        distributed: divide the trials among the processes of `torch.distributed`. All processes get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: for a length, depth or number out of range, or `distributed` without a process group.
    """
    if passage < 3 or any(length < 2 * passage for length in lengths):
        raise ValueError(f"passage must be at least 3 tokens, and fit twice into {min(lengths)}; it has {passage}")
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # ZeRO-3 leaves its weight empty
    words = torch.arange(size // 100 + 1, size - size // 100 - 1)  # tokenizers keep their special tokens at the ends

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        context = words[torch.randint(len(words), (length,), generator=generator)]
        start = round(depth * (length - 2 * passage))
        context[length - passage :] = context[start : start + passage]
        return context, passage - 2

    cells = [(length, depth) for length in lengths for depth in depths]
    return _measure(model, "induction_copy", make, 1 / len(words), cells, trials, seed, distributed, progress)


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def passkey(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    text: str = FILLER,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Hide a five-digit number in a text and ask for it (Mohtashami and Jaggi 2023, arXiv:2305.16300).

    Papers report `exact`. Base models that follow no instructions may fail it at every length. The sentences take about
    64 tokens, and a shorter length raises ValueError. `tokenizer` is the model's tokenizer, and the depth is that of
    the number. `text` is repeated to fill the context: by default the paper's filler; in real text the test is harder
    (Kamradt 2023, "needle in a haystack"). For the other arguments, the result and the errors see `induction_copy`.
    """

    def ids(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)

    filler, question = ids(text), ids("\nWhat is the pass key? The pass key is")
    if not len(filler):
        raise ValueError("the filler text is empty")
    start = torch.tensor(tokenizer("").input_ids[:1], dtype=torch.long)  # the token that texts begin with, if any

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        # Contexts have exactly the given length.
        number = str(int(torch.randint(10000, 100000, (), generator=generator)))
        needle = ids(f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n")
        answer = ids(" " + number)
        room = length - sum(map(len, (start, needle, question, answer)))
        if room < 0:
            raise ValueError(f"length {length} is too short for needle and question, which take {length - room} tokens")
        hay = filler.repeat(math.ceil(room / len(filler)))[:room]
        slot = round(depth * room)
        return torch.cat([start, hay[:slot], needle, hay[slot:], question, answer]), len(answer)

    cells = [(length, depth) for length in lengths for depth in depths]
    return _measure(model, "passkey", make, 0.1, cells, trials, seed, distributed, progress)


def _measure(
    model: nn.Module,
    task: str,
    make: Callable[[int, float, torch.Generator], tuple[Tensor, int]],
    chance: float,
    cells: Sequence[tuple[int, float]],
    trials: int,
    seed: int,
    distributed: bool,
    progress: bool,
) -> list[Cell]:
    """Run all trials, divided among the processes, and return their results.

    Args:
        model: the model.
        task: name of the test.
        make: length, depth and generator -> tokens (length,) int64, and the number of answer tokens at their end.
        chance: accuracy of a guess.
        cells: lengths and depths.
        trials: number of trials of each cell.
        seed: seed of all contexts.
        distributed: divide the trials among the processes of `torch.distributed`.
        progress: show a progress bar.
    """
    if any(not 0 <= depth <= 1 for _, depth in cells):
        raise ValueError(f"depths must lie between 0 and 1, not {sorted({depth for _, depth in cells})}")
    if trials < 1:
        raise ValueError(f"the number of trials must be at least 1, not {trials}")

    def context(cell: tuple[int, float], trial: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of a context, and which of them are answers, (length,) bool."""
        drawn = random.Random(f"{seed} {cell[0]} {cell[1]} {trial}").getrandbits(63)
        tokens, answers = make(*cell, torch.Generator().manual_seed(drawn))
        return tokens, torch.arange(len(tokens)) >= len(tokens) - answers

    firsts = [context(cell, 0)[0] for cell in cells]  # a length that is too short raises here
    with reading(model, firsts[0], distributed=distributed, progress=progress) as reader:

        def score(batch: list[int]) -> Tensor:
            contexts = [context(cells[index // trials], index % trials) for index in batch]
            rows, answers = (torch.stack(each).to(reader.device) for each in zip(*contexts, strict=True))
            return _scores(reader.logits_of, rows, answers)

        sizes = [(length,) for length, _ in cells for _ in range(trials)]
        parts = reader.scores(sizes, score, (3,), "trial").split(trials)
    measured = []
    for (length, depth), part in zip(cells, parts, strict=True):
        tokens, right, loss = part.sum(0).tolist()
        exact = (part[:, 0] == part[:, 1]).double().mean().item()
        shares = {"accuracy": right / tokens, "exact": exact, "loss": loss / tokens, "chance": chance}
        measured.append(Cell(task=task, length=length, depth=depth, trials=trials, tokens=int(tokens), **shares))
    return measured


def _scores(logits_of: LogitsOf, rows: Tensor, answers: Tensor) -> Tensor:
    """Return (B, 3) float64 on the CPU: the numbers of answers and of right ones, and the sum of losses."""
    first = int(answers.any(0).nonzero()[0])
    targets, asked = rows[:, first:].flatten(), answers[:, first:].flatten()
    found, done = [], 0
    for logits in logits_of(rows, slice(first - 1, rows.shape[1] - 1)):
        part = slice(done, done + len(logits))
        wanted = logits.gather(-1, targets[part, None])
        # A tie is not right. With argmax it could be, because argmax returns the first of several equal logits.
        right = (logits >= wanted).sum(-1) == 1
        (losses,) = token_losses([logits], targets[part])
        found.append(torch.stack((torch.ones_like(losses), right, losses), -1) * asked[part, None])
        done += len(logits)
    return torch.cat(found).cpu().double().unflatten(0, (len(rows), -1)).sum(1)
