"""Checkpoints that Infinibatch 0.1.1 wrote restore here: ``data/legacy``, made by ``generate_legacy.py``."""

import gzip
import json
import os
import pickle
import unittest

from described_pipelines import as_json, build
from generate_legacy import FOLDER, PIPELINES


def load():
    """Return the recorded checkpoints, as they were stored in JSON and by pickle."""
    with gzip.open(os.path.join(FOLDER, "checkpoints.json.gz"), "rt", encoding="ascii") as file:
        checkpoints = json.load(file)
    with gzip.open(os.path.join(FOLDER, "checkpoints.pickle.gz"), "rb") as file:
        return checkpoints, pickle.load(file)


class TestLegacyCheckpoints(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.checkpoints, cls.pickled = load()

    def for_each(self, check):
        """Run the check for each checkpoint, with its pipeline, its entry and its state as pickle gives it."""
        for name, entries in self.checkpoints.items():
            for entry, state in zip(entries, self.pickled[name]):
                with self.subTest(name, position=entry["position"], after_end=entry["after_end"]):
                    check(PIPELINES[name][0], entry, state)

    def assert_goes_on(self, iterator, entry):
        items = []
        for _ in entry["items"]:
            items.append(next(iterator, "the end"))
        self.assertEqual(as_json(items), entry["items"])
        if entry["ends"]:
            self.assertRaises(StopIteration, next, iterator)

    def test_every_pipeline_of_the_table_is_recorded(self):
        self.assertEqual(set(self.checkpoints), set(PIPELINES))
        self.assertEqual(set(self.pickled), set(PIPELINES))
        for name, (_, positions) in PIPELINES.items():
            self.assertEqual(len(self.checkpoints[name]), len(positions), name)
            self.assertEqual(as_json(self.pickled[name]), [entry["state"] for entry in self.checkpoints[name]], name)

    def test_checkpoint_in_json_restores(self):
        def check(description, entry, _):
            with build(description) as iterator:
                iterator.setstate(entry["state"])
                self.assert_goes_on(iterator, entry)

        self.for_each(check)

    def test_pickled_checkpoint_restores_in_a_used_pipeline(self):
        def check(description, entry, state):
            with build(description) as iterator:
                for _ in range(3):
                    next(iterator, None)
                iterator.setstate(state)
                self.assert_goes_on(iterator, entry)

        self.for_each(check)

    def test_checkpoint_taken_after_restoring_one_restores(self):
        def check(description, entry, state):
            with build(description) as iterator:
                iterator.setstate(state)
                resaved = iterator.getstate()
            with build(description) as iterator:
                iterator.setstate(as_json(resaved))
                self.assert_goes_on(iterator, entry)

        self.for_each(check)

    def test_checkpoint_written_here_has_the_keys_of_0_1_1(self):
        def check(description, entry, _):
            with build(description) as iterator:
                for _ in range(entry["position"]):
                    next(iterator)
                self.assert_has_keys_of(as_json(iterator.getstate()), entry["state"])

        self.for_each(check)

    def assert_has_keys_of(self, state, legacy):
        if isinstance(legacy, dict) and state is not None:
            self.assertLessEqual(set(legacy), set(state))
            for key in legacy:
                self.assert_has_keys_of(state[key], legacy[key])


if __name__ == "__main__":
    unittest.main()
