"""Text for the recipes: reading, tokenising, splitting off held-out documents, packing into windows."""

import hashlib
import random
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..model.logits import IGNORED
from .embedded import library_parts
from .options import Count, UsageError

FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
"""Suffix of a file, without .gz -> its kind; all others are text."""
SUFFIXES = {".gz", ".txt", *FORMATS}
"""Suffixes of names that cannot be those of a dataset of the Hub."""


@dataclass(kw_only=True)
class TextArguments:
    r"""The text.

    Args:
        data: text (UTF-8), .jsonl or .parquet files of one kind (text and .jsonl also .gz), a folder of datasets'
            save_to_disk, or a dataset id of the Hub. Optional for `extend` without --model.
        data_name: configuration of a dataset of the Hub.
        data_split: split of a dataset that has several.
        text_column: column with the text, in data that has columns.
        separator: string between two documents of a text, e.g. '\n\n'; by default a text is one document.
        streaming: read only as many documents as the run needs, instead of downloading all.
    """

    data: list[str] | tuple[str, ...] = ()
    data_name: str | None = None
    data_split: str = "train"
    text_column: str = "text"
    separator: str = ""
    streaming: bool = False

    @property
    def description(self) -> str:
        """Names of the sources, for messages."""
        return ", ".join(self.data) or "the sources of the Python standard library"


@dataclass(kw_only=True)
class DataArguments(TextArguments):
    """Windows of the text.

    Args:
        packing: how documents fill windows. concatenate: a document attends to the documents before it in the
            window. documents: positions start again with every document, and attention stays inside it.
        eval_tokens: number of tokens to measure on. Whole documents are held out until there are so many; the last one
            is measured only up to that number (default: 16384, or the longest of --lengths).
    """

    packing: Literal["concatenate", "documents"] = "concatenate"
    eval_tokens: Count | None = None


@dataclass
class Document:
    """One document as tokens.

    Attributes:
        tokens: (N,) int64.
        bytes: number of bytes of the text in UTF-8, for bits per byte.
    """

    tokens: Tensor
    bytes: int


# -------------------------------------------------------------------------------------------------------------- reading


def documents(tokenizer: Tokenizer, arguments: TextArguments, max_tokens: int = 0) -> list[Document]:
    """Read the documents in order and tokenise them, without repetitions.

    A repeated document could end up on both sides of the split.

    Args:
        tokenizer: tokenizer of the model.
        arguments: options that name the text.
        max_tokens: number of tokens after which a stream is not read further.

    Raises:
        UsageError: if a file cannot be read, a column is missing, or there is no text.
    """
    found: dict[bytes, Document] = {}
    read = 0
    try:
        rows, column = rows_of(arguments)
        separator = arguments.separator.encode().decode("unicode_escape")
        encoded = rows.select_columns([column]).map(
            partial(encode, column=column, tokenizer=tokenizer, separator=separator),
            batched=True,
            remove_columns=[column],
        )
        for row in encoded.with_format("torch"):
            tokens = row["tokens"].long()
            digest = hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest()
            found.setdefault(digest, Document(tokens, int(row["bytes"])))
            read += len(tokens)
            if arguments.streaming and read >= max_tokens:
                break
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"--data {arguments.description}: {error.__cause__ or error}") from None
    if not found:
        raise UsageError(f"there is no text in {arguments.description}")
    return list(found.values())


def rows_of(arguments: TextArguments) -> tuple[Any, str]:
    """Return a dataset, saved on disk, on the Hub or in files, and the name of its column with the text."""
    names, split, streaming = list(arguments.data), arguments.data_split, arguments.streaming
    kind = kind_of(names)
    if kind == "text":
        whole = {"sample_by": "document", "split": "train", "streaming": streaming}
        return datasets.load_dataset("text", data_files=names, **whole), "text"
    if kind == "saved":
        rows = datasets.load_from_disk(names[0])
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                raise UsageError(f"--data-split {split}: {names[0]} has {', '.join(rows)}")
            rows = rows[split]
    elif kind == "hub":
        rows = datasets.load_dataset(names[0], arguments.data_name, split=split, streaming=streaming)
    else:
        rows = datasets.load_dataset(kind, data_files=names, split="train", streaming=streaming)
    columns = rows.column_names or list(next(iter(rows)))
    if arguments.text_column not in columns:
        raise UsageError(
            f"--text-column {arguments.text_column}: {arguments.description} has columns {', '.join(columns)}; name "
            "one with strings"
        )
    return rows, arguments.text_column


