"""The command plot: a picture of how well a pipeline mixes, and how full its batches are."""

import argparse
import html
import os
import random
from itertools import chain
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple

from infinibatch._console import at_least, interrupt_on_signals, progress, tell
from infinibatch._stream import add_pipeline_options, batched, num_words, reader, shuffled
from infinibatch.readers import find_chunks

_PLOT_HELP = """\
Draw where the lines of the corpus end up in the order of stream with these options, as an SVG file for a browser.

The upper part has a point for each of some thousand lines, drawn at random: its place in the corpus (files in the
order of their names) against its place in the stream. A good shuffle looks like noise; stripes are files or buffers
that stay together, and a larger --buffer-size or smaller files dissolve them. The number in the title is the mean
distance, in the corpus, of lines that follow each other in the stream; where every order is equally likely it is a
third of the corpus.

The lower part, with --batch-size or --max-tokens, is the distribution of batch fill: how much of the room of a batch is
taken by words, not by padding. The room is --max-tokens, or --batch-size times the words of the longest line.
"""

_NUM_POINTS = 4000
_NUM_BARS = 50

_Item = Tuple[float, int]  # the place in the corpus, in files, and the number of words


def add_plot(commands: Any) -> None:
    """Add the command plot."""
    parser = commands.add_parser(
        "plot",
        help="draw how well stream mixes the corpus, and how full its batches are",
        description=_PLOT_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_pipeline_options(parser)
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="look at the first N lines of the stream only")
    parser.add_argument("--out", required=True, metavar="FILE", help="the picture to write, such as plot.svg")
    parser.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> int:
    interrupt_on_signals()
    paths = find_chunks(options.files)
    fills: List[float] = []
    order = _Order(_NUM_POINTS)
    with shuffled(paths, _reader_of_places(paths, options), options) as items:
        in_batches = bool(options.batch_size or options.max_tokens)
        stream: Iterable[Any] = batched(items, options, _words)
        with progress("lines", options.limit, amid_output=True) as advance:
            for batch in stream if in_batches else ([item] for item in stream):
                if in_batches:
                    fills.append(_fill(batch, options))
                for place, _ in batch:
                    order.add(place)
                advance(len(batch))
                if options.limit is not None and order.num_items >= options.limit:
                    break
    if not order.num_items:
        raise ValueError("there are no lines in {}".format(", ".join(options.files)))
    with open(options.out, "w", encoding="utf-8", errors="replace") as file:  # a file's name may be no text
        file.write(_picture(order, len(paths), fills, options))
    tell("{}: {:,} lines, {}".format(options.out, order.num_items, order.mixing(len(paths))))
    return 0


def _reader_of_places(paths: List[str], options: argparse.Namespace) -> Any:
    read = reader(options)
    numbers = {path: number for number, path in enumerate(paths)}

    def read_places(path: str) -> List[_Item]:
        words = [num_words(line) for line in read(path)]
        # Within a file by share, so that no other file needs to be read to know the place.
        return [(numbers[path] + (i + 0.5) / len(words), number) for i, number in enumerate(words)]

    return read_places


def _words(item: _Item) -> int:
    return item[1]


def _fill(batch: Sequence[_Item], options: argparse.Namespace) -> float:
    words = [number for _, number in batch]
    longest = max(1, max(words))
    room = options.batch_size * longest if options.batch_size else max(options.max_tokens, len(words) * longest)
    return float(sum(words) / room)


class _Order:
    """What is remembered of the order: some of the items, each equally likely, and how far neighbours lie apart."""

    def __init__(self, num_points: int) -> None:
        self.points: List[Tuple[float, int]] = []  # place in the corpus, place in the stream
        self.num_items = 0
        self._num_points = num_points
        self._random = random.Random(0)
        self._last: Optional[float] = None
        self._distance = 0.0

    def add(self, place: float) -> None:
        point = (place, self.num_items)
        self.num_items += 1
        if len(self.points) < self._num_points:
            self.points.append(point)
        else:
            slot = self._random.randrange(self.num_items)
            if slot < self._num_points:
                self.points[slot] = point
        if self._last is not None:
            self._distance += abs(place - self._last)
        self._last = place

    def mixing(self, num_files: int) -> str:
        distance = self._distance / max(1, self.num_items - 1) / num_files
        return "neighbours {:.3f} of the corpus apart (fully shuffled: 0.333)".format(distance)


# ---------------------------------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------------------------------

_WIDTH = 960
_LEFT, _RIGHT = 90, 930
_COLOUR = "#1f5fa8"


