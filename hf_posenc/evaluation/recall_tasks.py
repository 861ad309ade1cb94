"""Synthetic tasks that ask a model to recall tokens of its context, and the share of right answers.

A small model can learn them in minutes, and they ask two things apart: how many items a context holds, and how far away
an item stands. All examples of a task are rows of exactly `length` tokens. The answers are tokens of the row, and the
model reads the true ones before the next.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..did_you_mean import did_you_mean
from ..live.logits import LogitsOf, token_losses
from ..measurement import Result
from .batches import progress_bar, reading

LETTERS = 26
"""Different tokens in a string to copy, as in Jelassi et al. 2024."""
COPIED = 14
"""Different tokens in a selective copy: MAD's vocabulary of 16 without its blank and its copy token."""
NOISE_SHARE = 0.2
"""Share of slots without a pair in noisy recall, as in MAD."""


@dataclass(frozen=True)
class TaskTokens:
    """Token ids that the tasks are written with: consecutive ids after those of the text.

    Attributes:
        first: first id of the tasks.
        words: token ids of each natural word, with the space before it. Only `induction` needs them.
        keys: number of key tokens.
        values: number of value tokens.
        noise: number of noise tokens.
    """

    first: int
    words: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    keys: int = 128
    values: int = 128
    noise: int = 16

    @property
    def copy(self) -> int:
        """The token that asks for a copy."""
        return self.first + len(TASKS)

    @property
    def key_ids(self) -> range:
        """Ids of the keys."""
        return range(self.copy + 1, self.copy + 1 + self.keys)

    @property
    def value_ids(self) -> range:
        """Ids of the values, of which strings and selective copies take the first ones."""
        return range(self.key_ids.stop, self.key_ids.stop + self.values)

    @property
    def noise_ids(self) -> range:
        """Ids of the noise, the first of which is the blank of selective copies."""
        return range(self.value_ids.stop, self.value_ids.stop + self.noise)

    def start_of(self, task: str) -> int:
        """Return the token that begins the examples of a task."""
        return self.first + list(TASKS).index(task)

    def __len__(self) -> int:
        """Return the number of ids, those of the text among them: the vocabulary that a model needs."""
        return self.noise_ids.stop


