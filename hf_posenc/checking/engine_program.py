"""A program that asks an engine for log-probabilities. It runs in the engine's own Python, which needs no hf_posenc.

`python engine_program.py JOB ANSWERS`: JOB is a JSON file with `engine`, `model`, `length`, `chunk`, `dtype` and
`questions`, a list of `[tokens, new]`. ANSWERS gets a list with, for each question, the log-probabilities of the tokens
of the prompt after the first (None if `new` is not 0), the `new` tokens that greedy decoding appends, and their
log-probabilities. Prompts are computed in chunks; the beginning that a prompt shares with the one before is cached.
"""

# ruff: noqa: B905

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any


def ask_vllm(job: dict[str, Any]) -> Iterator[Any]:
    """Yield the answers of vLLM."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm

    options = {"enforce_eager": True, "skip_tokenizer_init": True, "enable_prefix_caching": True, "max_num_seqs": 1}
    options |= {"dtype": job["dtype"], "max_model_len": job["length"], "max_num_batched_tokens": job["chunk"]}
    llm = vllm.LLM(job["model"], **options)
    for tokens, new in job["questions"]:
        # A request that wants log-probabilities of its prompt reads no cached prefix.
        asked = {"logprobs": 0} if new else {"prompt_logprobs": 0}
        settings = {"temperature": 0, "max_tokens": max(new, 1), "ignore_eos": True, "detokenize": False} | asked
        (answer,) = llm.generate([{"prompt_token_ids": tokens}], vllm.SamplingParams(**settings), use_tqdm=False)
        if not new:
            yield [each[token].logprob for each, token in zip(answer.prompt_logprobs[1:], tokens[1:])], [], []
            continue
        written = list(answer.outputs[0].token_ids)
        yield None, written, [each[token].logprob for each, token in zip(answer.outputs[0].logprobs, written)]


def ask_llama_cpp(job: dict[str, Any]) -> Iterator[Any]:
    """Yield the answers of llama.cpp, without flash attention, which rounds keys and values to half precision."""
    import llama_cpp
    import numpy

    default = llama_cpp.llama_model_default_params()
    default.use_extra_bufts = False  # repacked for AMX, q8_0 ends the process in llama-cpp-python 0.3.36
    llama_cpp.llama_cpp.llama_model_default_params = lambda: default
    options = {"n_ctx": job["length"], "n_batch": job["chunk"], "n_ubatch": job["chunk"], "type_k": 0, "type_v": 0}
    llm = llama_cpp.Llama(job["model"], logits_all=True, flash_attn=False, verbose=False, **options)

    def scores(first: int, last: int) -> Any:
        logits = numpy.asarray(llm.scores[first:last], dtype=numpy.float64)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - numpy.log(numpy.exp(logits).sum(-1, keepdims=True))

    before: list[int] = []
    for tokens, new in job["questions"]:
        cached = 0
        while new and cached < min(len(before), len(tokens) - 1) and before[cached] == tokens[cached]:
            cached += 1
        llm.n_tokens = cached
        llm.eval(tokens[cached:])  # removes what is cached beyond
        prompt = [] if new else [float(row[token]) for row, token in zip(scores(0, len(tokens) - 1), tokens[1:])]
        written, found = [], []
        for _ in range(new):
            last = scores(llm.n_tokens - 1, llm.n_tokens)[0]
            written.append(int(last.argmax()))
            found.append(float(last[written[-1]]))
            llm.eval(written[-1:])
        before = tokens + written
        yield None if new else prompt, written, found


def ask_transformers(job: dict[str, Any]) -> Iterator[Any]:
    """Yield the answers of transformers, of whatever release."""
    import torch
    import transformers

    dtype = "auto" if job["dtype"] == "auto" else getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], torch_dtype=dtype).eval()

    def step(tokens: list[int], cache: Any) -> Any:
        with torch.no_grad():
            output = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
        return output.logits[0].double().log_softmax(-1), output.past_key_values

    for tokens, new in job["questions"]:
        cache, prompt, written, scores = None, [], [], []
        for start in range(0, len(tokens), job["chunk"]):
            found, cache = step(tokens[start : start + job["chunk"]], cache)
            prompt += [float(row[token]) for row, token in zip(found, tokens[start + 1 :])]
        for _ in range(new):
            written.append(int(found[-1].argmax()))
            scores.append(float(found[-1, written[-1]]))
            found, cache = step(written[-1:], cache)
        yield None if new else prompt, written, scores


ENGINES = {"vllm": ask_vllm, "llama.cpp": ask_llama_cpp, "transformers": ask_transformers}


def main() -> None:
    """Answer a job."""
    with open(sys.argv[1]) as file:
        job = json.load(file)
    answers = list(ENGINES[job["engine"]](job))
    with open(sys.argv[2], "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
