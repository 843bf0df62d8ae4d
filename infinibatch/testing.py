"""The contract of a checkpointable iterator, as one check that runs on any stage.

Whoever writes a `infinibatch.iterators.CheckpointableIterator` of their own calls `check_iterator` in a test. It reads
the iterator in every way in which a training run reads it (from the start, after a restore at every position, after its
end, after an error) and fails where one of them gives other items.
"""

import copy
import json
import pickle
import random
import reprlib
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Callable, Dict, Generic, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar

from infinibatch.iterators import CheckpointableIterator

__all__ = ["check_iterator"]

T = TypeVar("T")

_MAX_ITEMS = 10000
_MAX_FAILURES = 8
_INJECTED = "injected by check_iterator"


def check_iterator(
    make: Callable[..., "CheckpointableIterator[T]"],
    expected: Optional[Sequence[T]] = None,
    *,
    take: Optional[int] = None,
    positions: Optional[int] = None,
    through_json: bool = True,
    pickles: bool = False,
    errors: Sequence[Type[BaseException]] = (),
    seed: int = 0,
) -> None:
    """Check that an iterator keeps the contract of checkpointable iterators, at every position.

    The iterators that `make` builds must

    * yield the expected items, then raise `StopIteration` again and again until `setstate`;
    * go on exactly after a restore, in a fresh instance, in one that was read, in one that has ended, in any order,
      twice in a row, behind `setstate(None)`, from the state itself and from a copy that went through `pickle`
      or `json`, also if the state carries a key that the caller added;
    * not be disturbed by `getstate`, and hand out states that are snapshots: reading on does not change a state,
      and changing a state does not change the iterator;
    * give the same items where another stage reads them in runs or skips them;
    * with `pickles`, go on from where they were as a pickled or deep copy;
    * with `errors`, let an error of a callback through with its type and traceback, lose no item by it, try the
      same item again at the next `next()`, and still be at the last good position for `getstate`;
    * bear any number of `close`.

    Every iterator that is made is closed.

    Args:
        make (callable): builds a fresh iterator, sources included. It is called without an argument, or with a
            function if `errors` are given: the callbacks of the pipeline call that function (without an argument)
            each time they run, and it raises one of the errors at some of these calls.
        expected (sequence): the items. None stands for what the first instance yields.
        take (int, at least 1): how many items are looked at, for iterators that do not end. None: all.
        positions (int, at least 2): check at most so many positions (and calls of the callbacks), spread evenly from
            the first to the last. None: every one.
        through_json (bool): False if the states hold data of the user's that JSON cannot hold.
        pickles (bool): True if the iterators themselves can be pickled and copied.
        errors (sequence of exception classes): what the callbacks raise, in turn. Each must be constructible from
            one text. `StopIteration` must arrive as a `RuntimeError` with it as `__cause__`.
        seed (int): of the random walk over all operations, the last check.

    Raises:
        AssertionError: the contract is broken. The message names the check, the position, and both sequences.
        TypeError: `errors` are no exception classes.
        ValueError: an argument is out of range, `take` is missing, or the pipeline never calls the function it got.

    Cost: builds some fifteen iterators per position and reads each to its end, so time grows with the square of the
    number of items; a hundred take about a second.

    >>> class Countdown(CheckpointableIterator):
    ...     def __init__(self, start):
    ...         self._start = start
    ...         self.setstate(None)
    ...     def getstate(self):
    ...         return {"left": self._left}
    ...     def setstate(self, checkpoint):
    ...         self._left = self._start if checkpoint is None else checkpoint["left"]
    ...     def __next__(self):
    ...         if self._left == 0:
    ...             raise StopIteration
    ...         self._left -= 1
    ...         return self._left + 1
    ...     def close(self):
    ...         pass
    >>> check_iterator(lambda: Countdown(3), [3, 2, 1])

    >>> class Forgetful(Countdown):
    ...     def setstate(self, checkpoint):
    ...         self._left = self._start
    >>> check_iterator(lambda: Forgetful(3), [3, 2, 1])
    Traceback (most recent call last):
        ...
    AssertionError: restored from the state itself into a fresh instance at position 1: differs at item 1
      expected from item 1: 2, 1, <end>
      got from item 1:      3, 2, 1, ...

    >>> from infinibatch.iterators import MapIterator
    >>> def make(fail_at_times):
    ...     def double(item):
    ...         fail_at_times()
    ...         return 2 * item
    ...     return MapIterator(Countdown(3), double)
    >>> check_iterator(make, [6, 4, 2], errors=[ValueError, StopIteration])
    """
    if take is not None and take < 1:
        raise ValueError("take must be at least 1, got {}".format(take))
    if positions is not None and positions < 2:
        raise ValueError("positions must be at least 2, got {}".format(positions))
    if isinstance(errors, type) or not all(isinstance(e, type) and issubclass(e, BaseException) for e in errors):
        raise TypeError("errors must be a sequence of exception classes, got {!r}".format(errors))
    check = _Check(make, positions, through_json, pickles, errors, seed)
    try:
        check.run(expected, take)
    except _Failed as failure:
        raise AssertionError(str(failure)) from failure.__cause__


