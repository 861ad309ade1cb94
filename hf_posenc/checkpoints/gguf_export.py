"""Export a patched model as a GGUF file, if a graph of llama.cpp computes the same."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel

from ..core.errors import NotPatchedError, UnsupportedModelError
from ..core.modules import owner_of
from ..families.base import language_config
from ..families.gguf_blocks import BYTE_LEVEL_BPE, BYTE_LEVEL_SPLITS, SENTENCEPIECE, GgufBlock
from ..model.base_model import BaseModel
from ..model.obstacles import check_unquantized
from ..model.patch_record import Patch, patch_of
from ..schemes.alibi import alibi_slopes
from ..transformers_glue.rotary import steady_rotation
from . import files
from .export import stock_form
from .saving import position_keys
from .wide_heads import UNTURNED, widened_model

FILE_TYPES = {"float32": (0, "F32"), "float16": (1, "F16"), "q8_0": (7, "Q8_0")}
"""Name of a dtype -> llama.cpp's number of files whose matrices have it, and its own name of the dtype."""

LARGEST_BIAS = 8.0
"""ALiBi's bias as llama.cpp says it: the first of H slopes is `2 ** (-8 / H)`."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""llama.cpp's types of tokens."""

_BYTES = {f"<0x{byte:02X}>" for byte in range(256)}
"""Tokens of SentencePiece that stand for bytes."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space

_SENTENCEPIECE = [
    {"type": "Prepend", "prepend": _SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
]
"""Normalizers of a tokenizer.json that do what llama.cpp does: a space before each text, and after each added token."""


def export_gguf(
    model: PreTrainedModel, path: str | os.PathLike[str], *, tokenizer: object = None, dtype: str = "float32"
) -> None:
    """Save a patched model as a GGUF file, if a graph of llama.cpp computes the same.

    llama.cpp has a few graphs, and these compute

    - `alibi` with the paper's slopes, on llama and mistral as `refact`, on gpt2 as `mpt`;
    - `rope` on llama and mistral, as `llama` with one factor per pair. A factor on cosines and sines (YaRN's) goes into
      the weights of queries and keys. Scalings whose angles depend on the length of the text are refused;
    - `transformer_xl` on what `export_stock` can write as a llama, as `llama` with wider heads; those of values, too,
      because the graph has one size;
    - `nope` on llama and mistral, as `llama` with factors under which no pair turns, and on gpt2 as `mpt`.

    Needs the package `gguf`: `pip install '.[gguf]'` in a clone.

    Args:
        model: a patched model with a language model head; it stays unchanged.
        path: the file; an existing one is replaced once the new one is complete.
        tokenizer: the model's fast tokenizer. With None the file has none and this warns: llama.cpp then computes
            logits of token ids, but can read no text.
        dtype: of matrices: `float32`, `float16`, or `q8_0`, blocks of 32 weights in 8 bits with a scale. Vectors are
            float32 always.

    Raises:
        ImportError: if the package `gguf` is missing.
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if no graph computes the same, the weights are quantised, or llama.cpp would split text
            differently. The message says why, and what can be exported. No file is written.
        ValueError: if `dtype` is another one, or cannot hold the weights. The package `gguf` refuses `q8_0` for rows
            that are no multiple of 32 weights.
    """
    if dtype not in FILE_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(FILE_TYPES)}, not {dtype!r}")
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: llama.cpp's own converter takes it")
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ImportError("GGUF files are written by the package gguf: pip install gguf") from error
    check_unquantized(model, "export the model")
    base = BaseModel.of(model)
    form = stock_form(patch, base)
    if is_wide := form is not None and form.waves and not form.within_length:
        model = widened_model(model, patch, form, for_gguf=True)
        base = BaseModel.of(model)
    block = base.family.gguf
    if block is None or language_config(model.config) is not model.config:
        raise _refusal(patch, base, f"llama.cpp has no graph for {base.name} that these schemes could use")
    architecture, factors, strength = _find_graph(patch, base, block, is_wide=is_wide)
    tensors = dict(_named_tensors(model, patch, base, block, biases=architecture == block.rotated))
    if architecture == block.rotated:
        heads = {"attn_q": base.dims.num_heads, "attn_k": base.dims.num_key_value_heads}
        for name, tensor in tensors.items():
            if (count := heads.get(name.split(".")[-2])) is not None:
                tensors[name] = _neighbouring_pairs(tensor.float() * strength, count)
    if factors is not None:
        tensors["rope_freqs.weight"] = factors
        warnings.warn(
            f"hf_posenc: {path} holds its rotation in rope_freqs.weight, which llama.cpp reads. transformers "
            "(gguf_file=) would compute a plain rotation: use export_stock for it",
            stacklevel=2,
        )
    spoken = {} if tokenizer is None else _tokenizer_facts(tokenizer, len(tensors["token_embd.weight"]))
    if tokenizer is None:
        warnings.warn(
            f"hf_posenc: {path} gets no tokenizer, because none was given: llama.cpp can read no text with it",
            stacklevel=2,
        )
    with files.replaced(Path(path)) as partial:
        writer: Any = gguf.GGUFWriter(partial, architecture)
        writer.add_name(base.name + " + " + patch.name)
        writer.add_file_type(FILE_TYPES[dtype][0])
        _add_sizes(writer, base, block, tensors)
        if architecture == block.rotated:
            writer.add_rope_dimension_count(base.dims.head_dim)
            writer.add_rope_freq_base(_theta(base))
        elif block.reads_bias:
            writer.add_max_alibi_bias(LARGEST_BIAS if _has_paper_slopes(base) else 0.0)
        if not spoken:
            writer.add_tokenizer_model("no_vocab")
        add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        for key, value in spoken.items():
            add[type(value)](f"tokenizer.{key}", value)
        _write_tensors(gguf, writer, tensors, dtype)


def _write_tensors(gguf: Any, writer: Any, tensors: dict[str, Tensor], dtype: str) -> None:
    """Add tensors to a file, matrices in `dtype`, and write the whole file. ValueError if `dtype` cannot hold one."""
    kinds = gguf.GGMLQuantizationType
    for name, tensor in tensors.items():
        array = tensor.detach().float().cpu().contiguous().numpy()
        kind = kinds[FILE_TYPES[dtype][1]] if array.ndim > 1 else kinds.F32
        if kind != kinds.F32 and abs(array).max() > torch.finfo(torch.float16).max:
            raise ValueError(f"{name} has weights beyond float16's largest number: use float32")
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _refusal(patch: Patch, base: BaseModel, reason: str) -> UnsupportedModelError:
    """Return an error that says why a model has no GGUF file, and which models have one."""
    return UnsupportedModelError(
        f"{patch.name} on {base.name} cannot be written to a GGUF file: {reason}. These can be exported: alibi with "
        "the paper's slopes, nope, and rope whose angles do not depend on the length of the text, on llama and "
        "mistral; alibi and nope on gpt2; each as the only scheme, in every layer, without a window; and "
        "transformer_xl where export_stock makes a llama of it. Otherwise try export_stock and llama.cpp's converter"
    )


def _find_graph(patch: Patch, base: BaseModel, block: GgufBlock, *, is_wide: bool) -> tuple[str, Tensor | None, float]:
    """Return the architecture that computes a patched model, its `rope_freqs`, and the factor on queries and keys.

    If `is_wide`, the base is a stock model with wider heads, which has the patch's positions in its rotation. llama.cpp
    divides the angles of pairs by `rope_freqs`, (D / 2,). None leaves them as they are.

    Raises:
        UnsupportedModelError: if no architecture computes the same.
    """
    scheme = patch.schemes[0]
    beside = f"the graphs do not compute {scheme.name}, which acts beside the base's positions"
    obstacles = {
        "a graph computes one scheme": len(patch.schemes) > 1 and not is_wide,
        beside: scheme.joins,
        "a graph computes the same scheme in every layer": len(base.layers_of(scheme)) != base.num_layers
        and not is_wide,
        "these graphs have no sliding window": scheme.window is not None or base.windows,
    }
    for setting, values in block.settings.items():
        value = getattr(base.config, setting, values[0])
        obstacles[f"config.{setting} is {value!r}, and the graph computes {values[0]!r}"] = value not in values
    if found := [reason for reason, is_so in obstacles.items() if is_so]:
        raise _refusal(patch, base, found[0])
    if is_wide or scheme.needs_queries:
        return str(block.rotated), *_rotation(patch, base, block)
    if base.layers_with_scores():
        if not _has_paper_slopes(base):
            raise _refusal(patch, base, "the graphs add ALiBi's bias with the paper's slopes, and no other term")
        return block.sloped, None, 1.0
    if scheme.answers_at_input(base) or any(scheme.answers(i, base) for i in range(base.num_layers)):
        raise _refusal(patch, base, "these graphs add no vectors for positions")
    if block.unpositioned is not None:
        return block.unpositioned, None, 1.0
    return str(block.rotated), torch.full((base.dims.head_dim // 2,), UNTURNED), 1.0


def _has_paper_slopes(base: BaseModel) -> bool:
    """Return whether every layer adds ALiBi's bias with the paper's slopes."""
    layers = base.layers_with_scores()
    expected = torch.tensor(alibi_slopes(base.dims.num_heads))
    for layer in layers:
        module = owner_of(base.modules.attention_of[layer].get_submodule("posenc"))
        form = module.form(expected)
        if form is None or form.line is None or not torch.equal(form.line.detach().cpu().float(), expected):
            return False
    return len(layers) == base.num_layers


def _rotation(patch: Patch, base: BaseModel, block: GgufBlock) -> tuple[Tensor | None, float]:
    """Return the `rope_freqs` of a patched model's rotation, (D / 2,) or None, and its factor on cosines and sines.

    Raises:
        UnsupportedModelError: if no architecture rotates, or the rotation depends on the length of the text.
    """
    if block.rotated is None or base.modules.rotary is None:
        raise _refusal(patch, base, "no graph for it rotates")
    size = base.dims.head_dim
    try:
        frequencies, factor = steady_rotation(base.modules.rotary, base.family.rotation.angles, base.length, size)
    except ValueError as error:
        raise _refusal(patch, base, str(error)) from error
    expected = _theta(base) ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    factors = torch.where(frequencies == 0, UNTURNED, expected / frequencies)
    is_plain = torch.allclose(factors, torch.ones_like(factors), rtol=0, atol=1e-6)
    return None if is_plain else factors.float(), factor


def _theta(base: BaseModel) -> float:
    """Return the base of the frequencies that the file says."""
    return float((getattr(base.config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def _named_tensors(
    model: PreTrainedModel, patch: Patch, base: BaseModel, block: GgufBlock, *, biases: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the GGUF name and the values of each weight, in the layout of the file but for the order of rotated pairs.

    Raises:
        UnsupportedModelError: if a weight has no place in the file, or the file needs one that the model lacks.
    """
    weights = model.state_dict()
    names = {id(module): name for name, module in model.named_modules()}
    places = {f"{names[id(base.modules.decoder)]}.{path}": name for path, name in block.decoder_tensors.items()}
    for index, layer in enumerate(base.modules.layers):
        start = names[id(layer)]
        places |= {f"{start}.{path}": f"blk.{index}.{name}" for path, name in block.layer_tensors.items()}
        found = {path: name for path, name in block.layer_biases.items() if biases and f"{start}.{path}" in weights}
        places |= {f"{start}.{path}": f"blk.{index}.{name}" for path, name in found.items()}
    head: Any = model.get_output_embeddings()
    if head is None:
        raise _refusal(patch, base, f"{type(model).__name__} has no language model head")
    places[f"{names[id(head)]}.weight"] = "output.weight"
    if missing := sorted(set(places) - set(weights)):
        raise _refusal(patch, base, f"the graph needs {missing[0]}, which the model lacks")
    if unplaced := sorted(set(weights) - set(places) - set(position_keys(model))):
        raise _refusal(patch, base, f"the graph has no place for {', '.join(unplaced[:3])}")
    for key, name in places.items():
        if name != "output.weight" or head.weight is not base.token_weight:
            yield name, weights[key].T if name.split(".", 2)[-1] in block.transposed else weights[key]


def _neighbouring_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows of a projection (heads * D, E), or of its bias: pairs `(u, u + D / 2)` become `(2u, 2u + 1)`."""
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _add_sizes(writer: Any, base: BaseModel, block: GgufBlock, tensors: dict[str, Tensor]) -> None:
    """Write the sizes of a model."""
    dims = base.dims
    writer.add_context_length(base.length)
    writer.add_embedding_length(dims.hidden_size)
    writer.add_block_count(base.num_layers)
    writer.add_feed_forward_length(len(tensors["blk.0.ffn_up.weight"]))
    writer.add_head_count(dims.num_heads)
    writer.add_head_count_kv(dims.num_key_value_heads)
    writer.add_key_length(dims.head_dim)
    writer.add_value_length(dims.head_dim)
    writer.add_vocab_size(len(tensors["token_embd.weight"]))
    add_epsilon = writer.add_layer_norm_rms_eps if block.uses_rms_norm else writer.add_layer_norm_eps
    add_epsilon(getattr(base.config, block.config_epsilon))


def _tokenizer_facts(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what a GGUF file says of a tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: number of rows of the model's token embedding.

    Returns:
        Name of a key after `tokenizer.` -> value. Tokens that the tokenizer lacks are marked as unused.

    Raises:
        UnsupportedModelError: if llama.cpp would split text differently, or the model has too few rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _no_tokenizer(f"{type(tokenizer).__name__} has no tokenizer.json")
    facts = json.loads(backend.to_str())
    model = facts["model"]
    if model.get("type") != "BPE":
        raise _no_tokenizer(f"it is a {model.get('type')} tokenizer")
    if any(model.get(option) for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")):
        raise _no_tokenizer("its merges have a prefix, a suffix or dropout")
    tokens = tokenizer.get_vocab()
    if tokens and max(tokens.values()) >= vocab_size:
        raise _no_tokenizer(f"it has token {max(tokens.values())}, and the model only {vocab_size} rows")
    merges = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if not merges:
        raise _no_tokenizer("it has no merges, and llama.cpp loads none without")
    _check_added_tokens(facts["added_tokens"], normalizes=facts["normalizer"] is not None)
    written: dict[str, Any]
    if (split := _byte_level_split(facts)) is not None:
        written = {"ggml.model": BYTE_LEVEL_BPE, "ggml.pre": split, "ggml.merges": [" ".join(m) for m in merges]}
    elif _is_sentencepiece(facts):
        scores = _scores(model["vocab"], merges)
        by_id = {index: token for token, index in tokens.items()}
        listed = [float(scores.get(by_id.get(index, ""), 0.0)) for index in range(vocab_size)]
        written = {"ggml.model": SENTENCEPIECE, "ggml.scores": listed, "ggml.add_space_prefix": True}
    else:
        raise _no_tokenizer("its normalizer or its pre-tokenizer is another one")
    if tokenizer.eos_token_id is None:
        raise _no_tokenizer("it has no eos_token, and llama.cpp would take another token for the end of a text")
    kinds = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in facts["added_tokens"]}
    if model.get("byte_fallback"):
        kinds = dict.fromkeys(_BYTES, BYTE) | kinds | {tokenizer.unk_token: UNKNOWN}
    names, types = [f"[UNUSED{index}]" for index in range(vocab_size)], [UNUSED] * vocab_size
    for token, index in tokens.items():
        names[index], types[index] = token, kinds.get(token, NORMAL)
    written |= {"ggml.tokens": names, "ggml.token_type": types}
    for role, name in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        if (index := getattr(tokenizer, f"{role}_token_id")) is not None:
            written[f"ggml.{name}_token_id"] = int(index)
    whole, text = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    begins, ends = whole[:1] == [tokenizer.bos_token_id], whole[-1:] == [tokenizer.eos_token_id]
    if whole != [tokenizer.bos_token_id] * begins + text + [tokenizer.eos_token_id] * ends:
        raise _no_tokenizer("it puts other tokens around a text than those of its beginning and its end")
    written |= {"ggml.add_bos_token": begins, "ggml.add_eos_token": ends}
    if isinstance(template := getattr(tokenizer, "chat_template", None), str):
        written["chat_template"] = template
    return written


def _no_tokenizer(reason: str) -> UnsupportedModelError:
    """Return an error about a tokenizer."""
    return UnsupportedModelError(
        f"this tokenizer cannot be written to a GGUF file: {reason}. Two kinds can: byte-level BPE that splits text as "
        f"GPT-2, SmolLM, LLaMA 3 or Qwen 2 ({', '.join(BYTE_LEVEL_SPLITS)}), and BPE with SentencePiece's spaces and "
        "bytes, as LLaMA 2's. With tokenizer=None (--no-tokenizer) the file has none, and takes token ids"
    )


def _check_added_tokens(tokens: list[dict[str, Any]], *, normalizes: bool) -> None:
    """Raise UnsupportedModelError unless llama.cpp finds the same added tokens in a text: as they are, anywhere.

    It looks for the longest first, and transformers for the first in the text. That makes a difference where one can
    end inside another.

    Args:
        tokens: `added_tokens` of a tokenizer.json.
        normalizes: whether the tokenizer has a normalizer.
    """
    for token in tokens:
        checked = ["single_word", "lstrip", "rstrip", *(["normalized"] if normalizes else [])]
        if options := [name for name in checked if token[name]]:
            raise _no_tokenizer(
                f"its added token {token['content']!r} has {options[0]}=True, and llama.cpp finds it wherever the text "
                f"has it: add it as AddedToken(..., {options[0]}=False)"
            )
    for first, second in itertools.permutations((token["content"] for token in tokens), 2):
        joined = any(first.endswith(second[:cut]) for cut in range(1, min(len(first), len(second))))
        if joined and len(set(first + second)) > 1:
            raise _no_tokenizer(
                f"its added token {second!r} can begin inside {first!r}: llama.cpp takes the longer one"
            )


def _byte_level_split(facts: dict[str, Any]) -> str | None:
    """Return llama.cpp's name of the rule by which a byte-level tokenizer splits text; None for another tokenizer.

    A tokenizer that composes characters (NFC) is warned of, because llama.cpp does not.
    """
    before, model, normalizer = facts["pre_tokenizer"] or {}, facts["model"], facts["normalizer"]
    steps = [
        {key: value for key, value in step.items() if key != "trim_offsets"}
        for step in before.get("pretokenizers", [before])
    ]
    rule = (steps, bool(model.get("ignore_merges")))
    name = next((name for name, known in BYTE_LEVEL_SPLITS.items() if known == rule), None)
    if name is None or model.get("byte_fallback") or normalizer not in (None, {"type": "NFC"}):
        return None
    lacking = set(pre_tokenizers.ByteLevel.alphabet()) - set(model["vocab"])
    if lacking and model.get("unk_token") is not None:
        unknown = model["unk_token"]
        raise _no_tokenizer(f"it reads a byte without a token ({min(lacking)!r}) as {unknown!r}, llama.cpp as none")
    if normalizer is not None:
        warnings.warn(
            "hf_posenc: this tokenizer composes characters (NFC), and llama.cpp does not: it reads decomposed text as "
            "other tokens",
            stacklevel=4,
        )
    return name


def _is_sentencepiece(facts: dict[str, Any]) -> bool:
    """Return whether a tokenizer replaces spaces, puts one before each piece of text, and falls back to bytes."""
    before, model = facts["pre_tokenizer"] or {}, facts["model"]
    if before.get("type") == "Metaspace":
        raise _no_tokenizer(
            f"its pre-tokenizer Metaspace (prepend_scheme={before['prepend_scheme']!r}) puts spaces into other places "
            "than llama.cpp. After rule = tokenizer.backend_tokenizer; rule.pre_tokenizer = None; rule.normalizer = "
            f"normalizers.Sequence([normalizers.Prepend({_SPACE!r}), normalizers.Replace(' ', {_SPACE!r})]) it fits"
        )
    return (
        not before
        and (facts["normalizer"] or {}).get("normalizers") == _SENTENCEPIECE
        and bool(model.get("byte_fallback"))
        and _BYTES <= model["vocab"].keys()
        and not model.get("ignore_merges")
    )


def _scores(vocabulary: dict[str, int], merges: list[tuple[str, ...]]) -> dict[str, float]:
    """Return the score of each merged token: the later it is merged, the lower.

    llama.cpp merges any two neighbours that make a token, the one with the highest score first. So each way to split a
    token into two must be a merge, and the merges of one token must follow each other.

    Raises:
        UnsupportedModelError: if that is not so.
    """
    scores: dict[str, float] = {}
    last = ""
    for left, right in merges:
        token = left + right
        if token != last and token in scores:
            raise _no_tokenizer(f"its merges of {token!r} do not follow each other")
        scores.setdefault(token, -float(len(scores) + 1))
        last = token
    known = set(merges)
    for token in vocabulary:
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in known:
                raise _no_tokenizer(f"{pair[0]!r} and {pair[1]!r} are not merged to {token!r}")
    return scores
