"""A model type that transformers lacks, with its classes: LLaMA's, and a table of positions beside the rotation."""

from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from hf_posenc import Family
from hf_posenc.families import Names


class StrangerConfig(LlamaConfig):
    model_type = "stranger"


class StrangerModel(LlamaModel):
    config_class = StrangerConfig

    def __init__(self, config):
        super().__init__(config)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = (input_ids.new_ones(input_ids.shape[1]).cumsum(0) - 1 + cached)[None]
        states = self.embed_tokens(input_ids) + self.places(position_ids)
        return super().forward(
            None, attention_mask, position_ids, past_key_values, **{**kwargs, "inputs_embeds": states}
        )


class StrangerForCausalLM(LlamaForCausalLM):
    config_class = StrangerConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = StrangerModel(config)
        self.post_init()


AutoConfig.register("stranger", StrangerConfig)
AutoModel.register(StrangerConfig, StrangerModel)
AutoModelForCausalLM.register(StrangerConfig, StrangerForCausalLM)

STRANGER = Family(model_types=("stranger",), names=Names(position_table="places"))
