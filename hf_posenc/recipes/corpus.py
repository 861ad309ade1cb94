"""Text for the recipes: read, tokenised, split into training and held-out documents, packed into windows."""

import gzip
import hashlib
import pickle
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from .embedded import standard_library
from .options import UsageError, at_least, one_of, refuse

FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    "": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
READ_OF = {
    "data_name": ("hub",),
    "data_split": ("hub", "splits"),
    "text_column": ("hub", "splits", "saved", "json", "parquet"),
}
"""Options that only some kinds of text have."""
IGNORED = -100
"""Target of a token that nothing should predict: the first of a document, and what follows a window's last token."""


@dataclass
class TextArguments:
    """The text."""

    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "text (UTF-8), .jsonl or .parquet files, all of one kind, the first two also with .gz; or one folder of "
            "save_to_disk, or one dataset id of the Hub; without any, where a recipe allows it: the standard library's "
            "sources",
            "metavar": "FILE",
        },
    )
    data_name: str | None = field(default=None, metadata={"help": "configuration of a dataset of the Hub"})
    data_split: str = field(default="train", metadata={"help": "split of a dataset that has several"})
    text_column: str = field(default="text", metadata={"help": "column that holds the text, if not a text file"})
    separator: str = field(
        default="",
        metadata={"help": r"what separates documents within a text, e.g. '\n\n'; by default a text is one document"},
    )
    streaming: bool = field(
        default=False, metadata={"help": "read only as many documents as the run needs, instead of downloading all"}
    )
    workers: int | None = field(
        default=None, metadata={"help": "processes that tokenise; by default one, whose tokenizer uses threads"}
    )


@dataclass
class DataArguments(TextArguments):
    """Windows of the text."""

    packing: str = field(
        default="concatenate",
        metadata={
            "help": "concatenate: documents in a row, each may look at the ones before it in its window; "
            "documents: positions start again with each and attention stays inside"
        },
    )
    eval_tokens: int = field(
        default=16384,
        metadata={
            "help": "tokens to measure on, at most: whole documents are held out until there are so many, and of the "
            "last one the beginning is measured"
        },
    )


@dataclass
class Document:
    """One text as tokens."""

    tokens: Tensor  # (N,) int64
    bytes: int  # of the text in UTF-8, what bits per byte are counted against


def check(arguments: TextArguments, needs_data: bool) -> None:
    """What can be known without reading the text."""
    if arguments.workers is not None:
        at_least(arguments, 1, "workers")
        if arguments.streaming:
            raise UsageError("--workers is not for --streaming, which tokenises one document after the other")
    if needs_data and not arguments.data:
        raise UsageError("--model needs --data FILE..., text to fine-tune and measure on")
    kind = kind_of(arguments)
    for name, read_of in READ_OF.items():
        if kind not in read_of:
            refuse(arguments, name, f"is not for text from {describe(arguments)}")
    if isinstance(arguments, DataArguments):
        at_least(arguments, 1, "eval_tokens")
        one_of(arguments, "packing", ("concatenate", "documents"))


def kind_of(arguments: TextArguments) -> str:
    """What the text is in: `text`, `json` or `parquet` files, a `saved` dataset or several `splits` of one, the `hub`."""
    kinds = set()
    for name in arguments.data:
        kinds.add(kind_of_place(name))
        if "hub" in kinds and len(arguments.data) > 1:
            raise UsageError(f"--data {name}: no such file")
    if len(kinds) > 1:
        raise UsageError(f"--data: files of one kind at a time, not {' and '.join(sorted(kinds))}")
    kind = kinds.pop() if kinds else "text"
    if kind in ("saved", "splits") and len(arguments.data) > 1:
        raise UsageError(
            f"--data: one saved dataset at a time, not {len(arguments.data)}; of files there may be several"
        )
    return kind


def kind_of_place(name: str) -> str:
    """The same of one of them."""
    path = Path(name)
    if (path / "dataset_dict.json").is_file():
        return "splits"
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return "saved"
    if path.is_dir():
        raise UsageError(
            f"--data {name}: is a folder, and no dataset that save_to_disk of datasets has written: name its files"
        )
    if path.is_file():
        kind = FORMATS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix, "text")
        if path.suffix == ".gz" and kind == "parquet":
            raise UsageError(f"--data {name}: parquet files are compressed inside: gunzip it first")
        return kind
    if looks_like_a_file(name):
        raise UsageError(f"--data {name}: no such file")
    return "hub"


def looks_like_a_file(name: str) -> bool:
    """Whether it is meant as a path and not as a dataset id: it has a suffix that is read here, or more than one `/`."""
    return Path(name).suffix in {".gz", *FORMATS} - {""} or name.count("/") > 1 or name.startswith((".", "/", "~"))


def describe(arguments: TextArguments) -> str:
    """What is read, in words."""
    return ", ".join(arguments.data) if arguments.data else "the sources of the Python standard library"