def kind_of(names: list[str]) -> str:
    """Return `text`, `json` or `parquet` for files, `saved` for a folder of `save_to_disk`, `hub` for a dataset id."""
    paths = [Path(name) for name in names]
    if len(paths) == 1 and paths[0].is_dir():
        return "saved"
    for path in paths:
        if not path.is_file():
            if len(paths) == 1 and re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", names[0]) and path.suffix not in SUFFIXES:
                return "hub"
            raise UsageError(f"--data {path}: no such file")
    suffixes = [path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix for path in paths]
    kinds = sorted({FORMATS.get(suffix, "text") for suffix in suffixes})
    if len(kinds) > 1:
        raise UsageError(f"--data: files of one kind at a time, not {' and '.join(kinds)}")
    return kinds[0] if kinds else "text"


def encode(batch: dict[str, list[Any]], column: str, tokenizer: Tokenizer, separator: str) -> dict[str, list[Any]]:
    """Tokenise a batch of rows, with the tokenizer's special tokens.

    Texts are split into documents, and blank ones left out. If the tokenizer adds no special tokens to a text, its
    end-of-text is put at the end.
    """
    values = batch[column]
    if strange := [value for value in values if not isinstance(value, str)]:
        raise UsageError(
            f"--text-column {column}: {str(strange[0])[:50]} is no string. Train on chats with TRL's SFTTrainer"
        )
    parts = [part.strip("\n") for text in values for part in (text.split(separator) if separator else [text])]
    texts = [part for part in parts if part.strip()]
    end = [] if tokenizer("").input_ids or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # verbose=False: no warning that a text is longer than the model's context
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False).input_ids if texts else []
    return {"tokens": [ids + end for ids in encoded], "bytes": [len(text.encode()) for text in texts]}


# ------------------------------------------------------------------------------------------------------------ the split


def split(documents: list[Document], tokenizer: Tokenizer, eval_tokens: int) -> tuple[list[Document], list[Document]]:
    """Return training and held-out documents. Whole documents are held out, so no text is on both sides.

    Documents are drawn at random, the same in every run, until they have `eval_tokens`. Tokens beyond that number are
    neither measured nor trained on. If there is only one document, its end is held out.

    Args:
        documents: all documents.
        tokenizer: tokenizer that made them.
        eval_tokens: number of tokens to hold out.
    """
    if len(documents) == 1:
        parts = (part_of(documents[0], slice(*ends), tokenizer) for ends in ((0, -eval_tokens), (-eval_tokens, None)))
        start, end = ([part] if len(part.tokens) else [] for part in parts)
        return start, end
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    held_out: list[int] = []
    missing = eval_tokens
    while order and missing > 0:
        held_out.append(order.pop())
        missing -= len(documents[held_out[-1]].tokens)
    measured = cut([documents[index] for index in sorted(held_out)], tokenizer, eval_tokens)
    return [documents[index] for index in sorted(order)], measured


def cut(documents: list[Document], tokenizer: Tokenizer, tokens: int) -> list[Document]:
    """Return the first documents, up to a total number of tokens; the last one may be cut."""
    kept: list[Document] = []
    for document in documents:
        if len(document.tokens) > tokens:
            return [*kept, part_of(document, slice(tokens), tokenizer)] if tokens else kept
        kept.append(document)
        tokens -= len(document.tokens)
    return kept


def part_of(document: Document, part: slice, tokenizer: Tokenizer) -> Document:
    """Return a part of a document."""
    tokens = document.tokens[part]
    return Document(tokens, text_bytes(tokens, tokenizer))


def text_bytes(tokens: Tensor | list[int], tokenizer: Tokenizer) -> int:
    """Return the number of bytes of a text, without the special tokens that the tokenizer added."""
    return len(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())


def stream(documents: list[Document]) -> Document:
    """Concatenate documents."""
    if not documents:
        return Document(torch.empty(0, dtype=torch.long), 0)
    tokens = torch.cat([document.tokens for document in documents])
    return Document(tokens, sum(document.bytes for document in documents))


