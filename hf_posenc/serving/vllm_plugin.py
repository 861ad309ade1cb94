"""vLLM's entry point: patched LLaMAs and Mistrals, served from the folder that `save_pretrained` writes.

vLLM calls `register` in each of its processes. `alibi`, with trained slopes, too, runs by the slopes of vLLM's own
attention; `transformer_xl` over wider heads; `rope` and `nope` by vLLM's rotation. Other schemes are refused.
"""

ARCHITECTURES = ("PosEncLlamaForCausalLM", "PosEncMistralForCausalLM")
"""Classes of patched models that vLLM's LLaMA can compute."""


def register() -> None:
    """Tell vLLM who serves patched checkpoints."""
    from vllm import ModelRegistry

    import hf_posenc  # noqa: F401  registers the model types

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, "hf_posenc.serving.vllm_model:PosEncLlama")
