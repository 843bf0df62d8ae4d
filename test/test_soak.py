"""
A training job that is killed at random moments, again and again, and must write the same bytes as one that is not.

INFINIBATCH_TEST_SOAK sets for how many seconds (5), INFINIBATCH_TEST_SEED the moments (0: others each time; a failure
names them).
"""

import glob
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from test_workers import take_signals

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SECONDS = float(os.environ.get("INFINIBATCH_TEST_SOAK", "5"))
SEED = int(os.environ.get("INFINIBATCH_TEST_SEED", "0")) or int(time.time())
NUM_BATCHES = 600

# The job appends each batch to a file, and now and then saves how far it is, as a training job does. When it starts
# again, what it wrote after that is cut off.
JOB = """
import json, os, sys
sys.path.insert(0, {root!r})
from infinibatch import datasets, iterators, readers

folder, num_batches, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
open(os.path.join(folder, "started"), "w").close()
chunks = readers.find_chunks(os.path.join({corpus!r}, "*"))
lines = datasets.chunked_dataset_iterator(chunks, readers.read_lines, buffer_size=300, seed=1, num_workers=2)
draws = iterators.SamplingRandomMapIterator(lines, lambda rng, line: (line, rng.random()), seed=2)
batches = iterators.BucketedReadaheadBatchIterator(
    draws, 200, key=lambda item: len(item[0]), batch_size=lambda item: 400 // len(item[0]) + 1, seed=3)
texts = iterators.ParallelMapIterator(batches, lambda batch: repr(batch) + "\\n", 2, 5)
saved = os.path.join(folder, "state")
with iterators.PrefetchIterator(texts, 20) as stream, open(os.path.join(folder, "out"), "a+b") as out:
    done = size = 0
    if os.path.exists(saved):
        with open(saved) as file:
            state, done, size = json.load(file)
        stream.setstate(state)
    out.truncate(size)
    while done < num_batches:
        out.write(next(stream).encode("utf-8"))
        done += 1
        if done % every == 0 or done == num_batches:
            out.flush()
            with open(saved + ".new", "w") as file:
                json.dump([stream.getstate(), done, out.seek(0, 2)], file)
            os.replace(saved + ".new", saved)
"""


def running(mark):
    """Return the processes whose command line holds the mark."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                if os.fsencode(mark) in file.read().split(b"\0"):
                    found.append(int(path.split("/")[2]))
        except OSError:
            pass
    return found


@unittest.skipUnless(sys.platform == "linux", "looks for processes in /proc")
class TestSoak(unittest.TestCase):
    def start(self, folder, every):
        if not os.path.isdir(folder):
            os.mkdir(folder)
        elif os.path.exists(os.path.join(folder, "started")):
            os.remove(os.path.join(folder, "started"))
        command = [sys.executable, self.script, folder, str(NUM_BATCHES), str(every)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=take_signals)

    def finish(self, job, seconds=120):
        _, messages = job.communicate(timeout=seconds)
        return job.returncode, messages.decode("utf-8", "replace")

    def result(self, folder):
        with open(os.path.join(folder, "out"), "rb") as file:
            return file.read()

    def test_a_job_killed_at_random_moments_writes_the_same_bytes_and_leaves_no_process(self):
        rng = random.Random(SEED)
        with tempfile.TemporaryDirectory() as parent, self.subTest(seed=SEED):
            corpus = os.path.join(parent, "corpus")
            os.mkdir(corpus)
            for number in range(12):
                with open(os.path.join(corpus, "chunk-{:02}".format(number)), "w") as file:
                    for i in range(rng.randint(1, 400)):
                        file.write("{}.{} {}\n".format(number, i, "x" * rng.randint(0, 150)))
            self.script = os.path.join(parent, "job.py")
            with open(self.script, "w") as file:
                file.write(JOB.format(root=ROOT, corpus=corpus))

            begin = time.monotonic()
            whole = os.path.join(parent, "whole")
            self.assertEqual(self.finish(self.start(whole, 50)), (0, ""))
            needed = time.monotonic() - begin
            expected = self.result(whole)
            self.assertEqual(expected.count(b"\n"), NUM_BATCHES)

            runs = kills = 0
            while time.monotonic() - begin < SECONDS or not kills:
                folder = os.path.join(parent, "run-{}".format(runs))
                runs += 1
                every = rng.randint(1, 60)
                while True:
                    job, number = self.start(folder, every), 0
                    try:
                        status, messages = self.finish(job, rng.uniform(0, 1.5 * needed))
                    except subprocess.TimeoutExpired:
                        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
                        if number == signal.SIGINT and not os.path.exists(os.path.join(folder, "started")):
                            number = signal.SIGKILL  # an interpreter that is still starting may abort
                        job.send_signal(number)
                        status, messages = self.finish(job)
                        kills += 1
                    if messages:  # Ctrl-C may also come when all is done, while the interpreter ends
                        self.assertEqual(number, signal.SIGINT, messages)
                        self.assertIn("KeyboardInterrupt", messages)
                    if status == 0:
                        break
                    self.assertIn(status, (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, 1), messages)
                    deadline = time.monotonic() + 10
                    while running(folder):
                        self.assertLess(time.monotonic(), deadline, "processes are left behind")
                        time.sleep(0.01)
                self.assertTrue(self.result(folder) == expected, "run {} differs".format(runs))


if __name__ == "__main__":
    unittest.main()
