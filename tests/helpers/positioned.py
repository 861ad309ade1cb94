"""A GPT-2 whose table of positions does one thing to attention scores, chosen beforehand."""

import math

import torch
from transformers import GPT2Config, GPT2LMHeadModel

WORDS = 16
SCALE = 1e-4
"""Size of a position's numbers beside a token's, which are about 1: LayerNorm divides by a length that they hardly
change, and what reads them is as much larger."""


def positioned(biases):
    """A GPT-2 whose table of positions adds exactly `biases` (layers, H, T) by distance to its scores, and nothing else.

    Any even sequence of period 2 T is a sum of T + 1 cosines, and each is the product of two positions that are a
    cosine and a sine. Positions and tokens have dimensions of their own, in hidden states and in heads.
    """
    layers, heads, length = biases.shape
    waves = length + 1
    content, hidden = WORDS // heads, WORDS + 4 * waves
    size = content + 2 * waves
    config = GPT2Config(
        vocab_size=97,
        n_positions=length,
        n_embd=heads * size,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
    )
    assert config.n_embd == hidden
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).double().eval()
    angles = torch.arange(length).double()[:, None] * math.pi / length * torch.arange(waves)
    turning = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
    even = torch.cat([biases, biases[..., -1:], biases[..., 1:].flip(-1)], -1).double()
    shares = torch.fft.rfft(even).real / length  # twice, but for the first and the last, what a cosine takes
    shares[..., 0] /= 2
    shares[..., -1] /= 2
    with torch.no_grad():
        words = model.transformer.wte.weight.normal_()[:, :WORDS]
        words -= words.mean(-1, keepdim=True)
        words *= (config.n_embd / words.square().sum(-1, keepdim=True)).sqrt()
        model.transformer.wte.weight[:, WORDS:] = 0.0
        model.transformer.wpe.weight.zero_()
        model.transformer.wpe.weight[:, WORDS:hidden] = SCALE * torch.cat([turning, -turning], -1)  # of mean 0
        for block, share in zip(model.transformer.h, shares, strict=True):
            deviation = (1 + block.ln_1.eps) ** 0.5
            query, key, value = block.attn.c_attn.weight.split(config.n_embd, 1)
            for weight in (query, key, value):
                weight[WORDS:] = 0.0
                if weight is not value:
                    weight.view(-1, heads, size)[:, :, content:] = 0.0
            for head in range(heads):
                at = head * size + content
                rows = torch.arange(2 * waves)
                query[WORDS + rows, at + rows] = share[head].repeat_interleave(2) * size**0.5 * deviation / SCALE
                key[WORDS + rows, at + rows] = deviation / SCALE
            block.attn.c_proj.weight[:, WORDS:] = 0.0
            block.mlp.c_fc.weight[WORDS:] = 0.0
            block.mlp.c_proj.weight[:, WORDS:] = 0.0
        for block in model.transformer.h[:-1]:  # LayerNorm sees the same length in all layers
            block.attn.c_proj.weight.zero_()
            block.mlp.c_proj.weight.zero_()
    return model
