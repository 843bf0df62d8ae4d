"""Every example in the documentation runs: docstrings, and the fenced blocks of README.md and docs/*.md."""

import contextlib
import doctest
import glob
import gzip
import importlib
import io
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

import infinibatch
from infinibatch import iterators

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(infinibatch.__file__)))
GUIDES = [os.path.join(ROOT, "README.md")] + sorted(glob.glob(os.path.join(ROOT, "docs", "*.md")))
NEEDS = {"infinibatch.torch": "torch"}  # modules whose import needs a package that may be missing
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules():
    yield infinibatch
    for _, name, _ in pkgutil.iter_modules(infinibatch.__path__, "infinibatch."):
        try:
            yield importlib.import_module(name)
        except ImportError as error:
            if NEEDS.get(name) != error.name:
                raise


def fenced_blocks(text):
    """Yield (language, line number of the first line, content) of each fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match.group(1), text.count("\n", 0, match.start(2)) + 1, match.group(2)


@contextlib.contextmanager
def corpus_folder():
    """Work in a temporary folder that holds chunks/*.gz, which the guides' examples read."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            os.mkdir("chunks")
            for chunk in range(10):
                with gzip.open(os.path.join("chunks", "part-{}.gz".format(chunk)), "wt", encoding="utf-8") as file:
                    for line in range(100):
                        file.write("line {} of chunk {}{}\n".format(line, chunk, " and more" * (line % 7)))
            yield folder
        finally:
            os.chdir(before)


def run_python(source, path, line, namespace):
    if ">>>" in source:
        test = doctest.DocTestParser().get_doctest(source, namespace, os.path.basename(path), path, line - 1)
        report = io.StringIO()
        # The examples share the document's namespace, so the runner must neither copy nor clear it.
        test.globs = namespace
        doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.write, clear_globs=False)
        return report.getvalue()
    with contextlib.redirect_stdout(io.StringIO()):
        # Blank lines in front give a traceback the document's line numbers.
        exec(compile("\n" * (line - 1) + source, path, "exec"), namespace)
    return ""


def run_commands(source):
    """Run a block's lines that call this package, and return what the first one that failed printed."""
    environment = dict(os.environ, PYTHONPATH=PACKAGE_PARENT)
    for command in source.replace("\\\n", " ").splitlines():
        if command.startswith("python3 -m infinibatch") and not command.startswith("python3 -m infinibatch demo"):
            command = shlex.quote(sys.executable) + command[len("python3") :]
            process = subprocess.run(
                command,
                shell=True,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if process.returncode:
                return "{}\n{}".format(command, process.stdout.decode("utf-8", "replace"))
    return ""


class TestGuides(unittest.TestCase):
    def test_every_example_of_each_guide_runs(self):
        for path in GUIDES:
            with open(path, encoding="utf-8") as file:
                blocks = list(fenced_blocks(file.read()))
            with self.subTest(guide=os.path.basename(path)), corpus_folder():
                namespace = {"__name__": "__main__"}
                for language, line, source in blocks:
                    if language == "python":
                        self.assertEqual(run_python(source, path, line, namespace), "")
                    elif language == "sh" and os.name == "posix":
                        self.assertEqual(run_commands(source), "")

    def test_guides_hold_examples(self):
        with open(GUIDES[0], encoding="utf-8") as file:
            languages = [language for language, _, _ in fenced_blocks(file.read())]
        self.assertIn("python", languages)
        self.assertIn("sh", languages)

    def test_readme_lists_every_iterator(self):
        with open(GUIDES[0], encoding="utf-8") as file:
            listed = set(re.findall(r"^\| `(\w+)\(", file.read(), re.MULTILINE))
        classes = {
            name
            for name, thing in vars(iterators).items()
            if isinstance(thing, type)
            and issubclass(thing, iterators.CheckpointableIterator)
            and thing is not iterators.CheckpointableIterator
            and not name.startswith("_")
        }
        self.assertEqual(listed - {"create_source_iterator"}, classes)

    def test_a_wrong_example_is_noticed(self):
        self.assertIn("Expected:", run_python(">>> 1 + 1\n3\n", "guide.md", 1, {}))
        with self.assertRaisesRegex(NameError, "missing"):
            run_python("missing()\n", "guide.md", 1, {})
        if os.name == "posix":
            self.assertIn("no-such-command", run_commands("python3 -m infinibatch no-such-command\n"))

    def test_links_to_files_lead_somewhere(self):
        for path in GUIDES:
            with open(path, encoding="utf-8") as file:
                targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read())
            for target in targets:
                with self.subTest(guide=os.path.basename(path), target=target):
                    self.assertTrue(os.path.exists(os.path.join(os.path.dirname(path), target)))


class TestBenchmark(unittest.TestCase):
    @unittest.skipUnless(os.name == "posix", "measures with the module resource")
    def test_cases_run_and_both_sides_yield_the_same_number_of_items(self):
        cases = ["shuffle", "buckets", "gzip", "classes", "resume", "state", "memory"]
        script = os.path.join(ROOT, "docs", "benchmark", "run.py")
        process = subprocess.run(
            [sys.executable, "-B", script, "--items", "2000", "--rounds", "1", "--other", ROOT] + cases,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        self.assertEqual(process.returncode, 0, process.stdout)
        for text in (
            "| shuffle, blocks of 10,000 |",
            "| ShardedIterator, 16 shards |",
            "the other Infinibatch: shuffled",
            "the other Infinibatch: 2 chunks",
        ):
            self.assertIn(text, process.stdout)


class TestDocstrings(unittest.TestCase):
    def test_every_public_class_and_function_has_an_example_or_is_part_of_one(self):
        for module in modules():
            for name, thing in sorted(vars(module).items()):
                if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                    continue
                if isinstance(thing, type) or callable(thing):
                    with self.subTest(name="{}.{}".format(module.__name__, name)):
                        self.assertTrue((thing.__doc__ or "").strip(), "no docstring")


def load_tests(loader, tests, pattern):
    """Add the docstrings' examples to the tests, one suite a module."""
    for module in modules():
        tests.addTests(doctest.DocTestSuite(module, optionflags=FLAGS, extraglobs={"__name__": "__main__"}))
    return tests


if __name__ == "__main__":
    unittest.main()
