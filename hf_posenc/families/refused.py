"""Model types that are not served, each with its reason. Whoever describes one as a `Family` takes it off here."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why some model types cannot be patched.

    Attributes:
        model_types: the `config.model_type` values.
        reason: what stands in the way, a clause that a user is told.
    """

    model_types: tuple[str, ...]
    reason: str


ENCODER = "it is an encoder, a decoder by a setting at most, and schemes are defined for keys at or before the query"
DECODER_HALF = (
    "it is the decoder half of an encoder-decoder, whose layers also attend to another sequence, where no scheme is "
    "defined"
)
_INDEXER = "a learned indexer chooses the keys that each query may see, by scores of its own that no scheme reaches"
_SEES_FORWARD = (
    "image tokens see each other in both directions, and every scheme is defined for keys at or before the query"
)
_NO_ATTENTION = "it has no attention: order is in its recurrence, and there is no position encoding to replace"
_NOT_YET = (
    "nobody has yet described and tested where its positions live; install or import the package that brings its "
    "family, or describe it as a Family"
)

REFUSALS = (
    Refusal(
        model_types=(
            "albert",
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "convbert",
            "data2vec-text",
            "deberta",
            "deberta-v2",
            "distilbert",
            "electra",
            "ernie",
            "esm",
            "esmc",
            "eurobert",
            "flaubert",
            "fnet",
            "funnel",
            "gte",
            "ibert",
            "jina_embeddings_v3",
            "layoutlm",
            "longformer",
            "luke",
            "megatron-bert",
            "mobilebert",
            "modernbert",
            "mpnet",
            "mra",
            "neomme",
            "nomic_bert",
            "nystromformer",
            "perceiver",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roc_bert",
            "roformer",
            "squeezebert",
            "tapas",
            "ultrabert",
            "xlm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
            "yoso",
        ),
        reason=ENCODER,
    ),
    Refusal(
        model_types=(
            "bart",
            "bigbird_pegasus",
            "blenderbot",
            "blenderbot-small",
            "blip_text_model",
            "marian",
            "mbart",
            "musicgen",
            "musicgen_decoder",
            "musicgen_melody",
            "musicgen_melody_decoder",
            "mvp",
            "pegasus",
            "plbart",
            "prophetnet",
            "trocr",
            "whisper",
        ),
        reason=DECODER_HALF,
    ),
    Refusal(model_types=("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), reason=_NO_ATTENTION),
    # ------------------------------------------------------------------------------------------------- own positions
    Refusal(
        model_types=("beam",),
        reason="the layers that it leaves unrotated multiply each query by a number that grows with its position, "
        "which no setting turns off",
    ),
    Refusal(
        model_types=("inkling_text", "inkling2_text"),
        reason="each attention computes a bias for every distance from the hidden states, and adds it to the scores",
    ),
    Refusal(
        model_types=("cpmant",),
        reason="its attention is code of its own that adds a bias for each distance within and between segments",
    ),
    Refusal(
        model_types=("xlnet",),
        reason="its attention is code of its own, with relative positions over a memory and two streams",
    ),
    Refusal(
        model_types=("ctrl",),
        reason="its positions are a buffer that it indexes in its forward, no module that another could stand in for",
    ),
    # ---------------------------------------------------------------------------------------- other kinds of attention
    Refusal(
        model_types=(
            "axk2",
            "deepseek_v32",
            "dots3_note_text",
            "glm5_next_text",
            "glm_moe_dsa",
            "hy_v4",
            "minimax_m3_vl_text",
            "mistral_large4_text",
            "qwen4_exp_text",
        ),
        reason=_INDEXER,
    ),
    Refusal(
        model_types=("deepseek_v4",),
        reason="its queries also see compressed keys, each of many tokens at once, which have no one position",
    ),
    Refusal(
        model_types=("diffllama",),
        reason="what its attention gives is the difference of two softmaxes, computed in code of its own",
    ),
    Refusal(
        model_types=("doge",),
        reason="its layers combine the mask with learned numbers before they call attention, so a scheme would not get "
        "the mask itself",
    ),
    Refusal(
        model_types=("unlimited_ocr_text",),
        reason="a query sees the whole prompt but only a window of what was generated, so that what it sees depends on "
        "how the tokens came in",
    ),
    Refusal(model_types=("reformer",), reason="its attention is code of its own, by hashing and within chunks"),
    Refusal(
        model_types=("zaya",),
        reason="its queries, keys and values mix each token with the ones before it, so that order is in them whatever "
        "the scheme, and its masks are handed to layers in a dict",
    ),
    # --------------------------------------------------------------------------------------------- other kinds of layer
    Refusal(
        model_types=("blt",),
        reason="it is several transformers, over bytes and over patches whose ends another model chooses, each with "
        "positions of its own",
    ),
    Refusal(
        model_types=("hrm_text",),
        reason="two stacks of layers are run several times for each token, so one layer attends more than once per "
        "forward",
    ),
    Refusal(model_types=("longcat_flash",), reason="each of its layers has two attentions"),
    Refusal(
        model_types=("idefics", "kyutai_speech_to_text", "moshi"),
        reason="each attention has a rotary module of its own, and none serves all layers",
    ),
    Refusal(
        model_types=("zamba", "zamba2"),
        reason="several layers share one attention, which gets with each call the index of the layer that it runs for",
    ),
    Refusal(
        model_types=("gemma4_assistant", "gemma4_unified_assistant"),
        reason="it drafts for another model, whose keys it attends to in both directions; it has none of its own",
    ),
    # ----------------------------------------------------------------------------------------------------- multimodal
    Refusal(model_types=("git",), reason=_SEES_FORWARD),
    Refusal(
        model_types=("phi4_multimodal",),
        reason="its decoder reads images and sounds itself, and no scheme says how far a token is from a part of one",
    ),
    Refusal(
        model_types=("mllama_text_model",),
        reason="some of its layers attend to the image and have no self-attention, and no scheme is defined there",
    ),
    Refusal(
        model_types=("cohere_compass_text",),
        reason="a token has three positions there (time, height and width of a picture), which each type of layer "
        "turns in its own way or not at all",
    ),
    Refusal(
        model_types=("qwen2_5_omni", "qwen3_omni_moe"),
        reason="its language model is in its thinker, a multimodal model of its own: patch and save `model.thinker`",
    ),
    Refusal(
        model_types=("voxtral_realtime_text",),
        reason="its layers ask with each call for the delay of the speech, without which its language model cannot be "
        "measured and verified",
    ),
    Refusal(
        model_types=("pi0",),
        reason="it predicts the movements of a robot, which see each other in both directions, and every scheme is "
        "defined for keys at or before the query",
    ),
    Refusal(
        model_types=("diffusion_gemma_text",),
        reason="it writes blocks of tokens by diffusion, which see each other in both directions, and every scheme is "
        "defined for keys at or before the query",
    ),
    # ------------------------------------------------------------------------------------------------- not served yet
    Refusal(
        model_types=(
            "hyperclovax",  # left to the package that is the example of how to serve one from outside
            "kosmos_2_5_text_model",
            "kosmos_2_text_model",
            "recurrent_gemma",
        ),
        reason=_NOT_YET,
    ),
)

SINCE = {"cosmos3_edge_text": "5.23", "dbrx": "5.23", "mistral4": "5.23", "paddleocr_vl_text": "5.23"}
"""Model type -> the first release of transformers with which it was tested without a failure.

Releases from 5.17 on have these types too, but their configs or classes differ."""


def missing_release(model_type: str) -> str | None:
    """Return the release of transformers that a model type needs, or None if the installed one is new enough."""
    needed = SINCE.get(model_type)
    if needed is None or _numbers(version("transformers")) >= _numbers(needed):
        return None
    return needed


def _numbers(release: str) -> tuple[int, ...]:
    """Return the first two numbers of a release."""
    return tuple(int(number) for number in release.split(".")[:2])
