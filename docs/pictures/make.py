#!/usr/bin/env python3
"""Make the pictures of docs/sizes.md: `python docs/pictures/make.py`, which needs nothing but Python.

The corpus is 20,000 lines of 2 to 60 words in 50 files of 400 lines. Each picture is that of
`python -m infinibatch plot` with other options, so what it shows is the order of the pipeline itself.
"""

import os
import random
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))

PICTURES = {
    "buffer-of-a-chunk.svg": ["--buffer-size", "400"],
    "buffer-of-ten-chunks.svg": ["--buffer-size", "4000"],
    "batches-of-like-length.svg": ["--buffer-size", "4000", "--max-tokens", "1000"],
}


def write_corpus(folder: str, num_files: int = 50, num_lines: int = 400) -> None:
    rng = random.Random(1)
    for number in range(num_files):
        with open(os.path.join(folder, "chunk-{:02}.txt".format(number)), "w") as file:
            for _ in range(num_lines):
                file.write(" ".join(["word"] * min(max(int(rng.lognormvariate(2.8, 0.7)), 2), 60)) + "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_corpus(folder)
        for name, options in PICTURES.items():
            subprocess.check_call(
                [sys.executable, "-m", "infinibatch", "plot", "chunk-*.txt", "--seed", "1"]
                + options
                + ["--out", os.path.join(HERE, name)],
                cwd=folder,
                env=dict(os.environ, PYTHONPATH=ROOT),
            )


if __name__ == "__main__":
    main()
