"""A plugin for axolotl: the model is patched and calibrated after it is loaded, before an adapter is put around it.

In axolotl's configuration, with this file where Python finds it (axolotl trains on without a plugin that it cannot
import, and says so only in its log):

    plugins:
      - axolotl_plugin.PositionEncoding
    position_encoding: transformer_xl
    position_encoding_text: book.txt # to calibrate with: a few hundred windows are enough
    learning_rate: 0.0003            # at 1e-3 calibrated models got worse
    attn_implementation: sdpa        # flash attention cannot carry a scheme on scores, and is refused
    lora_modules_to_save: [posenc]   # with an adapter: train and save the scheme's parameters whole

A base that is loaded in 4 or 8 bits cannot be calibrated any more: calibrate it before (`hf-posenc calibrate`), give the
folder as `base_model`, and leave `position_encoding` out.
"""

from pathlib import Path

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import AutoTokenizer

import hf_posenc


class PositionEncodingArgs(BaseModel):
    """The plugin's keys in axolotl's configuration."""

    position_encoding: str | None = None
    position_encoding_text: str | None = None


class PositionEncoding(BasePlugin):
    """A plugin that patches and calibrates the model that axolotl built."""

    def get_input_args(self):
        """Return the dotted name of the class of the plugin's keys."""
        return f"{__name__}.{PositionEncodingArgs.__name__}"

    def post_model_build(self, cfg, model):
        """Patch and calibrate the stock model: axolotl calls this."""
        if cfg.position_encoding is None:
            return
        if cfg.position_encoding_text is None:
            raise ValueError("position_encoding_text is missing: the text to calibrate the swap with")
        tokenizer = AutoTokenizer.from_pretrained(cfg.tokenizer_config or cfg.base_model)
        text = Path(cfg.position_encoding_text).read_text(encoding="utf-8")
        tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
        length = min(256, model.config.max_position_embeddings)
        hf_posenc.patch_model(model, cfg.position_encoding, seed=0)
        print(hf_posenc.calibrate(model, tokens.unfold(0, length, length)[:400], matching=hf_posenc.Matching(steps=50)))

    def post_model_load(self, cfg, model):
        """Check that every layer still responds to the scheme: axolotl calls this last, with the adapter around the model."""
        if cfg.position_encoding is not None:
            report = hf_posenc.verify(model)
            if not report:
                raise RuntimeError(str(report))
