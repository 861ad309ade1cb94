"""A patched model is the model that transformers has for the same positions: weights moved over, outputs compared.

Every comparison is made once more with the unpatched model and with other schemes, where it has to fail: otherwise equality
would only say that positions do not matter to the tiny models of this test.
"""

import pytest
import torch
import transformers
from families import LEARNED, VOCAB_SIZE, tiny, tokens
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.xlm.modeling_xlm import create_sinusoidal_embeddings
from transformers.models.xlnet.modeling_xlnet import XLNetModel

from hf_posenc import patched
from hf_posenc.core.attention_call import Call
from hf_posenc.core.dims import Dims
from hf_posenc.core.positions import Positions
from hf_posenc.core.registry import scheme_class
from hf_posenc.engines import reference

TOLERANCE = 1e-4  # two float32 implementations, different kernels, values of order 1 after two layers
DIFFERENT = 100 * TOLERANCE

HEADS, HEAD_DIM = 6, 8
WIDTH = HEADS * HEAD_DIM

pytestmark = pytest.mark.usefixtures("no_gradients")


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def assert_peers(ours: torch.Tensor, peer: torch.Tensor, **others: torch.Tensor) -> None:
    """Ours equals the peer, and none of the others does."""
    assert difference(ours, peer) <= TOLERANCE
    for name, other in others.items():
        assert difference(other, peer) > DIFFERENT, f"{name} equals the peer too: the comparison proves nothing"


def shaken(model):
    """Move every parameter, so that no bias is 0, no gain 1, and none can be forgotten unnoticed."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def head_by_head(fused: torch.Tensor) -> torch.Tensor:
    """Rows (head, q|k|v, dimension) of a fused projection, reordered to (q|k|v, head, dimension)."""
    return fused.unflatten(0, (HEADS, 3, HEAD_DIM)).transpose(0, 1).flatten(0, 2)


def gpt2_like(activation: str, embedding: torch.Tensor, final_norm, blocks):
    """A GPT-2 with a peer's weights; `blocks` yields six modules per layer and how rows of the fused projection are ordered."""
    model = tiny("gpt2", n_embd=WIDTH, n_head=HEADS, activation_function=activation)
    body = model.transformer
    body.wte.weight.copy_(embedding)
    copy_affine(body.ln_f, final_norm)
    for layer, (norm1, fused, out, norm2, up, down, order) in zip(body.h, blocks, strict=True):
        copy_affine(layer.ln_1, norm1)
        copy_affine(layer.ln_2, norm2)
        copy_affine(layer.attn.c_attn, fused, order)
        copy_affine(layer.attn.c_proj, out)
        copy_affine(layer.mlp.c_fc, up)
        copy_affine(layer.mlp.c_proj, down)
    return model


def copy_affine(target, source, order=lambda rows: rows) -> None:
    """Copy weight and bias (zero where the peer has none); a matrix of GPT-2 is a Conv1D, which is transposed."""
    weight = order(source.weight)
    target.weight.copy_(weight.T if weight.ndim == 2 else weight)
    target.bias.zero_() if source.bias is None else target.bias.copy_(order(source.bias))


def hidden(model, ids, **inputs) -> torch.Tensor:
    inputs = {"input_ids": ids, **inputs} if "inputs_embeds" not in inputs else inputs
    return model.base_model(use_cache=False, **inputs).last_hidden_state


def with_scheme(model, scheme: str, ids: torch.Tensor, hyperparameters=(), **inputs) -> torch.Tensor:
    with patched(model, scheme, **dict(hyperparameters)):
        return hidden(model, ids, **inputs)


@pytest.mark.parametrize("left_padding", [0, 5])
def test_alibi_on_gpt2_is_bloom(left_padding):
    config = transformers.BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=WIDTH, n_layer=2, n_head=HEADS, initializer_range=0.2
    )
    bloom = shaken(transformers.BloomModel(config))
    blocks = [
        (
            block.input_layernorm,
            block.self_attention.query_key_value,
            block.self_attention.dense,
            block.post_attention_layernorm,
            block.mlp.dense_h_to_4h,
            block.mlp.dense_4h_to_h,
            head_by_head,
        )
        for block in bloom.h
    ]
    gpt2 = gpt2_like("gelu_new", bloom.word_embeddings.weight, bloom.ln_f, blocks)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[0, :left_padding] = 0
    seen = mask.bool()
    peer = bloom(ids, attention_mask=mask).last_hidden_state[seen]
    # BLOOM normalises its embeddings, GPT-2 does not: they are fed in.
    inputs = dict(inputs_embeds=bloom.word_embeddings_layernorm(bloom.word_embeddings(ids)), attention_mask=mask)
    assert_peers(
        with_scheme(gpt2, "alibi", ids, **inputs)[seen],
        peer,
        unpatched=hidden(gpt2, ids, **inputs)[seen],
        nope=with_scheme(gpt2, "nope", ids, **inputs)[seen],
        other_slopes=with_scheme(gpt2, "alibi", ids, {"slopes": (0.1,) * HEADS}, **inputs)[seen],
    )


