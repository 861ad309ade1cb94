"""GGUF files: llama.cpp's formulas, in float64 on what the file holds, give the patched model's logits."""

import copy
import functools
import itertools
import json
import sys

import numpy as np
import pytest
import regex
import torch
from families import tiny
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.checkpoints.gguf_export import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED
from hf_posenc.recipes.embedded import byte_tokenizer

gguf = pytest.importorskip("gguf", reason="pip install gguf runs this")

TOLERANCE = 2e-4
"""Between a float32 model and float64 formulas; logits are up to 5 in size."""
ENGINE_TOLERANCE = 5e-3
"""llama.cpp computes GELU from a table in half precision; they differ by 3e-3."""
HALF_TOLERANCE = {"float16": 0.05, "q8_0": 0.8}
"""Rounded weights: 11 and about 8 bits, in two layers with weights that are ten times the usual."""
APART = 0.5
"""Least difference of the logits of two schemes."""
NO_TOKENIZER = pytest.mark.filterwarnings("ignore:.*(gets no tokenizer|holds its rotation in):UserWarning")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = [
    ("llama", "alibi", {}, "refact"),
    ("llama", "nope", {}, "llama"),
    ("llama", "rope", {}, "llama"),
    ("llama", "rope", {"rope_theta": 300.0}, "llama"),
    ("llama", "rope", {"scaling": LINEAR}, "llama"),
    ("llama", "rope", {"scaling": YARN}, "llama"),
    ("llama", "rope", {"scaling": LLAMA3}, "llama"),
    ("llama", "rope", {"frequencies": (1.0, 0.3, 0.02, 0.0)}, "llama"),
    ("llama", "rope", {"frequencies": {"name": "soft_clip", "pairs": 3}}, "llama"),
    ("llama", "rope", {"frequencies": {"name": "ntk", "factor": 4.0}}, "llama"),
    ("llama", "transformer_xl", {"frequencies": 5, "seed": 0}, "llama"),
    ("llama", "transformer_xl", {"frequencies": 5, "seed": 0, "layers": [1]}, "llama"),
    ("gpt2", "alibi", {}, "mpt"),
    ("gpt2", "nope", {}, "mpt"),
]
IDS = [f"{family}-{scheme}-{index}" for index, (family, scheme, *_) in enumerate(CASES)]


def made(family, scheme, **hyperparameters):
    """A patched model whose vectors are not all 0 or 1."""
    model = tiny(family)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        patch_model(model, scheme, **hyperparameters)
        for name, parameter in model.named_parameters():
            if "posenc" in name:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


