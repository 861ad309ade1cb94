"""Export a patched model as a GGUF file, if a graph of llama.cpp computes the same."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import NotPatchedError, UnsupportedModelError
from ..families.base import language_config
from ..families.gguf_blocks import GgufBlock
from ..live.base_model import BaseModel
from ..live.obstacles import check_unquantized
from ..live.patch_record import Patch, patch_of
from ..modules import owner_of
from ..schemes.alibi import alibi_slopes
from ..upstream.rotary import by_pair
from . import files
from .gguf_tokenizers import tokenizer_facts
from .loading_weights import position_keys

FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7}
"""Name of a dtype -> llama.cpp's number of files whose matrices have it."""

LARGEST_BIAS = 8.0
"""ALiBi's bias as llama.cpp says it: the first of H slopes is `2 ** (-8 / H)`."""

UNTURNED = 1e30
"""Factor of a pair that does not turn: llama.cpp divides its angle by this number."""

BLOCK = 32
"""Number of weights of a row that `q8_0` gives one scale."""

TABLE = """These can be exported:
  scheme                             model types      architecture in the file
  alibi, with the paper's slopes     llama, mistral   refact
  rope, of which no angle depends
    on the length of the text        llama, mistral   llama, with a factor per pair
  nope                               llama, mistral   llama, with factors under which nothing turns
  alibi, with the paper's slopes     gpt2             mpt
  nope                               gpt2             mpt
The scheme must be the only one, in every layer, without a window."""


def export_gguf(
    model: PreTrainedModel, path: str | os.PathLike[str], *, tokenizer: object = None, dtype: str = "float32"
) -> None:
    """Save a patched model as a GGUF file, if a graph of llama.cpp computes the same.

    llama.cpp has a few graphs, and these compute

    - `alibi` with the paper's slopes, on llama and mistral as `refact`, on gpt2 as `mpt`;
    - `rope` on llama and mistral, as `llama` with one factor per pair. A factor on cosines and sines (YaRN's) goes into
      the weights of queries and keys. Scalings whose angles depend on the length of the text are refused;
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
        ValueError: if `dtype` is another one, or cannot hold the weights.
    """
    if dtype not in FILE_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(FILE_TYPES)}, not {dtype!r}")
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(
            f"this {type(model).__name__} is not patched: save it with save_pretrained and use llama.cpp's converter"
        )
    gguf = _import_gguf()
    check_unquantized(model, "export the model")
    base = BaseModel.of(model)
    block = base.family.gguf
    if block is None or language_config(model.config) is not model.config:
        raise _refusal(patch, base, f"llama.cpp has no graph for {base.name} that these schemes could use")
    architecture, frequencies, strength = _find_graph(patch, base, block)
    tensors = dict(_named_tensors(model, patch, base, block))
    if architecture == block.rotated:
        heads = {"attn_q.weight": base.dims.num_heads, "attn_k.weight": base.dims.num_key_value_heads}
        for name, tensor in tensors.items():
            if (count := heads.get(name.split(".", 2)[-1])) is not None:
                tensors[name] = _neighbouring_pairs(tensor.float() * strength, count)
    _check_fits(tensors, dtype)
    spoken = {} if tokenizer is None else tokenizer_facts(tokenizer, len(tensors["token_embd.weight"]))
    if tokenizer is None:
        warnings.warn(
            f"hf_posenc: {path} gets no tokenizer, because none was given: llama.cpp can read no text with it",
            stacklevel=2,
        )
    with files.replaced(Path(path)) as partial:
        writer: Any = gguf.GGUFWriter(partial, architecture)
        writer.add_name(base.name + " + " + patch.name)
        writer.add_file_type(FILE_TYPES[dtype])
        _add_sizes(writer, base, block, tensors)
        if architecture == block.rotated:
            if (factors := _add_rotation(writer, base, frequencies)) is not None:
                tensors["rope_freqs.weight"] = factors
        elif block.reads_bias:
            writer.add_max_alibi_bias(LARGEST_BIAS if _has_paper_slopes(base) else 0.0)
        if not spoken:
            writer.add_tokenizer_model("no_vocab")
        for key, value in spoken.items():
            _add(writer, f"tokenizer.{key}", value)
        _write_tensors(gguf, writer, tensors, dtype)


def _import_gguf() -> Any:
    """Return the package `gguf`; ImportError that says how to install it."""
    try:
        import gguf
    except ImportError:
        raise ImportError(
            "GGUF files need the package gguf: install hf_posenc with its extra gguf, or pip install 'gguf>=0.19,<0.20'"
        ) from None
    return gguf


def _write_tensors(gguf: Any, writer: Any, tensors: dict[str, Tensor], dtype: str) -> None:
    """Add tensors to a file, matrices in `dtype`, and write the whole file."""
    quantised = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in tensors.items():
        array = tensor.detach().float().cpu().contiguous().numpy()
        if array.ndim < 2 or dtype == "float32":
            writer.add_tensor(name, array)
        elif dtype == "float16":
            writer.add_tensor(name, array.astype("float16"))
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _refusal(patch: Patch, base: BaseModel, reason: str) -> UnsupportedModelError:
    """Return an error that says why a model has no GGUF file, and which models have one."""
    return UnsupportedModelError(f"{patch.name} on {base.name} cannot be written to a GGUF file: {reason}.\n{TABLE}")


