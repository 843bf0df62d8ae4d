"""`check_iterator` passes what keeps the contract and finds each of many planted mistakes."""

import gc
import random
import unittest
import warnings

from infinibatch.iterators import CheckpointableIterator
from infinibatch.testing import check_iterator

NUMBERS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SUMS = [3, 4, 8, 9, 14, 23, 25, 31, 36, 39, 44]


class Sums(CheckpointableIterator):
    """A correct iterator: running sums, whose state holds a list. The mistakes below are planted in subclasses."""

    def __init__(self, callback=None, numbers=NUMBERS):
        self.callback = callback
        self.numbers = numbers
        self.closed = 0
        self.setstate(None)

    def getstate(self):
        return {"index": self.index, "recent": list(self.recent)}

    def setstate(self, checkpoint):
        checkpoint = {"index": 0, "recent": []} if checkpoint is None else checkpoint
        self.index = checkpoint["index"]
        self.recent = list(checkpoint["recent"])

    def __next__(self):
        if self.index >= len(self.numbers):
            raise StopIteration
        self.call_back()
        total = self.numbers[self.index] + (self.recent[-1] if self.recent else 0)
        self.recent = (self.recent + [total])[-3:]
        self.index += 1
        return total

    def call_back(self):
        if self.callback is not None:
            try:
                self.callback()
            except StopIteration as error:
                raise RuntimeError("the callback raised StopIteration") from error

    def close(self):
        self.closed += 1


class RestoresOneTooFar(Sums):
    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.index += checkpoint is not None


class HasNamesOfTheLibraryForOtherThings(Sums):
    _sources = _shown = _inputs = ()

    def _fill(self):
        raise AssertionError("this is not what you think")

    _skip = _back = _parse = _check = _save = _restore = _state = _read = _own = _step = _fill


class IgnoresSetstate(Sums):
    def setstate(self, checkpoint):
        super().setstate(None)


class ForgetsPartOfTheState(Sums):
    def getstate(self):
        return {"index": self.index, "recent": []}


class IsWrongAtOnePosition(Sums):
    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.index += self.index == 7


class SharesTheStateItGives(Sums):
    def getstate(self):
        return {"index": self.index, "recent": self.recent}


class SharesWhatIsDeepInAState(Sums):
    around = list

    def getstate(self):
        return {"index": self.index, "inner": self.around([{"recent": self.recent}])}

    def setstate(self, checkpoint):
        super().setstate(checkpoint and {"index": checkpoint["index"], "recent": checkpoint["inner"][0]["recent"]})


class SharesWhatIsInATuple(SharesWhatIsDeepInAState):
    around = tuple


class ChangesTheStateItGave(SharesTheStateItGives):
    def __next__(self):
        recent = self.recent
        total = super().__next__()
        recent.append(total)
        self.recent = recent
        return total


class KeepsTheStateItTakes(Sums):
    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        if checkpoint is not None:
            self.recent = checkpoint["recent"]


class ChangesTheStateItTook(KeepsTheStateItTakes):
    def __next__(self):
        recent = self.recent
        total = super().__next__()
        recent.append(total)
        self.recent = recent
        return total


class StartsAgainAfterItsEnd(Sums):
    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.setstate(None)
            raise


class YieldsAnItemAfterItsEnd(Sums):
    ended = 0

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.ended += 1
            if self.ended == 2:
                return 44
            raise


class StaysEndedAfterSetstate(Sums):
    ended = False

    def __next__(self):
        if self.ended:
            raise StopIteration
        try:
            return super().__next__()
        except StopIteration:
            self.ended = True
            raise


class RestoresTheEndToTheStart(Sums):
    def setstate(self, checkpoint):
        super().setstate(None if checkpoint is not None and checkpoint["index"] == len(self.numbers) else checkpoint)


class ForgetsTheEndAfterIt(Sums):
    def getstate(self):
        return {"index": 0, "recent": []} if self.at_end else super().getstate()

    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.at_end = False

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.at_end = True
            raise