def _bulk(iterator: "CheckpointableIterator[Any]", name: str) -> Any:
    """Return a bulk operation as a stage above finds it: a class outside the library is asked item by item."""
    return partial(getattr(CheckpointableIterator if iterator._foreign else type(iterator), name), iterator)


class _Failed(AssertionError):
    """A finished message; what raised it is the cause."""


class _Difference(Exception):
    """What is wrong, still without the check and the position."""


class _Hook:
    """The function that callbacks call: counts the calls and raises at one of them, once."""

    def __init__(self) -> None:
        import mmap

        # Shared with forked workers, so that a failure in one is neither missed nor repeated by its successor.
        self._cells = memoryview(mmap.mmap(-1, 16)).cast("q")
        self._error: Type[BaseException] = Exception

    def __reduce__(self) -> Tuple[Any, ...]:
        return _Hook, ()  # a copy of a pipeline gets one that never raises

    @property
    def calls(self) -> int:
        return self._cells[0]

    def arm(self, call: int, error: Type[BaseException]) -> None:
        self._error = error
        self._cells[0], self._cells[1] = 0, call

    def __call__(self) -> None:
        self._cells[0] += 1
        if self._cells[0] == self._cells[1]:
            self._cells[1] = 0
            self._raise_injected()

    def _raise_injected(self) -> None:
        raise self._error(_INJECTED)


class _Subject(Generic[T]):
    """An iterator under test, and the position at which it has to stand."""

    def __init__(self, check: "_Check[T]", what: str, at: int) -> None:
        self.check = check
        self.what = what
        self.at = at
        self.position = 0
        self.given = 0  # by the last call that gave items
        self.hook = _Hook() if check.errors else None
        self.iterator = check.make() if self.hook is None else check.make(self.hook)

    def now(self, what: str, at: int) -> None:
        """Name what is being checked from here on."""
        self.what = what
        self.at = at

    def restore(self, position: int, state: Any) -> None:
        self.given = 0
        self.iterator.setstate(state)
        self.position = position

    def read(self, num_items: int) -> None:
        """Read and compare items, fewer if the expected ones end before."""
        for _ in range(min(num_items, self.left())):
            self.given = 0
            try:
                item = next(self.iterator)
            except StopIteration:
                self._differs([], True)
            self._compare([item])
            self.given = 1

    def rest(self) -> None:
        """Read and compare to the last expected item, and the end if there is one."""
        self.read(self.left())
        self.end()

    def end(self) -> None:
        """Compare the end, several times, if the iterator stands at one."""
        if not self.check.ends or self.left():
            return
        self.given = 0
        for _ in range(3):
            try:
                item = next(self.iterator)
            except StopIteration:
                continue
            self._differs([item], False)

    def fill(self, num_items: int) -> None:
        """Read and compare a run of at most so many items."""
        mark = object()
        out: List[Any] = [mark]
        allowed = self._allowed(num_items)
        ended = False
        self.given = 0
        try:
            _bulk(self.iterator, "_fill")(out, allowed)
            ended = len(out) == 1
        finally:
            if out[:1] != [mark] or len(out) > 1 + allowed:
                raise _Difference("_fill(out, {}) left {} in out".format(allowed, _short(out)))
            self._compare(out[1:])
        if ended and self.left():
            self._differs([], True)
        self.given = len(out) - 1

    def back(self, num_items: int) -> None:
        """Take back at most so many of the items that the last call gave, where the iterator can."""
        num_items = min(num_items, self.given)
        self.given = 0
        back = _bulk(self.iterator, "_back")
        if num_items and back.func is not CheckpointableIterator._back:
            back(num_items)
            self.position -= num_items

    def skip(self, num_items: int) -> None:
        """Pass over items, fewer if the expected ones end before."""
        self.given = 0
        allowed = self._allowed(num_items)
        wanted = min(allowed, self.left())
        skipped = _bulk(self.iterator, "_skip")(allowed)
        if skipped != wanted:
            raise _Difference(
                "_skip({}) at item {} returned {}, expected {}".format(allowed, self.position, skipped, wanted)
            )
        self.position += skipped

    def left(self) -> int:
        return len(self.check.items) - self.position

    def _allowed(self, num_items: int) -> int:
        """Return how many items may be asked for at once: beyond the last one of an endless iterator none is known."""
        return num_items if self.check.ends else min(num_items, self.left())

    def _compare(self, items: List[T]) -> None:
        for number, item in enumerate(items):
            if not self.left() or not _same(item, self.check.items[self.position]):
                self._differs(items[number:], False)
            self.position += 1

    def _differs(self, got: List[T], ended: bool) -> None:
        wanted = self.check.items
        shown = max(self.at, self.position - 2)
        got = list(wanted[shown : self.position]) + got
        try:  # some more, so that one sees whether items are missing, repeated or other ones
            while not ended and len(got) < self.position - shown + 3:
                got.append(next(self.iterator))
        except BaseException as error:
            ended = isinstance(error, StopIteration)
        end = self.position + 3
        raise _Difference(
            "differs at item {0}\n  expected from item {1}: {2}\n  got from item {1}:      {3}".format(
                self.position,
                shown,
                _listed(wanted[shown:end], self.check.ends and end > len(wanted)),
                _listed(got, ended),
            )
        )


