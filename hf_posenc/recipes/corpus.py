"""Text for the recipes: reading, tokenising, splitting off held-out documents, packing into windows."""

import gzip
import hashlib
import json
import pickle
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import datasets
import jinja2
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer

from .embedded import library_parts
from .options import Count, File, Options, UsageError, refuse
from .results import Results

FORMATS = {".txt": "text", ".md": "text", ".py": "text", "": "text", ".json": "json", ".jsonl": "json"}
FORMATS |= {".parquet": "parquet"}
PACKINGS = ("concatenate", "documents")
KINDS_WITH_OPTION = {
    "data_name": ("hub",),
    "data_split": ("hub", "splits"),
    "text_column": ("hub", "splits", "saved", "json", "parquet"),
}
"""Option name -> the kinds of text that the option applies to, for options that do not apply to all."""
IGNORED = -100
"""Target where nothing is predicted: at the end of a document or of a window, and before a token of a chat that is not
the assistant's."""
PROGRESS_BAR_FROM = 5_000_000
"""Number of characters, in a stream of tokens, from which tokenising shows a progress bar. It takes seconds then."""
Chat = list[dict[str, Any]]
"""The messages of a chat, each with `role` and `content`."""


@dataclass
class TextArguments(Options):
    r"""The text.

    Args:
        data: text (UTF-8), .jsonl or .parquet files of one kind (text and .jsonl also .gz), a folder of datasets'
            save_to_disk, or a dataset id of the Hub. Optional for `pretrain`, and `extend` without --model.
        data_name: configuration of a dataset of the Hub.
        data_split: split of a dataset that has several.
        text_column: column with the text, in data that has columns. If it contains chats (lists of messages), the
            tokenizer's chat template writes them out, and only what the assistant says is trained on.
        separator: string between two documents of a text, e.g. '\n\n'; by default a text is one document.
        streaming: read only as many documents as the run needs, instead of downloading all.
        workers: processes that tokenise (default: one, with a tokenizer that uses threads).
    """

    data: list[File] = field(default_factory=list)
    data_name: str | None = None
    data_split: str = "train"
    text_column: str = "text"
    separator: str = ""
    streaming: bool = False
    workers: Count | None = None


@dataclass
class DataArguments(TextArguments):
    """Windows of the text.

    Args:
        packing: how documents fill windows. concatenate: a document attends to the documents before it in the
            window. documents: positions start again with every document, and attention stays inside it.
        eval_tokens: number of tokens to measure on. Whole documents are held out until there are so many; the last one
            is measured only up to that number.
    """

    packing: Annotated[str, PACKINGS] = "concatenate"
    eval_tokens: Count = 16384


@dataclass
class Document:
    """One document as tokens.

    Attributes:
        tokens: (N,) int64.
        bytes: number of bytes of the text in UTF-8, for bits per byte.
        counted: (N,) bool, whether the model learns to predict a token; None if it learns all tokens.
    """

    tokens: Tensor
    bytes: int
    counted: Tensor | None = None


def check(arguments: TextArguments, needs_data: bool) -> None:
    """Raise UsageError for options of the text that contradict each other. The text is not read."""
    if arguments.workers is not None and arguments.streaming:
        raise UsageError("--workers has no effect with --streaming, which tokenises one document after the other")
    if needs_data and not arguments.data:
        raise UsageError("--model needs --data FILE..., text to fine-tune and measure on")
    kind = kind_of(arguments)
    for name, kinds_with_option in KINDS_WITH_OPTION.items():
        if kind not in kinds_with_option:
            refuse(arguments, name, f"is not for text from {describe(arguments)}")


def kind_of(arguments: TextArguments) -> str:
    """Return the kind of the sources of `--data`.

    `text`, `json` and `parquet` are files; `saved` and `splits` are a dataset on disk, without or with splits; `hub` is
    a dataset of the Hub.
    """
    kind_of_source = {name: source_kind(name) for name in arguments.data}
    several, kinds = len(arguments.data) > 1, sorted(set(kind_of_source.values()))
    if several and "hub" in kinds:
        raise UsageError(f"--data {next(name for name, kind in kind_of_source.items() if kind == 'hub')}: no such file")
    if len(kinds) > 1:
        raise UsageError(f"--data: files of one kind at a time, not {' and '.join(kinds)}")
    if several and kinds[0] in ("saved", "splits"):
        count = len(arguments.data)
        raise UsageError(f"--data: one saved dataset at a time, not {count}; only of files there can be several")
    return kinds[0] if kinds else "text"


