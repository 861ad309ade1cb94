"""Runs a function in several processes that share a gloo group, and collects what it returns."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_processes(function: Callable[..., Any], processes: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` in each of the processes, which must find it by import; the results by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    multiprocessing.start_processes(_work, (function, processes, port, queue, arguments), processes)
    return [result for _, result in sorted((queue.get() for _ in range(processes)), key=lambda pair: pair[0])]


def _work(rank: int, function: Callable[..., Any], processes: int, port: int, queue: Any, arguments: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(processes))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    try:
        queue.put((rank, function(*arguments)))
    finally:
        dist.destroy_process_group()