class IgnoresSetstateNone(Sums):
    def setstate(self, checkpoint):
        if checkpoint is not None or not hasattr(self, "index"):
            super().setstate(checkpoint)


class LosesAnItemInGetstate(Sums):
    def getstate(self):
        state = super().getstate()
        next(self, None)
        return state


class LosesAnItemInTheSecondGetstate(Sums):
    asked_at = None

    def getstate(self):
        if self.asked_at == self.index:
            next(self, None)
        self.asked_at = self.index
        return super().getstate()


class KeepsTheStateOfTheFirstGetstate(Sums):
    kept = None

    def getstate(self):
        self.kept = super().getstate()
        return super().getstate()

    def setstate(self, checkpoint):
        super().setstate(self.kept or checkpoint)


class HonoursOnlyTheFirstSetstate(Sums):
    restored = False

    def setstate(self, checkpoint):
        if not self.restored:
            super().setstate(checkpoint)
        self.restored = checkpoint is not None


class AddsUpRestores(Sums):
    def __init__(self, callback=None, numbers=NUMBERS):
        self.pending = 0
        super().__init__(callback, numbers)

    def setstate(self, checkpoint):
        super().setstate(None)
        self.pending = self.pending + checkpoint["index"] if checkpoint is not None else 0

    def getstate(self):
        self.catch_up()
        return super().getstate()

    def __next__(self):
        self.catch_up()
        return super().__next__()

    def catch_up(self):
        pending, self.pending = self.pending, 0
        for _ in range(pending):
            super().__next__()


class KeepsWhatItHadReadAhead(Sums):
    """Hands out items from runs of three and forgets to drop the run in `setstate`."""

    def __init__(self, callback=None, numbers=NUMBERS):
        self.run = []
        super().__init__(callback, numbers)

    def getstate(self):
        state = super().getstate()
        if self.run:
            ahead = Sums()
            index = self.index - len(self.run)
            for _ in range(index):
                next(ahead)
            state = ahead.getstate()
        return state

    def __next__(self):
        if not self.run:
            while len(self.run) < 3:
                try:
                    self.run.append(super().__next__())
                except StopIteration:
                    break
        if not self.run:
            raise StopIteration
        return self.run.pop(0)


class SavesWronglyRightAfterRestore(Sums):
    fresh = False

    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.fresh = checkpoint is not None and self.index > 4

    def getstate(self):
        state = super().getstate()
        state["index"] -= self.fresh
        return state

    def __next__(self):
        self.fresh = False
        return super().__next__()


class RefusesAddedKeys(Sums):
    def setstate(self, checkpoint):
        if checkpoint is not None and len(checkpoint) != 2:
            raise ValueError("what is this?")
        super().setstate(checkpoint)


class HasAStateThatJsonRefuses(Sums):
    def getstate(self):
        return dict(super().getstate(), recent={*self.recent})

    def setstate(self, checkpoint):
        super().setstate(checkpoint and dict(checkpoint, recent=sorted(checkpoint["recent"])))


class HasAStateThatJsonAlters(Sums):
    def getstate(self):
        return {"by index": {self.index: list(self.recent)}}

    def setstate(self, checkpoint):
        if checkpoint is None:
            super().setstate(None)
        else:
            for index, recent in checkpoint["by index"].items():
                super().setstate({"index": index if isinstance(index, int) else 0, "recent": recent})


class CannotSetAGeneratorBackFromJson(Sums):
    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.random = random.Random(1)
        if checkpoint is not None:
            self.random.setstate(checkpoint["random"])

    def getstate(self):
        return dict(super().getstate(), random=self.random.getstate())


class DiffersFromInstanceToInstance(Sums):
    instances = 0

    def __init__(self, callback=None):
        type(self).instances += 1
        super().__init__(callback, NUMBERS if self.instances % 2 else NUMBERS[::-1])


class LosesAnItemByAnError(Sums):
    def __next__(self):
        index = self.index
        try:
            return super().__next__()
        except Exception:
            self.index = index + 1
            raise


class TakesAnErrorForTheEnd(Sums):
    def call_back(self):
        try:
            super().call_back()
        except Exception:
            raise StopIteration from None