@dataclass
class Text:
    """The text of a run: its name and kind, the number of all documents, those to train on, and those to measure on."""

    description: str
    kind: str
    documents: int
    train: list[Document]
    held_out: list[Document]

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of results.json about the text."""
        held_out = stream(self.held_out)
        return {
            "description": self.description,
            "kind": self.kind,
            "documents": self.documents,
            "training_tokens": len(stream(self.train).tokens),
            "held_out_tokens": len(held_out.tokens),
            "held_out_bytes": held_out.bytes,
        }

    def digest(self) -> str:
        """Return the SHA-256 of all tokens, of the limits of the documents, and of the split."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            digest.update(f"{[(len(document.tokens), document.bytes) for document in part]}".encode())
            digest.update(stream(part).tokens.numpy().tobytes())
        return digest.hexdigest()


def read_text(arguments: DataArguments, tokenizer: Tokenizer, accelerator: Accelerator, training_tokens: int) -> Text:
    """Read the text that a run trains on and the text that it measures.

    Without `--data` both consist of modules of the standard library. What is measured is always taken from the modules
    that the embedded base was not trained on.

    Args:
        arguments: options that name the text.
        tokenizer: tokenizer of the model.
        accelerator: accelerator of the processes. The main process fills the cache of datasets for the others.
        training_tokens: number of tokens that one process trains on; a stream is read until there are enough.
    """
    assert arguments.eval_tokens is not None  # measurements.check has set it
    max_tokens = arguments.eval_tokens + training_tokens * accelerator.num_processes
    about = arguments.description, kind_of(list(arguments.data))
    with accelerator.main_process_first():
        if arguments.data:
            found = documents(tokenizer, arguments, max_tokens)
            return Text(*about, len(found), *split(found, tokenizer, arguments.eval_tokens))
        train, unseen = (
            documents(tokenizer, TextArguments(data=list(map(str, files)), separator=arguments.separator), max_tokens)
            for files in library_parts()
        )
    return Text(*about, len(train) + len(unseen), train, split(unseen, tokenizer, arguments.eval_tokens)[1])


# -------------------------------------------------------------------------------------------------------------- windows


class Windows:
    """A text cut into windows of one length; a rest at the end is dropped.

    Args:
        documents: documents of the text, in order.
        length: tokens in a window.
        packing: `concatenate`, or `documents`: positions start again with every document, and its first token
            is not predicted. From such positions transformers infers that attention must stay inside a document.
    """

    def __init__(self, documents: list[Document], length: int, packing: str = "concatenate"):
        """Cut documents into windows."""
        self.length = length
        text = stream(documents)
        self.total = len(text.tokens)
        count = self.total // length
        self.tokens = text.tokens[: count * length].view(count, length)
        self.starts = None
        if packing == "documents":
            lengths = torch.tensor([len(document.tokens) for document in documents])
            starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)  # of each token's document
            self.starts = starts[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Return windows as model inputs, and `targets` `(B, T)`: the token that follows, or IGNORED."""
        tokens = self.tokens[indices]
        targets = torch.full_like(tokens, IGNORED)
        targets[:, :-1] = tokens[:, 1:]
        if self.starts is None:
            return {"input_ids": tokens, "targets": targets}
        starts = self.starts[indices]
        targets[:, :-1][starts[:, 1:] != starts[:, :-1]] = IGNORED
        # Positions count from the start of the document, or of the window if the document began before it.
        positions = torch.arange(self.length) + torch.tensor(indices)[:, None] * self.length
        begins = torch.maximum(starts, positions[:, :1])
        return {"input_ids": tokens, "position_ids": positions - begins, "targets": targets}


def order(seed: int, windows: int, first: int, last: int) -> list[int]:
    """Return the windows number `first .. last - 1` of an endless seeded shuffle. Each pass has its own order.

    A window depends only on the seed and its number, not on the number of processes or on where a run was resumed.
    """
    indices: list[int] = []
    for pass_index in range(first // windows, (last - 1) // windows + 1):
        shuffled = list(range(windows))
        random.Random(f"{seed} {pass_index}").shuffle(shuffled)
        indices += shuffled[max(first - pass_index * windows, 0) : last - pass_index * windows]
    return indices
