"""Text for the recipes: read, tokenised, split into training and held-out documents, packed into windows."""

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
READ_OF = {
    "data_name": ("hub",),
    "data_split": ("hub", "splits"),
    "text_column": ("hub", "splits", "saved", "json", "parquet"),
}
"""Options that only some kinds of text have: name -> kinds."""
IGNORED = -100
"""Target that no token is to predict: the first token of a document, the one after a window's last, and tokens that
others than the assistant say."""
LARGE = 5_000_000
"""Number of characters, or of tokens in a stream, from which tokenizing takes seconds and shows a progress bar."""
Chat = list[dict[str, Any]]
"""Messages with `role` and `content`."""


@dataclass
class TextArguments(Options):
    r"""The text.

    Args:
        data: text (UTF-8), .jsonl or .parquet files, all of one kind, the first two also with .gz; or one folder of
            save_to_disk, or one dataset id of the Hub; `extend` without --model, and `pretrain`, have one.
        data_name: configuration of a dataset of the Hub.
        data_split: split of a dataset that has several.
        text_column: column that holds the text, if not a text file. A column of chats, e.g. messages, holds lists of
            messages: the tokenizer's chat template writes them out, and only what the assistant says is trained on.
        separator: what separates documents within a text, e.g. '\n\n'; by default a text is one document.
        streaming: read only as many documents as the run needs, instead of downloading all.
        workers: processes that tokenise; by default one, whose tokenizer uses threads.
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
        packing: how documents fill windows. With concatenate they stand in a row, and each may look at the ones before
            it in its window. With documents positions start again with each, and attention stays inside.
        eval_tokens: tokens to measure on, at most: whole documents are held out until there are so many, and of the
            last one the beginning is measured.
    """

    packing: Annotated[str, PACKINGS] = "concatenate"
    eval_tokens: Count = 16384


@dataclass
class Document:
    """One text as tokens.

    Attributes:
        tokens: (N,) int64.
        bytes: of the text in UTF-8, for bits per byte.
        counted: (N,) bool, whether the model learns to predict a token; None where it learns all.
    """

    tokens: Tensor
    bytes: int
    counted: Tensor | None = None


def check(arguments: TextArguments, needs_data: bool) -> None:
    """Raise UsageError for options of the text that cannot work together, without reading it."""
    if arguments.workers is not None and arguments.streaming:
        raise UsageError("--workers is not for --streaming, which tokenises one document after the other")
    if needs_data and not arguments.data:
        raise UsageError("--model needs --data FILE..., text to fine-tune and measure on")
    kind = kind_of(arguments)
    for name, read_of in READ_OF.items():
        if kind not in read_of:
            refuse(arguments, name, f"is not for text from {describe(arguments)}")


def kind_of(arguments: TextArguments) -> str:
    """Return the kind of source: `text`, `json` or `parquet` files, a `saved` dataset or its `splits`, or the `hub`."""
    kinds = {name: kind_of_place(name) for name in arguments.data}
    several, found = len(arguments.data) > 1, sorted(set(kinds.values()))
    if several and "hub" in found:
        raise UsageError(f"--data {next(name for name, kind in kinds.items() if kind == 'hub')}: no such file")
    if len(found) > 1:
        raise UsageError(f"--data: files of one kind at a time, not {' and '.join(found)}")
    if several and found[0] in ("saved", "splits"):
        count = len(arguments.data)
        raise UsageError(f"--data: one saved dataset at a time, not {count}; of files there may be several")
    return found[0] if found else "text"


def kind_of_place(name: str) -> str:
    """Return the kind of one source of `--data`."""
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
    """Return whether a name is meant as a path, not as a dataset id: by a suffix that is read here, or several `/`."""
    return Path(name).suffix in {".gz", *FORMATS} - {""} or name.count("/") > 1 or name.startswith((".", "/", "~"))


def describe(arguments: TextArguments) -> str:
    """Return the names of what is read."""
    return ", ".join(arguments.data) if arguments.data else "the sources of the Python standard library"


