"""What the commands share: numbers as options, notes, signals, and progress on a terminal."""

import argparse
import contextlib
import signal
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that reads a number of at least this from an option."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError("must be an integer, got {!r}".format(text)) from None
        if value < minimum:
            raise argparse.ArgumentTypeError("must be at least {}, got {}".format(minimum, value))
        return value

    return number


def num_bytes(text: str) -> int:
    """Read a number of bytes, such as 64M, from an option."""
    unit = text[-1:].upper()
    if unit in ("K", "M", "G", "T"):
        return at_least(1)(text[:-1]) << 10 * ("KMGT".index(unit) + 1)
    return at_least(1)(text)


def seconds(text: str) -> float:
    """Read a time from an option."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError("must be a number, got {!r}".format(text)) from None
    if not value >= 0:
        raise argparse.ArgumentTypeError("must be at least 0, got {}".format(text))
    return value


def tell(text: str) -> None:
    """Print output that may hold characters which the terminal, or its encoding, does not have: they are escaped."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def note(message: str) -> None:
    """Tell something that is no output, in one line."""
    if sys.stderr is not None:  # print() would take the standard output instead
        print("infinibatch: " + " ".join(message.split("\n")), file=sys.stderr)


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # under nohup it is not
            signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt(signum)


@contextlib.contextmanager
def signals_put_off() -> Iterator[None]:
    """Let no signal of those that end a command come before the end of the block."""
    came: List[Tuple[int, Any]] = []
    handlers: Dict[int, Any] = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and callable(signal.getsignal(number)):
            handlers[number] = signal.signal(number, lambda *signaled: came.append(signaled))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            handlers[came[0][0]](*came[0])


@contextlib.contextmanager
def progress(unit: str, total: Optional[int], amid_output: bool = False) -> Iterator[Callable[[int], None]]:
    """Give a function to report progress to; it is shown if there is a terminal that the output does not go to."""
    if sys.stderr is None or not sys.stderr.isatty() or sys.stdout.isatty() and not amid_output:
        yield lambda number: None
        return
    import importlib

    try:
        bar = importlib.import_module("tqdm").tqdm(total=total, unit=" " + unit, unit_scale=True, file=sys.stderr)
    except ImportError:
        bar = _PlainProgress(unit)
    try:
        yield bar.update
    finally:
        bar.close()


class _PlainProgress:
    """What is used of `tqdm.tqdm`, on one plain line."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._number = 0
        self._started = self._shown = time.monotonic()

    def update(self, number: int) -> None:
        self._number += number
        if time.monotonic() - self._shown >= 0.5:
            self._show("")

    def close(self) -> None:
        self._show("\n")

    def _show(self, end: str) -> None:
        self._shown = time.monotonic()
        rate = self._number / max(self._shown - self._started, 1e-3)
        sys.stderr.write("\r{:,} {}, {:,.0f}/s {}".format(self._number, self._unit, rate, end))
        sys.stderr.flush()