class LetsStopIterationThrough(Sums):
    def call_back(self):
        if self.callback is not None:
            self.callback()


class ChangesTheTypeOfAnError(Sums):
    def call_back(self):
        try:
            super().call_back()
        except ValueError as error:
            raise OSError("something went wrong") from error


class DropsTheTracebackOfAnError(Sums):
    def call_back(self):
        try:
            super().call_back()
        except ValueError as error:
            raised = ValueError(*error.args)
        else:
            return
        raise raised


class RaisesAnErrorForEver(Sums):
    error = None

    def call_back(self):
        try:
            if self.error is None:
                super().call_back()
        except ValueError as error:
            self.error = error
        if self.error is not None:
            raise self.error


class SavesAFailedItemAsDone(Sums):
    failed = False

    def getstate(self):
        state = super().getstate()
        state["index"] += self.failed
        return state

    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.failed = False

    def __next__(self):
        self.failed = True
        item = super().__next__()
        self.failed = False
        return item


class KeepsAFailedItemAfterSetstate(Sums):
    held = None

    def getstate(self):
        return super().getstate() if self.held is None else self.held

    def __next__(self):
        if self.held is not None:
            super().setstate(self.held)
        try:
            item = super().__next__()
        except StopIteration:
            raise
        except Exception:
            self.held = super().getstate()
            raise
        self.held = None
        return item


class MovesOnByKeyboardInterrupt(Sums):
    def call_back(self):
        try:
            super().call_back()
        except KeyboardInterrupt:
            self.index += 1
            raise


class CallsBackInSetstate(Sums):
    """Correct."""

    def setstate(self, checkpoint):
        if checkpoint is not None:
            self.call_back()
        super().setstate(checkpoint)


class IgnoresSetstateAfterOneThatFailed(CallsBackInSetstate):
    failed = False

    def setstate(self, checkpoint):
        if not self.failed:
            self.failed = True
            super().setstate(checkpoint)
        self.failed = False


class FailsWhenAnErrorMeetsARestore(Sums):
    caught_up = True

    def setstate(self, checkpoint):
        super().setstate(checkpoint)
        self.caught_up = checkpoint is None

    def __next__(self):
        if not self.caught_up:
            self.caught_up = True
            index, self.index = self.index, 0
            self.call_back()
            self.index = index
        return super().__next__()


