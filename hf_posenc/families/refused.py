"""Model types that are not served, by reason. Whoever describes one as a `Family` takes it off here."""

from __future__ import annotations

from importlib.metadata import version

DECODER_HALF = (
    "it is the decoder half of an encoder-decoder, whose layers also attend to another sequence, where no scheme is "
    "defined"
)

_TYPES = {
    "it is an encoder, a decoder by a setting at most, and schemes are defined for keys at or before the query": (
        "albert bert bert-generation big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra "
        "ernie esm esmc eurobert flaubert fnet funnel gte ibert jina_embeddings_v3 layoutlm longformer luke "
        "megatron-bert mobilebert modernbert mpnet mra neomme nomic_bert nystromformer perceiver rembert roberta "
        "roberta-prelayernorm roc_bert roformer squeezebert tapas ultrabert xlm xlm-roberta xlm-roberta-xl xmod yoso"
    ),
    DECODER_HALF: (
        "bart bigbird_pegasus blenderbot blenderbot-small blip_text_model marian mbart musicgen musicgen_decoder "
        "musicgen_melody musicgen_melody_decoder mvp pegasus plbart prophetnet trocr whisper"
    ),
    "it has no attention: order is in its recurrence, and there is no position encoding to replace": (
        "falcon_mamba mamba mamba2 rwkv xlstm"
    ),
    "its tokens see each other in both directions, and every scheme is defined for keys at or before the query": (
        "diffusion_gemma_text git pi0"
    ),
    # Learned indexers that choose keys, biases from hidden states, compressed keys, two softmaxes, hashing.
    "its attention computes scores or positions in a way of its own, which is not supported yet": (
        "axk2 beam cpmant ctrl deepseek_v32 deepseek_v4 diffllama doge dots3_note_text glm5_next_text glm_moe_dsa "
        "hy_v4 minimax_m3_vl_text mistral_large4_text qwen4_exp_text reformer unlimited_ocr_text xlnet zaya"
    ),
    # Attentions that layers share, layers with two of them, with a rotary module each, or run more than once.
    "its layers and attentions are arranged in a way of their own, which is not supported yet": (
        "blt gemma4_assistant gemma4_unified_assistant hrm_text idefics kyutai_speech_to_text longcat_flash moshi "
        "zamba zamba2"
    ),
    "its language model reads pictures or sounds in a way of its own, which is not supported yet": (
        "cohere_compass_text mllama_text_model phi4_multimodal voxtral_realtime_text"
    ),
    "its language model is in its thinker, a multimodal model of its own: patch and save `model.thinker`": (
        "qwen2_5_omni qwen3_omni_moe"
    ),
    # hyperclovax is left to the package that is the example of how to serve one from outside.
    "it is not supported yet: install or import the package that brings its family, or describe it as a Family": (
        "hyperclovax kosmos_2_5_text_model kosmos_2_text_model recurrent_gemma"
    ),
}

REFUSED = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}
"""Model type -> what stands in the way, a clause that a user is told."""

NEWER = {"cosmos3_edge_text", "dbrx", "inkling2_text", "inkling_text", "mistral4", "paddleocr_vl_text"}
"""Model types that were tested without a failure from transformers 5.23 on.

Releases from 5.17 on have these types too, but their configs or classes differ."""


def missing_release(model_type: str) -> str | None:
    """Return the release of transformers that a model type needs, or None if the installed one is new enough."""
    installed = tuple(map(int, version("transformers").split(".")[:2]))
    return "5.23" if model_type in NEWER and installed < (5, 23) else None