def source_kind(name: str) -> str:
    """Return the kind of one source of `--data`."""
    path = Path(name)
    if (path / "dataset_dict.json").is_file():
        return "splits"
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return "saved"
    if path.is_dir():
        raise UsageError(
            f"--data {name}: is a folder, but not a dataset written by save_to_disk of datasets: name its files"
        )
    if path.is_file():
        kind = FORMATS.get(path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix, "text")
        if path.suffix == ".gz" and kind == "parquet":
            raise UsageError(f"--data {name}: parquet is compressed already, so .gz is not read: gunzip it first")
        return kind
    if looks_like_a_file(name):
        raise UsageError(f"--data {name}: no such file")
    return "hub"


def looks_like_a_file(name: str) -> bool:
    """Return whether a name must be a path, because no dataset id has such a suffix, beginning or number of `/`."""
    return Path(name).suffix in {".gz", *FORMATS} - {""} or name.count("/") > 1 or name.startswith((".", "/", "~"))


def describe(arguments: TextArguments) -> str:
    """Return the names of the sources, for messages."""
    return ", ".join(arguments.data) if arguments.data else "the sources of the Python standard library"


def documents(
    tokenizer: Tokenizer, arguments: TextArguments, files: list[Path] | None, max_tokens: int
) -> list[Document]:
    """Read the documents in order and tokenise them, without repetitions.

    A repeated document could end up on both sides of the split.

    Args:
        tokenizer: tokenizer of the model.
        arguments: options that name the text.
        files: text files to read instead of `--data`. Those that are not UTF-8 are left out.
        max_tokens: number of tokens after which a stream is not read further.

    Raises:
        UsageError: if a file cannot be read, a column is missing, or there is no text.
    """
    texts = unique(read(arguments, files), arguments.separator.encode().decode("unicode_escape"))
    result: list[Document] = []
    if arguments.streaming:
        hide_bar = max_tokens < PROGRESS_BAR_FROM
        with tqdm(total=max_tokens, desc="tokenizing", unit="token", leave=False, disable=hide_bar) as bar:
            while max_tokens > 0 and (text := next(texts, None)) is not None:
                result += encode(tokenizer, [text])
                bar.update(len(result[-1].tokens))
                max_tokens -= len(result[-1].tokens)
    else:
        result = encode_cached(tokenizer, list(texts), arguments.workers)
    if not result:
        raise UsageError(f"there is no text in {describe(arguments)}")
    return result


def read(arguments: TextArguments, files: list[Path] | None) -> Iterator[str | Chat]:
    """Yield the texts, or chats, unchanged."""
    if files is not None or kind_of(arguments) == "text":
        for path in map(Path, arguments.data) if files is None else files:
            try:
                with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
                    yield file.read()
            except (OSError, EOFError, UnicodeDecodeError) as error:
                if files is None:
                    raise UsageError(f"--data {path}: not readable as UTF-8 text ({error})") from None
        return
    try:
        for row in rows_of(arguments):
            value = row.get(arguments.text_column)
            if not (isinstance(value, str) or is_chat(value)):
                raise UsageError(
                    f"--text-column {arguments.text_column}: {describe(arguments)} has columns {', '.join(row)}; name "
                    "one with strings, or with chats: lists of messages with role and content"
                )
            yield value
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"--data {describe(arguments)}: {error.__cause__ or error}") from None


def rows_of(arguments: TextArguments) -> Iterable[dict[str, Any]]:
    """Return the rows of a dataset: saved on disk, on the Hub, or in files."""
    kind, name, split = kind_of(arguments), arguments.data[0], arguments.data_split
    if kind in ("saved", "splits"):
        saved = datasets.load_from_disk(name)
        if kind == "splits" and split not in saved:
            raise UsageError(f"--data-split {split}: {name} has {', '.join(saved)}")
        return saved[split] if kind == "splits" else saved
    if kind == "hub":
        return datasets.load_dataset(name, arguments.data_name, split=split, streaming=arguments.streaming)
    return datasets.load_dataset(kind, data_files=arguments.data, split="train", streaming=arguments.streaming)


def is_chat(value: object) -> TypeGuard[Chat]:
    """Return whether a value is a chat."""
    if not (isinstance(value, list) and value):
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)


def unique(texts: Iterable[str | Chat], separator: str) -> Iterator[str | Chat]:
    """Split texts into documents, and yield each document once; blank documents are left out."""
    seen = set()
    for text in texts:
        if separator and not isinstance(text, str):
            raise UsageError("--separator splits text, but these are chats: leave it out")
        for part in text.split(separator) if separator and isinstance(text, str) else [text]:
            part = part.strip("\n") if isinstance(part, str) else part
            key = hashlib.blake2b(as_string(part).encode(), digest_size=16).digest()
            if as_string(part).strip() and key not in seen:
                seen.add(key)
                yield part