class File:
    """What a GGUF file holds, and what llama.cpp computes from it."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        self.tensors = {
            t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        self.types = {t.name: t.tensor_type.name for t in reader.tensors}
        self.keys = {key: field.contents() for key, field in reader.fields.items()}
        self.architecture = self.keys["general.architecture"]

    def key(self, name, default=None):
        return self.keys.get(f"{self.architecture}.{name}", default)

    def norm(self, x, name):
        if self.architecture != "mpt":
            scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.key("attention.layer_norm_rms_epsilon"))
            return x / scale * self.tensors[f"{name}.weight"]
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.key("attention.layer_norm_epsilon"))
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def linear(self, x, name):
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0.0)

    def rotated(self, x):
        """Neighbouring dimensions of (T, heads, D) turned by `t theta^(-2u/D) / f_u`."""
        size = self.key("rope.dimension_count")
        angles = self.key("rope.freq_base") ** (-np.arange(0, size, 2) / size)
        angles = angles / self.tensors.get("rope_freqs.weight", 1.0) * np.arange(len(x))[:, None]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def slopes(self, heads):
        """llama.cpp's slopes, in its own words: `ggml_soft_max_ext`."""
        largest = {"refact": 8.0, "mpt": self.key("attention.max_alibi_bias", 0.0)}.get(self.architecture, 0.0)
        if not largest:
            return np.zeros(heads)
        power = 2 ** int(np.floor(np.log2(heads)))
        m0, m1 = 2.0 ** (-largest / power), 2.0 ** (-(largest / 2) / power)
        return np.array([m0 ** (h + 1) if h < power else m1 ** (2 * (h - power) + 1) for h in range(heads)])

    def logits(self, ids):
        heads, groups = self.key("attention.head_count"), self.key("attention.head_count_kv")
        size = self.key("attention.key_length")
        x = self.tensors["token_embd.weight"][ids]
        distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
        for index in range(self.key("block_count")):
            block = f"blk.{index}."
            h = self.norm(x, f"{block}attn_norm")
            if self.architecture == "mpt":
                q, k, v = np.split(self.linear(h, f"{block}attn_qkv"), 3, -1)
            else:
                q, k, v = (self.linear(h, f"{block}attn_{each}") for each in "qkv")
            q, k, v = (each.reshape(len(ids), -1, size) for each in (q, k, v))
            if self.architecture == "llama":
                q, k = self.rotated(q), self.rotated(k)
            k, v = (each.repeat(heads // groups, 1) for each in (k, v))
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(size)
            scores = scores - self.slopes(heads)[:, None, None] * np.abs(distance)
            scores = np.where(distance < 0, -np.inf, scores)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            mixed = np.einsum("hij,jhd->ihd", weights, v).reshape(len(ids), -1)
            x = x + self.linear(mixed, f"{block}attn_output")
            h = self.norm(x, f"{block}ffn_norm")
            if self.architecture == "mpt":
                u = self.linear(h, f"{block}ffn_up")
                u = 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
            else:
                gate = self.linear(h, f"{block}ffn_gate")
                u = gate / (1 + np.exp(-gate)) * self.linear(h, f"{block}ffn_up")
            x = x + self.linear(u, f"{block}ffn_down")
        head = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return self.norm(x, "output_norm") @ head.T


def random_ids(model, length):
    return torch.randint(model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits[0].double().numpy()


@NO_TOKENIZER
@pytest.mark.parametrize(("family", "scheme", "hyperparameters", "architecture"), CASES, ids=IDS)
def test_the_file_computes_what_the_model_does(family, scheme, hyperparameters, architecture, tmp_path):
    model = made(family, scheme, **hyperparameters)
    hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    file = File(tmp_path / "model.gguf")
    assert file.architecture == architecture
    ids = random_ids(model, 90)
    computed = file.logits(ids[0].numpy())
    np.testing.assert_allclose(computed, logits_of(model, ids), rtol=0, atol=TOLERANCE)
    # The positions are in the file: another scheme computes something else.
    other = logits_of(made(family, "nope" if scheme != "nope" else "alibi"), ids)
    assert np.abs(computed - other).max() > APART


@NO_TOKENIZER
@pytest.mark.parametrize(
    ("family", "options"), [("gpt2", {"n_head": 6, "n_embd": 48}), ("mistral", {"sliding_window": None})]
)
def test_heads_that_are_no_power_of_two_and_mistral(family, options, tmp_path):
    model = patch_model(tiny(family, **options), "alibi")
    hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    ids = random_ids(model, 40)
    computed = File(tmp_path / "model.gguf").logits(ids[0].numpy())
    np.testing.assert_allclose(computed, logits_of(model, ids), rtol=0, atol=TOLERANCE)


@NO_TOKENIZER
@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_matrices_can_be_smaller(dtype, tmp_path):
    model = patch_model(tiny("llama", hidden_size=64, intermediate_size=64), "alibi")
    hf_posenc.export_gguf(model, tmp_path / "full.gguf")
    hf_posenc.export_gguf(model, tmp_path / "model.gguf", dtype=dtype)
    assert (tmp_path / "model.gguf").stat().st_size < 0.7 * (tmp_path / "full.gguf").stat().st_size
    file = File(tmp_path / "model.gguf")
    assert file.types["blk.0.attn_q.weight"] == {"float16": "F16", "q8_0": "Q8_0"}[dtype]
    assert file.types["blk.0.attn_norm.weight"] == "F32"
    assert file.keys["general.file_type"] == {"float16": 1, "q8_0": 7}[dtype]
    ids = random_ids(model, 40)
    difference = np.abs(file.logits(ids[0].numpy()) - logits_of(model, ids)).max()
    assert 0 < difference < HALF_TOLERANCE[dtype]


@NO_TOKENIZER
@pytest.mark.parametrize(
    ("family", "scheme", "hyperparameters", "reason"),
    [
        ("llama", "alibi", {"slopes": [0.5, 0.25, 0.1, 0.1]}, "paper's slopes"),
        ("llama", "shaw", {}, "no other term"),
        ("llama", "sinusoidal", {}, "no vectors"),
        ("gpt2", "rope", {}, "no graph for it rotates"),
        ("mistral", "temperature", {"strength": 0.5, "length": 16}, "do not compute temperature"),
        ("llama", "rope", {"scaling": {"rope_type": "dynamic", "factor": 4.0}}, "length of the text"),
        ("llama", "nope", {"layers": [0]}, "every layer"),
        ("llama", "alibi", {"window": 8}, "no sliding window"),
        ("qwen2", "alibi", {}, "no graph for qwen2"),
    ],
)
def test_what_no_graph_computes_is_refused(family, scheme, hyperparameters, reason, tmp_path):
    model = patch_model(tiny(family), scheme, **hyperparameters)
    with pytest.raises(hf_posenc.UnsupportedModelError, match=rf"{reason}.*These can be exported: alibi"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@NO_TOKENIZER
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_other_scheme_is_written(family, tmp_path):
    """A scheme that no test compares with llama.cpp's formulas, a new one too, has no file."""
    compared = {scheme for name, scheme, _, _ in CASES if name == family}
    given = {"temperature": {"strength": 0.5, "length": 16}}
    for scheme in sorted(set(hf_posenc.available_schemes()) - compared):
        model = made(family, scheme, **given.get(scheme, {}))
        with pytest.raises(hf_posenc.UnsupportedModelError, match=r"cannot be written to a GGUF file|no stock class"):
            hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_weights_and_settings_without_a_place_are_refused(tmp_path):
    model = patch_model(tiny("llama", attention_bias=True), "alibi")
    with pytest.raises(hf_posenc.UnsupportedModelError, match=r"no place for .*k_proj\.bias"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    model = patch_model(tiny("gpt2", activation_function="relu"), "alibi")
    with pytest.raises(hf_posenc.UnsupportedModelError, match="activation_function is 'relu'"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    model = patch_model(tiny("mistral", sliding_window=8), "alibi")
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no sliding window"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(hf_posenc.UnsupportedModelError, match="no language model head"):
        hf_posenc.export_gguf(patch_model(tiny("llama").model, "alibi"), tmp_path / "model.gguf")
    with pytest.raises(hf_posenc.NotPatchedError, match="not patched"):
        hf_posenc.export_gguf(tiny("llama"), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@NO_TOKENIZER
def test_wrong_dtypes_are_refused(tmp_path):
    model = patch_model(tiny("llama"), "alibi")
    with pytest.raises(ValueError, match="float32, float16, q8_0, not 'q4_0'"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf", dtype="q4_0")
    narrow = patch_model(tiny("llama", intermediate_size=40), "alibi")
    with pytest.raises(gguf.quants.QuantError, match="40"):
        hf_posenc.export_gguf(narrow, tmp_path / "model.gguf", dtype="q8_0")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = 1e5
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight has weights beyond"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf", dtype="float16")
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        hf_posenc.export_gguf(patch_model(tiny("llama"), "nope"), tmp_path / "model.gguf")


@NO_TOKENIZER
def test_a_file_is_whole_or_the_old_one(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_text("old")

    def fail(self):
        raise OSError("disk full")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(OSError, match="disk full"):
        hf_posenc.export_gguf(patch_model(tiny("llama"), "alibi"), tmp_path / "model.gguf")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


@NO_TOKENIZER
def test_a_model_from_a_gguf_file_is_calibrated_saved_loaded_and_exported(tmp_path):
    """transformers unpacks the file and still calls the model quantised, so that it neither saves nor trains it."""
    stock = tiny("llama")
    ids = random_ids(stock, 40)
    hf_posenc.export_gguf(patch_model(copy.deepcopy(stock), "rope"), tmp_path / "base.gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="base.gguf").eval()
    assert model.is_quantized
    np.testing.assert_allclose(logits_of(model, ids), logits_of(stock, ids), rtol=0, atol=TOLERANCE)
    windows = torch.randint(stock.config.vocab_size, (6, 16), generator=torch.Generator().manual_seed(2))
    choice = hf_posenc.choose_layers(model, windows, "nope", held_out=2)
    assert len(choice.costs) == stock.config.num_hidden_layers
    patch_model(model, "t5", seed=0)
    hf_posenc.calibrate(model, windows, held_out=2, matching=None)
    model.float().save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    loaded = hf_posenc.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(logits_of(loaded, ids), logits_of(model, ids))
    assert hf_posenc.unpatch_model(model).is_quantized

    swapped = hf_posenc.from_pretrained(tmp_path, gguf_file="base.gguf", scheme="alibi")
    expected = logits_of(patch_model(copy.deepcopy(stock), "alibi"), ids)
    np.testing.assert_allclose(logits_of(swapped, ids), expected, rtol=0, atol=TOLERANCE)
    hf_posenc.export_gguf(swapped, tmp_path / "swapped.gguf")
    computed = File(tmp_path / "swapped.gguf").logits(ids[0].numpy())
    np.testing.assert_allclose(computed, expected, rtol=0, atol=TOLERANCE)
    turned = hf_posenc.from_pretrained(tmp_path, gguf_file="base.gguf", scheme="rope", rope_theta=500.0)
    hf_posenc.export_stock(turned, tmp_path / "stock")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    np.testing.assert_allclose(logits_of(again, ids), logits_of(turned, ids), rtol=0, atol=TOLERANCE)


def test_a_rotation_that_transformers_cannot_read_back_is_said_at_both_ends(tmp_path):
    model = made("llama", "rope", scaling=LINEAR)
    with pytest.warns(UserWarning, match="gets no tokenizer"), pytest.warns(UserWarning, match="holds its rotation in"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    assert File(tmp_path / "model.gguf").keys["tokenizer.ggml.model"] == "no_vocab"
    with pytest.warns(UserWarning, match="turns by rope_theta alone"):
        plain = hf_posenc.from_pretrained(tmp_path, gguf_file="model.gguf", scheme="rope", rope_theta=300.0)
    ids = random_ids(model, 40)
    assert np.abs(logits_of(plain, ids) - logits_of(model, ids)).max() > APART


# ----------------------------------------------------------------------------------------------------------- tokenizers

SPACE = "\u2581"
WORDS = ("▁h", "el", "lo", "ello", "▁hello", "wo", "rl", "world")


def sentencepiece_tokenizer(without=()):
    """A tokenizer like LLaMA 2's. Every way to split a word into two tokens is a merge, but for those `without`."""
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *"helowrd", *WORDS]:
        vocabulary[token] = len(vocabulary)
    merges = [
        (word[:cut], word[cut:])
        for word in WORDS
        for cut in range(1, len(word))
        if word[:cut] in vocabulary and word[cut:] in vocabulary and (word[:cut], word[cut:]) not in without
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def metaspace_tokenizer(scheme="first"):
    """The same, with the pre-tokenizer that transformers gives LLaMA's tokenizers."""
    tokenizer = sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    return tokenizer


def repaired_tokenizer():
    """That one, after what the refusal says to do."""
    tokenizer = metaspace_tokenizer()
    rule = tokenizer.backend_tokenizer
    rule.pre_tokenizer = None
    rule.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return tokenizer


WORDS_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
"""In the tokenizer.json of LLaMA 3. Qwen 2's takes digits one by one."""
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
} | {
    name: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for name, expression in (("llama-bpe", WORDS_3), ("dbrx", WORDS_3), ("qwen2", WORDS_3.replace("{1,3}", "")))
}
MERGES = [
    *("l o", "h e", "l lo", "\u0120 w", "he llo", "1 2", "12 3", "123 4", "\u0120 1", "' s", "' S"),
    *("\u010a \u010a", "\u0120 \u0120", "( x", ") \u010a"),
]


def byte_level_tokenizer(split="gpt-2"):
    """A tokenizer like GPT-2's: bytes, a few merges, and a word that no merge makes."""

    def add(facts):
        facts["added_tokens"].clear()
        facts["model"]["ignore_merges"] = split == "llama-bpe"
        for merge in MERGES:
            facts["model"]["vocab"][merge.replace(" ", "")] = 256 + len(facts["model"]["merges"])
            facts["model"]["merges"].append(merge.split())
        facts["model"]["vocab"]["wow"] = 256 + len(MERGES)

    tokenizer = changed(byte_tokenizer(), add)
    tokenizer.backend_tokenizer.pre_tokenizer = SPLITS[split]
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"})
    return tokenizer


LLAMA_CPP_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA_CPP_WORDS = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_CPP = {
    "gpt-2": [LLAMA_CPP_GPT2],
    "smollm": [r"\p{N}", LLAMA_CPP_GPT2],
    "llama-bpe": [LLAMA_CPP_WORDS],
    "dbrx": [LLAMA_CPP_WORDS],
    "qwen2": [LLAMA_CPP_WORDS.replace("{1,3}", "")],
}
"""Expressions of src/llama-vocab.cpp. Each cuts the pieces of the one before into its matches and what lies between."""


def read_by_merges(file, text):
    """llama.cpp's byte-level BPE."""
    tokens, name = file.keys["tokenizer.ggml.tokens"], file.keys["tokenizer.ggml.pre"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(file.keys["tokenizer.ggml.merges"])}
    pieces = [text]
    for expression in LLAMA_CPP[name]:
        cut = regex.compile(f"({expression})")
        pieces = [part for piece in pieces for part in cut.split(piece) if part]
    found = []
    for piece in pieces:
        symbols = list("".join(letters for letters, _ in byte_level.pre_tokenize_str(piece)))
        if name == "llama-bpe" and "".join(symbols) in tokens:
            symbols = ["".join(symbols)]
        while ranked := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]:
            place = min(ranked)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        found += [tokens.index(symbol) for symbol in symbols]
    return found


byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def read_by_scores(file, text):
    """llama.cpp's SentencePiece: the neighbours whose token has the highest score are joined, the first of them first."""
    tokens = file.keys["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, file.keys["tokenizer.ggml.scores"], strict=True))
    pieces = list(SPACE + text.replace(" ", SPACE))
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not joined:
            break
        place = -max(joined)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    known = [[piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()] for piece in pieces]
    return [tokens.index(token) for piece in known for token in piece]


TEXTS = (
    *("hello world", "lo hell  wor", "rlello é wow", "ldoolhe", "he'll 12 wo, lo!\n", " lo", "wow  wow"),
    *("12345 x12 ²½ ٣١٢", "it's IT'S he'S", "a\n\n\nb \r\n c\t d  ", "f(x)\n(1234)", "   ", "\u00a0nbsp\u2003em"),
    *("日本語 12年", "😀👩‍👩‍👧 🇩🇪", "e\u0301 \u017f'\u017f don\u2019t", "Ünïcödé ß Ⅷ", "ab12cd34"),
)
SPECIAL = ("he</s> lo <s>wo<unk> x", "<|endoftext|> lo<|endoftext|>12", "</s></s>")


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, repaired_tokenizer])
def test_a_sentencepiece_tokenizer_is_in_the_file(make, tmp_path):
    tokenizer = make()
    model = patch_model(tiny("llama", vocab_size=len(tokenizer) + 5), "alibi")
    hf_posenc.export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)
    file = File(tmp_path / "model.gguf")
    assert file.keys["tokenizer.ggml.model"] == "llama"
    assert file.keys["tokenizer.ggml.tokens"][:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    types = file.keys["tokenizer.ggml.token_type"]
    assert types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE]
    assert types[len(tokenizer) - 1 :] == [NORMAL] + 5 * [UNUSED]
    assert (file.keys["tokenizer.ggml.bos_token_id"], file.keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert file.keys["tokenizer.ggml.add_bos_token"]
    assert not file.keys["tokenizer.ggml.add_eos_token"]
    for text in TEXTS:
        assert [1, *read_by_scores(file, text)] == tokenizer(text).input_ids


@pytest.mark.parametrize("split", SPLITS)
def test_a_byte_level_tokenizer_is_in_the_file(split, tmp_path):
    tokenizer = byte_level_tokenizer(split)
    tokenizer.chat_template = "{{ messages }}"
    model = patch_model(tiny("llama", vocab_size=len(tokenizer)), "alibi")
    hf_posenc.export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)
    file = File(tmp_path / "model.gguf")
    keys = file.keys
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", split)
    assert keys["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert keys["tokenizer.ggml.token_type"] == (len(tokenizer) - 1) * [NORMAL] + [CONTROL]
    assert keys["tokenizer.ggml.merges"] == MERGES
    assert keys["tokenizer.chat_template"] == "{{ messages }}"
    assert not keys["tokenizer.ggml.add_bos_token"]
    for text in TEXTS:
        assert read_by_merges(file, text) == tokenizer(text).input_ids, text
    for other in set(SPLITS) - {split}:
        tokens = [byte_level_tokenizer(other)(text).input_ids for text in TEXTS]
        assert tokens != [tokenizer(text).input_ids for text in TEXTS]
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # as Qwen's
    with pytest.warns(UserWarning, match=r"composes characters \(NFC\), and llama.cpp does not"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)


def changed(tokenizer, change):
    """A tokenizer with another tokenizer.json."""
    facts = json.loads(tokenizer.backend_tokenizer.to_str())
    change(facts)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(facts)))


def without_a_byte(facts):
    facts["model"].update(unk_token="wow")
    facts["model"]["vocab"]["another"] = facts["model"]["vocab"].pop("\u0103")


def around(tokenizer):
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def with_tokens(*words, **options):
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_tokens([AddedToken(word, special=False, **options) for word in words])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (lambda: sentencepiece_tokenizer(without=[("el", "lo")]), "'el' and 'lo' are not merged"),
        (lambda: with_tokens(*(f"<more{n}>" for n in range(40)), normalized=False), "the model only 300 rows"),
        (metaspace_tokenizer, "prepend_scheme='first'.*rule.pre_tokenizer = None"),
        (lambda: changed(byte_level_tokenizer(), lambda f: f.update(normalizer={"type": "Lowercase"})), "normalizer"),
        (lambda: changed(byte_level_tokenizer(), lambda f: f["model"].update(ignore_merges=True)), "pre-tokenizer"),
        (lambda: changed(byte_level_tokenizer(), without_a_byte), "reads a byte without a token .* as 'wow'"),
        (lambda: changed(byte_level_tokenizer(), lambda f: None), "no eos_token"),
        (lambda: around(sentencepiece_tokenizer()), "other tokens around"),
        (lambda: changed(byte_level_tokenizer(), lambda f: f["model"].update(dropout=0.1)), "dropout"),
        (lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))), "WordLevel"),
        (lambda: with_tokens("zq", normalized=False, single_word=True), "'zq' has single_word=True"),
        (lambda: with_tokens("zq", "qxy", normalized=False), "'qxy' can begin inside 'zq'"),
    ],
)
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(tokenizer, reason, tmp_path):
    model = patch_model(tiny("llama", vocab_size=300), "alibi")
    with pytest.raises(hf_posenc.UnsupportedModelError, match=f"tokenizer cannot be written.*{reason}"):
        hf_posenc.export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer())
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- llama.cpp


