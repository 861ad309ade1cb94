"""A plugin for axolotl: the model is patched after it is loaded and before an adapter is put around it.

In axolotl's configuration, with this file where Python finds it (axolotl trains on without a plugin that it cannot
import, and says so only in its log):

    plugins:
      - axolotl_plugin.PositionEncoding
    position_encoding: alibi
    attn_implementation: sdpa        # flash attention cannot carry a scheme on scores, and is refused
    lora_modules_to_save: [posenc]   # with an adapter: train and save the scheme's parameters whole
"""

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

import hf_posenc


class PositionEncodingArgs(BaseModel):
    """What the plugin adds to axolotl's configuration."""

    position_encoding: str | None = None


class PositionEncoding(BasePlugin):
    """Patches the model that axolotl built."""

    def get_input_args(self):
        """The dotted name of the options that this plugin reads."""
        return f"{__name__}.{PositionEncodingArgs.__name__}"

    def post_model_build(self, cfg, model):
        """Axolotl calls this with the stock model."""
        if cfg.position_encoding is not None:
            hf_posenc.patch_model(model, cfg.position_encoding)

    def post_model_load(self, cfg, model):
        """Axolotl calls this last, with the adapter around the model: every layer has to answer to the scheme still."""
        if cfg.position_encoding is not None:
            report = hf_posenc.verify(model)
            if not report:
                raise RuntimeError(str(report))