def documents(tokenizer: Any, arguments: TextArguments, files: list[Path] | None, enough: int) -> list[Document]:
    """The documents in order, tokenised, each only once: a repeated one could end up on both sides of the split.

    Args:
        tokenizer: of the model.
        arguments: where the text is.
        files: text files to read instead of `--data`; those that are not UTF-8 are left out.
        enough: when streaming, reading stops at this many tokens.

    Raises:
        UsageError: if a file cannot be read, a column is missing, or there is no text.
    """
    separator = arguments.separator.encode().decode("unicode_escape")
    texts = unique(part for text in read(arguments, files) for part in (text.split(separator) if separator else [text]))
    if arguments.streaming:
        found: list[Document] = []
        for text in texts:
            found += encode(tokenizer, [text])
            enough -= len(found[-1].tokens)
            if enough <= 0:
                break
    else:
        found = encode_and_keep(tokenizer, list(texts), arguments.workers)
    if not found:
        raise UsageError(f"there is no text in {describe(arguments)}")
    return found


def read(arguments: TextArguments, files: list[Path] | None) -> Iterator[str]:
    """The texts as they are stored."""
    paths = [Path(name) for name in arguments.data]
    kind = kind_of(arguments)
    if files is not None or kind == "text":
        for path in paths if files is None else files:
            try:
                with (
                    gzip.open(path, "rt", encoding="utf-8")
                    if path.suffix == ".gz"
                    else path.open(encoding="utf-8") as file
                ):
                    yield file.read()
            except (OSError, EOFError, UnicodeDecodeError) as error:
                if files is None:
                    raise UsageError(f"--data {path}: not readable as UTF-8 text ({error})") from None
        return
    try:
        if kind in ("saved", "splits"):
            rows = datasets.load_from_disk(arguments.data[0])
            if kind == "splits":
                if arguments.data_split not in rows:
                    raise UsageError(f"--data-split {arguments.data_split}: {paths[0]} has {', '.join(rows)}")
                rows = rows[arguments.data_split]
        elif kind == "hub":
            rows = datasets.load_dataset(
                arguments.data[0], arguments.data_name, split=arguments.data_split, streaming=arguments.streaming
            )
        else:
            rows = datasets.load_dataset(
                kind, data_files=[str(path) for path in paths], split="train", streaming=arguments.streaming
            )
        for row in rows:
            if not isinstance(row.get(arguments.text_column), str):
                raise UsageError(
                    f"--text-column {arguments.text_column}: {describe(arguments)} has {', '.join(row)}, of which the "
                    "text must be a column of strings"
                )
            yield row[arguments.text_column]
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"--data {describe(arguments)}: {error.__cause__ or error}") from None


def unique(texts: Iterable[str]) -> Iterator[str]:
    """Those that are not blank, each at its first place."""
    seen = set()
    for text in texts:
        text = text.strip("\n")
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if text.strip() and key not in seen:
            seen.add(key)
            yield text


def encode(tokenizer: Any, texts: list[str]) -> list[Document]:
    """Each text between the marks the tokenizer adds; if it adds none, it ends with the tokenizer's end-of-text."""
    end = [] if tokenizer("").input_ids or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # The tokenizer would warn that a whole book is longer than the model's context, which is the point.
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False).input_ids
    return [
        Document(torch.tensor(ids + end, dtype=torch.long), len(text.encode()))
        for text, ids in zip(texts, encoded, strict=True)
    ]


def encode_and_keep(tokenizer: Any, texts: list[str], workers: int | None) -> list[Document]:
    """The same through the cache of datasets: what was tokenised before is read from there.

    The name in the cache is made of every text and of the tokenizer, so it cannot be another's.
    """
    key = hashlib.sha256(
        tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else pickle.dumps(tokenizer)
    )
    for text in texts:
        key.update(len(text).to_bytes(8, "big") + text.encode())
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_posenc"
    folder.mkdir(parents=True, exist_ok=True)

    def columns(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        found = encode(tokenizer, batch["text"])
        return {"tokens": [document.tokens for document in found], "bytes": [document.bytes for document in found]}

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": texts}).map(
        columns,
        batched=True,
        num_proc=workers,
        remove_columns="text",
        cache_file_name=str(folder / f"{key.hexdigest()}.arrow"),
        new_fingerprint=key.hexdigest()[:16],
    )
    return [
        Document(tokens, count)
        for tokens, count in zip(rows.with_format("torch")[:]["tokens"], rows[:]["bytes"], strict=True)
    ]


