"""The commands bench and plot: what they measure and draw."""

import argparse
import os
import re
import unittest
import xml.dom.minidom
from unittest import mock

import test_main

from infinibatch import _bench, _plot

SHARES = re.compile(r"^ +([0-9]+)% +([0-9.]+) s  (.+)$", re.MULTILINE)


class TestBench(test_main.CommandTestCase):
    def bench(self, *args):
        status, out, err = self.run_command("bench", "chunk-*.gz", "--buffer-size", 50, "--repeat", 1, *args)
        self.assertEqual((status, err), (0, ""))
        return out.decode("utf-8")

    def test_stages_share_the_whole_time(self):
        for options, names in [
            ([], ["splitting into lines", "shuffling"]),
            (["--batch-size", 5], ["splitting into lines", "shuffling", "batching"]),
            (["--max-tokens", 60, "--workers", 1], ["splitting into lines", "shuffling", "batching"]),
        ]:
            with self.subTest(options=options):
                text = self.bench(*options)
                shares = SHARES.findall(text)
                expected = ["reading files", "decompressing"] + names + ["handing out"]
                self.assertEqual([name for _, _, name in shares], expected)
                self.assertLess(abs(sum(int(share) for share, _, _ in shares) - 100), 5)
                size = sum(map(os.path.getsize, self.paths))
                self.assertRegex(text, "^600 lines in 6 file\\(s\\) of {:,} bytes\n[0-9,]+ lines a second".format(size))
                self.assertRegex(text, "\nwith --workers [1-9][0-9]*: [0-9,]+ lines a second\n[A-Z].*\\.\n$")

    def test_files_are_read_until_they_hold_enough_lines(self):
        self.assertRegex(self.bench("--limit", 101), "^200 lines in 2 file")

    def test_stage_takes_what_the_pipeline_takes_more_with_it(self):
        stages = _bench._stages(["a", "b", "c", "d"], [1.0, 3.0, 2.5, 4.0])
        self.assertEqual(stages, [("a", 1.0), ("b", 2.0), ("c", 0.0), ("d", 1.0)])

    def test_least_time_of_each_part_counts(self):
        ticks = iter([0, 5, 5, 6, 10, 12, 12, 20])
        advanced = []
        with mock.patch.object(_bench.time, "perf_counter", lambda: next(ticks)):
            times = _bench._least_times([lambda: None] * 2, 2, advanced.append)
        self.assertEqual((times, advanced), ([2, 1], [1] * 4))

    def test_advice_is_about_the_slowest_stage_and_about_what_helped(self):
        names = ["reading files", "decompressing", "splitting into lines", "shuffling", "batching", "handing out"]
        for slowest, gains, pattern in [
            ("reading files", {}, "Reading takes .* above all reading files.*workers do not help.*faster disk"),
            ("decompressing", {"workers": 1.6}, "decompressing.*--workers 3 \\(num_workers=3\\) was 1.6 times.*zstd"),
            ("splitting into lines", {"workers": 1.2}, "above all splitting into lines.*was 1.2 times as fast.$"),
            ("shuffling", {"workers": 9}, "^Shuffling.*smaller buffer would not help.*PrefetchIterator"),
            ("shuffling", {"buffer": 1.5}, "^Shuffling.*--buffer-size 70 was 1.5 times as fast.*plot"),
            ("batching", {}, "^Batching.*counting of words"),
            ("handing out", {}, "^Handing items out.*little to speed up"),
        ]:
            stages = [(name, 9.0 if name == slowest else 1.0) for name in names]
            with self.subTest(slowest=slowest, gains=gains):
                gains = dict({"workers": 1.0, "buffer": 1.0}, **gains)
                self.assertRegex(_bench._advice(stages, gains, 3, 70), pattern)

    def test_parsing_is_a_stage_of_its_own(self):
        path = os.path.join(self.own_folder, "rows.csv")
        with open(path, "w") as file:
            file.write("a,b\n" + "1,2\n" * 100)
        status, out, err = self.run_command("bench", path, "--format", "csv", "--repeat", 1)
        self.assertEqual((status, err), (0, ""))
        self.assertIn("parsing csv", [name for _, _, name in SHARES.findall(out.decode("utf-8"))])

    def test_empty_corpus_and_bad_options_are_errors(self):
        path = os.path.join(self.own_folder, "empty")
        open(path, "w").close()
        self.assertFails("there are no lines in .*empty", "bench", path)
        self.assertFails("--repeat: must be at least 1, got 0", "bench", path, "--repeat", 0, status=2)
        self.assertFails("nowhere", "bench", os.path.join(self.own_folder, "nowhere"))