def as_string(text: str | Chat) -> str:
    """Return a text unchanged, and a chat as JSON."""
    return text if isinstance(text, str) else json.dumps(text)


def encode(tokenizer: Tokenizer, texts: Sequence[str | Chat]) -> list[Document]:
    """Tokenise texts, with the tokenizer's special tokens, or chats, with its chat template.

    If the tokenizer adds no special tokens to a text, its end-of-text is put at the end.
    """
    if texts and not isinstance(texts[0], str):
        return [encode_chat(tokenizer, text) for text in texts if not isinstance(text, str)]
    end = [] if tokenizer("").input_ids or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # verbose=False: no warning that a text is longer than the model's context
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False).input_ids
    return [
        Document(torch.tensor(ids + end, dtype=torch.long), len(as_string(text).encode()))
        for text, ids in zip(texts, encoded, strict=True)
    ]


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> Document:
    """Tokenise a chat as the tokenizer's template writes it out. Only the assistant's tokens are learnt.

    A template can mark what the assistant says (`{% generation %}`). Otherwise the chat is written out twice, up to the
    prompt for the assistant's message and up to the end of the message. The difference is what the assistant says.

    Raises:
        UsageError: if the tokenizer has no template, if the template cannot write the chat, or if the assistant's parts
            cannot be found in it.
    """
    if tokenizer.chat_template is None:
        raise UsageError("--text-column names chats, but this tokenizer has no chat template to write them out")
    try:
        written = tokenizer.apply_chat_template(chat, tokenize=False)
        if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
            encoded = tokenizer.apply_chat_template(
                chat, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
            )
            ids, counted = encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]
        else:
            spans = assistant_spans(tokenizer, chat, written)
            encoded = tokenizer(written, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = encoded.input_ids
            counted = [any(start <= first < end for start, end in spans) for first, _ in encoded.offset_mapping]
    except (jinja2.TemplateError, NotImplementedError, TypeError) as error:
        raise UsageError(f"the tokenizer's chat template cannot write out a chat of --data: {error}") from None
    tokens = torch.tensor(ids, dtype=torch.long)
    return Document(tokens, text_bytes(tokens, tokenizer), torch.tensor(counted, dtype=torch.bool))


def assistant_spans(tokenizer: Tokenizer, chat: Chat, written: str) -> list[tuple[int, int]]:
    """Return the first and last + 1 character of each of the assistant's parts in a chat that was written out."""
    spans = []
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            before = (
                tokenizer.apply_chat_template(chat[:index], tokenize=False, add_generation_prompt=True) if index else ""
            )
            until = tokenizer.apply_chat_template(chat[: index + 1], tokenize=False)
            if not (until.startswith(before) and written.startswith(until)):
                raise UsageError(
                    "the tokenizer's chat template writes earlier turns in another way once others follow, and does "
                    "not mark what the assistant generates: put {% generation %} and {% endgeneration %} around that"
                )
            spans.append((len(before), len(until)))
    return spans


def encode_cached(tokenizer: Tokenizer, texts: Sequence[str | Chat], workers: int | None) -> list[Document]:
    """Tokenise texts with `encode`, or read their tokens from the cache of datasets.

    A name in the cache is the digest of all texts and of the tokenizer.
    """
    if not texts:
        return []
    chats = not isinstance(texts[0], str)
    tokenizer_state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(pickle.dumps(tokenizer))
    key_content = json.dumps([tokenizer_state, tokenizer.chat_template if chats else None, texts])
    key = hashlib.sha256(key_content.encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_posenc"
    folder.mkdir(parents=True, exist_ok=True)

    def columns(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        documents = encode(tokenizer, [json.loads(text) for text in batch["text"]])
        names = ("tokens", "bytes", "counted") if chats else ("tokens", "bytes")
        return {name: [getattr(document, name) for document in documents] for name in names}

    (datasets.disable_progress_bars if len(key_content) < PROGRESS_BAR_FROM else datasets.enable_progress_bars)()
    rows = datasets.Dataset.from_dict({"text": [json.dumps(text) for text in texts]}).map(
        columns,
        batched=True,
        num_proc=workers,
        remove_columns="text",
        desc="tokenizing",
        cache_file_name=str(folder / f"{key}.arrow"),
        new_fingerprint=key[:16],
    )
    tensors, byte_counts = rows.with_format("torch")[:], rows[:]["bytes"]
    marks = [mark.bool() for mark in tensors["counted"]] if chats else [None] * len(byte_counts)
    return [Document(*columns) for columns in zip(tensors["tokens"], byte_counts, marks, strict=True)]


def split(
    documents: list[Document], tokenizer: Tokenizer, eval_tokens: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Return training and held-out documents. Whole documents are held out, so no text is on both sides.

    Documents are drawn at random until they have `eval_tokens`. Tokens beyond that number are neither measured nor
    trained on. If there is only one document, its end is held out.

    Args:
        documents: all documents.
        tokenizer: tokenizer that made them.
        eval_tokens: number of tokens to hold out.
        seed: seed of the draw.
    """
    if len(documents) == 1:
        parts = (part_of(documents[0], slice(*ends), tokenizer) for ends in ((0, -eval_tokens), (-eval_tokens, None)))
        start, end = ([part] if len(part.tokens) else [] for part in parts)
        return start, end
    order = list(range(len(documents)))
    random.Random(seed).shuffle(order)
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
    counted = None if document.counted is None else document.counted[part]
    return Document(tokens, text_bytes(tokens, tokenizer), counted)


def text_bytes(tokens: Tensor, tokenizer: Tokenizer) -> int:
    """Return the number of bytes of a text, without the special tokens that the tokenizer added."""
    return len(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())


def stream(documents: list[Document]) -> Document:
    """Concatenate documents."""
    if not documents:
        return Document(torch.empty(0, dtype=torch.long), 0)
    marks = [document.counted for document in documents if document.counted is not None]
    assert len(marks) in (0, len(documents)), "either all documents are chats, or none"
    return Document(
        torch.cat([document.tokens for document in documents]),
        sum(document.bytes for document in documents),
        torch.cat(marks) if marks else None,
    )


@dataclass
class Text:
    """The text of a run: the number of all documents, the documents to train on, and the documents to measure on."""

    documents: int
    train: list[Document]
    held_out: list[Document]

    def to_dict(self, arguments: TextArguments) -> Results:
        """Return the entry of results.json about the text."""
        return {
            "description": describe(arguments),
            "kind": kind_of(arguments),
            "documents": self.documents,
            "training_tokens": len(stream(self.train).tokens),
            "held_out_tokens": len(stream(self.held_out).tokens),
            "held_out_bytes": stream(self.held_out).bytes,
        }

    def digest(self) -> str:
        """Return the SHA-256 of all tokens, of the limits of the documents, and of the split."""
        digest = hashlib.sha256()
        for part in (self.train, self.held_out):
            for document in part:
                digest.update(f"{len(document.tokens)} {document.bytes} ".encode() + document.tokens.numpy().tobytes())
                if document.counted is not None:
                    digest.update(document.counted.numpy().tobytes())
            digest.update(b"|")
        return digest.hexdigest()


def read_text(
    arguments: DataArguments,
    tokenizer: Tokenizer,
    accelerator: Accelerator,
    training_tokens: int,
    split_seed: int,
) -> Text:
    """Read the text that a run trains on and the text that it measures.

    Without `--data` both consist of modules of the standard library. What is measured is always taken from the modules
    that the embedded base was not trained on.

    Args:
        arguments: options that name the text.
        tokenizer: tokenizer of the model.
        accelerator: accelerator of the processes. The main process fills the cache for the others.
        training_tokens: number of tokens that one process trains on; a stream is read until there are enough.
        split_seed: seed of the draw of held-out documents.
    """
    max_tokens = arguments.eval_tokens + training_tokens * accelerator.num_processes
    with accelerator.main_process_first():
        if arguments.data:
            all_documents = documents(tokenizer, arguments, None, max_tokens)
            return Text(len(all_documents), *split(all_documents, tokenizer, arguments.eval_tokens, split_seed))
        train, unseen = (documents(tokenizer, arguments, files, max_tokens) for files in library_parts())
    measured = split(unseen, tokenizer, arguments.eval_tokens, split_seed)[1]
    return Text(len(train) + len(unseen), train, measured)


class Windows:
    """A text cut into windows of one length; a rest at the end is dropped.

    Args:
        documents: documents of the text, in order.
        length: tokens in a window.
        packing: `concatenate`, or `documents`: positions start again with every document, and its first token
            is not predicted. From such positions transformers infers that attention must stay inside a document.
    """

    def __init__(self, documents: list[Document], length: int, packing: str):
        """Cut documents into windows."""
        self.length = length
        text = stream(documents)
        self.total = len(text.tokens)
        count = self.total // length
        self.tokens = text.tokens[: count * length].view(count, length)
        self.counted = None if text.counted is None else text.counted[: count * length].view(count, length)
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
        if self.counted is not None:
            targets[:, :-1][~self.counted[indices][:, 1:]] = IGNORED
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