def _picture(order: _Order, num_files: int, fills: List[float], options: argparse.Namespace) -> str:
    height = 800 if fills else 580
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" '
        'font-family="sans-serif" font-size="13">'.format(_WIDTH, height),
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 28, _title(options), size=16),
        _text(
            _LEFT,
            48,
            "{:,} lines of {:,} file(s); {}".format(order.num_items, num_files, order.mixing(num_files)),
        ),
    ]
    corpus = _Axis(num_files, _LEFT, _RIGHT)
    stream = _Axis(order.num_items, 510, 64)  # upwards
    parts += _frame(corpus, stream, "place in the corpus (file)", "place in the stream (line)", "{:,.0f}".format)
    dots = "".join("M{:.1f} {:.1f}h0".format(corpus.at(place), stream.at(number)) for place, number in order.points)
    parts.append(
        '<path d="{}" stroke="{}" stroke-width="2.4" stroke-linecap="round" opacity="0.6"/>'.format(dots, _COLOUR)
    )
    if fills:
        counts = [0] * _NUM_BARS
        for fill in fills:
            counts[min(int(fill * _NUM_BARS), _NUM_BARS - 1)] += 1
        fill_axis = _Axis(1, _LEFT, _RIGHT, smallest=0.01)
        batch_axis = _Axis(max(counts), 740, 600)
        title = "{:,} batches, full to {:.1%} on average".format(len(fills), sum(fills) / len(fills))
        parts.append(_text(_LEFT, 590, title))
        parts += _frame(fill_axis, batch_axis, "batch fill (words as share of the room)", "batches", "{:.0%}".format)
        for i, count in enumerate(counts):
            if count:
                left, right = fill_axis.at(i / _NUM_BARS), fill_axis.at((i + 1) / _NUM_BARS)
                top = batch_axis.at(count)
                parts.append(
                    '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" fill="{}"/>'.format(
                        left + 0.5, top, right - left - 1, batch_axis.begin - top, _COLOUR
                    )
                )
    parts.append("</svg>\n")
    return "\n".join(parts)


def _title(options: argparse.Namespace) -> str:
    shown = ["--buffer-size {:,}".format(options.buffer_size), "--seed {}".format(options.seed)]
    for name in ("batch_size", "max_tokens"):
        if getattr(options, name):
            shown.append("--{} {:,}".format(name.replace("_", "-"), getattr(options, name)))
    names = ", ".join(map(os.path.basename, options.files))
    return "{}: {}".format(names if len(names) <= 50 else names[:49] + "…", " ".join(shown))


class _Axis:
    """Values along a line of the picture.

    Args:
        high: The value at its end; at its beginning it is 0.
        begin, end: Where these are, in pixels.
        smallest: The smallest step between two values that are shown.
    """

    def __init__(self, high: float, begin: float, end: float, smallest: float = 1) -> None:
        self.high, self.begin, self.end, self.smallest = high, begin, end, smallest

    def at(self, value: float) -> float:
        return self.begin + value / self.high * (self.end - self.begin)

    def ticks(self) -> Iterator[float]:
        """Yield some round values."""
        steps = (digit * 10.0**power for power in range(-2, 20) for digit in (1, 2, 5))
        step = next(step for step in steps if step >= self.smallest and self.high / step <= 6)
        for i in range(int(self.high / step + 1e-9) + 1):
            yield i * step


def _frame(across: _Axis, up: _Axis, label_across: str, label_up: str, format_across: Any) -> Iterator[str]:
    grid = chain(
        ("M{:.1f} {}V{}".format(across.at(value), up.begin, up.end) for value in across.ticks()),
        ("M{} {:.1f}H{}".format(across.begin, up.at(value), across.end) for value in up.ticks()),
    )
    yield '<path d="{}" stroke="#ddd"/>'.format("".join(grid))
    yield '<path d="M{0} {1}H{2}M{0} {1}V{3}" stroke="#444" fill="none"/>'.format(
        across.begin, up.begin, across.end, up.end
    )
    for value in across.ticks():
        yield _text(across.at(value), up.begin + 18, format_across(value), anchor="middle")
    for value in up.ticks():
        yield _text(across.begin - 8, up.at(value) + 4, "{:,.0f}".format(value), anchor="end")
    yield _text((across.begin + across.end) / 2, up.begin + 38, label_across, anchor="middle")
    middle = (up.begin + up.end) / 2
    yield '<g transform="rotate(-90 18 {0:.1f})">{1}</g>'.format(middle, _text(18, middle, label_up, anchor="middle"))


def _text(x: float, y: float, text: str, size: int = 13, anchor: str = "start") -> str:
    return '<text x="{:.1f}" y="{:.1f}" font-size="{}" text-anchor="{}" fill="#222">{}</text>'.format(
        x, y, size, anchor, html.escape(text)
    )