def documents(tokenizer: Tokenizer, arguments: TextArguments, files: list[Path] | None, enough: int) -> list[Document]:
    """Read the documents in order and tokenise them, each only once.

    A repeated document could end up on both sides of the split.

    Args:
        tokenizer: of the model.
        arguments: which text to read.
        files: text files to read instead of `--data`. Those that are not UTF-8 are left out.
        enough: number of tokens at which a stream is no longer read.

    Raises:
        UsageError: if a file cannot be read, a column is missing, or there is no text.
    """
    texts = unique(read(arguments, files), arguments.separator.encode().decode("unicode_escape"))
    result: list[Document] = []
    if arguments.streaming:
        with tqdm(total=enough, desc="tokenizing", unit="token", leave=False, disable=enough < LARGE) as bar:
            while enough > 0 and (text := next(texts, None)) is not None:
                result += encode(tokenizer, [text])
                bar.update(len(result[-1].tokens))
                enough -= len(result[-1].tokens)
    else:
        result = encode_and_keep(tokenizer, list(texts), arguments.workers)
    if not result:
        raise UsageError(f"there is no text in {describe(arguments)}")
    return result


def read(arguments: TextArguments, files: list[Path] | None) -> Iterator[str | Chat]:
    """Yield the texts, or chats, as they are stored."""
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
                    f"--text-column {arguments.text_column}: {describe(arguments)} has {', '.join(row)}, of which the "
                    "text must be a column of strings, or of chats: lists of messages with role and content"
                )
            yield value
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"--data {describe(arguments)}: {error.__cause__ or error}") from None


def rows_of(arguments: TextArguments) -> Iterable[dict[str, Any]]:
    """Return the rows of a dataset, from disk, from the Hub, or made of files."""
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
    """Return whether a value is a list of messages."""
    if not (isinstance(value, list) and value):
        return False
    return all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value)


def unique(texts: Iterable[str | Chat], separator: str) -> Iterator[str | Chat]:
    """Yield the documents of texts that are not blank, each where it comes first."""
    seen = set()
    for text in texts:
        if separator and not isinstance(text, str):
            raise UsageError("--separator is for text, and these are chats: leave it out")
        for part in text.split(separator) if separator and isinstance(text, str) else [text]:
            part = part.strip("\n") if isinstance(part, str) else part
            key = hashlib.blake2b(as_string(part).encode(), digest_size=16).digest()
            if as_string(part).strip() and key not in seen:
                seen.add(key)
                yield part


def as_string(text: str | Chat) -> str:
    """Return a text as it is, and a chat as JSON."""
    return text if isinstance(text, str) else json.dumps(text)


def encode(tokenizer: Tokenizer, texts: Sequence[str | Chat]) -> list[Document]:
    """Tokenise texts, each between the marks that the tokenizer adds, and chats by the tokenizer's template.

    If the tokenizer adds no marks, a text ends with the tokenizer's end-of-text.
    """
    if texts and not isinstance(texts[0], str):
        return [encode_chat(tokenizer, text) for text in texts if not isinstance(text, str)]
    end = [] if tokenizer("").input_ids or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # The tokenizer would warn that a whole book is longer than the model's context, which is the point.
    encoded = tokenizer(texts, return_attention_mask=False, verbose=False).input_ids
    return [
        Document(torch.tensor(ids + end, dtype=torch.long), len(as_string(text).encode()))
        for text, ids in zip(texts, encoded, strict=True)
    ]


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> Document:
    """Tokenise a chat as the tokenizer's template writes it; only the assistant's tokens count.

    A template can mark the assistant's part (`{% generation %}`). Without marks, it is the text that the template adds
    to the turns before and its prompt for the next turn.

    Raises:
        UsageError: if the tokenizer has no template, if the template cannot write the chat, or if the assistant's parts
            are not to be found in it.
    """
    if tokenizer.chat_template is None:
        raise UsageError("--text-column names chats, and this tokenizer has no chat template to write them out")
    try:
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        if re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.chat_template):
            encoded = tokenizer.apply_chat_template(
                chat, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
            )
            ids, counted = encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]
        else:
            spans = assistant_spans(tokenizer, chat, whole)
            encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ids = encoded.input_ids
            counted = [any(a <= first < b for a, b in spans) for first, _ in encoded.offset_mapping]
    except (jinja2.TemplateError, NotImplementedError, TypeError) as error:
        raise UsageError(f"the tokenizer's chat template cannot write out a chat of --data: {error}") from None
    tokens = torch.tensor(ids, dtype=torch.long)
    return Document(tokens, text_bytes(tokens, tokenizer), torch.tensor(counted, dtype=torch.bool))