def multi_query_recall(
    tokens: TaskTokens, count: int, items: int, length: int, draw: torch.Generator, power: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Write `items` pairs of a key and a value, then ask for each of them once, at places drawn by chance.

    Source: MQAR of Arora et al. 2023, arXiv:2312.04927, and the code of Zoology. Deviations: the space between the
    queries is noise and not any token, the value follows its key there, and the places are uniform. With
    `power=0.01`, their value, a place after `n` pairs has a probability in proportion to `n ** (power - 1)`.
    """
    rows = _noise(tokens, count, length, draw)
    keys, values = (_without_repeats(ids, count, items, draw) for ids in (tokens.key_ids, tokens.value_ids))
    rows[:, 1 : 2 * items + 1] = torch.stack((keys, values), -1).flatten(1)
    slots = (length - 1 - 2 * items) // 2
    odds = torch.arange(1, slots + 1, dtype=torch.double) ** (power - 1)
    places = 2 * torch.multinomial(odds.expand(count, -1), items, generator=draw) + 2 * items + 1
    rows.scatter_(1, places, keys).scatter_(1, places + 1, values)
    return rows, torch.zeros_like(rows, dtype=torch.bool).scatter_(1, places + 1, True)


def noisy_recall(
    tokens: TaskTokens, count: int, items: int, length: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Write pairs of keys, drawn from `items` of them, and their values, with noise between; a known key is asked.

    Source: noisy in-context recall of MAD, Poli et al. 2024, arXiv:2403.17844, and its code. A fifth of the slots is
    noise; the last key was there before. Deviation: each example draws its keys and values from all of them.
    """
    rows = _noise(tokens, count, length, draw)
    keys = _without_repeats(tokens.key_ids, count, items, draw)
    values = _ids(tokens.value_ids)[torch.randint(tokens.values, (count, items), generator=draw)]
    slots = (length - 1) // 2
    item = torch.randint(items, (count, slots), generator=draw)
    pairs = torch.rand(count, slots, generator=draw) >= NOISE_SHARE
    pairs.scatter_(1, torch.randint(slots - 1, (count, 1), generator=draw), True)  # at least one
    pairs[:, -1] = False
    slot = torch.arange(slots).expand(count, -1)
    first = torch.full((count, items), slots).scatter_reduce_(1, item, slot.where(pairs, slots), "amin")
    asked = torch.rand(count, items, generator=draw).where(first < slots, -1.0).argmax(-1)
    item[:, -1], pairs[:, -1] = asked, True
    known = pairs & (first.gather(1, item) < slot)
    answers = torch.zeros_like(rows, dtype=torch.bool)
    answers[:, 2 : 2 * slots + 1 : 2] = known
    for start, ids in ((1, keys), (2, values)):
        of_slot = rows[:, start : 2 * slots + 1 : 2]  # a view
        of_slot.copy_(ids.gather(1, item).where(pairs, of_slot))
    return rows, answers


def selective_copy(
    tokens: TaskTokens, count: int, items: int, length: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Scatter `items` tokens among blanks, and ask for them in their order.

    Source: selective copying of MAD, Poli et al. 2024, arXiv:2403.17844. Deviations: places are uniform, where MAD's
    code leaves no blank after the last token, and the answers are read, where MAD shows blanks.
    """
    rows = torch.full((count, length), tokens.noise_ids[0])
    copied = _letters(tokens, count, items, COPIED, draw)
    space = length - items - 2
    places = torch.rand(count, space, generator=draw).argsort(-1)[:, :items].sort(-1).values + 1
    rows.scatter_(1, places, copied)
    rows[:, space + 1] = tokens.copy
    rows[:, space + 2 :] = copied
    return rows, _last(count, items, length)


def string_copy(
    tokens: TaskTokens, count: int, items: int, length: int, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Write a string of `items` tokens of 26, then noise, and ask for the string.

    Source: the copy task of Jelassi et al. 2024, arXiv:2402.01032, which has no noise: `length = 2 * items + 2`.
    """
    rows = _noise(tokens, count, length, draw)
    copied = _letters(tokens, count, items, LETTERS, draw)
    rows[:, 1 : items + 1] = copied
    rows[:, length - items - 1] = tokens.copy
    rows[:, length - items :] = copied
    return rows, _last(count, items, length)


def induction(tokens: TaskTokens, count: int, items: int, length: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Repeat a passage of `items` natural words in an order drawn by chance; other words stand between the copies.

    All but the first word of the second copy are answers. Where two copies do not fit, the passage has fewer words.
    Source: induction heads, Olsson et al. 2022, arXiv:2209.11895, on words in place of random tokens.
    """
    if len(tokens.words) <= items:
        raise ValueError(f"induction of {items} words needs more words than {len(tokens.words)}: TaskTokens(words=...)")
    rows, answers = _noise(tokens, count, length, draw), torch.zeros(count, length, dtype=torch.bool)
    dice = random.Random(int(torch.randint(2**62, (), generator=draw)))
    for row in range(count):
        drawn = dice.sample(range(len(tokens.words)), items)
        words = [tokens.words[word] for word in drawn]
        while 2 * sum(map(len, words)) > length - 1:
            words.pop()
        passage = [token for word in words for token in word]
        room = length - 1 - 2 * len(passage)
        between: list[int] = []
        while len(between) < room:
            other = dice.randrange(len(tokens.words))
            between += tokens.words[other] if other not in drawn else ()
        rows[row, 1:] = torch.tensor(passage + between[:room] + passage)
        answers[row, length - len(passage) + len(words[0]) :] = True
    return rows, answers


Examples = Callable[[TaskTokens, int, int, int, torch.Generator], tuple[Tensor, Tensor]]
"""Tokens, number of examples, items, length and generator -> rows (N, T) int64, and which are answers, (N, T) bool."""
TASKS: dict[str, Examples] = {
    "multi_query_recall": multi_query_recall,
    "noisy_recall": noisy_recall,
    "selective_copy": selective_copy,
    "string_copy": string_copy,
    "induction": induction,
}
"""Name of a task -> the function that writes its examples."""


def _shortest(task: str, tokens: TaskTokens, items: int) -> int:
    """Return the number of tokens in the shortest example of a task."""
    if task == "induction":  # two words, twice
        return 4 * max(map(len, tokens.words), default=1) + 1
    return {"multi_query_recall": 4 * items + 1, "noisy_recall": 5}.get(task, 2 * items + 2)


def recall_examples(
    task: str, tokens: TaskTokens, *, count: int, items: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw examples of a task.

    Args:
        task: one of `TASKS`.
        tokens: the ids to write with.
        count: number of examples N.
        items: number of pairs, copied tokens or words.
        length: tokens T of an example.
        generator: source of chance.

    Returns:
        Rows (N, T) int64, and which of their tokens are answers, (N, T) bool.

    Raises:
        ValueError: for an unknown task, and where the items do not fit the length or the vocabulary.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}{did_you_mean(task, list(TASKS))}; choose from {', '.join(TASKS)}")
    least, fewest = _shortest(task, tokens, items), 2 if task == "induction" else 1
    if items < fewest or length < least:
        raise ValueError(f"{task} of {items} items needs {fewest} items or more, and {least} tokens, not {length}")
    if task in ("multi_query_recall", "noisy_recall") and items > min(tokens.keys, tokens.values):
        raise ValueError(f"{task} of {items} items needs as many keys and values, not {tokens.keys}, {tokens.values}")
    rows, answers = TASKS[task](tokens, count, items, length, generator)
    rows[:, 0] = tokens.start_of(task)
    return rows, answers


@dataclass(frozen=True, kw_only=True)
class RecallCell(Result):
    """Result of all examples of a task with the same number of items and the same length.

    Attributes:
        task: name of the task.
        items: number of pairs, copied tokens or words.
        length: tokens of an example.
        examples: number of examples.
        answers: number of answer tokens in all examples.
        accuracy: share of answer tokens that the model ranks first, after the true tokens before them.
        exact: share of examples whose answers are all ranked first.
        loss: mean loss of an answer token, in nats.
    """

    task: str
    items: int
    length: int
    examples: int
    answers: int
    accuracy: float
    exact: float
    loss: float


def measure_recall(
    model: nn.Module,
    tokens: TaskTokens,
    *,
    cells: Sequence[tuple[str, int, int]],
    examples: int = 64,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[RecallCell]:
    """Measure the share of right answers in recall tasks.

    Args:
        model: a causal language model that knows the ids of `tokens`; set to eval mode and back.
        tokens: the ids to write with.
        cells: triples of a task, a number of items and a length.
        examples: number of examples of each cell.
        seed: seed of the examples. An example depends only on the seed, its cell and its number.
        distributed: divide the examples among the processes of `torch.distributed`. All get the same result.
        progress: show a progress bar, in examples.

    Returns:
        One result per cell.

    Raises:
        ValueError: see `recall_examples`.
        RuntimeError: for `distributed` without an initialised process group.
    """
    if examples < 1:
        raise ValueError(f"examples must be at least 1, not {examples}")
    drawn = []
    for task, items, length in cells:
        generator = torch.Generator().manual_seed(random.Random(f"{seed} {task} {items} {length}").getrandbits(63))
        drawn.append(recall_examples(task, tokens, count=examples, items=items, length=length, generator=generator))
    if not drawn:
        return []
    shapes = [cell for cell in cells for _ in range(examples)]
    bar = progress_bar(len(shapes), "recall", "example", progress)
    with reading(model, drawn[0][0][0], distributed=distributed) as reader, bar:

        def score(batch: list[int]) -> Tensor:
            """Return for each example the numbers of answers and of right ones, and the sum of losses, (B, 3)."""
            rows, answers = drawn[batch[0] // examples]
            chosen = [index % examples for index in batch]
            return _scores(reader.logits_of, rows[chosen].to(reader.device), answers[chosen].to(reader.device))

        batches = reader.batches(shapes, lambda cell: cell[2])
        parts = reader.scores(batches, score, (3,), bar).split(examples)
    return [_cell(*cell, part) for cell, part in zip(cells, parts, strict=True)]


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
    return torch.cat(found).double().unflatten(0, (len(rows), -1)).sum(1).cpu()


def _cell(task: str, items: int, length: int, scores: Tensor) -> RecallCell:
    """Return the cell from the scores (N, 3) of its examples."""
    answers = int(scores[:, 0].sum())
    return RecallCell(
        task=task,
        items=items,
        length=length,
        examples=len(scores),
        answers=answers,
        accuracy=scores[:, 1].sum().item() / answers,
        exact=(scores[:, 0] == scores[:, 1]).double().mean().item(),
        loss=scores[:, 2].sum().item() / answers,
    )


def _ids(ids: range) -> Tensor:
    """Return ids as a tensor."""
    return torch.arange(ids.start, ids.stop)


def _noise(tokens: TaskTokens, count: int, length: int, draw: torch.Generator) -> Tensor:
    """Return rows (N, T) of noise."""
    return _ids(tokens.noise_ids)[torch.randint(tokens.noise, (count, length), generator=draw)]


def _without_repeats(ids: range, count: int, items: int, draw: torch.Generator) -> Tensor:
    """Return (N, items) ids, different ones in each row."""
    return _ids(ids)[torch.rand(count, len(ids), generator=draw).argsort(-1)[:, :items]]


def _letters(tokens: TaskTokens, count: int, items: int, different: int, draw: torch.Generator) -> Tensor:
    """Return (N, items) ids; each row has its own alphabet of `different` keys and values."""
    return _ids(tokens.key_ids)[torch.randint(different, (count, items), generator=draw)]


def _last(count: int, items: int, length: int) -> Tensor:
    """Return (N, T) bool: the last `items` tokens."""
    return (torch.arange(length) >= length - items).expand(count, -1)
