"""The command line: `python -m infinibatch COMMAND`; `--help` behind a command tells what it does."""

import argparse
import os
import signal
import sys
from typing import Any, Optional, Sequence

from infinibatch import _bench, _demo, _plot, _split, _stream, checkpoint
from infinibatch._console import note, tell


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command and return its exit status.

    Args:
        argv: The arguments behind the program's name; None: those of this process.
    """
    options = _parser().parse_args(argv)
    if sys.stdout is None:  # nor must a file that is opened take its place
        note("error: the standard output is closed")
        return int(options.error_status)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as interrupt:
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    except BrokenPipeError:
        # What the interpreter flushes when it ends must not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a shell reports SIGPIPE
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        note("error: {}".format(error))
        return int(options.error_status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m infinibatch", description="Checkpointable iterators over data sets larger than memory."
    )
    parser.set_defaults(error_status=1)
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")
    commands.required = True
    _stream.add_stream(commands)
    _add_show(commands)
    _add_diff(commands)
    _stream.add_skip(commands)
    _split.add_split(commands)
    _bench.add_bench(commands)
    _plot.add_plot(commands)
    _demo.add_demo(commands)
    return parser


def _add_show(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        help="tell where each stage of a checkpoint stands",
        description="Tell where each stage of a checkpoint stands, the last one of the pipeline first.",
    )
    show.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a file written by stream or infinibatch.checkpoint.save"
    )
    show.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> int:
    tell(checkpoint.show(options.checkpoint))
    return 0


def _add_diff(commands: Any) -> None:
    diff = commands.add_parser(
        "diff",
        help="tell in which stages two checkpoints differ",
        description="Tell in which stages two checkpoints differ. The exit status is 0 if they are the same, 1 if they "
        "differ, 2 if one cannot be read.",
    )
    diff.add_argument("first", metavar="A", help="a checkpoint, as for show")
    diff.add_argument("second", metavar="B", help="another one")
    diff.set_defaults(run=_diff, error_status=2)


def _diff(options: argparse.Namespace) -> int:
    differences = checkpoint.diff(options.first, options.second)
    if differences:
        tell(differences)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