class Engine:
    """A file in llama.cpp: float32 caches, no flash attention, which would round to half precision."""

    def __init__(self, path):
        self.lib = pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python runs this")
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        assert self.model, f"llama.cpp does not load {path}"

    def logits(self, ids, vocab_size):
        options = self.lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 1024
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = options.flash_attn_type = 0
        context, batch = self.lib.llama_init_from_model(self.model, options), self.lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place], batch.logits[place] = int(token), place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert self.lib.llama_decode(context, batch) == 0
        rows = [self.lib.llama_get_logits_ith(context, place) for place in range(len(ids))]
        found = np.stack([np.ctypeslib.as_array(row, shape=(vocab_size,)).copy() for row in rows])
        self.lib.llama_free(context)
        return found

    def tokenize(self, text):
        vocabulary, words = self.lib.llama_model_get_vocab(self.model), text.encode()
        tokens = (self.lib.llama_token * 64)()
        count = self.lib.llama_tokenize(vocabulary, words, len(words), tokens, 64, True, True)
        return list(tokens)[:count]


@pytest.mark.slow
@NO_TOKENIZER
@pytest.mark.parametrize(("family", "scheme", "hyperparameters", "architecture"), CASES, ids=IDS)
def test_llama_cpp_computes_what_the_model_does(family, scheme, hyperparameters, architecture, tmp_path):
    model = made(family, scheme, **hyperparameters)
    hf_posenc.export_gguf(model, tmp_path / "model.gguf")
    engine = Engine(tmp_path / "model.gguf")
    for length in (64, 300, 700):
        ids = random_ids(model, length)
        computed = engine.logits(ids[0].tolist(), model.config.vocab_size)
        assert np.abs(computed - logits_of(model, ids)).max() < ENGINE_TOLERANCE
        other = logits_of(made(family, "nope" if scheme != "nope" else "alibi"), ids)
        assert np.abs(computed - other).max() > APART


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        sentencepiece_tokenizer,
        repaired_tokenizer,
        lambda: with_tokens("zq", "</s>zq", normalized=False),
        *(functools.partial(byte_level_tokenizer, split) for split in SPLITS),
    ],
)
def test_llama_cpp_reads_text_as_the_tokenizer_does(make, tmp_path):
    tokenizer = make()
    model = patch_model(tiny("llama", vocab_size=len(tokenizer)), "alibi")
    hf_posenc.export_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer)
    engine = Engine(tmp_path / "model.gguf")
    for text in (*TEXTS, *SPECIAL, "azqb zq", "</s>zq zq</s>"):
        assert engine.tokenize(text) == tokenizer(text).input_ids