def _find_graph(patch: Patch, base: BaseModel, block: GgufBlock) -> tuple[str, Tensor | None, float]:
    """Return the architecture that computes a patched model, its frequencies, and the factor on queries and keys.

    The frequencies are (D / 2,), in float64 radians per token, or None without a rotation.

    Raises:
        UnsupportedModelError: if no architecture computes the same.
    """
    if len(patch.schemes) != 1:
        raise _refusal(patch, base, "a graph computes one scheme")
    scheme = patch.schemes[0]
    if scheme.acts_on.joins():
        raise _refusal(patch, base, f"the graphs do not compute {scheme.name}, which acts beside the base's positions")
    if len(base.layers_of(scheme)) != base.num_layers:
        raise _refusal(patch, base, "a graph computes the same scheme in every layer")
    if scheme.window is not None or base.windows:
        raise _refusal(patch, base, "these graphs have no sliding window")
    for setting, values in block.settings.items():
        value = getattr(base.config, setting, values[0])
        if value not in values:
            raise _refusal(patch, base, f"config.{setting} is {value!r}, and the graph computes {values[0]!r}")
    if scheme.acts_on.needs_queries():
        frequencies, strength = _rotation(patch, base, block)
        return str(block.rotated), frequencies, strength
    if base.layers_with_scores():
        if not _has_paper_slopes(base):
            raise _refusal(patch, base, "the graphs add ALiBi's bias with the paper's slopes, and no other term")
        return block.sloped, None, 1.0
    if scheme.acts_on.answers_at_input(base) or any(scheme.acts_on.answers(i, base) for i in range(base.num_layers)):
        raise _refusal(patch, base, "these graphs add no vectors for positions")
    return str(block.unpositioned or block.rotated), None, 1.0


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


def _rotation(patch: Patch, base: BaseModel, block: GgufBlock) -> tuple[Tensor, float]:
    """Return the frequencies of a patched model's rotation, (D / 2,) in radians, and its factor on cosines and sines.

    Raises:
        UnsupportedModelError: if no architecture rotates, or the rotation depends on the length of the text.
    """
    if block.rotated is None or base.modules.rotary is None:
        raise _refusal(patch, base, "no graph for it rotates")
    rotary = copy.deepcopy(base.modules.rotary).cpu()  # some keep the frequencies of the last call
    found = []
    for last in (2, 16 * (base.length or 4096)):
        cos, sin = by_pair(rotary(torch.zeros(1), torch.tensor([[1, last - 1]])), base.family.rotation.angles)
        found.append((cos[0, 0].double(), sin[0, 0].double()))
    (cos, sin), (later_cos, later_sin) = found
    if not (torch.equal(cos, later_cos) and torch.equal(sin, later_sin)):
        raise _refusal(patch, base, "its angles depend on the length of the text")
    if 2 * len(cos) != base.dims.head_dim:
        raise _refusal(patch, base, "it rotates a part of each head")
    strength = torch.hypot(cos, sin)
    if not torch.allclose(strength, strength[:1], rtol=1e-5):
        raise _refusal(patch, base, "it scales pairs differently")
    return torch.atan2(sin, cos), round(float(strength.mean()), 6) if abs(strength.mean() - 1) > 1e-6 else 1.0


def _named_tensors(
    model: PreTrainedModel, patch: Patch, base: BaseModel, block: GgufBlock
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
    head: Any = model.get_output_embeddings()
    if head is None:
        raise _refusal(patch, base, f"{type(model).__name__} has no language model head")
    embedding = base.token_weight
    places[f"{names[id(head)]}.weight"] = "output.weight"
    unplaced = set(weights) - set(places) - set(position_keys(model))
    if missing := sorted(set(places) - set(weights)):
        raise _refusal(patch, base, f"the graph needs {missing[0]}, which the model lacks")
    if unplaced:
        raise _refusal(patch, base, f"the graph has no place for {', '.join(sorted(unplaced)[:3])}")
    for key, name in places.items():
        if name == "output.weight" and head.weight is embedding:
            continue
        yield name, weights[key].T if name.split(".", 2)[-1] in block.transposed else weights[key]


def _neighbouring_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a projection (heads * D, E) so that pairs `(u, u + D / 2)` become `(2u, 2u + 1)`."""
    size = len(weight) // heads
    return weight.view(heads, 2, size // 2, -1).transpose(1, 2).reshape(len(weight), -1)


def _check_fits(tensors: dict[str, Tensor], dtype: str) -> None:
    """Raise ValueError if a dtype cannot hold a matrix."""
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and dtype == "q8_0" and tensor.shape[1] % BLOCK:
            raise ValueError(
                f"q8_0 gives {BLOCK} weights of a row one scale, and rows of {name} have {tensor.shape[1]}: use float16"
            )
        limit = torch.finfo(torch.float16).max
        if tensor.ndim == 2 and dtype != "float32" and float(tensor.abs().max()) > limit:
            raise ValueError(f"{name} has weights beyond {limit}, float16's largest number: use float32")


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


def _add_rotation(writer: Any, base: BaseModel, frequencies: Tensor | None) -> Tensor | None:
    """Write the base of the frequencies; return the factors by which llama.cpp divides them, (D / 2,), if need be."""
    size = base.dims.head_dim
    theta = float((getattr(base.config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(theta)
    if frequencies is None:
        return torch.full((size // 2,), UNTURNED)
    expected = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    factors = torch.where(frequencies == 0, UNTURNED, expected / frequencies)
    return None if torch.allclose(factors, torch.ones_like(factors), rtol=0, atol=1e-6) else factors.float()


def _add(writer: Any, key: str, value: Any) -> None:
    """Write one value of a tokenizer."""
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)
