"""Questions to other engines: tokens in, log-probabilities out. Nothing else is asked of them.

An engine runs in a Python of its own, by `engine_program`, or is a server that is running.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.did_you_mean import did_you_mean
from ..core.errors import UnsupportedModelError
from . import engine_program

INSTALL = {"vllm": "vllm", "llama.cpp": "llama-cpp-python", "transformers": "transformers"}
"""Engine -> the package that its Python needs."""


@dataclass(frozen=True)
class Question:
    """A prompt.

    Attributes:
        about: what it asks, for the report.
        tokens: the prompt.
        new: number of tokens that greedy decoding shall append; 0 asks for the log-probabilities of the prompt.
    """

    about: str
    tokens: list[int]
    new: int = 0


@dataclass(frozen=True)
class Answer:
    """What an engine answers.

    Attributes:
        tokens: the prompt, and the tokens that were appended.
        scores: log-probabilities of the last tokens of these; None if the engine does not say them.
    """

    tokens: list[int]
    scores: list[float] | None


@dataclass(frozen=True)
class OtherEngine:
    """An engine and what it runs.

    Attributes:
        engine: `vllm`, `llama.cpp` or `transformers`.
        served: a folder, a GGUF file, or the address of a server.
        python: the Python of the engine, unless it is a server.
        dtype: dtype in which it shall compute; a server and llama.cpp choose theirs.

    Raises:
        ValueError: for another engine.
    """

    engine: str
    served: str
    python: str = sys.executable
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse an engine that nobody knows how to ask."""
        if self.engine not in INSTALL:
            known = did_you_mean(self.engine, tuple(INSTALL))
            raise ValueError(f"there is no engine {self.engine!r}; choose from {', '.join(INSTALL)}{known}")

    @property
    def is_server(self) -> bool:
        """Whether it is a server that runs already."""
        return self.served.startswith(("http://", "https://"))

    def ask(self, questions: list[Question], chunk: int) -> list[Answer]:
        """Ask the questions one after the other.

        Args:
            questions: the prompts.
            chunk: number of tokens of a prompt that are computed at once; a server chooses its own.

        Raises:
            UnsupportedModelError: if the engine cannot run what is served. The message has the engine's last line.
        """
        if self.is_server:
            ask = self._complete if self.engine == "llama.cpp" else self._completions
            return [ask(each) for each in questions]
        job: dict[str, Any] = {"engine": self.engine, "model": self.served, "dtype": self.dtype, "chunk": chunk}
        job["length"] = max(len(each.tokens) + each.new for each in questions) + 1
        job["questions"] = [(each.tokens, each.new) for each in questions]
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder, name)) for name in ("job.json", "answers.json")]
            Path(files[0]).write_text(json.dumps(job))
            try:
                run = subprocess.run(
                    [self.python, engine_program.__file__, *files], capture_output=True, text=True, errors="replace"
                )
            except OSError as error:
                raise UnsupportedModelError(f"{self.python} is no Python that can be started: {error}") from error
            if run.returncode:
                raise UnsupportedModelError(self._complaint(run.stderr, run.returncode))
            answers = json.loads(Path(files[1]).read_text())
        return [
            Answer(question.tokens + written, scores if question.new else prompt)
            for question, (prompt, written, scores) in zip(questions, answers, strict=True)
        ]

    def _complaint(self, stderr: str, status: int) -> str:
        """Return why the engine did not run."""
        lines = [line for line in stderr.splitlines() if line.strip()] or [f"it ended with status {status}"]
        if "ModuleNotFoundError" in lines[-1]:
            package = INSTALL[self.engine]
            return (
                f"{self.python} lacks {self.engine} ({lines[-1]}): name the Python that has it (--python), after "
                f"`pip install {package}` in an environment of its own, or the address of a running server"
            )
        # An error of an error of an error: the first one says the reason.
        errors = [line for line in lines if "Error" in line.split(":")[0]] or lines[-1:]
        return f"{self.engine} cannot run {self.served}: {errors[0].strip()}"

    def _post(self, path: str, data: dict[str, Any] | None = None) -> Any:
        """Return the JSON that a server answers."""
        body = None if data is None else json.dumps(data).encode()
        address = self.served.rstrip("/").removesuffix("/v1") + path
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            raise UnsupportedModelError(f"{address} answered {error.code}: {said}") from error
        except OSError as error:
            raise UnsupportedModelError(f"no server answers at {address}: {error}") from error

    def _completions(self, question: Question) -> Answer:
        """Ask a server of OpenAI's interface (vLLM and others), which must know `return_tokens_as_token_ids`."""
        data = {
            "model": self._post("/v1/models")["data"][0]["id"],
            "prompt": question.tokens,
            "max_tokens": max(question.new, 1),
            "temperature": 0,
            "logprobs": 1,
            "echo": not question.new,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        found = self._post("/v1/completions", data)["choices"][0]["logprobs"]
        if not question.new:
            return Answer(question.tokens, _numbers(found["token_logprobs"][1 : len(question.tokens)]))
        written = [int(token.removeprefix("token_id:")) for token in found["tokens"]]
        return Answer(question.tokens + written, _numbers(found["token_logprobs"]))

    def _complete(self, question: Question) -> Answer:
        """Ask llama.cpp's server, which says nothing of the tokens of a prompt."""
        if not question.new:
            return Answer(question.tokens, None)
        data = {
            "prompt": question.tokens,
            "n_predict": question.new,
            "n_probs": 1,
            "temperature": 0,
            "ignore_eos": True,
        }
        found = self._post("/completion", data)["completion_probabilities"]
        scores = _numbers([each["logprob"] for each in found])
        return Answer(question.tokens + [each["id"] for each in found], scores)


def _numbers(scores: list[float | None]) -> list[float]:
    """Return log-probabilities with NaN for null, by which servers write it in JSON."""
    return [math.nan if each is None else each for each in scores]