def split(found: list[Document], tokenizer: Any, arguments: Any) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents. Whole documents are held out, so no text is on both sides.

    They are drawn at random until there are `--eval-tokens`, and what is beyond these is neither measured nor trained
    on. Of a single document the end is held out.

    Args:
        found: all documents.
        tokenizer: that made them.
        arguments: `eval_tokens`, `split_seed`.
    """
    missing = arguments.eval_tokens
    if len(found) == 1:
        tokens = found[0].tokens
        start, end = (
            [Document(part, text_bytes(part, tokenizer))] if len(part) else []
            for part in (tokens[:-missing], tokens[-missing:])
        )
        return start, end
    order = list(range(len(found)))
    random.Random(arguments.split_seed).shuffle(order)
    held_out: list[int] = []
    while order and missing > 0:
        held_out.append(order.pop())
        missing -= len(found[held_out[-1]].tokens)
    measured = cut([found[index] for index in sorted(held_out)], tokenizer, arguments.eval_tokens)
    return [found[index] for index in sorted(order)], measured


def cut(found: list[Document], tokenizer: Any, tokens: int) -> list[Document]:
    """At most so many tokens from the beginning: of the document that goes beyond them only its first part."""
    kept: list[Document] = []
    for document in found:
        if len(document.tokens) > tokens:
            beginning = document.tokens[:tokens]
            return [*kept, Document(beginning, text_bytes(beginning, tokenizer))] if tokens else kept
        kept.append(document)
        tokens -= len(document.tokens)
    return kept


def text_bytes(tokens: Tensor, tokenizer: Any) -> int:
    """Bytes of the text that these tokens are, without the marks that the tokenizer added."""
    return len(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())


def stream(found: list[Document]) -> Document:
    """All documents in a row, as one."""
    if not found:
        return Document(torch.empty(0, dtype=torch.long), 0)
    return Document(torch.cat([document.tokens for document in found]), sum(document.bytes for document in found))


@dataclass
class Text:
    """What a run reads: documents to train on, and others that are measured."""

    documents: int
    train: list[Document]
    held_out: list[Document]

    def to_dict(self, arguments: TextArguments) -> dict[str, Any]:
        """What a run's results say of it."""
        return {
            "description": describe(arguments),
            "kind": kind_of(arguments),
            "documents": self.documents,
            "training_tokens": len(stream(self.train).tokens),
            "held_out_tokens": len(stream(self.held_out).tokens),
            "held_out_bytes": stream(self.held_out).bytes,
        }

    def digest(self) -> str:
        """Of every token, in its document and on its side."""
        found = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                found.update(f"{len(document.tokens)} {document.bytes} ".encode() + document.tokens.numpy().tobytes())
            found.update(b"|")
        return found.hexdigest()


def read_text(arguments: Any, tokenizer: Any, accelerator: Accelerator) -> Text:
    """What a run trains on and what it measures; without `--data` the standard library."""
    per_step = arguments.batch_size * arguments.train_length * arguments.gradient_accumulation
    # Of a stream: what is held out, and every training window once.
    enough = arguments.eval_tokens + arguments.steps * per_step * accelerator.num_processes
    with accelerator.main_process_first():  # the others find its cache
        found = documents(tokenizer, arguments, None if arguments.data else standard_library(), enough)
    return Text(len(found), *split(found, tokenizer, arguments))


class Windows:
    """A text cut into windows of one length; what is left at its end is dropped.

    Args:
        found: documents, taken in a row.
        length: tokens in a window.
        packing: `concatenate`, or `documents`: positions start again with each document, and nothing is predicted
            across its start. transformers reads off such positions that attention must stay inside.
    """

    def __init__(self, found: list[Document], length: int, packing: str):
        """Cut documents into windows."""
        self.length = length
        tokens = stream(found).tokens
        self.total = len(tokens)
        count = self.total // length
        self.tokens = tokens[: count * length].view(count, length)
        self.starts = None
        if packing == "documents":
            lengths = torch.tensor([len(document.tokens) for document in found])
            starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)  # of each token's document
            self.starts = starts[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Windows as the model takes them, with `targets` `(B, T)`: the token that follows, or IGNORED."""
        tokens = self.tokens[indices]
        targets = torch.full_like(tokens, IGNORED)
        targets[:, :-1] = tokens[:, 1:]
        if self.starts is None:
            return {"input_ids": tokens, "targets": targets}
        starts = self.starts[indices]
        targets[:, :-1][starts[:, 1:] != starts[:, :-1]] = IGNORED
        # Counted from the document's start, or from the window's where the document began before it.
        positions = torch.arange(self.length) + torch.tensor(indices)[:, None] * self.length
        begins = torch.maximum(starts, positions[:, :1])
        return {"input_ids": tokens, "position_ids": positions - begins, "targets": targets}


def order(seed: int, windows: int, first: int, last: int) -> list[int]:
    """The windows numbered `first .. last - 1` of an endless, seeded shuffle: pass after pass, each its own order.

    A window depends on the seed and its number alone, not on the number of processes or on where a run was resumed.
    """
    found = []
    for turn in range(first // windows, (last - 1) // windows + 1):
        shuffled = list(range(windows))
        random.Random(f"{seed} {turn}").shuffle(shuffled)
        found += shuffled[max(first - turn * windows, 0) : last - turn * windows]
    return found
