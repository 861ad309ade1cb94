"""The end of a recipe as a program: a sentence and a status, whatever stops it, also in a group of processes."""

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
def ending(parser: ArgumentParser, again: str, kept: Callable[[], str]) -> Iterator[None]:
    """Context manager that turns what stops a run into a message on the error stream and an exit status.

    Args:
        parser: whose `error` names the recipe.
        again: the command that goes on after a signal.
        kept: returns what is kept when anything else stops the run, and how to go on.
    """
    try:
        yield
    except (UsageError, hf_posenc.HfPosencError, ImportError) as error:
        parser.error(str(error).removeprefix("hf_posenc: "))
    except Interrupted as stop:
        print(f"\n{stop}. Everything is in {stop.folder}: {again} goes on.", file=sys.stderr)
        raise SystemExit(stop.status) from None
    except Diverged as error:
        raise SystemExit(f"{error}") from None
    except OSError as error:
        print(f"\n{error}. {kept()}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(f"\nInterrupted. {kept()}", file=sys.stderr)
        raise SystemExit(130) from None


def start(main: Callable[[], object]) -> None:
    """Run a recipe as a program. A process of a group ends here, with the status that it has by then.

    Threads of a process group's backend now and then abort a process while the interpreter ends, after the work is
    done. Destroying the group does not always end these threads: torch keeps references to a group over which
    parameters were sharded. So the interpreter's own end is left out.
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
        if status == 0:  # else another process may never come to it
            PartialState().destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