class InRuns(Sums):
    """Those below are asked for runs of items, as the library's own stages are."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls._foreign = False


class DropsAnItemInRuns(InRuns):
    def _fill(self, out, n):
        super()._fill(out, n)
        if n == 3:
            next(self, None)


class ForgetsARunWhereAnErrorComes(InRuns):
    def _fill(self, out, n):
        run = []
        while len(run) < n:
            try:
                run.append(next(self))
            except StopIteration:
                break
        out.extend(run)


class GivesTooManyInARun(InRuns):
    def _fill(self, out, n):
        super()._fill(out, n + 1)


class GivesAnEmptyRun(InRuns):
    def _fill(self, out, n):
        if self.index != 5:
            super()._fill(out, n)


class GivesARunAfterItsEnd(InRuns):
    def _fill(self, out, n):
        if self.index == len(self.numbers):
            out.append(44)
        super()._fill(out, n)


class LosesAnItemInARunAfterASkip(InRuns):
    skipped = False

    def _skip(self, n):
        skipped = super()._skip(n)
        self.skipped = True
        return skipped

    def _fill(self, out, n):
        if self.skipped:
            next(self, None)
        super()._fill(out, n)

    def __next__(self):
        self.skipped = False
        return super().__next__()


class ChangesItsPositionAtItsEndInARun(InRuns):
    def _fill(self, out, n):
        length = len(out)
        super()._fill(out, n)
        if len(out) - length < n and len(out) > length:
            self.index -= 1


class SkipsOneTooFew(InRuns):
    def _skip(self, n):
        return super()._skip(n - 1) + 1 if n > 1 else super()._skip(n)


class MiscountsWhatItSkipped(InRuns):
    def _skip(self, n):
        super()._skip(n)
        return n


class SkipsWithoutTheState(InRuns):
    def _skip(self, n):
        before, self.index = self.index, min(self.index + n, len(self.numbers))
        return self.index - before


class TakesBackOneTooFew(InRuns):
    def _back(self, n):
        index = self.index - n + (n > 1)
        super().setstate(None)
        for _ in range(index):
            super().__next__()


class ForgetsItsPositionInACopy(Sums):
    def __reduce__(self):
        return type(self), ()


class IsMovedByACopy(Sums):
    def __deepcopy__(self, memo):
        copied = type(self)()
        copied.setstate(self.getstate())
        next(self, None)
        return copied


class CannotBeCopied(Sums):
    def __reduce__(self):
        raise TypeError("no copies of this one")


class CannotBeClosedTwice(Sums):
    def close(self):
        super().close()
        if self.closed == 2:
            raise OSError("already closed")


# Iterator class, arguments of check_iterator, what the message says.
MISTAKES = [
    (RestoresOneTooFar, {}, r"restored from the state itself into a fresh instance at position 0: differs at item 0"),
    (IgnoresSetstate, {}, r"restored from the state itself into a fresh instance at position 1: differs at item 1"),
    (ForgetsPartOfTheState, {}, r"into a fresh instance at position 1: differs at item 1\n"),
    (IsWrongAtOnePosition, {}, r"into a fresh instance at position 7: differs at item 7\n.*: +31, 36, 39.*\n.*: +30,"),
    (SharesTheStateItGives, {}, r"the caller altered a state that was taken at position 1: differs at item 1"),
    (SharesWhatIsDeepInAState, {}, r"the caller altered a state that was taken at position 1: differs at item 1"),
    (SharesWhatIsInATuple, {}, r"the caller altered a state that was taken at position 1: differs at item 1"),
    (ChangesTheStateItGave, {}, r"getstate\(\) at position 0: the state changed while the iterator was read on"),
    (KeepsTheStateItTakes, {}, r"the caller altered a state that had been restored at position 1: differs at item 1"),
    (ChangesTheStateItTook, {}, r"getstate\(\) at position 0: setstate\(\), or reading .* changed the state it was"),
    (StartsAgainAfterItsEnd, {}, r"read from a fresh instance at position 0: differs at item 11\n.*44, <end>\n.*3,"),
    (YieldsAnItemAfterItsEnd, {}, r"read from a fresh instance at position 0: differs at item 11\n"),
    (StaysEndedAfterSetstate, {}, r"read again after setstate\(None\) at position 0: differs at item 0\n.*\n.* <end>"),
    (RestoresTheEndToTheStart, {}, r"into a fresh instance at position 11: differs at item 11\n.*: <end>\n.*: +3, 4"),
    (ForgetsTheEndAfterIt, {}, r"restored from a state taken after the end at position 11: differs at item 11"),
    (IgnoresSetstateNone, {}, r"read again after setstate\(None\) at position 0: differs at item 0"),
    (LosesAnItemInGetstate, {}, r"read on after getstate\(\) at position 0: differs at item 0\n"),
    (LosesAnItemInTheSecondGetstate, {}, r"read on after two getstate\(\) at position 0: differs at item 0\n"),
    (KeepsTheStateOfTheFirstGetstate, {}, r"after one item and a getstate\(\) at position 0: differs at item 0\n"),
    (HonoursOnlyTheFirstSetstate, {}, r"setstate\(None\) after restoring the end at position 0: differs at item 0\n"),
    (AddsUpRestores, {}, r"restored .* at position \d+: differs at item \d+\n"),
    (KeepsWhatItHadReadAhead, {}, r"read after setstate\(None\) when some .* at position 2: differs at item 0\n"),
    (SavesWronglyRightAfterRestore, {}, r"saved right after a restore at position 5: differs at item 5\n.*\n.*"),
    (RefusesAddedKeys, {}, r"caller added a key at position 0: raised ValueError: what is this\?"),
    (HasAStateThatJsonRefuses, {}, r"after getstate\(\) at position 0: the state is not JSON data: .*set"),
    (HasAStateThatJsonAlters, {}, r"restored from json into a fresh instance at position 1: differs at item 1\n"),
    (CannotSetAGeneratorBackFromJson, {}, r"restored from json into a fresh instance at position 0: raised TypeError"),
    (DiffersFromInstanceToInstance, {}, r"^read .*: differs at item 0"),
    (LosesAnItemByAnError, {"errors": [ValueError]}, r"ValueError raised by call 1 .*, then next\(\) at position 0: d"),
    (TakesAnErrorForTheEnd, {"errors": [ValueError]}, r"ValueError raised by call 1 .* at item 0\n.*\n.*: +<end>"),
    (LetsStopIterationThrough, {"errors": [StopIteration]}, r"StopIteration raised by call 1 .* 0\n.*\n.*: +<end>"),
    (ChangesTheTypeOfAnError, {"errors": [ValueError]}, r"call 1 .* at position 0: raised OSError: something went"),
    (DropsTheTracebackOfAnError, {"errors": [ValueError]}, r"call 1 .*: the error came without the traceback of the"),
    (RaisesAnErrorForEver, {"errors": [ValueError]}, r"call 1 .*: the error comes again and again at item 0"),
    (SavesAFailedItemAsDone, {"errors": [ValueError]}, r"getstate\(\) restored into a fresh instance at position 0: d"),
    (KeepsAFailedItemAfterSetstate, {"errors": [ValueError]}, r"then setstate\(\) at position \d+: differs at item \d"),
    (MovesOnByKeyboardInterrupt, {"errors": [ValueError, KeyboardInterrupt]}, r"KeyboardInterrupt raised by call 1 .*"),
    (IgnoresSetstateAfterOneThatFailed, {"errors": [ValueError]}, r"restored, ValueError .* position 1: differs at"),
    (FailsWhenAnErrorMeetsARestore, {"errors": [ValueError]}, r"restored, ValueError raised by call 1 .* position 1:"),
    (
        DropsAnItemInRuns,
        {},
        r"read in runs of up to 3 at position 0: differs at item 3\n.*: 4, 8, 9, .*\n.*: +4, 8, 14",
    ),
    (ForgetsARunWhereAnErrorComes, {"errors": [ValueError]}, r"then _fill\(\) at position \d+: differs at item \d+"),
    (GivesTooManyInARun, {}, r"read in runs of up to 1 at position 0: _fill\(out, 1\) left \[.*\] in out"),
    (
        GivesAnEmptyRun,
        {},
        r"read in runs of up to 1 at position 0: differs at item 5\n.*: 9, 14, 23, .*\n.*: +9, 14, <end>",
    ),
    (
        GivesARunAfterItsEnd,
        {},
        r"read in runs of up to 1 at position 0: differs at item 11\n.*, <end>\n.*: +39, 44, 44,",
    ),
    (ChangesItsPositionAtItsEndInARun, {}, r"read in runs of up to 2 at position 0: differs at item 11\n"),
    (
        LosesAnItemInARunAfterASkip,
        {},
        r"random walk with seed 0, .*_skip\(\d\).*_fill\(\d\), at position \d+: differs at",
    ),
    (SkipsOneTooFew, {}, r"skipped to at position 2: differs at item 2"),
    (MiscountsWhatItSkipped, {}, r"skipped to at position 0: _skip\(1\) at item 11 returned 1, expected 0"),
    (SkipsWithoutTheState, {}, r"skipped to at position 1: differs at item 1"),
    (TakesBackOneTooFew, {}, r"items taken back from runs of up to 3 at position 0: differs at item 1\n"),
    (ForgetsItsPositionInACopy, {"pickles": True}, r"the instance copied by pickle at position 1: differs at item 1"),
    (IsMovedByACopy, {"pickles": True}, r"read on after it was copied at position 0: differs at item 0\n"),
    (CannotBeCopied, {"pickles": True}, r"copied by pickle at position 0: raised TypeError: no copies of this one"),
    (CannotBeClosedTwice, {}, r", closed twice, at position 0: raised OSError: already closed"),
]


class Wandering(CheckpointableIterator):
    """Endless, without a list in its state."""

    def __init__(self):
        self.setstate(None)

    def getstate(self):
        return {"item": self.item}

    def setstate(self, checkpoint):
        self.item = 1 if checkpoint is None else checkpoint["item"]

    def __next__(self):
        item, self.item = self.item, self.item * 5 % 97
        return item

    def close(self):
        pass


class Listed(Wandering):
    """The items of a list."""

    def __init__(self, items):
        self.items = items
        super().__init__()

    def setstate(self, checkpoint):
        self.item = 0 if checkpoint is None else checkpoint["item"]

    def __next__(self):
        if self.item == len(self.items):
            raise StopIteration
        self.item += 1
        return self.items[self.item - 1]


class Array:
    """Compares as arrays do: item by item, with a result that has no truth value."""

    dtype = "float64"

    def __init__(self, *values):
        self.values = list(values)
        self.shape = (len(values),)

    def tolist(self):
        return self.values

    def __eq__(self, other):
        return Array(*(a == b for a, b in zip(self.values, other.values)))

    def __bool__(self):
        raise ValueError("the truth value is ambiguous")


class Record:
    """Knows no equality."""

    def __init__(self, value):
        self.value = value


class TestCheckIterator(unittest.TestCase):
    def test_correct_iterator_passes(self):
        check_iterator(Sums)
        check_iterator(Sums, SUMS)
        for iterator_class in (Sums, CallsBackInSetstate, HasNamesOfTheLibraryForOtherThings):
            check_iterator(iterator_class, SUMS, pickles=True, errors=(ValueError, StopIteration, KeyboardInterrupt))

    def test_correct_iterator_passes_for_any_part(self):
        for length in range(4):
            with self.subTest(length):
                check_iterator(lambda: Sums(None, NUMBERS[:length]), SUMS[:length])  # noqa: B023
        for take in (1, 5, 11, 12):
            with self.subTest(take=take):
                check_iterator(Sums, SUMS, take=take, errors=[ValueError])
        for positions in (2, 3, 50):
            with self.subTest(positions=positions):
                check_iterator(Sums, SUMS, positions=positions)

    def test_correct_iterator_passes_whatever_the_seed(self):
        for seed in range(20):
            with self.subTest(seed):
                check_iterator(Sums, SUMS, seed=seed)

    def test_correct_endless_iterator_passes(self):
        check_iterator(Wandering, take=30)
        check_iterator(Wandering, [1, 5, 25, 28, 43, 21], take=6)

    def test_mistakes_are_found_and_named(self):
        for iterator_class, arguments, pattern in MISTAKES:
            with self.subTest(iterator_class.__name__):
                with self.assertRaisesRegex(AssertionError, pattern) as caught:
                    check_iterator(iterator_class, SUMS, **arguments)
                self.assertRegex(str(caught.exception), r"at position \d+: ")

    def test_wrong_items_are_found(self):
        where = "read from a fresh instance at position 0: differs at "
        for expected, pattern in [
            (
                SUMS[:5] + [0] + SUMS[6:],
                r"item 5\n  expected from item 3: 9, 14, 0, .*\n  got from item 3: +9, 14, 23, .*$",
            ),
            (SUMS + [45], r"item 11\n  expected .*: 39, 44, 45, <end>\n  got .*: +39, 44, <end>$"),
            (SUMS[:-1], r"item 10\n  expected .*: 36, 39, <end>\n  got .*: +36, 39, 44, <end>$"),
            ([], r"item 0\n  expected .*: <end>\n  got .*: +3, 4, 8, \.\.\.$"),
        ]:
            with self.subTest(pattern):
                with self.assertRaisesRegex(AssertionError, where + pattern):
                    check_iterator(Sums, expected)

    def test_error_of_the_iterator_is_the_cause(self):
        with self.assertRaises(AssertionError) as caught:
            check_iterator(RefusesAddedKeys)
        self.assertIsInstance(caught.exception.__cause__, ValueError)

    def test_make_that_raises_is_named(self):
        with self.assertRaisesRegex(AssertionError, r"make\(\) raised ZeroDivisionError"):
            check_iterator(lambda: 1 // 0)

    def test_every_iterator_is_closed(self):
        for iterator_class, arguments, _ in [(Sums, {"pickles": True, "errors": [ValueError]}, "")] + MISTAKES:
            with self.subTest(iterator_class.__name__):
                made = []

                def make(*hook):
                    made.append(iterator_class(*hook))  # noqa: B023
                    return made[-1]  # noqa: B023

                try:
                    check_iterator(make, **arguments)
                except AssertionError:
                    pass
                self.assertTrue(made)
                self.assertEqual([iterator for iterator in made if not iterator.closed], [])

    def test_nothing_is_left_open(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_iterator(Sums, errors=[ValueError])
            gc.collect()

    def test_interrupt_by_the_user_is_no_failure_of_the_check(self):
        class Interrupted(Sums):
            def setstate(self, checkpoint):
                super().setstate(checkpoint)
                if self.index == 5:
                    raise KeyboardInterrupt

        with self.assertRaises(KeyboardInterrupt):
            check_iterator(Interrupted)
        with self.assertRaises(KeyboardInterrupt):
            check_iterator(Interrupted, errors=[ValueError])

    def test_items_without_plain_equality_are_compared(self):
        nan = float("nan")
        for items in (
            [0.5, nan, -nan],
            [[nan, {"a": nan}], (nan,)],
            [Array(1, 2), Array(nan), [Array()]],
            [Record(1), Record([nan])],
        ):
            with self.subTest(items):
                check_iterator(lambda: Listed(items), items)  # noqa: B023
        check_iterator(lambda: Listed([Array(1, nan), Record([nan])]))

    def test_items_without_plain_equality_may_differ(self):
        for item, expected in [
            (float("nan"), 0.0),
            (None, 0),
            ((1,), [1]),
            ([1, 2], [1]),
            ({"a": 1}, {"b": 1}),
            (Array(1, 2), Array(1, 3)),
            (Array(1), Array(1, 1)),
            (Array(1), [1]),
            (Record(1), Record(2)),
        ]:
            with self.subTest(item=item, expected=expected):
                with self.assertRaisesRegex(AssertionError, "differs at item 0"):
                    check_iterator(lambda: Listed([item]), [expected])  # noqa: B023

    def test_state_of_users_data_can_stay_out_of_json(self):
        check_iterator(HasAStateThatJsonRefuses, SUMS, through_json=False)

    def test_long_items_are_shortened_in_the_message(self):
        with self.assertRaisesRegex(AssertionError, "differs at item 1") as caught:
            check_iterator(lambda: Listed(["x" * 10000, "y" * 10000]), ["x" * 10000, "z" * 10000])
        self.assertLess(len(str(caught.exception)), 500)

    def test_bad_arguments_are_refused(self):
        for arguments, error, pattern in [
            ({"take": 0}, ValueError, "take must be at least 1, got 0"),
            ({"positions": 1}, ValueError, "positions must be at least 2, got 1"),
            ({"errors": KeyError}, TypeError, "errors must be a sequence of exception classes, got <class 'KeyError'>"),
            ({"errors": [int]}, TypeError, r"errors must be a sequence of exception classes, got \[<class 'int'>\]"),
        ]:
            with self.subTest(pattern):
                with self.assertRaisesRegex(error, pattern):
                    check_iterator(Sums, **arguments)

    def test_endless_iterator_needs_take(self):
        with self.assertRaisesRegex(ValueError, "take must be given for an iterator of more than 10000 items"):
            check_iterator(Wandering)

    def test_errors_need_a_callback_that_calls_the_hook(self):
        with self.assertRaisesRegex(ValueError, "it was never called"):
            check_iterator(lambda hook: Sums(), errors=[ValueError])


if __name__ == "__main__":
    unittest.main()
