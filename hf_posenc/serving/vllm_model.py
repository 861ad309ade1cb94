"""vLLM's LLaMA with the positions of a patched checkpoint, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.utils import extract_layer_index

from ..loading import from_pretrained
from .as_llama import AsLlama, Layer, as_llama


class PosEncAttention(LlamaAttention):
    """The attention of one layer: with ALiBi's slopes, with a rotation, or without positions."""

    attn: Any

    def __init__(self, config: Any, *arguments: Any, prefix: str, cache_config: Any = None, **keywords: Any) -> None:
        """Give vLLM's kernel the slopes of the heads on this device, and the window."""
        self.positions: Layer = config.posenc_layers[extract_layer_index(prefix)]
        super().__init__(config, *arguments, prefix=prefix, cache_config=cache_config, **keywords)
        # LLaMA's constructor hands no slopes on, and kernels are chosen by them: so make the kernel again.
        get_current_vllm_config().compilation_config.static_forward_context.pop(self.attn.layer_name)
        slopes, first = self.positions.slopes, get_tensor_model_parallel_rank() * self.num_heads
        self.attn = Attention(
            self.num_heads,
            self.head_dim,
            self.scaling,
            num_kv_heads=self.num_kv_heads,
            alibi_slopes=None if slopes is None else slopes[first : first + self.num_heads],
            cache_config=cache_config,
            quant_config=keywords.get("quant_config"),
            per_layer_sliding_window=self.positions.window,
            prefix=self.attn.layer_name,
        )

    def _init_rotary_emb(self, *arguments: Any, **keywords: Any) -> None:
        if self.positions.turned:
            super()._init_rotary_emb(*arguments, **keywords)
        else:
            self.rotary_emb = lambda positions, query, key: (query, key)


class PosEncLayer(LlamaDecoderLayer):
    """A decoder layer with this attention."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Make the layer."""
        super().__init__(*arguments, **keywords, attn_layer_type=PosEncAttention)


class PosEncLlama(LlamaForCausalLM):
    """A patched LLaMA or Mistral."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Load the checkpoint, and make the model that computes the same."""
        made: AsLlama = as_llama(from_pretrained(vllm_config.model_config.model))
        made.config.posenc_layers = made.layers
        self.made: dict[str, Tensor] = made.weights
        super().__init__(vllm_config=vllm_config.with_hf_config(made.config), prefix=prefix)

    def _init_model(self, vllm_config: Any, prefix: str = "", layer_type: type = LlamaDecoderLayer) -> LlamaModel:
        return LlamaModel(vllm_config=vllm_config, prefix=prefix, layer_type=PosEncLayer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights that were made of the checkpoint, in place of those in its files."""
        made, self.made = self.made, {}
        loaded: set[str] = super().load_weights(made.items())
        return loaded