class TestPlot(test_main.CommandTestCase):
    def setUp(self):
        super().setUp()
        self.out = os.path.join(self.own_folder, "plot.svg")

    def plot(self, *args, files=("chunk-*.gz",)):
        """Return the summary, the points as places in the corpus (0 to 1) and in the stream, and the texts."""
        status, out, err = self.run_command("plot", *files, "--out", self.out, *args)
        self.assertEqual((status, err), (0, ""))
        document = xml.dom.minidom.parse(self.out)
        dots = [path.getAttribute("d") for path in document.getElementsByTagName("path")][2]
        points = []
        for x, y in re.findall(r"M([0-9.]+) ([0-9.]+)h0", dots):
            x, y = (float(x) - 90) / 840, (510 - float(y)) / 446
            self.assertTrue(0 <= x <= 1 and 0 <= y <= 1, (x, y))
            points.append((x, y))
        texts = [text.firstChild.data for text in document.getElementsByTagName("text")]
        return out.decode("utf-8"), points, texts

    def test_points_are_where_lines_are_in_corpus_and_stream(self):
        text, points, texts = self.plot("--buffer-size", 1)
        self.assertRegex(text, "plot.svg: 600 lines, neighbours 0.0[0-9]+ of the corpus apart")
        self.assertEqual(len(points), 600)
        order = self.stream_order("--buffer-size", 1)
        for (x, _), number in zip(points, order):
            self.assertAlmostEqual(x, (number + 0.5) / 600, delta=1e-3)
        self.assertEqual([y for _, y in points], sorted(y for _, y in points))
        self.assertIn("place in the corpus (file)", texts)
        self.assertIn("chunk-*.gz: --buffer-size 1 --seed 0", texts)

    def stream_order(self, *args):
        """Return the places in the corpus of the lines of a stream, the last one of each file being empty."""
        _, out, _ = self.run_command("stream", "chunk-*.gz", *args)
        places = {line: place for place, line in enumerate(self.corpus) if line}
        order = [places.get(line) for line in out.decode("utf-8").split("\n")[:-1]]
        return [place if place is not None else order[i - 1] + 1 for i, place in enumerate(order)]

    def test_larger_buffer_mixes_better(self):
        distances = []
        for size in [1, 100, 600]:
            text, _, _ = self.plot("--buffer-size", size)
            distances.append(float(re.search("neighbours ([0-9.]+) of", text).group(1)))
        self.assertEqual(distances, sorted(distances))
        self.assertLess(abs(distances[-1] - 1 / 3), 0.03)

    def test_points_are_few_and_from_everywhere_however_long_the_stream_is(self):
        with mock.patch.object(_plot, "_NUM_POINTS", 50):
            _, points, _ = self.plot()
        self.assertEqual(len(points), 50)
        self.assertLess(min(y for _, y in points), 0.2)
        self.assertGreater(max(y for _, y in points), 0.8)
        order = _plot._Order(_plot._NUM_POINTS)
        for number in range(10 * _plot._NUM_POINTS):
            order.add(number * 0.37 % 10)
        options = argparse.Namespace(files=["a"], buffer_size=1, seed=1, batch_size=1, max_tokens=None)
        self.assertLess(len(_plot._picture(order, 10, [0.5] * 1000, options)), 300000)

    def test_batch_fill_is_the_share_of_words(self):
        options = argparse.Namespace(batch_size=4, max_tokens=None)
        batch = [(0.0, 6), (0.0, 3), (0.0, 0)]
        self.assertEqual(_plot._fill(batch, options), 9 / 24)
        self.assertEqual(_plot._fill([(0.0, 0)], options), 0)
        options = argparse.Namespace(batch_size=None, max_tokens=20)
        self.assertEqual(_plot._fill(batch, options), 9 / 20)
        self.assertEqual(_plot._fill([(0.0, 30)], options), 1)  # a line longer than the room

    def test_distribution_of_batch_fill_is_drawn_with_batches(self):
        _, out, _ = self.run_command("stream", "chunk-*.gz", "--batch-size", 8)
        num_batches = out.count(b"\n")
        for options in [["--batch-size", 8], ["--batch-size", 8, "--workers", 1]]:
            with self.subTest(options=options):
                _, points, texts = self.plot(*options)
                self.assertEqual(len(points), 600)
                self.assertRegex("\n".join(texts), "\n{} batches, full to 9[0-9]".format(num_batches))
        _, _, texts = self.plot()
        self.assertFalse(any("batches" in text for text in texts))

    def test_limit_and_one_short_file(self):
        text, points, _ = self.plot("--limit", 7)
        self.assertIn(": 7 lines,", text)
        self.assertEqual(len(points), 7)
        path = os.path.join(self.own_folder, "<one> & only")
        with open(path, "w") as file:
            file.write("a line\n")
        text, points, texts = self.plot(files=[path])
        self.assertIn(": 1 lines,", text)
        self.assertEqual([x for x, _ in points], [0.5])
        self.assertTrue(texts[0].startswith("<one> & only: --buffer-size 100,000"))

    def test_files_that_cannot_be_read_or_written_are_errors(self):
        out = os.path.join(self.own_folder, "nowhere", "plot.svg")
        self.assertFails("No such file.*nowhere", "plot", "chunk-*.gz", "--out", out)
        empty = os.path.join(self.own_folder, "empty")
        open(empty, "w").close()
        self.assertFails("there are no lines in .*empty", "plot", empty, "--out", self.out)
        self.assertFalse(os.path.exists(self.out))
        self.assertFails("--out", "plot", "chunk-*.gz", status=2)


if __name__ == "__main__":
    unittest.main()
