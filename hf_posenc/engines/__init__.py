"""Attention engines: tensor code that computes the attention of a scheme. They do not import transformers.

A scheme says which form its scores have (`hf_posenc.core.forms`), and an engine which forms it takes. `dispatch.choose`
returns the first engine of this table that can compute a call exactly. Each engine is in the file of its name.

| engine | forms | device | accuracy class |
|---|---|---|---|
| `sdpa` | Content, where no scheme changes the scores | any | that of torch's kernels |
| `decode` | Bias, Slopes, Factors, ClippedVectors, RelativeKeys, in decoding steps | any | flash, reference, eager |
| `banded` | Slopes | CPU | flash |
| `toeplitz` | Bias, Slopes | CPU | flash |
| `clipped` | ClippedVectors | CPU | flash for far keys, float32 for near ones |
| `rescaled` | Factors | CPU | float32 |
| `wide` | every scheme whose form has two sides; forget gates | any | flash |
| `flex` | Bias, Slopes, Factors | CUDA | flash |
| `near_far` | ClippedVectors, Ranges | CUDA | flash for far keys and ranges, float32 for near ones |
| `chunked` | every scheme | any | reference |
| `reference` | every scheme | any | reference |

Accuracy classes:

- reference: float64 for models in float64, float32 for all others. It is the definition.
- float32: float32 throughout. bfloat16 inputs are converted to float32, which is exact.
- flash: products of the inputs in their dtype; sums, scores and biases in float32.
- eager: products are rounded to the dtype of the inputs, as in transformers' eager attention. `decode` is of this class
  in bfloat16 and float16, where it does not use the flash kernel.
"""