def assistant_spans(tokenizer: Tokenizer, chat: Chat, whole: str) -> list[tuple[int, int]]:
    """Return where the assistant's parts begin and end in a chat that was written out, in characters."""
    spans = []
    for index, message in enumerate(chat):
        if message["role"] == "assistant":
            before = (
                tokenizer.apply_chat_template(chat[:index], tokenize=False, add_generation_prompt=True) if index else ""
            )
            until = tokenizer.apply_chat_template(chat[: index + 1], tokenize=False)
            if not (until.startswith(before) and whole.startswith(until)):
                raise UsageError(
                    "the tokenizer's chat template writes earlier turns in another way once others follow, and does "
                    "not mark what the assistant generates: put {% generation %} and {% endgeneration %} around that"
                )
            spans.append((len(before), len(until)))
    return spans


def encode_and_keep(tokenizer: Tokenizer, texts: Sequence[str | Chat], workers: int | None) -> list[Document]:
    """Tokenise texts as `encode` does, or read their tokens from the cache of datasets.

    The name in the cache is a digest of every text and of the tokenizer, so that no other text can have it.
    """
    if not texts:
        return []
    chats = not isinstance(texts[0], str)
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(pickle.dumps(tokenizer))
    made_from = json.dumps([state, tokenizer.chat_template if chats else None, texts])
    key = hashlib.sha256(made_from.encode()).hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "hf_posenc"
    folder.mkdir(parents=True, exist_ok=True)

    def columns(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        documents = encode(tokenizer, [json.loads(text) for text in batch["text"]])
        names = ("tokens", "bytes", "counted") if chats else ("tokens", "bytes")
        return {name: [getattr(document, name) for document in documents] for name in names}

    (datasets.disable_progress_bars if len(made_from) < LARGE else datasets.enable_progress_bars)()
    rows = datasets.Dataset.from_dict({"text": [json.dumps(text) for text in texts]}).map(
        columns,
        batched=True,
        num_proc=workers,
        remove_columns="text",
        desc="tokenizing",
        cache_file_name=str(folder / f"{key}.arrow"),
        new_fingerprint=key[:16],
    )
    tensors, counts = rows.with_format("torch")[:], rows[:]["bytes"]
    marks = [mark.bool() for mark in tensors["counted"]] if chats else [None] * len(counts)
    return [Document(*columns) for columns in zip(tensors["tokens"], counts, marks, strict=True)]


def split(
    documents: list[Document], tokenizer: Tokenizer, eval_tokens: int, seed: int
) -> tuple[list[Document], list[Document]]:
    """Return training and held-out documents. Whole documents are held out, so no text is on both sides.

    They are drawn at random until there are `eval_tokens`. Tokens beyond these are neither measured nor trained on.
    The end of a single document is held out.

    Args:
        documents: all of them.
        tokenizer: that made them.
        eval_tokens: number of tokens to hold out.
        seed: of the draw.
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
    """Return the beginning of a text, at most a number of tokens; the last document is cut."""
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
    """Return the number of bytes of a text, without the marks that the tokenizer added."""
    return len(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False).encode())


def stream(documents: list[Document]) -> Document:
    """Return documents in a row, as one."""
    if not documents:
        return Document(torch.empty(0, dtype=torch.long), 0)
    marks = [document.counted for document in documents if document.counted is not None]
    assert len(marks) in (0, len(documents)), "a text is of chats, or it is not"
    return Document(
        torch.cat([document.tokens for document in documents]),
        sum(document.bytes for document in documents),
        torch.cat(marks) if marks else None,
    )


@dataclass
class Text:
    """The text of a run: the number of its documents, those to train on, and those to measure on."""

    documents: int
    train: list[Document]
    held_out: list[Document]

    def to_dict(self, arguments: TextArguments) -> Results:
        """Return what the results of a run say of its text."""
        return {
            "description": describe(arguments),
            "kind": kind_of(arguments),
            "documents": self.documents,
            "training_tokens": len(stream(self.train).tokens),
            "held_out_tokens": len(stream(self.held_out).tokens),
            "held_out_bytes": stream(self.held_out).bytes,
        }

    def digest(self) -> str:
        """Return the SHA-256 of every token, in its document and on its side of the split."""
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

    Without `--data` both are modules of the standard library. The measured ones are among those that the embedded base
    has not seen, whatever the seed.

    Args:
        arguments: which text to read.
        tokenizer: of the model.
        accelerator: of the processes. The first one fills the cache for the others.
        training_tokens: that a process trains on. A stream is read until there are so many for each.
        split_seed: of the draw of held-out documents.
    """
    enough = arguments.eval_tokens + training_tokens * accelerator.num_processes
    with accelerator.main_process_first():
        if arguments.data:
            whole = documents(tokenizer, arguments, None, enough)
            return Text(len(whole), *split(whole, tokenizer, arguments.eval_tokens, split_seed))
        train, unseen = (documents(tokenizer, arguments, files, enough) for files in library_parts())
    measured = split(unseen, tokenizer, arguments.eval_tokens, split_seed)[1]
    return Text(len(train) + len(unseen), train, measured)


class Windows:
    """A text cut into windows of one length; what is left at its end is dropped.

    Args:
        documents: taken in a row.
        length: tokens in a window.
        packing: `concatenate`, or `documents`: positions start again with each document, and nothing is predicted
            across its start. From such positions transformers infers that attention must stay inside.
    """

    def __init__(self, documents: list[Document], length: int, packing: str):
        """Cut documents into windows."""
        self.length = length
        whole = stream(documents)
        self.total = len(whole.tokens)
        count = self.total // length
        self.tokens = whole.tokens[: count * length].view(count, length)
        self.counted = None if whole.counted is None else whole.counted[: count * length].view(count, length)
        self.starts = None
        if packing == "documents":
            lengths = torch.tensor([len(document.tokens) for document in documents])
            starts = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)  # of each token's document
            self.starts = starts[: count * length].view(count, length)

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> dict[str, Tensor]:
        """Return windows as the model takes them, with `targets` `(B, T)`: the token that follows, or IGNORED."""
        tokens = self.tokens[indices]
        targets = torch.full_like(tokens, IGNORED)
        targets[:, :-1] = tokens[:, 1:]
        if self.counted is not None:
            targets[:, :-1][~self.counted[indices][:, 1:]] = IGNORED
        if self.starts is None:
            return {"input_ids": tokens, "targets": targets}
        starts = self.starts[indices]
        targets[:, :-1][starts[:, 1:] != starts[:, :-1]] = IGNORED
        # Counted from the document's start, or from the window's where the document began before it.
        positions = torch.arange(self.length) + torch.tensor(indices)[:, None] * self.length
        begins = torch.maximum(starts, positions[:, :1])
        return {"input_ids": tokens, "position_ids": positions - begins, "targets": targets}


def order(seed: int, windows: int, first: int, last: int) -> list[int]:
    """Return the windows numbered `first .. last - 1` of an endless, seeded shuffle. Each pass has its own order.

    A window depends on the seed and its number alone, not on the number of processes or on where a run was resumed.
    """
    indices: list[int] = []
    for turn in range(first // windows, (last - 1) // windows + 1):
        shuffled = list(range(windows))
        random.Random(f"{seed} {turn}").shuffle(shuffled)
        indices += shuffled[max(first - turn * windows, 0) : last - turn * windows]
    return indices
