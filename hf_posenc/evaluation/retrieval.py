"""Retrieval tests: can a model find information far back in its context?

Perplexity hardly shows this, because most tokens need little context.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

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


def retrieve(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    task: str = "passkey",
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    text: str = FILLER,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Hide something in a text and ask for it. Models that follow no instructions may fail at every length.

    `passkey` (Mohtashami and Jaggi 2023, arXiv:2305.16300) hides a number of five digits. The other tasks are those of
    RULER (Hsieh et al. 2024, arXiv:2404.06654): `niah_single` asks for the one number in the text that has a name,
    `niah_multikey` for one of four such numbers, `vt` for the five variables that a chain of assignments gives one
    value, in RULER's words, without its worked example. The depth is that of the number, or of the first assignment;
    the other assignments are further on, the other numbers anywhere. Papers report `exact` for numbers. RULER takes
    variables in any order, and its share of them is about `accuracy`.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokenizer: the model's tokenizer.
        task: `passkey`, `niah_single`, `niah_multikey` or `vt`.
        lengths: lengths of contexts in tokens, with begin, question and answer, which take 64 to 160 tokens.
        depths: see above; 0 is the start.
        trials: number of contexts per length and depth.
        text: repeated to fill the context: by default the papers' filler; in real text the test is harder (Kamradt
            2023, "needle in a haystack").
        seed: seed of the contexts, as for `induction_copy`.
        distributed: divide the trials among the processes of `torch.distributed`. All processes get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: as for `induction_copy`, for an unknown task, or a length that is too short.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    cells = [(length, depth) for length in lengths for depth in depths]
    make = _contexts(tokenizer, text, TASKS[task])
    return _measure(model, task, make, 0.0 if task == "vt" else 0.1, cells, trials, seed, distributed, progress)


Question = tuple[str, list[tuple[float, str]], str, str]
"""The words of a context: its begin, what is hidden in the filler, (depth, words), a question, and the answer."""
ADJECTIVES = "amber brave calm dusty eager fancy gentle hollow icy jolly kind lucky mighty noble odd proud".split()
NOUNS = "anchor bridge candle desert engine forest garden harbor island jacket kettle ladder market needle".split()
NAMES = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]


def _number(digits: int, generator: torch.Generator) -> str:
    return str(int(torch.randint(10 ** (digits - 1), 10**digits, (), generator=generator)))


def _passkey(depth: float, generator: torch.Generator) -> Question:
    """Hide a number, and ask for it."""
    number = _number(5, generator)
    needle = f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
    return "", [(depth, needle)], "\nWhat is the pass key? The pass key is", f" {number}"


def _numbers(count: int, depth: float, generator: torch.Generator) -> Question:
    """Hide named numbers, and ask for the one at a depth."""
    names = [NAMES[each] for each in torch.randperm(len(NAMES), generator=generator)[:count].tolist()]
    numbers = {name: _number(7, generator) for name in names}
    needles = [f"\nOne of the special magic numbers for {name} is: {number}.\n" for name, number in numbers.items()]
    depths = [depth, *torch.rand(count - 1, generator=generator).tolist()]
    asked = f"special magic number for {names[0]} mentioned in the provided text"
    return (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the numbers afterwards.\n",
        list(zip(depths, needles, strict=True)),
        f"\nWhat is the {asked}? The {asked} is",
        f" {numbers[names[0]]}",
    )


def _variables(depth: float, generator: torch.Generator) -> Question:
    """Hide a chain of five assignments that begins at a depth, and ask for the variables."""
    letters = torch.randint(ord("A"), ord("Z") + 1, (5, 5), generator=generator).tolist()
    names, value = ["".join(map(chr, row)) for row in letters], _number(5, generator)
    depths = [depth, *sorted((depth + (1 - depth) * torch.rand(4, generator=generator)).tolist())]
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    chain = [(at, f"\nVAR {name} = {of}\n") for at, name, of in zip(depths, names, sources, strict=True)]
    return (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
        chain,
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, 5 variables are assigned the value {value}, they are:",
        f" {' '.join(names)}",
    )


TASKS: dict[str, Callable[[float, torch.Generator], Question]] = {
    "passkey": _passkey,
    "niah_single": partial(_numbers, 1),
    "niah_multikey": partial(_numbers, 4),
    "vt": _variables,
}


def _contexts(
    tokenizer: PreTrainedTokenizerBase, text: str, write: Callable[[float, torch.Generator], Question]
) -> Callable[[int, float, torch.Generator], tuple[Tensor, int]]:
    """Return a function that makes contexts of exactly a given length, for `_measure`; `text` fills them."""

    def ids(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)

    filler = ids(text)
    if not len(filler):
        raise ValueError("the filler text is empty")
    start = torch.tensor(tokenizer("").input_ids[:1], dtype=torch.long)  # the token that texts begin with, if any

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        first, needles, *last = write(depth, generator)
        begin, question, answer = map(ids, (first, *last))
        hidden = [(each, ids(words)) for each, words in sorted(needles, key=itemgetter(0))]
        room = length - sum(map(len, (start, begin, *(sentence for _, sentence in hidden), question, answer)))
        if room < 0:
            raise ValueError(f"length {length} is too short for needle and question, which take {length - room} tokens")
        hay = filler.repeat(math.ceil(room / len(filler)))[:room]
        parts, done = [start, begin], 0
        for each, sentence in hidden:
            slot = round(each * room)
            parts += [hay[done:slot], sentence]
            done = slot
        return torch.cat([*parts, hay[done:], question, answer]), len(answer)

    return make


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
