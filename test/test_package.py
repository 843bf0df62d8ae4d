"""The package as a whole: what it imports, what it is called, which Python it is written for."""

import ast
import glob
import importlib.util
import os
import re
import subprocess
import sys
import unittest

import infinibatch
from infinibatch import datasets, iterators

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PACKAGE = os.path.dirname(os.path.abspath(infinibatch.__file__))
SOURCES = sorted(glob.glob(os.path.join(PACKAGE, "*.py")))

# Modules that would make `import infinibatch` slow.
SLOW = {"asyncio", "concurrent", "ctypes", "multiprocessing", "socket", "subprocess", "unittest"}

PUBLIC = {
    iterators: [
        "BlockwiseShuffleIterator",
        "BucketedReadaheadBatchIterator",
        "BufferedShuffleIterator",
        "CheckpointableIterator",
        "ChunkedSourceIterator",
        "FixedBatchIterator",
        "InfinitePermutationSourceIterator",
        "MapIterator",
        "MultiplexIterator",
        "NativeCheckpointableIterator",
        "ParallelMapIterator",
        "PrefetchIterator",
        "RandomIterator",
        "RecurrentIterator",
        "SamplingRandomMapIterator",
        "SelectManyIterator",
        "WindowedIterator",
        "ZipIterator",
        "create_source_iterator",
    ],
    datasets: ["bump_seed", "chunked_dataset_iterator"],
}


def parse(path):
    with open(path, encoding="utf-8") as file:
        source = file.read()
    if sys.version_info >= (3, 8):
        return ast.parse(source, path, feature_version=(3, 6))
    return ast.parse(source, path)


def imported_at_load(tree):
    """Yield the top-level package of every import that runs when the module is loaded."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield "infinibatch" if node.level else node.module.split(".")[0]
        elif isinstance(node, (ast.If, ast.Try)):
            pending += ast.iter_child_nodes(node)
        elif isinstance(node, ast.ClassDef):
            pending += node.body


class TestPackage(unittest.TestCase):
    def run_python(self, code):
        # -S and -E: without site-packages, and without what the environment would add.
        code = "import sys; sys.path.insert(0, {!r})\n".format(os.path.dirname(PACKAGE)) + code
        output = subprocess.check_output([sys.executable, "-S", "-E", "-c", code], universal_newlines=True)
        return output.split()

    def test_import_loads_no_slow_module(self):
        loaded = self.run_python("import infinibatch, infinibatch.datasets\nprint(*sys.modules)")
        self.assertIn("infinibatch", loaded)
        self.assertEqual(SLOW & {name.split(".")[0] for name in loaded}, set())

    def test_import_prints_nothing(self):
        self.assertEqual(self.run_python("import infinibatch, infinibatch.iterators, infinibatch.datasets"), [])

    @unittest.skipUnless(hasattr(sys, "stdlib_module_names"), "needs sys.stdlib_module_names (Python 3.10)")
    def test_modules_need_the_standard_library_alone(self):
        allowed = set(sys.stdlib_module_names) | {"infinibatch"}
        for path in SOURCES:
            extra = {"torch", "torchdata"} if os.path.basename(path) == "torch.py" else set()
            with self.subTest(module=os.path.basename(path)):
                self.assertEqual(set(imported_at_load(parse(path))) - allowed - extra, set())

    def test_syntax_is_that_of_python_3_6(self):
        self.assertTrue(SOURCES)
        for path in SOURCES:
            with self.subTest(module=os.path.basename(path)):
                self.assertIsInstance(parse(path), ast.Module)

    def test_public_names_of_0_1_1_exist(self):
        for module, names in PUBLIC.items():
            for name in names:
                with self.subTest(name="{}.{}".format(module.__name__, name)):
                    self.assertTrue(callable(getattr(module, name, None)))

    def test_version_is_that_of_the_newest_changes(self):
        with open(os.path.join(ROOT, "CHANGELOG.md"), encoding="utf-8") as file:
            newest = re.search(r"^## (\d\S*)", file.read(), re.MULTILINE).group(1)
        self.assertEqual(infinibatch.__version__, newest)

    def test_type_hints_are_announced(self):
        self.assertTrue(os.path.isfile(os.path.join(PACKAGE, "py.typed")))


class TestSetup(unittest.TestCase):
    def test_setup_reads_name_and_version_without_importing_the_package(self):
        if importlib.util.find_spec("setuptools") is None:
            self.skipTest("needs setuptools")
        output = subprocess.check_output(
            [sys.executable, "-W", "ignore", "-c", SETUP, os.path.join(ROOT, "setup.py")],
            universal_newlines=True,
            cwd=ROOT,
        )
        self.assertEqual(output.split(), ["infinibatch", infinibatch.__version__, ">=3.6", "0", "False"])


# Runs setup.py with setup() replaced, so that nothing is written.
SETUP = """
import runpy, sys, setuptools
def setup(name, version, python_requires, install_requires=(), **others):
    print(name, version, python_requires, len(install_requires), "infinibatch" in sys.modules)
setuptools.setup = setup
runpy.run_path(sys.argv[1])
"""


if __name__ == "__main__":
    unittest.main()
