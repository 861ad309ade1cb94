"""How a recipe ends as a program: with a sentence and a status, whatever stops it, and outside of its process group."""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from accelerate import PartialState

import hf_posenc

from .options import UsageError
from .training import Diverged, Interrupted


@contextmanager
def ending(parser: ArgumentParser, again: str, kept: Callable[[], str]) -> Iterator[None]:
    """Inside a run is made; what stops it becomes words on the error stream and the status a shell expects.

    Args:
        parser: whose `error` names the recipe.
        again: the command that goes on after a signal.
        kept: what there is when something else stops it, and how to go on.
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
    """Runs a recipe as a program."""
    main()
    # A process that leaves its group to the end of the interpreter is aborted there now and then.
    PartialState().destroy_process_group()
