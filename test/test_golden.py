"""The reference sequences of ``data/golden``: same parameters and seeds, same items, also after any restore."""

import json
import os
import pickle
import tempfile
import unittest
from functools import partial

from described_pipelines import as_json, build

from infinibatch.testing import check_iterator

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "golden")


def cases():
    """Return (file name, case) for every reference sequence."""
    found = []
    for name in sorted(os.listdir(FOLDER)):
        with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
            found.extend((name, case) for case in json.load(file))
    return found


def read(iterator, take):
    """Return up to so many items, and whether StopIteration came before."""
    items = []
    for _ in range(take):
        try:
            items.append(next(iterator))
        except StopIteration:
            return items, True
    return items, False


class TestGolden(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def build(self, name, case):
        folder = os.path.join(self.folder, name, case["id"])
        os.makedirs(folder, exist_ok=True)
        return build(case["pipeline"], folder)

    def test_there_are_cases_of_every_kind(self):
        names = {name for name, _ in cases()}
        self.assertEqual(
            names, {"batch.json", "dataset.json", "map.json", "shuffle.json", "source.json", "tutorial.json"}
        )

    def test_items_and_end_are_the_reference(self):
        for name, case in cases():
            with self.subTest(case["id"]):
                with self.build(name, case) as iterator:
                    items, ended = read(iterator, case["take"])
                self.assertEqual(as_json(items), case["expected"])
                self.assertEqual(ended, case["ends"])

    def test_every_position_restores_exactly(self):
        for name, case in cases():
            states = []
            with self.build(name, case) as iterator:
                for _ in case["expected"]:
                    states.append(iterator.getstate())
                    next(iterator)
                states.append(iterator.getstate())
            for position, state in enumerate(states):
                for way, stored in (("json", as_json(state)), ("pickle", pickle.loads(pickle.dumps(state)))):
                    with self.subTest(case["id"], position=position, way=way), self.build(name, case) as iterator:
                        iterator.setstate(stored)
                        items, ended = read(iterator, case["take"] - position)
                        self.assertEqual(as_json(items), case["expected"][position:])
                        self.assertEqual(ended, case["ends"])

    def test_contract_is_kept(self):
        for name, case in cases():
            if name != "tutorial.json":  # pipelines like those of dataset.json, whose chunks take long to read
                with self.subTest(case["id"]):
                    check_iterator(partial(self.build, name, case), take=case["take"], positions=3, pickles=True)


if __name__ == "__main__":
    unittest.main()
