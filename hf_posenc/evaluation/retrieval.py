"""Can a model find what it has seen, that far back? Perplexity hardly tells: most tokens need little context."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..live.eval_mode import evaluation
from .perplexity import default_batch_size, logits_function


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Trials of one length and depth.

    Attributes:
        length: tokens of the whole context, the answer included.
        depth: where in the context the answer was given: 0 at its beginning, 1 right before the question.
        trials: number of contexts.
        tokens: number of answer tokens that were scored in all of them.
        accuracy: share of these tokens that are the model's first choice, given the tokens before.
        exact: share of trials whose answer tokens were all the first choice: what greedy decoding would get right.
        logprob: mean log-probability of an answer token, in nats.
        chance: accuracy of a guess among what could have been the answer.
    """

    length: int
    depth: float
    trials: int
    tokens: int
    accuracy: float
    exact: float
    logprob: float
    chance: float

    def to_dict(self) -> dict[str, Any]:
        """All numbers, ready for JSON."""
        return asdict(self)


Make = Callable[[int, float, torch.Generator], tuple[Tensor, int]]
"""From length, depth and generator to a context `(length,)` and how many tokens at its end are the answer."""


def induction_copy(
    model: nn.Module,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.5, 0.9),
    trials: int = 8,
    passage: int = 16,
    vocabulary: Sequence[int] | None = None,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Repeats a passage of random tokens at the end of random tokens, and scores the repetition but for its first two.

    It needs no instructions and no language: two tokens say which passage is meant, and the rest has to be copied from
    where it stood (induction heads, Olsson et al. 2022, arXiv:2209.11895).

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        lengths: tokens of a context, at least twice the passage.
        depths: where the passage stands first, between 0 and 1.
        trials: contexts per length and depth.
        passage: tokens that are repeated, at least 3.
        vocabulary: token ids to draw from; by default all of the model's but the first and last hundredth, where
            tokenizers keep their special tokens.
        seed: of the contexts. They depend on it, the length, the depth and the trial's number alone.
        distributed: spread the trials over the processes of `torch.distributed`; all get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: a length, depth or number out of range.
        RuntimeError: `distributed` without an initialised process group.
    """
    if passage < 3:
        raise ValueError(f"passage must be at least 3 tokens, not {passage}")
    words = _vocabulary(model, vocabulary)

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        context = words[torch.randint(len(words), (length,), generator=generator)]
        start = round(depth * (length - 2 * passage))
        context[length - passage :] = context[start : start + passage]
        return context, passage - 2

    _check(lengths, depths, trials, 2 * passage)
    return _grid(model, make, lengths, depths, trials, seed, 1 / len(words), distributed, progress)


def associative_recall(
    model: nn.Module,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.5, 0.9),
    trials: int = 8,
    vocabulary: Sequence[int] | None = None,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Pairs of a key and a value token, no key twice; then one of the keys again: which value does it have?

    Multi-query recall with one query (Arora et al. 2023, arXiv:2312.04927). A context of `length` holds as many pairs
    as fit and as there are keys; where keys run out, values follow one another in between.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        lengths: tokens of a context, at least 6.
        depths: where the pair that is asked for stands, between 0 and 1.
        trials: contexts per length and depth.
        vocabulary: token ids to draw from, half as keys and half as values; the default is as for `induction_copy`.
        seed: of the contexts. They depend on it, the length, the depth and the trial's number alone.
        distributed: spread the trials over the processes of `torch.distributed`; all get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: a length, depth or number out of range.
        RuntimeError: `distributed` without an initialised process group.
    """
    words = _vocabulary(model, vocabulary)
    keys, values = words[: len(words) // 2], words[len(words) // 2 :]

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        context = values[torch.randint(len(values), (length,), generator=generator)]
        slots = (length - 2) // 2
        # Where there are more places than keys, keys are spread over them evenly.
        used = torch.linspace(0, slots - 1, min(slots, len(keys))).round().long()
        order = torch.randperm(len(keys), generator=generator)[: len(used)]
        context[length % 2 + 2 * used] = keys[order]
        asked = round(depth * (len(used) - 1))
        slot = length % 2 + 2 * int(used[asked])
        context[-2:] = context[slot : slot + 2]
        return context, 1

    _check(lengths, depths, trials, 6)
    return _grid(model, make, lengths, depths, trials, seed, 1 / len(values), distributed, progress)


FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
QUESTION = "\nWhat is the pass key? The pass key is"


def passkey(
    model: nn.Module,
    tokenizer: Any,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Hides a five-digit number in repeated filler and asks for it (Mohtashami and Jaggi 2023, arXiv:2305.16300).

    `exact` is what papers report. It is easier than finding a needle in real text, and base models that follow no
    instructions may fail it at every length.

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokenizer: of the model.
        lengths: tokens of a context; 64 is about the least.
        depths: where the number stands, between 0 and 1.
        trials: contexts per length and depth.
        seed: of the numbers. They depend on it, the length, the depth and the trial's number alone.
        distributed: spread the trials over the processes of `torch.distributed`; all get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: a length, depth or number out of range, or a length in which the sentences do not fit.
        RuntimeError: `distributed` without an initialised process group.
    """

    def sentence(number: str) -> str:
        return f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n"

    return _hidden(model, tokenizer, FILLER, sentence, QUESTION, lengths, depths, trials, seed, distributed, progress)


def needle(
    model: nn.Module,
    tokenizer: Any,
    *,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    trials: int = 4,
    seed: int = 0,
    distributed: bool = False,
    progress: bool = False,
) -> list[Cell]:
    """Hides a sentence with a number in real text and asks for it (Kamradt 2023, "needle in a haystack").

    Args:
        model: a causal language model, patched or not; set to eval mode and back.
        tokenizer: of the model.
        text: the haystack; repeated where it is too short.
        lengths: tokens of a context; 64 is about the least.
        depths: where the needle stands, between 0 and 1.
        trials: contexts per length and depth.
        seed: of the numbers. They depend on it, the length, the depth and the trial's number alone.
        distributed: spread the trials over the processes of `torch.distributed`; all get the same result.
        progress: show a progress bar, in trials.

    Returns:
        One cell per length and depth.

    Raises:
        ValueError: a length, depth or number out of range, or a length in which the sentences do not fit.
        RuntimeError: `distributed` without an initialised process group.
    """

    def sentence(number: str) -> str:
        return f"\nThe special magic number is {number}.\n"

    question = "\nWhat is the special magic number? The special magic number is"
    return _hidden(model, tokenizer, text, sentence, question, lengths, depths, trials, seed, distributed, progress)


def _hidden(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    sentence: Callable[[str], str],
    question: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    distributed: bool,
    progress: bool,
) -> list[Cell]:
    """A number in a text: everything is cut to the token, so that a context has exactly the length asked for."""

    def ids(words: str) -> Tensor:
        return torch.tensor(tokenizer(words, add_special_tokens=False, verbose=False).input_ids, dtype=torch.long)

    filler, ending = ids(text), ids(question)
    if not len(filler):
        raise ValueError("the filler text is empty")
    before = torch.tensor(tokenizer("").input_ids[:1], dtype=torch.long)  # a mark that texts begin with, if any

    def make(length: int, depth: float, generator: torch.Generator) -> tuple[Tensor, int]:
        number = str(int(torch.randint(10000, 100000, (), generator=generator)))
        hidden, answer = ids(sentence(number)), ids(" " + number)
        room = length - sum(map(len, (before, hidden, ending, answer)))
        if room < 0:
            raise ValueError(f"length {length} is too short for needle and question, which take {length - room} tokens")
        hay = filler.repeat(math.ceil(room / len(filler)))[:room]
        slot = round(depth * room)
        return torch.cat([before, hay[:slot], hidden, hay[slot:], ending, answer]), len(answer)

    _check(lengths, depths, trials, 2)
    for length in lengths:  # all of them before the first is run
        make(length, 0.0, torch.Generator().manual_seed(0))
    return _grid(model, make, lengths, depths, trials, seed, 0.1, distributed, progress)


def _vocabulary(model: nn.Module, given: Sequence[int] | None) -> Tensor:
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]  # ZeRO-3 leaves its weight empty
    words = list(given) if given is not None else list(range(size // 100 + 1, size - size // 100 - 1))
    if len(set(words)) < 4 or min(words) < 0 or max(words) >= size:
        raise ValueError(f"vocabulary must be at least 4 token ids of 0 .. {size - 1}")
    return torch.tensor(words, dtype=torch.long)


def _check(lengths: Sequence[int], depths: Sequence[float], trials: int, shortest: int) -> None:
    if any(length < shortest for length in lengths):
        raise ValueError(f"lengths must be at least {shortest}, not {min(lengths)}")
    if any(not 0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths must lie between 0 and 1, not {list(depths)}")
    if trials < 1:
        raise ValueError(f"trials must be at least 1, not {trials}")


def _seed(seed: int, length: int, depth: float, trial: int) -> int:
    return random.Random(f"{seed} {length} {depth} {trial}").getrandbits(63)


def _grid(
    model: nn.Module,
    make: Make,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int,
    chance: float,
    distributed: bool,
    progress: bool,
) -> list[Cell]:
    """Runs every trial once, on some process, and adds up in the order of the trials."""
    if distributed and not dist.is_initialized():
        raise RuntimeError("distributed=True needs torch.distributed.init_process_group first")
    device = next(model.parameters()).device
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    jobs = [(length, depth, trial) for length in lengths for depth in depths for trial in range(trials)]
    if not jobs:
        return []
    batches: list[list[int]] = []
    for index, (length, *_) in enumerate(jobs):
        if batches and jobs[batches[-1][0]][0] == length and len(batches[-1]) < default_batch_size(device, length):
            batches[-1].append(index)
        else:
            batches.append([index])
    outcome = torch.zeros(len(jobs), 3, dtype=torch.float64)  # tokens, right ones, sum of log-probabilities
    with (
        evaluation(model),
        torch.no_grad(),
        tqdm(total=len(jobs), desc="retrieval", unit="trial", leave=False, disable=not progress) as bar,
    ):
        # On the same tokens in every process: all must come to the same way of computing.
        length, depth, trial = jobs[0]
        first, _ = make(length, depth, torch.Generator().manual_seed(_seed(seed, length, depth, trial)))
        logits_of = logits_function(model, first)
        for number in range(math.ceil(len(batches) / world)):
            mine = number * world + rank
            batch = batches[mine] if mine < len(batches) else batches[0]  # FSDP: as many forwards as the others
            made = [
                make(length, depth, torch.Generator().manual_seed(_seed(seed, length, depth, trial)))
                for length, depth, trial in (jobs[index] for index in batch)
            ]
            longest = max(answer for _, answer in made)  # digits need not be as many tokens in every number
            tokens = torch.stack([context for context, _ in made]).to(device)
            size = tokens.shape[1]
            logits = torch.cat(list(logits_of(tokens, slice(size - longest - 1, size - 1)))).view(
                len(batch), longest, -1
            )
            targets = tokens[:, size - longest :, None]
            chosen = logits.float().log_softmax(-1).gather(-1, targets)[..., 0].double().cpu()
            # Not argmax: where several are equally likely it would name the first, which may be the answer.
            beaten = logits >= logits.gather(-1, targets)
            right = (beaten.sum(-1) == 1).cpu()
            if mine < len(batches):
                for row, (index, (_, answer)) in enumerate(zip(batch, made, strict=True)):
                    last = slice(longest - answer, None)
                    outcome[index] = torch.tensor([answer, right[row, last].sum(), chosen[row, last].sum()])
            bar.update(len(batch) * world)
    if distributed:
        moved = outcome.to(device)
        dist.all_reduce(moved)
        outcome = moved.cpu()
    cells = []
    for slot, (length, depth) in enumerate((length, depth) for length in lengths for depth in depths):
        part = outcome[slot * trials : (slot + 1) * trials]
        tokens_scored = int(part[:, 0].sum())
        cells.append(
            Cell(
                length=length,
                depth=depth,
                trials=trials,
                tokens=tokens_scored,
                accuracy=part[:, 1].sum().item() / tokens_scored,
                exact=(part[:, 0] == part[:, 1]).double().mean().item(),
                logprob=part[:, 2].sum().item() / tokens_scored,
                chance=chance,
            )
        )
    return cells
