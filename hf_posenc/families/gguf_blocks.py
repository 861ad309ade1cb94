"""Architectures of llama.cpp that compute the blocks of a family: their names, tensors and conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BYTE_LEVEL_BPE = "gpt2"
"""llama.cpp's name of byte-level BPE tokenizers."""

SENTENCEPIECE = "llama"
"""llama.cpp's name of SentencePiece tokenizers."""

_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_BYTES = _GPT2 | {"use_regex": False}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _words(number: str) -> dict[str, Any]:
    """Return the step that splits text into words as LLaMA 3 and Qwen 2 do, which differ in their numbers."""
    expression = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + number
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


BYTE_LEVEL_SPLITS = {
    "gpt-2": ([_GPT2], False),
    "smollm": ([_DIGITS, _GPT2], False),
    "llama-bpe": ([_words(r"\p{N}{1,3}"), _BYTES], True),
    "dbrx": ([_words(r"\p{N}{1,3}"), _BYTES], False),
    "qwen2": ([_words(r"\p{N}"), _BYTES], False),
}
"""llama.cpp's name of a rule that splits text before byte-level BPE -> the same steps in a tokenizer.json, and whether
a word that is a token is taken as it is, without merges."""


@dataclass(frozen=True, kw_only=True)
class GgufBlock:
    """Where the weights of a family go in a GGUF file, and which graphs of llama.cpp compute with them.

    Attributes:
        rotated: architecture whose graph rotates queries and keys, by neighbouring dimensions and with one factor per
            pair in `rope_freqs.weight`. None means that there is none.
        sloped: architecture whose graph adds ALiBi's bias and rotates nothing.
        unpositioned: architecture whose graph adds nothing if the file says so. None means `rotated`, with factors
            under which no pair turns.
        reads_bias: whether `sloped` reads the largest bias from the file; otherwise its code has 8.
        decoder_tensors: path of a parameter from the decoder -> its GGUF name.
        layer_tensors: path of a parameter from a layer -> its GGUF name after `blk.N.`.
        layer_biases: the same of biases that only the graph `rotated` adds, where the model has them.
        transposed: GGUF names, with their suffix, of weights that the family keeps as (inputs, outputs).
        config_epsilon: attribute of the config with the epsilon of norms.
        uses_rms_norm: whether norms are RMSNorm; otherwise they are LayerNorm.
        settings: attribute of the config -> the values that the graphs compute. A missing attribute is accepted.
    """

    rotated: str | None
    sloped: str
    unpositioned: str | None
    reads_bias: bool
    decoder_tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    transposed: tuple[str, ...]
    config_epsilon: str
    uses_rms_norm: bool
    settings: Mapping[str, tuple[Any, ...]]
    layer_biases: Mapping[str, str] = field(default_factory=dict)


LLAMA_BLOCK = GgufBlock(
    rotated="llama",
    sloped="refact",
    unpositioned=None,
    reads_bias=False,
    decoder_tensors={"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight"},
    layer_tensors={
        "input_layernorm.weight": "attn_norm.weight",
        "self_attn.q_proj.weight": "attn_q.weight",
        "self_attn.k_proj.weight": "attn_k.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "mlp.gate_proj.weight": "ffn_gate.weight",
        "mlp.up_proj.weight": "ffn_up.weight",
        "mlp.down_proj.weight": "ffn_down.weight",
    },
    transposed=(),
    config_epsilon="rms_norm_eps",
    uses_rms_norm=True,
    settings={"hidden_act": ("silu",)},
    layer_biases={
        f"self_attn.{letter}_proj.bias": f"attn_{name}.bias"
        for letter, name in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()
    },
)
"""The block of LLaMA."""

GPT2_BLOCK = GgufBlock(
    rotated=None,
    sloped="mpt",
    unpositioned="mpt",
    reads_bias=True,
    decoder_tensors={
        "wte.weight": "token_embd.weight",
        "ln_f.weight": "output_norm.weight",
        "ln_f.bias": "output_norm.bias",
    },
    layer_tensors={
        f"{module}.{parameter}": f"{name}.{parameter}"
        for module, name in {
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        }.items()
        for parameter in ("weight", "bias")
    },
    transposed=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
    config_epsilon="layer_norm_epsilon",
    uses_rms_norm=False,
    settings={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    },
)
"""The block of GPT-2. llama.cpp's MPT computes the same, without the table of positions."""