class _Check(Generic[T]):
    """All checks of one pipeline; the simple ones come first, since the first that fails is reported."""

    def __init__(
        self,
        make: Callable[..., "CheckpointableIterator[T]"],
        positions: Optional[int],
        through_json: bool,
        pickles: bool,
        errors: Sequence[Type[BaseException]],
        seed: int,
    ) -> None:
        self.make = make
        self.max_positions = positions
        self.ways = ["pickle", "json"] if through_json else ["pickle"]
        self.pickles = pickles
        self.errors = errors
        self.seed = seed
        self.items: List[T] = []
        self.ends = True
        self.positions: List[int] = []
        self.states: Dict[int, Any] = {}
        self.pickled: Dict[int, bytes] = {}

    def run(self, expected: Optional[Sequence[T]], take: Optional[int]) -> None:
        if expected is None:
            self.items, self.ends = self._first_run(take)
        else:
            self.items = list(expected) if take is None else list(expected[:take])
            self.ends = take is None or len(self.items) < take
        self.positions = _spread(len(self.items), self.max_positions)
        self._sequence()
        self._save()
        self._restore_fresh()
        self._restore_used()
        self._restore_after_getstate()
        self._save_after_restore()
        self._isolation()
        self._runs()
        if self.pickles:
            self._copies()
        if self.errors:
            self._errors()
            self._errors_while_restoring()
        self._walk()

    @contextmanager
    def subject(self, what: str, at: int = 0) -> Iterator["_Subject[T]"]:
        """Yield a fresh subject; what goes wrong with it becomes a message that says what was done and where."""
        try:
            subject = _Subject(self, what, at)
        except Exception as error:
            raise _Failed("make() raised {}".format(_described(error))) from error
        try:
            try:
                yield subject
            except BaseException:
                with suppress(Exception):  # of what goes wrong, the first is reported
                    subject.iterator.close()
                raise
            subject.what += ", closed twice,"
            subject.iterator.close()
            subject.iterator.close()
        except _Failed:
            raise
        except _Difference as difference:
            message = "{} at position {}: {}".format(subject.what, subject.at, difference)
            raise _Failed(message) from difference.__cause__
        except Exception as error:
            message = "{} at position {}: raised {} when {} items had been read".format(
                subject.what, subject.at, _described(error), subject.position
            )
            raise _Failed(message) from error

    def stored(self, position: int, way: str) -> Any:
        """Return the state at a position as it comes back from a way of storing it."""
        if way == "the state itself":
            return self.states[position]
        state = pickle.loads(self.pickled[position])
        return json.loads(json.dumps(state)) if way == "json" else state

    def _first_run(self, take: Optional[int]) -> Tuple[List[T], bool]:
        items: List[T] = []
        with self.subject("read for the first time") as subject:
            while len(items) <= _MAX_ITEMS:
                if len(items) == take:
                    return items, False
                try:
                    items.append(next(subject.iterator))
                except StopIteration:
                    return items, True
        raise ValueError("take must be given for an iterator of more than {} items".format(_MAX_ITEMS))

    def _sequence(self) -> None:
        with self.subject("read from a fresh instance") as subject:
            subject.rest()
            subject.now("read again after setstate(None)", 0)
            subject.restore(0, None)
            subject.rest()
        with self.subject("read") as subject:
            for position in self.positions:
                subject.now("read after setstate(None) when some items had been read", position)
                subject.restore(0, None)
                subject.read(position)
            subject.restore(0, None)
            subject.rest()

    def _save(self) -> None:
        """Take the states that the other checks restore."""
        with self.subject("getstate()") as subject:
            for position in self.positions:
                subject.read(position - subject.position)
                subject.now("read on after getstate()", position)
                state = subject.iterator.getstate()
                self.states[position] = state
                self.pickled[position] = pickle.dumps(state)
                if "json" in self.ways:
                    try:
                        json.dumps(state)
                    except (TypeError, ValueError) as error:
                        raise _Difference("the state is not JSON data: {}".format(error)) from None
            subject.rest()
        with self.subject("getstate()") as subject:
            for position in self.positions:
                subject.read(position - subject.position)
                subject.now("read on after two getstate()", position)
                subject.iterator.getstate()
                subject.iterator.getstate()
            subject.rest()
        self._expect_unchanged("the state changed while the iterator was read on")

    def _expect_unchanged(self, problem: str) -> None:
        for position in self.positions:
            if not _same(self.states[position], pickle.loads(self.pickled[position])):
                raise _Failed("getstate() at position {}: {}".format(position, problem))

    def _restore_fresh(self) -> None:
        for position in self.positions:
            for way in ["the state itself"] + self.ways:
                with self.subject("restored from {} into a fresh instance".format(way), position) as subject:
                    subject.restore(position, self.stored(position, way))
                    subject.rest()
        self._expect_unchanged("setstate(), or reading on after it, changed the state it was given")
        if self.ends:
            with self.subject("state after the end") as subject:
                subject.rest()
                state = subject.iterator.getstate()
                subject.end()
            with self.subject("restored from a state taken after the end", len(self.items)) as subject:
                subject.restore(len(self.items), state)
                subject.rest()
                subject.now("setstate(None) after restoring the end", 0)
                subject.restore(0, None)
                subject.rest()

    def _restore_used(self) -> None:
        rng = random.Random(self.seed)
        order = self.positions * 2
        rng.shuffle(order)
        with self.subject("restored") as subject:
            for position in order:
                before = subject.position
                subject.now("restored into an instance that was at position {}".format(before), position)
                subject.restore(position, self._copy(rng, position))
                subject.read(rng.choice([0, 1, 2, 3, subject.left()]))
                if rng.random() < 0.5:
                    subject.end()
        for position in self.positions:
            other = rng.choice(self.positions)
            with self.subject("restored", position) as subject:
                subject.now("restored right after another state, that of position {},".format(other), position)
                subject.restore(other, self._copy(rng, other))
                subject.restore(position, self._copy(rng, position))
                subject.rest()
                subject.now("restored twice in a row, after the end,", position)
                state = self._copy(rng, position)
                subject.restore(position, state)
                subject.restore(position, state)
                subject.rest()
                subject.now("restored right after setstate(None)", position)
                subject.restore(0, None)
                subject.restore(position, self._copy(rng, position))
                subject.rest()
                state = self._copy(rng, position)
                if isinstance(state, dict):
                    subject.now("restored from a state to which the caller added a key", position)
                    state["added by the caller"] = 1
                    subject.restore(position, state)
                    subject.rest()

    def _copy(self, rng: random.Random, position: int) -> Any:
        return self.stored(position, rng.choice(self.ways))

    def _restore_after_getstate(self) -> None:
        rng = random.Random(self.seed)
        for position in self.positions:
            with self.subject("restored into a fresh instance after two getstate()", position) as subject:
                subject.iterator.getstate()
                subject.iterator.getstate()
                subject.restore(position, self._copy(rng, position))
                subject.rest()
            with self.subject("restored after one item and a getstate()", position) as subject:
                subject.read(1)
                subject.iterator.getstate()
                subject.restore(position, self._copy(rng, position))
                subject.rest()

    def _save_after_restore(self) -> None:
        rng = random.Random(self.seed)
        for position in self.positions:
            with self.subject("saved again right after a restore", position) as subject:
                subject.restore(position, self._copy(rng, position))
                state = subject.iterator.getstate()
                subject.rest()
            with self.subject("restored from a state that was saved right after a restore", position) as subject:
                subject.restore(position, state)
                subject.rest()
        state, saved_at = pickle.loads(self.pickled[0]), 0
        for position in self.positions:
            with self.subject("saved and restored at all positions before", position) as subject:
                subject.restore(saved_at, state)
                subject.read(position - saved_at)
                state, saved_at = _through_pickle(subject.iterator.getstate()), position
                subject.rest()

    def _isolation(self) -> None:
        for position in self.positions:
            with self.subject("the caller altered a state that was taken", position) as subject:
                subject.read(position)
                _spoil(subject.iterator.getstate())
                state = pickle.loads(pickle.dumps(subject.iterator.getstate()))
                subject.rest()
            with self.subject("the caller altered a state, and a new one was taken", position) as subject:
                subject.restore(position, state)
                subject.rest()
            with self.subject("the caller altered a state that had been restored", position) as subject:
                state = pickle.loads(self.pickled[position])
                subject.restore(position, state)
                _spoil(state)
                subject.rest()

    def _runs(self) -> None:
        for size in (1, 2, 3, len(self.items) + 1):
            with self.subject("read in runs of up to {}".format(size)) as subject:
                while subject.left():
                    subject.fill(size)
                subject.end()
                if self.ends:
                    subject.fill(size)
            with self.subject("items taken back from runs of up to {}".format(size)) as subject:
                while subject.left():
                    subject.fill(size)
                    subject.back(subject.given - 1)
        for position in self.positions:
            with self.subject("skipped to", position) as subject:
                if position:
                    subject.skip(position)
                subject.rest()
                if self.ends:
                    subject.skip(1)

    def _copies(self) -> None:
        for position in self.positions:
            with self.subject("copied", position) as subject:
                subject.read(position)
                for name, duplicate in (("pickle", _through_pickle), ("copy.deepcopy", copy.deepcopy)):
                    with self.subject("the instance copied by {}".format(name), position) as twin:
                        twin.iterator.close()
                        twin.iterator = duplicate(subject.iterator)
                        twin.position = position
                        twin.rest()
                subject.now("read on after it was copied", position)
                subject.rest()

    def _errors(self) -> None:
        rng = random.Random(self.seed)
        for error in self.errors:
            for call in _spread(self._count_calls(), self.max_positions)[1:]:
                for mode in ("next()", "getstate()", "setstate()", "_fill()"):
                    what = "{} raised by call {} of the callbacks, then {}".format(error.__name__, call, mode)
                    with self.subject(what) as subject:
                        self._fail_and_go_on(subject, call, error, mode, rng)

    def _errors_while_restoring(self) -> None:
        rng = random.Random(self.seed)
        for error in self.errors:
            for position in self.positions:
                for call in (1, 2, 3):
                    what = "restored, {} raised by call {} of the callbacks after that,".format(error.__name__, call)
                    with self.subject(what, position) as subject:
                        assert subject.hook is not None
                        state = self._copy(rng, position)
                        subject.hook.arm(call, error)
                        try:
                            subject.restore(position, state)
                        except BaseException as raised:
                            _expect_injected(raised, error)
                            subject.restore(position, state)
                        self._fail_and_go_on(subject, 0, error, rng.choice(["next()", "getstate()", "_fill()"]), rng)

    def _count_calls(self) -> int:
        with self.subject("read once more") as subject:
            assert subject.hook is not None
            subject.rest()
            calls = subject.hook.calls
        if not calls and self.items:
            raise ValueError("errors need callbacks that call the function given to make; it was never called")
        return calls

    def _fail_and_go_on(
        self, subject: "_Subject[T]", call: int, error: Type[BaseException], mode: str, rng: random.Random
    ) -> None:
        if call:
            assert subject.hook is not None
            subject.hook.arm(call, error)
        failures = 0
        ended = False
        while not ended:
            try:
                if not subject.left():
                    subject.end()  # what looks for another item may fail, too
                    ended = True
                elif mode == "_fill()":
                    subject.fill(rng.randint(1, 4))
                else:
                    subject.read(1)
            except (_Difference, _Failed):
                raise
            except BaseException as raised:
                _expect_injected(raised, error)
                failures += 1
                if failures > _MAX_FAILURES:
                    raise _Difference("the error comes again and again at item {}".format(subject.position)) from raised
                subject.at = subject.position
                self._after_failure(subject, mode, rng)

    def _after_failure(self, subject: "_Subject[T]", mode: str, rng: random.Random) -> None:
        if mode == "getstate()":
            state = _through_pickle(subject.iterator.getstate())
            with self.subject("{} restored into a fresh instance".format(subject.what), subject.position) as other:
                other.restore(subject.position, state)
                other.rest()
        elif mode == "setstate()":
            position = rng.choice(self.positions)
            subject.restore(position, self._copy(rng, position))

    def _walk(self) -> None:
        """Mix all operations at random."""
        rng = random.Random(self.seed)
        saved: List[Tuple[int, Any]] = [(0, None)]
        with self.subject("random walk") as subject:
            done: List[str] = []
            for _ in range(10 * len(self.positions)):
                size = rng.randint(1, max(2, len(self.items) // 3))
                operation = rng.choice(["next", "_fill", "_fill", "_back", "_skip", "getstate", "getstate", "setstate"])
                if not subject.left() and (not self.ends or rng.random() < 0.8):
                    operation = "setstate"
                position, state = rng.choice(saved)
                done.append("{}({})".format(operation, position if operation == "setstate" else size))
                subject.now("random walk with seed {}, {},".format(self.seed, " ".join(done[-8:])), subject.position)
                if operation == "next":
                    subject.read(size)
                    subject.end()
                elif operation == "_fill":
                    subject.fill(size)
                elif operation == "_back":
                    subject.back(size)
                elif operation == "_skip":
                    subject.skip(size)
                elif operation == "getstate":
                    state = subject.iterator.getstate()
                    saved.append((subject.position, _through_pickle(state)))
                    if "json" in self.ways:
                        saved.append((subject.position, json.loads(json.dumps(state))))
                else:
                    subject.restore(position, state)
            subject.rest()


def _spread(last: int, limit: Optional[int]) -> List[int]:
    """Return at most ``limit`` of the numbers 0 to ``last``, both included, in even steps."""
    if limit is None or limit > last:
        return list(range(last + 1))
    return sorted({number * last // (limit - 1) for number in range(limit)})


def _same(a: Any, b: Any) -> bool:
    """Compare as ``==`` does, but NaN equals NaN, arrays and plain objects are equal by their content."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(key in b and _same(value, b[key]) for key, value in a.items())
    if (isinstance(a, list) and isinstance(b, list)) or (isinstance(a, tuple) and isinstance(b, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    if _is_array(a) or _is_array(b):
        described = [(type(x), getattr(x, "dtype", None), getattr(x, "shape", None)) for x in (a, b)]
        return described[0] == described[1] and _same(a.tolist(), b.tolist())
    if type(a) is type(b) and getattr(type(a), "__eq__", None) is object.__eq__ and hasattr(a, "__dict__"):
        return _same(vars(a), vars(b))  # two objects of a class without equality
    return bool(a == b)


def _is_array(value: Any) -> bool:
    return hasattr(value, "tolist") and getattr(value, "shape", None) != ()  # scalars compare as numbers do


def _spoil(state: Any) -> None:
    """Change every mutable part of a state."""
    if isinstance(state, dict):
        for value in state.values():
            _spoil(value)
        state.clear()
    elif isinstance(state, list):
        for value in state:
            _spoil(value)
        state.clear()
    elif isinstance(state, tuple):
        for value in state:
            _spoil(value)


def _through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _expect_injected(raised: BaseException, error: Type[BaseException]) -> None:
    """Check that an error arrived as the one that a callback raised."""
    original: Optional[BaseException] = raised
    if issubclass(error, StopIteration) and type(raised) is RuntimeError:
        original = raised.__cause__
    if not isinstance(raised, (error, Exception)):
        raise raised  # Ctrl-C, for instance
    if type(original) is not error or original.args != (_INJECTED,):
        raise _Difference("raised {}".format(_described(raised))) from raised
    if "_raise_injected" not in "".join(traceback.format_exception(type(raised), raised, raised.__traceback__)):
        raise _Difference("the error came without the traceback of the callback")


def _described(error: BaseException) -> str:
    return "{}: {}".format(type(error).__name__, error) if str(error) else type(error).__name__


_reprs = reprlib.Repr()
_reprs.maxstring = _reprs.maxother = 60
_short = _reprs.repr


def _listed(items: Sequence[Any], ended: bool) -> str:
    return ", ".join([_short(item) for item in items] + ["<end>" if ended else "..."])