@pytest.mark.parametrize("num_heads", [3, 8, 12, 20])
def test_alibi_has_the_bias_of_mpt_and_bloom(num_heads):
    """Queries of zero leave the bias alone: weights are its softmax."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    length = 9
    module = scheme_class("alibi")().build(Dims(num_heads, num_heads, 4, 4 * num_heads, 1))
    zeros = torch.zeros(1, num_heads, length, 4)
    weights = module(Call(zeros, zeros, zeros, Positions.causal(length), scaling=0.5), reference.attend)[1]
    mpt = build_mpt_alibi_tensor(num_heads, length)
    bloom = build_alibi_tensor(torch.ones(1, length, dtype=torch.long), num_heads, torch.float32)
    for bias in (mpt, bloom):
        assert_peers(weights[0, :, -1], bias[:, 0].softmax(-1), uniform=torch.full((num_heads, length), 1 / length))


@pytest.mark.parametrize("attn_type", ["bi", "uni"])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 9)], ids=["square", "with-memory"])
def test_transformer_xl_is_the_relative_attention_of_xlnet(attn_type, queries, keys):
    """XLNet sees both directions; under a causal mask only one is left, and that is Transformer-XL."""
    config = transformers.XLNetConfig(
        vocab_size=VOCAB_SIZE,
        d_model=WIDTH,
        n_head=HEADS,
        n_layer=1,
        d_inner=WIDTH,
        initializer_range=0.2,
        attn_type=attn_type,
    )
    xlnet = shaken(XLNetModel(config))
    peer = xlnet.layer[0].rel_attn
    generator = torch.Generator().manual_seed(5)
    query = torch.randn(2, HEADS, queries, HEAD_DIM, generator=generator)
    key, value = (torch.randn(2, HEADS, keys, HEAD_DIM, generator=generator) for _ in range(2))

    embedding = xlnet.relative_positional_encoding(queries, keys, bsz=2)  # (distances, B, E)
    causal = torch.ones(queries, keys).triu(1 + keys - queries)[:, :, None, None].expand(-1, -1, 2, 1)
    theirs = peer.rel_attn_core(
        *(x.permute(2, 0, 1, 3) for x in (query, key, value)),
        torch.einsum("ibh,hnd->ibnd", embedding, peer.r),
        attn_mask=causal,
    ).transpose(0, 1)

    module = scheme_class("transformer_xl")(frequencies=WIDTH // 2, longest=10000).build(
        Dims(HEADS, HEADS, HEAD_DIM, WIDTH, 1)
    )
    weights = {
        "position_projection": peer.r.flatten(1).T,
        "content_bias": peer.r_w_bias,
        "position_bias": peer.r_r_bias,
    }

    def ours(**changed):
        module.load_state_dict({**weights, **changed})
        call = Call(query, key, value, Positions.causal(queries, keys), scaling=HEAD_DIM**-0.5)
        return module(call, reference.attend)[0]

    assert_peers(
        ours(),
        theirs,
        without_positions=ours(position_projection=torch.zeros(WIDTH, WIDTH)),
        exchanged_biases=ours(content_bias=peer.r_r_bias, position_bias=peer.r_w_bias),
        no_content_bias=ours(content_bias=torch.zeros(HEADS, HEAD_DIM)),
        no_position_bias=ours(position_bias=torch.zeros(HEADS, HEAD_DIM)),
    )


@pytest.mark.parametrize("queries", [12, 1])
def test_inkling_is_the_attention_of_inkling(queries):
    """The bias of its module, and the outputs of its attention before the last projection, 12 keys and 5 profiles."""
    modeling = pytest.importorskip("transformers.models.inkling.modeling_inkling")
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 8}
    config = transformers.InklingTextConfig(**sizes, d_rel=5, rel_extent=7, layer_types=["hybrid"], num_hidden_layers=1)
    config._attn_implementation = "eager"
    peer = shaken(modeling.InklingAttention(config, 0))
    peer.rel_logits_proj.proj.copy_(torch.randn(5, 7, generator=torch.Generator().manual_seed(3)))
    peer.o_proj = torch.nn.Identity()
    hidden = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(5))
    hide = torch.full((12, 12), torch.finfo(torch.float32).min).triu(1)
    theirs = peer(hidden, hide[None, None])[0].unflatten(-1, (4, 16))[:, -queries:]
    query, key = (
        norm(made.unflatten(-1, (-1, 16))).transpose(1, 2)
        for norm, made in ((peer.q_norm, peer.q_proj(hidden)), (peer.k_norm, peer.k_sconv(peer.k_proj(hidden))))
    )
    value = peer.v_sconv(peer.v_proj(hidden)).unflatten(-1, (-1, 16)).transpose(1, 2)
    module = scheme_class("inkling")(rank=5, extent=7).build(Dims(4, 2, 16, WIDTH, 1))

    def ours(profiles):
        module.load_state_dict({"queries.weight": peer.r_proj.weight, "profiles": profiles})
        numbers = {"posenc": module.queries(hidden)[:, :, -queries:]}
        positions = Positions.causal(queries, 12)
        call = Call(query[:, :, -queries:], key, value, positions, scaling=peer.scaling, by_module=numbers)
        return module(call, reference.attend)[0]

    assert difference(ours(peer.rel_logits_proj.proj), theirs) <= 1e-6
    assert difference(ours(torch.zeros(5, 7)), theirs) > 1e-2


@pytest.mark.parametrize("family", LEARNED)
@pytest.mark.parametrize("rows", [None, 30], ids=["default", "fewer-rows"])
def test_native_learned_positions_are_the_base_bit_for_bit(family, rows):
    model = tiny(family)
    ids = tokens()
    stock = model(ids).logits
    arguments = {"initialization": "native"} | ({} if rows is None else {"num_positions": rows})
    with patched(model, "learned", **arguments):
        assert torch.equal(model(ids).logits, stock)
    for scheme, other in [("learned", {"initialization": "sinusoidal"}), ("nope", {}), ("alibi", {})]:
        with patched(model, scheme, **other):
            assert difference(model(ids).logits, stock) > DIFFERENT


def sinusoids(layout: str, size: int, length: int) -> torch.Tensor:
    module = scheme_class("sinusoidal")(layout=layout, scale=1.0).build(Dims(1, 1, size, size, 1))
    return module(torch.arange(length)[None])[0].float()


@pytest.mark.parametrize("size", [16, 15], ids=["even", "odd"])
def test_split_sinusoids_are_marians(size):
    length = 300
    peer = MarianSinusoidalPositionalEmbedding(length, size).create_weight()
    assert_peers(sinusoids("split", size, length), peer, interleaved=sinusoids("interleaved", size, length))


def test_interleaved_sinusoids_are_xlms():
    length, size = 300, 16
    peer = create_sinusoidal_embeddings(length, size, torch.empty(length, size))
    assert_peers(sinusoids("interleaved", size, length), peer, split=sinusoids("split", size, length))


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_t5_biases(num_buckets, max_distance):
    """With queries of zero, weights are the softmax of the bias alone: that of transformers' decoder."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    heads, length = 3, 200
    config = T5Config(
        d_model=6,
        d_kv=2,
        num_heads=heads,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
        is_decoder=True,
    )
    peer = T5Attention(config, has_relative_attention_bias=True)
    module = scheme_class("t5")(num_buckets=num_buckets, max_distance=max_distance).build(Dims(heads, heads, 2, 6, 1))
    with torch.no_grad():
        table = torch.randn(num_buckets, heads, generator=torch.Generator().manual_seed(0))
        peer.relative_attention_bias.weight.copy_(table)
        module.biases.copy_(table)
        theirs = peer.compute_bias(length, length)
        zeros = torch.zeros(1, heads, length, 2)
        weights = module(Call(zeros, zeros, zeros, Positions.causal(length), scaling=1.0), reference.attend)[1]
    expected = theirs[0, :, -1].softmax(-1)
    assert_peers(weights[0, :, -1], expected, uniform=torch.full((heads, length), 1 / length))
