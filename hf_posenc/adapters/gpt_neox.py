"""GPT-NeoX and Pythia: partial rotation; layers take the cache as `layer_past`."""

from .base import Adapter

ADAPTER = Adapter(
    model_types=("gpt_neox",),
    attention="attention",
    token_embedding="embed_in",
    slices_rotary=True,
)
