"""Run a recipe as a program that ends with a message and an exit status, also in a group of processes."""

import atexit
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from accelerate import PartialState

import hf_posenc

from .options import UsageError
from .training import Diverged, Interrupted


@contextmanager
def ending(parser: ArgumentParser, advice: str) -> Iterator[None]:
    """Context manager that turns what stops a run into a message on the error stream and an exit status.

    Args:
        parser: parser of the recipe, whose `error` prints the message.
        advice: sentence for a run that was stopped: what is kept, how to go on.
    """
    try:
        yield
    except (UsageError, hf_posenc.HfPosencError, ImportError) as error:
        parser.error(str(error).removeprefix("hf_posenc: "))
    except Diverged as error:
        raise SystemExit(f"{error}") from None
    except (Interrupted, KeyboardInterrupt, OSError) as stop:
        print(f"\n{str(stop) or 'Interrupted'}. {advice}", file=sys.stderr)
        raise SystemExit(1 if isinstance(stop, OSError) else getattr(stop, "status", 130)) from None


def start(main: Callable[[], object]) -> None:
    """Run a recipe as a program. A process of a group is ended here, with the exit status of the recipe.

    Sometimes threads of the backend of a process group abort a process while the interpreter shuts down, after the work
    is done. Destroying the group does not always end these threads: torch keeps references to a group over which
    parameters were sharded. So the shutdown of the interpreter is skipped.
    """
    status = 0
    try:
        main()
    except SystemExit as stop:
        if not torch.distributed.is_initialized():
            raise
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    if torch.distributed.is_initialized():
        if status == 0:  # after an error another process may never join in this
            PartialState().destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
