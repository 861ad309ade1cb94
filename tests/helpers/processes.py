"""Processes that stay up between tests and run functions together, as the ranks of one gloo group on this machine."""

from __future__ import annotations

import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 120.0
"""Seconds that a function may take, and that one process waits for another."""


class Processes:
    """A gloo group of this many processes. `run` raises what the first failing process raised, as text."""

    def __init__(self, size: int, **environment: str) -> None:
        self.size = size
        self.environment = environment
        self.members: list[tuple[Any, Any]] = []

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, self.size, port, self.environment), daemon=True)
            process.start()
            self.members.append((process, here))

    def stop(self) -> None:
        for process, _ in self.members:
            process.kill()
            process.join()
        self.members = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a module-level function in every process; return what each returned, in order of rank."""
        if not self.members:
            self.start()
        for _, pipe in self.members:
            pipe.send((function, args, kwargs))
        deadline = time.monotonic() + PATIENCE
        answers: list[Any] = [None] * self.size
        waiting, failed = set(range(self.size)), False
        while waiting:
            for rank in sorted(waiting):
                if self.members[rank][1].poll(0.01):
                    answers[rank] = self.members[rank][1].recv()
                    waiting.remove(rank)
                    failed |= answers[rank][1] is not None
            if failed and deadline > time.monotonic() + 5:  # the others may be waiting for the one that failed
                deadline = time.monotonic() + 5
            if time.monotonic() > deadline:
                break
        problems = [f"process {n}: {answer[1]}" for n, answer in enumerate(answers) if answer and answer[1]]
        problems += [f"process {n} did not answer" for n in sorted(waiting)]
        if waiting:
            self.stop()
        if problems:
            raise RuntimeError("\n".join(problems))
        return [answer[0] for answer in answers]


def among(number: int, file: str, function: Callable[[], Any]) -> Any:
    """Call a function in the first processes of a group, as a group of so many; None in the others. To be run in each.

    The group that was there is left: from then on the processes are for calls of this one.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ["RANK"]) >= number:
        return None
    where = {"init_method": f"file://{file}", "rank": int(os.environ["RANK"]), "world_size": number}
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE), **where)
    try:
        return function()
    finally:
        dist.destroy_process_group()


def _serve(pipe: Any, rank: int, size: int, port: int, environment: dict[str, str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings(
        "ignore", "rope: (scaling|rope_theta) is one value for the layer types"
    )  # as pyproject.toml
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1", **environment}
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    while True:
        function, args, kwargs = pipe.recv()
        try:
            answer = (function(*args, **kwargs), None)
        except Exception:  # whatever a job raises: the process lives on for the next test, `run` raises it in this one
            answer = (None, traceback.format_exc())
        pipe.send(answer)
