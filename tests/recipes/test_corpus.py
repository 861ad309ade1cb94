"""Text for the recipes: reading, the split, packing, and the order of windows."""

import gzip
import importlib
import itertools
import json
import random

import pytest
import torch


@pytest.fixture
def corpus(recipes):
    return importlib.import_module("hf_posenc.recipes.corpus")


@pytest.fixture
def tokenizer(recipes):
    return importlib.import_module("hf_posenc.recipes.embedded").byte_tokenizer()


def texts_of(documents, tokenizer):
    return [tokenizer.decode(document.tokens, skip_special_tokens=True) for document in documents]


def test_files_of_every_kind_give_the_same_documents(corpus, tokenizer, tmp_path):
    texts = ["one", "two\nlines", "drei äöü"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"story": text}) for text in texts), encoding="utf-8")
    import datasets

    rows = datasets.Dataset.from_dict({"story": texts})
    rows.to_parquet(tmp_path / "a.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"first": rows.select([0]), "second": rows}).save_to_disk(tmp_path / "splits")
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    for name, options in (
        ("a.txt", {"separator": r"\n\n"}),
        ("a.jsonl", {"text_column": "story"}),
        ("a.parquet", {"text_column": "story"}),
        ("a.jsonl", {"text_column": "story", "streaming": True}),
        ("a.txt.gz", {"separator": r"\n\n"}),
        ("a.jsonl.gz", {"text_column": "story"}),
        ("saved", {"text_column": "story"}),
        ("saved", {"text_column": "story", "streaming": True}),
        ("splits", {"text_column": "story", "data_split": "second"}),
    ):
        arguments = corpus.DataArguments(data=[str(tmp_path / name)], **options)
        documents = corpus.documents(tokenizer, arguments, max_tokens=10**6)
        assert texts_of(documents, tokenizer) == texts
        assert [document.bytes for document in documents] == [3, 9, 11]
        # Bytes, and the mark that ends a document.
        assert documents[0].tokens.tolist() == [*tokenizer("one").input_ids, 256]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["folder"], {}, "--data .*folder: "),
        (["splits"], {"data_split": "test"}, "--data-split test: .*splits has first, second"),
        (["a.jsonl"], {"text_column": "story"}, "--text-column story: .* has columns text; name one"),
        (["a.txt", "b"], {}, "--data .*b: no such file"),
        (["a.txt", "a.jsonl"], {}, "files of one kind at a time, not json and text"),
        (["broken.txt.gz"], {}, "--data .*broken.txt.gz: "),
        (["latin.txt"], {}, "--data .*latin.txt: .*utf-8"),
        (["empty.txt"], {}, "there is no text in .*empty.txt"),
        (["blank.txt"], {}, "there is no text in .*blank.txt"),
        (["chats.jsonl"], {"text_column": "messages"}, "--text-column messages: .* is no string. Train on chats with"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(corpus, tokenizer, tmp_path, names, options, message):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one"]})
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"first": rows, "second": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}')
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "blank.txt").write_text(" \n\t\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.txt.gz").write_bytes(gzip.compress(b"one")[:-9])
    arguments = corpus.DataArguments(data=[str(tmp_path / name) for name in names], **options)

    def read():
        corpus.documents(tokenizer, arguments)

    with pytest.raises(corpus.UsageError, match=message):
        read()


def test_repeated_documents_count_once(corpus, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\none\n\n\n\n")
    (tmp_path / "b.txt").write_text("two\n\nthree")
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    arguments = corpus.DataArguments(data=files, separator=r"\n\n")
    assert texts_of(corpus.documents(tokenizer, arguments), tokenizer) == ["one", "two", "three"]


def test_streaming_reads_no_more_than_needed(corpus, tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{number:09}"}) for number in range(100)))
    arguments = corpus.DataArguments(data=[str(path)], streaming=True)
    assert len(corpus.documents(tokenizer, arguments, max_tokens=25)) == 3  # ten tokens each


def test_held_out_text_is_never_trained_on(corpus, tokenizer):
    documents = [corpus.Document(torch.full((10 + index,), index), 10 + index) for index in range(20)]
    for first in range(5):
        documents = documents[first:] + documents[:first]
        training, held_out = corpus.split(documents, tokenizer, eval_tokens=45)
        numbers = [{int(document.tokens[0]) for document in part} for part in (training, held_out)]
        assert not numbers[0] & numbers[1]
        assert len(numbers[0] | numbers[1]) == 20
        assert sum(len(document.tokens) for document in held_out) == 45
        whole = [10 + number for number in numbers[1]]
        assert sum(whole) - max(whole) < 45  # no document more than needed
    words = torch.tensor(tokenizer("x" * 20).input_ids)
    books = [corpus.Document(words, 20)] * 5
    training, held_out = corpus.split(books, tokenizer, eval_tokens=30)
    assert [(len(document.tokens), document.bytes) for document in held_out] == [(20, 20), (10, 10)]
    assert len(training) == 3  # what is not measured is not trained on either
    text = torch.tensor(tokenizer("x" * 100).input_ids)
    training, held_out = corpus.split([corpus.Document(text, 100)], tokenizer, eval_tokens=30)
    assert (len(training[0].tokens), len(held_out[0].tokens), held_out[0].bytes) == (70, 30, 30)
    marked = torch.cat([text, torch.tensor([tokenizer.eos_token_id])])  # a mark is a token, but no text
    _, held_out = corpus.split([corpus.Document(marked, 100)], tokenizer, eval_tokens=30)
    assert (len(held_out[0].tokens), held_out[0].bytes) == (30, 29)


def test_windows_follow_the_text(corpus):
    documents = [corpus.Document(torch.arange(start, stop), 1) for start, stop in ((0, 5), (5, 7), (7, 20))]
    windows = corpus.Windows(documents, 6, "concatenate")
    assert len(windows) == 3
    batch = windows.batch([2, 0])
    assert batch["input_ids"].tolist() == [[12, 13, 14, 15, 16, 17], [0, 1, 2, 3, 4, 5]]
    assert batch["targets"].tolist() == [[13, 14, 15, 16, 17, -100], [1, 2, 3, 4, 5, -100]]
    assert "position_ids" not in batch


def test_packed_documents_stay_apart(corpus):
    random.seed(0)
    lengths = [random.randint(1, 9) for _ in range(30)]
    documents = [corpus.Document(torch.full((length,), index), 1) for index, length in enumerate(lengths)]
    windows = corpus.Windows(documents, 8, "documents")
    batch = windows.batch(list(range(len(windows))))
    for tokens, positions, targets in zip(batch["input_ids"], batch["position_ids"], batch["targets"], strict=True):
        place = 0
        for index in range(8):  # one token after the other
            place = place + 1 if index and tokens[index] == tokens[index - 1] else 0
            assert positions[index] == place
            inside = index < 7 and tokens[index + 1] == tokens[index]
            assert targets[index] == (tokens[index] if inside else -100)


def test_order_depends_on_seed_and_number_alone(corpus):
    whole = corpus.order(3, 7, 0, 35)
    assert [sorted(whole[start : start + 7]) for start in range(0, 35, 7)] == [list(range(7))] * 5
    assert whole[:7] != whole[7:14]
    pieces = [0, 3, 4, 13, 14, 30, 35]
    assert [index for a, b in itertools.pairwise(pieces) for index in corpus.order(3, 7, a, b)] == whole
    assert corpus.order(4, 7, 0, 35) != whole
