"""Workers: processes and threads that run a function, and the channel to them."""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import unittest
import warnings
from functools import partial
from unittest import mock

from infinibatch import _workers
from infinibatch._workers import Closed, Ended, Worker

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PROCESSES = ("fork", "spawn") if hasattr(os, "fork") else ()
STARTS = PROCESSES + ("thread",)
ROOM = _workers._ROOM
SEGMENT = _workers._SEGMENT
PART = _workers._PART

posix = unittest.skipUnless(hasattr(os, "fork"), "needs POSIX processes")
linux = unittest.skipUnless(sys.platform.startswith("linux"), "looks into /proc")


def running(pid):
    """Whether a process exists and is no zombie."""
    try:
        with open("/proc/{}/stat".format(pid)) as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition, seconds=5):
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def environment():
    """The variables for another interpreter: none that change what this module is about."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return dict(variables, PYTHONPATH=ROOT, PYTHONDONTWRITEBYTECODE="1")


def take_signals():
    """Do not inherit that signals are ignored, as they are where the tests run under nohup or in the background."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def script(code, *options, seconds=30, **keywords):
    """Run a program in a process group of its own; return its status, output, errors and duration."""
    process = start_script(code, *options, **keywords)
    started = time.monotonic()
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        process.stderr.close()
    return process.returncode, out, err, time.monotonic() - started


def start_script(code, *options, **keywords):
    return subprocess.Popen(
        [sys.executable] + list(options or ["-W", "error"]) + ["-c", textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        env=environment(),
        start_new_session=True,
        preexec_fn=take_signals,
        **keywords,
    )


class WorkerCase(unittest.TestCase):
    deadline = 60

    def setUp(self):
        faulthandler.dump_traceback_later(self.deadline, exit=True)
        self.addCleanup(faulthandler.cancel_dump_traceback_later)

    def worker(self, target, start=None, **options):
        worker = Worker(target, start, **options)
        self.addCleanup(worker.close)
        return worker

    def received(self, worker):
        """What a worker sends until its end."""
        messages = []
        with self.assertRaises(Ended):
            while True:
                messages.append(worker.receive())
        return messages

    def in_fork(self, function):
        """Run a function in a fork of this process, which must not fail."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            status = 1
            try:
                function()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid


# Targets, where `spawn` can import them.


def count(link, n=5):
    for i in range(n):
        link.send(i)


def echo(link):
    with contextlib.suppress(Closed):
        while True:
            link.send(link.receive())


def block(link):
    link.send(os.getpid())
    threading.Event().wait()


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__("{} and {}".format(first, second))
        self.first = first


class Unpicklable(Exception):
    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()
        self.kept = 7


def fail(link, error):
    def users_function():
        raise error

    link.send("before")
    users_function()


def fail_unpicklable(link):
    link.send("before")
    raise Unpicklable("has a lock")


def fail_two_arguments(link):
    link.send("before")
    raise TwoArguments("this", "that")


def fail_stop_iteration(link):
    link.send("before")
    next(iter(()))


class MessagesTest(WorkerCase):
    def test_arrive_in_order_until_the_target_returns(self):
        for start in STARTS:
            with self.subTest(start=start):
                worker = self.worker(count, start)
                self.assertEqual(self.received(worker), [0, 1, 2, 3, 4])
                self.assertTrue(worker.closed)
                with self.assertRaisesRegex(RuntimeError, "is closed"):
                    worker.receive()
                with self.assertRaisesRegex(RuntimeError, "is closed"):
                    worker.send(1)

    def test_go_both_ways(self):
        messages = [None, True, 1 << 70, 1.5, "\udc80 é", b"", (), [[]], {"a": (1, [2])}, Ended, list(range(1000))]
        for start in STARTS:
            with self.subTest(start=start):
                worker = self.worker(echo, start)
                for message in messages:
                    worker.send(message)
                self.assertEqual([worker.receive() for _ in messages], messages)

    def test_of_any_size_around_those_of_segments_and_parts(self):
        sizes = [0, 1, PART - 40, PART + 1, 3 * ROOM + 7]
        sizes += [size + more for size in (SEGMENT, ROOM) for more in (-60, -40, -1, 0, 1)]
        for start in PROCESSES:
            worker = self.worker(echo, start)
            for size in sizes:
                with self.subTest(start=start, size=size):
                    data = os.urandom(size)
                    for message in (data, bytearray(data), "é" * (size // 2), [data[: size // 2], data[size // 2 :]]):
                        worker.send(message)
                        self.assertTrue(worker.receive() == message)

    def test_of_small_sizes_across_the_ends_of_segments(self):
        def target(link):
            for i in range(40):
                link.send(bytes([i]) * (ROOM // 10 + i))

        self.assertEqual(self.received(self.worker(target, "fork")), [bytes([i]) * (ROOM // 10 + i) for i in range(40)])

    def test_larger_than_all_segments_cross_each_other(self):
        # Both ends send before either receives: whoever blocked for one direction only would block for ever.
        def target(link):
            for i in range(4):
                link.send(bytes([i]) * (2 * ROOM + i))
            for _ in range(4):
                link.send(link.receive())

        worker = self.worker(target, "fork")
        for i in range(4):
            worker.send(bytes([i + 4]) * (3 * ROOM + i))
        self.assertEqual(
            [(message[0], len(message)) for message in self.received(worker)],
            [(i, 2 * ROOM + i) for i in range(4)] + [(i + 4, 3 * ROOM + i) for i in range(4)],
        )

    def test_by_the_thousand(self):
        worker = self.worker(partial(count, n=20000), "fork")
        self.assertEqual(self.received(worker), list(range(20000)))

    def test_all_arrive_though_the_worker_does_nothing_after_sending_them(self):
        def target(link):
            for i in range(3000):
                link.send(i)
            threading.Event().wait()

        worker = self.worker(target, "fork")
        self.assertEqual([worker.receive() for _ in range(3000)], list(range(3000)))

    def test_random_sizes_in_both_directions(self):
        import random

        generator = random.Random(5)
        worker = self.worker(echo, "fork")
        waiting, sent, received = 0, [], []
        for i in range(300):
            if waiting and generator.random() < 0.5:
                received.append(worker.receive())
                waiting -= 1
            else:
                sent.append(bytes([i % 256]) * int(10 ** generator.uniform(0, 6.5)))
                worker.send(sent[-1])
                waiting += 1
        received += [worker.receive() for _ in range(waiting)]
        self.assertTrue(sent == received)

    @posix
    def test_of_random_sizes_in_random_turns(self):
        # Both ends in this process, where nothing depends on who is faster.
        import mmap
        import random
        import socket

        class End(_workers._Channel):
            def silence(self):
                pass

        generator = random.Random(3)
        memory = mmap.mmap(-1, 5 * ROOM)  # the second one has more room
        one, two = socket.socketpair()
        ends = [End(one, memory, 0), End(two, memory, ROOM)]
        self.addCleanup(one.close)
        self.addCleanup(two.close)
        under_way = [[], []]
        for turn in range(2000):
            i = generator.randrange(2)
            if generator.random() < 0.5:
                data = bytes([turn % 256]) * int(10 ** generator.uniform(0, 6.2))
                under_way[i].append(data)
                ends[i].put(turn, data)
            elif under_way[i]:
                _, received = ends[1 - i].get(feeding=[ends[i]])
                self.assertTrue(received == under_way[i].pop(0), turn)
        self.assertGreater(min(end._sent for end in ends), 10 * ROOM)

    def test_for_others_move_while_one_is_waited_for(self):
        def slow(link):
            link.receive()
            os.read(gate, 1)
            link.send("slow")

        def fast(link):
            size = len(link.receive())
            os.write(opened, b"x")
            link.send(size)

        gate, opened = os.pipe()
        self.addCleanup(os.close, gate)
        self.addCleanup(os.close, opened)
        first, second = self.worker(slow, "fork"), self.worker(fast, "fork")
        for worker in (first, second):
            worker.send(bytes(5 * ROOM))
        # The first answers only when the second has all of its message.
        self.assertEqual(first.receive(feeding=[first, second]), "slow")
        self.assertEqual(second.receive(), 5 * ROOM)

    def test_may_be_changed_once_sent(self):
        worker = self.worker(echo, "fork")
        message = bytearray(3 * ROOM)
        for letter in b"abc":
            message[:] = bytes([letter]) * len(message)
            worker.send(message)
        for letter in b"abc":
            self.assertTrue(worker.receive() == bytes([letter]) * len(message))

    def test_by_the_thousand_wait_until_the_worker_takes_them(self):
        def target(link):
            os.read(gate, 1)
            link.send(sum(link.receive() for _ in range(20000)))

        gate, opened = os.pipe()
        self.addCleanup(os.close, gate)
        self.addCleanup(os.close, opened)
        worker = self.worker(target, "fork")
        for i in range(20000):
            worker.send(i)
        os.write(opened, b"x")
        self.assertEqual(worker.receive(), sum(range(20000)))

    def test_ready_tells_whether_something_is_there(self):
        def target(link):
            link.receive()
            link.send("answer")

        for start in STARTS:
            with self.subTest(start=start):
                worker = self.worker(target if start != "spawn" else partial(echo), start)
                self.assertFalse(worker.ready())
                worker.send("question")
                self.assertTrue(eventually(worker.ready))
                self.assertTrue(worker.ready())
                worker.receive()

    def test_that_are_numbers_only_add_up_and_need_not_be_waited_for(self):
        def target(link):
            link.send(link.granted(block=False))
            self.assertEqual(link.receive(), "granted")
            link.send(link.granted(block=False))
            link.send(link.granted(block=True))
            link.granted(block=True)

        for start in ("fork", "thread") if PROCESSES else ("thread",):
            with self.subTest(start=start):
                worker = self.worker(target, start)
                self.assertEqual(worker.receive(), 0)
                worker.grant(2)
                worker.grant(3)
                worker.send("granted")
                self.assertEqual(worker.receive(), 5)
                worker.grant(1)
                self.assertEqual(worker.receive(), 1)
                worker.close()

    def test_that_cannot_be_pickled_are_an_error_that_names_the_type(self):
        def target(link):
            link.send([1, {"key": threading.Lock()}])

        pattern = r"must be picklable, got _thread.lock at its \[1\]\['key'\]"
        with self.assertRaisesRegex(TypeError, pattern):
            self.worker(target, "fork").receive()
        worker = self.worker(echo, "fork")
        with self.assertRaisesRegex(TypeError, pattern):
            worker.send([1, {"key": threading.Lock()}])
        worker.send("goes on")
        self.assertEqual(worker.receive(), "goes on")

    def test_are_kept_for_the_consumer_in_the_room_that_there_is(self):
        def target(link):
            for i in range(6):
                link.send(bytes([i]) * ROOM)
                os.write(write, b"x")

        for room, least, most in ((ROOM, 0, 2), (3 * ROOM, 2, 4), (7 * ROOM, 6, 6)):
            with self.subTest(room=room):
                read, write = os.pipe()
                worker = self.worker(target, "fork", room=room)
                sent = os.read(read, 100) if least else b""
                while len(sent) < least:  # before any is received
                    sent += os.read(read, 100)
                self.assertLessEqual(len(sent), most)
                self.assertEqual([message[0] for message in self.received(worker)], list(range(6)))
                os.close(read)
                os.close(write)

    def test_stop_a_thread_that_runs_ahead(self):
        sent = []

        def target(link):
            for i in range(100):
                link.send(i)
                sent.append(i)

        worker = self.worker(target, "thread")
        for i in range(50):
            self.assertEqual(worker.receive(), i)
            self.assertLessEqual(len(sent), i + 2 + ROOM // _workers._THREAD_MESSAGE)
        self.assertEqual(len(self.received(worker)), 50)

    def test_waiting_for_them_is_measured(self):
        def target(link):
            link.receive()
            os.read(read, 1)
            link.send(None)
            link.send(None)

        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        for start in ("fork", "thread"):
            with self.subTest(start=start):
                worker = self.worker(target, start)
                time.sleep(0.3)
                worker.send(None)
                timer = threading.Timer(0.3, os.write, (write, b"x"))
                timer.start()
                self.assertEqual(self.received(worker), [None, None])
                timer.join()
                self.assertGreater(worker.waited, 0.2)
                self.assertGreater(worker.worker_waited, 0.1)

    def test_start_must_be_known(self):
        with self.assertRaisesRegex(ValueError, "start must be 'fork', 'spawn' or 'thread', got 'forkserver'"):
            Worker(count, "forkserver")


@unittest.skipIf(sys.version_info < (3, 8), "pickle protocol 5 came with Python 3.8")
class BuffersTest(WorkerCase):
    class Blob:
        """A large object that gives pickle its buffer, as arrays do."""

        def __init__(self, data):
            self.data = data

        def __reduce_ex__(self, protocol):
            return type(self), (pickle.PickleBuffer(self.data),)

    def test_arrive_as_memory_of_their_own(self):
        worker = self.worker(echo, "fork")
        for size in (0, 10, _workers._OUT_OF_BAND - 1, _workers._OUT_OF_BAND, PART + 1, ROOM, 2 * ROOM + 3):
            with self.subTest(size=size):
                sent = self.Blob(bytearray(os.urandom(size)))
                expected = bytes(sent.data)
                worker.send([sent, "text", sent])
                sent.data[:] = bytes(size)
                first, text, second = worker.receive()
                worker.send(self.Blob(bytearray(size + 100)))  # writes to the same memory again
                worker.receive()
                self.assertIs(first, second)
                self.assertEqual((bytes(first.data), text), (expected, "text"))
                memoryview(first.data)[:] = b"x" * size  # writable
                self.assertEqual(bytes(first.data), b"x" * size)

    def test_read_only_ones_stay_so(self):
        worker = self.worker(echo, "fork")
        worker.send(self.Blob(b"x" * ROOM))
        self.assertTrue(memoryview(worker.receive().data).readonly)

    def test_do_not_keep_the_senders_object_alive(self):
        import weakref

        class Data(bytearray):
            pass

        worker = self.worker(echo, "fork")
        data = Data(2 * ROOM)
        alive = weakref.ref(data)
        worker.send(self.Blob(data))
        del data
        gc.collect()
        self.assertIsNone(alive())

    def test_numpy_arrays(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("needs numpy")
        worker = self.worker(echo, "fork")
        for shape, dtype, order in (
            ((3,), "f4", "C"),
            ((1024, 1500), "f4", "C"),
            ((700, 900), "i8", "F"),
            ((0,), "u1", "C"),
        ):
            with self.subTest(shape=shape, order=order):
                array = numpy.asarray(numpy.arange(numpy.prod(shape)).reshape(shape), dtype=dtype, order=order)
                worker.send({"array": array, "view": array[::2]})
                received = worker.receive()
                numpy.testing.assert_array_equal(received["array"], array)
                numpy.testing.assert_array_equal(received["view"], array[::2])
                self.assertEqual(received["array"].dtype, array.dtype)
                received["array"][...] = 0

    def test_torch_tensors(self):
        try:
            import torch
        except ImportError:
            self.skipTest("needs torch")
        tensors = [
            torch.arange(5),
            torch.rand(1000, 1000),
            torch.rand(600, 500).t(),
            torch.rand(100000).to(torch.bfloat16),
            torch.rand(40000, requires_grad=True),
            torch.zeros(30, 30).to_sparse(),
            torch.nn.Parameter(torch.rand(20000)),
            torch.rand(300, dtype=torch.complex64).conj(),
            torch.tensor(True),
        ]
        worker = self.worker(echo, "fork")
        for tensor in tensors:
            with self.subTest(tensor=(tensor.dtype, tensor.shape, tensor.layout)):
                worker.send([tensor])
                received = worker.receive()[0]
                self.assertIs(type(received), type(tensor))
                self.assertEqual(received.dtype, tensor.dtype)
                self.assertEqual(received.requires_grad, tensor.requires_grad)
                self.assertTrue(torch.equal(received.to_dense(), tensor.to_dense()))
                if not received.requires_grad and received.layout is torch.strided:
                    received.zero_()

    def test_torch_runs_on_one_thread_in_a_worker(self):
        try:
            import torch
        except ImportError:
            self.skipTest("needs torch")

        torch.rand(1000, 1000) @ torch.rand(1000, 1000)  # starts the thread pool here

        def target(link):
            link.send(float((torch.ones(1000, 1000) @ torch.ones(1000, 1000)).sum()))
            link.send(torch.get_num_threads())

        self.assertEqual(self.received(self.worker(target, "fork")), [1e9, 1])


class LargeMessagesTest(WorkerCase):
    deadline = 300

    @unittest.skipUnless(os.environ.get("INFINIBATCH_TEST_LARGE"), "set INFINIBATCH_TEST_LARGE to use 5 GB of memory")
    def test_of_more_than_two_gigabytes(self):
        def target(link):
            link.send(bytes(size) + b"end")

        size = (2 << 30) + 5
        message = self.worker(target, "fork").receive()
        self.assertEqual((len(message), message[-4:]), (size + 3, b"\0end"))


class ExceptionsTest(WorkerCase):
    def failure(self, target, start):
        worker = self.worker(target, start)
        self.assertEqual(worker.receive(), "before")
        try:
            worker.receive()
        except BaseException as error:
            self.assertTrue(worker.closed)
            return error
        self.fail("no exception")

    def text(self, error):
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))

    def test_arrive_with_type_message_and_traceback(self):
        class Local(ValueError):
            pass

        errors = [ValueError("bad"), KeyError("key"), OSError(2, "gone", "name"), Local("local", 3), SystemExit(4)]
        errors += [KeyboardInterrupt(), UnicodeDecodeError("ascii", b"\xff", 0, 1, "reason"), GeneratorExit("odd")]
        for error in errors:
            for start in STARTS:
                if start == "spawn" and isinstance(error, Local):
                    continue
                with self.subTest(error=error, start=start):
                    received = self.failure(partial(fail, error=error), start)
                    self.assertIs(type(received), type(error))
                    self.assertEqual((received.args, str(received)), (error.args, str(error)))
                    text = self.text(received)
                    self.assertIn("in users_function", text)
                    self.assertIn("raise error", text)
                    self.assertRegex(text, 'test_workers.py", line [0-9]+')

    def test_whose_constructor_takes_several_arguments(self):
        for start in STARTS:
            with self.subTest(start=start):
                received = self.failure(fail_two_arguments, start)
                self.assertIs(type(received), TwoArguments)
                self.assertEqual((str(received), received.first), ("this and that", "this"))
                self.assertIn("in fail_two_arguments", self.text(received))

    def test_that_cannot_be_pickled(self):
        for start in STARTS:
            with self.subTest(start=start):
                received = self.failure(fail_unpicklable, start)
                self.assertIs(type(received), Unpicklable)
                self.assertEqual((str(received), received.kept), ("has a lock", 7))
                self.assertIn("in fail_unpicklable", self.text(received))

    @posix
    def test_of_a_type_that_only_the_worker_has_are_named(self):
        def target(link):
            class Inner(Exception):
                pass

            link.send("before")
            raise Inner("what happened")

        received = self.failure(target, "fork")
        self.assertRegex(str(received), r"test_workers\..*Inner: what happened")
        self.assertIsInstance(received, RuntimeError)
        self.assertIn("in target", self.text(received))

    def test_are_never_taken_for_the_end(self):
        for start in STARTS:
            with self.subTest(start=start):
                received = self.failure(fail_stop_iteration, start)
                self.assertIs(type(received), RuntimeError)
                self.assertIsInstance(received.__cause__, StopIteration)
                self.assertIn("in fail_stop_iteration", self.text(received))

    @posix
    def test_keep_their_causes(self):
        def target(link):
            link.send("before")
            try:
                raise KeyError("first")
            except KeyError as error:
                raise ValueError("second") from error

        received = self.failure(target, "fork")
        self.assertEqual(
            (repr(received), repr(received.__cause__)), (repr(ValueError("second")), repr(KeyError("first")))
        )
        self.assertIn("in target", str(received.__cause__.__cause__))

    @posix
    def test_of_unpickling_close_the_worker(self):
        class Trap:
            def __reduce__(self):
                return exec, ("raise LookupError('trap')",)

        worker = self.worker(lambda link: link.send(Trap()), "fork")
        with self.assertRaisesRegex(LookupError, "trap"):
            worker.receive()
        self.assertTrue(worker.closed)


@linux
class DeathTest(WorkerCase):
    def obituary(self, target, **options):
        worker = self.worker(target, "fork", **options)
        self.assertEqual(worker.receive(), "alive")
        started = time.monotonic()
        with self.assertRaises(RuntimeError) as caught:
            worker.receive()
        self.assertLess(time.monotonic() - started, 2)
        self.assertTrue(worker.closed)
        return str(caught.exception)

    @staticmethod
    def killed_by(number):
        def target(link):
            link.send("alive")
            faulthandler.disable()
            os.kill(os.getpid(), number)
            threading.Event().wait()

        return target

    def test_by_a_signal_is_an_error_that_names_it(self):
        self.assertRegex(self.obituary(self.killed_by(signal.SIGSEGV)), r"killed by signal SIGSEGV \(11\)$")
        self.assertRegex(self.obituary(self.killed_by(signal.SIGTERM)), r"killed by signal SIGTERM \(15\)$")
        self.assertRegex(self.obituary(self.killed_by(signal.SIGKILL)), r"SIGKILL \(9\); .* memory ran out")

    def test_by_exit_is_an_error_that_names_the_status(self):
        def target(link):
            link.send("alive")
            os._exit(3)

        self.assertRegex(self.obituary(target), "exited with status 3 before")

    def test_is_noticed_though_a_child_of_the_worker_keeps_the_channel_open(self):
        def target(link):
            for number in range(3, 100):
                with contextlib.suppress(OSError):
                    os.set_inheritable(number, True)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
            os.write(write, str(child.pid).encode())
            self.killed_by(signal.SIGKILL)(link)

        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        try:
            self.assertRegex(self.obituary(target), "SIGKILL")
        finally:
            os.kill(int(os.read(read, 20)), signal.SIGKILL)

    def test_is_noticed_where_children_are_not_waited_for(self):
        code = """
            import os, signal
            from infinibatch._workers import Worker
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            def target(link):
                link.send("alive")
                os.kill(os.getpid(), signal.SIGKILL)
            worker = Worker(target, "fork")
            print(worker.receive())
            try:
                worker.receive()
            except RuntimeError as error:
                print(error)
        """
        status, out, err, seconds = script(code)
        self.assertRegex(out, "^alive\nworker process [0-9]+ has died; how is unknown.*SIGCHLD is ignored")
        self.assertEqual((status, err), (0, ""))
        self.assertLess(seconds, 5)

    def test_is_noticed_where_somebody_else_reaps(self):
        def reap(signum, frame):
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

        before = signal.signal(signal.SIGCHLD, reap)
        try:
            self.assertRegex(self.obituary(self.killed_by(signal.SIGKILL)), "has died|SIGKILL")
        finally:
            signal.signal(signal.SIGCHLD, before)

    def test_comes_after_the_messages_sent_before_it(self):
        def target(link):
            for i in range(1000):
                link.send(i)
            os._exit(0)

        worker = self.worker(target, "fork")
        self.assertEqual([worker.receive() for _ in range(1000)], list(range(1000)))
        with self.assertRaisesRegex(RuntimeError, "status 0 before its work was done"):
            worker.receive()

    def test_between_two_looks_comes_after_the_message_sent_before_it(self):
        # The consumer finds nothing, then the worker sends and dies, then the consumer looks whether it has died.
        def target(link):
            os.read(read, 1)
            link.send("last words")
            os._exit(4)

        def has_ended():
            if not looks:
                os.write(write, b"x")
                os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            looks.append(1)
            return look()

        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        worker = self.worker(target, "fork")
        look, looks = worker._handle._has_ended, []
        with mock.patch.object(worker._handle, "_has_ended", has_ended):
            self.assertEqual(worker.receive(), "last words")
            with self.assertRaisesRegex(RuntimeError, "status 4"):
                worker.receive()

    def test_while_the_consumer_sends_is_an_error(self):
        def target(link):
            link.send(link.receive()[:1])
            os.kill(os.getpid(), signal.SIGKILL)

        worker = self.worker(target, "fork")
        for _ in range(3):
            worker.send(bytes(20 << 20))
        self.assertEqual(worker.receive(), b"\0")
        with self.assertRaisesRegex(RuntimeError, "SIGKILL"):
            for _ in range(100):
                worker.send(bytes(20 << 20))
                worker.receive()

    def test_in_the_middle_of_a_message_is_an_error(self):
        def target(link):
            threading.Timer(0.2, os._exit, (5,)).start()
            link.send(bytes(20 * ROOM))

        worker = self.worker(target, "fork")
        self.assertTrue(eventually(lambda: not running(worker.pid)))
        with self.assertRaisesRegex(RuntimeError, "status 5"):
            worker.receive()


# What a worker may be doing: nothing of it may keep it alive.
BUSY = """
    import ctypes, os, sys, threading, time
    from infinibatch._workers import Worker
    def reading(link):
        link.send(os.getpid())
        os.read(os.pipe()[0], 1)
    def sending(link):
        link.send(os.getpid())
        while True:
            link.send(bytes(1 << 20))
    def receiving(link):
        link.send(os.getpid())
        link.receive()
    def computing(link):
        link.send(os.getpid())
        while True:
            pass
    def holding_the_interpreter(link):
        link.send(os.getpid())
        ctypes.PyDLL(None).sleep(60)
    def with_a_thread(link):
        threading.Thread(target=threading.Event().wait).start()
        link.send(os.getpid())
        threading.Event().wait()
    targets = [reading, sending, receiving, computing, holding_the_interpreter, with_a_thread]
    workers = [Worker(target, start) for start in ["fork"] for target in targets]
    pids = [worker.receive() for worker in workers]
    print(*pids, flush=True)
"""


@linux
class EndOfTheConsumerTest(WorkerCase):
    def ends(self, rest, act=None, seconds=2.0):
        """Run a program with busy workers; return its status and errors when it and the workers are gone."""
        process = start_script(textwrap.dedent(BUSY) + textwrap.dedent(rest), "-W", "error")
        with process.stdout, process.stderr:
            try:
                pids = list(map(int, process.stdout.readline().split()))
                self.assertEqual(len(pids), 6, process.stderr.read() if len(pids) != 6 else "")
                if act is not None:
                    act(process.pid)
                started = time.monotonic()
                process.wait(20)
                self.assertTrue(eventually(lambda: not any(map(running, pids)), seconds), "left: {}".format(pids))
                self.assertLess(time.monotonic() - started, seconds + 1)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return process.returncode, process.stderr.read()

    rest_for_ever = "\nthreading.Event().wait()\n"

    def test_by_a_signal(self):
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV):
            with self.subTest(signal=number):
                status, err = self.ends(self.rest_for_ever, lambda pid, number=number: os.kill(pid, number))
                self.assertEqual((status, err), (-number, ""))

    def test_by_an_exception(self):
        status, err = self.ends("\nraise ValueError('mine')\n")
        self.assertEqual(status, 1)
        self.assertRegex(err, r"^Traceback[^\n]*\n[^\n]*\n(.*\n)?ValueError: mine\n$")

    def test_by_its_regular_end(self):
        for rest in ("", "\nsys.exit(0)\n", "\nworkers[0].close()\ndel workers\n"):
            with self.subTest(rest=rest):
                self.assertEqual(self.ends(rest), (0, ""))

    def test_by_os_exit(self):
        self.assertEqual(self.ends("\nos._exit(0)\n"), (0, ""))

    def test_by_control_c_is_one_keyboard_interrupt(self):
        status, err = self.ends("\nworkers[0].receive()\n", lambda pid: os.killpg(pid, signal.SIGINT))
        self.assertEqual(err.count("Traceback"), 1, err)
        self.assertRegex(err, "KeyboardInterrupt\n$")

    def test_of_spawned_workers(self):
        code = """
            import sys, threading
            sys.path.insert(0, {!r})
            from test_workers import block
            from infinibatch._workers import Worker
            if __name__ == "__main__":
                worker = Worker(block, "spawn")
                print(worker.receive(), flush=True)
                threading.Event().wait()
        """
        process = start_script(textwrap.dedent(code).format(os.path.dirname(os.path.abspath(__file__))))
        with process.stdout, process.stderr:
            try:
                pid = int(process.stdout.readline())
                process.kill()
                self.assertTrue(eventually(lambda: not running(pid), 2))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def test_while_a_fork_of_it_lives_on(self):
        rest = """
            import multiprocessing
            process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            process.start()
            workers[0].receive()
        """
        self.ends(textwrap.dedent(rest), self.kill_once_it_has_forked)

    def kill_once_it_has_forked(self, pid):
        def children():
            with open("/proc/{0}/task/{0}/children".format(pid)) as file:
                return len(file.read().split())

        self.assertTrue(eventually(lambda: children() > 6))
        os.kill(pid, signal.SIGKILL)


class CloseTest(WorkerCase):
    def test_ends_a_worker_that_blocks_for_ever(self):
        for start in PROCESSES:
            with self.subTest(start=start):
                worker = self.worker(block, start)
                pid = worker.receive()
                started = time.monotonic()
                worker.close()
                self.assertLess(time.monotonic() - started, 2)
                self.assertFalse(running(pid))
                worker.close()

    @linux
    def test_ends_many_workers_in_the_time_of_one(self):
        workers = [self.worker(block, "fork") for _ in range(12)]
        pids = [worker.receive() for worker in workers]
        started = time.monotonic()
        _workers.close(workers)
        self.assertLess(time.monotonic() - started, 2)
        self.assertFalse(any(map(running, pids)))

    def test_lets_the_target_clean_up(self):
        def target(link):
            try:
                link.send("begun")
                link.receive()
            finally:
                os.write(write, b"clean")

        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        for start in ("fork", "thread"):
            with self.subTest(start=start):
                worker = self.worker(target, start)
                worker.receive()
                worker.close()
                self.assertEqual(os.read(read, 5), b"clean")

    def test_is_noticed_by_a_worker_that_sends(self):
        def target(link):
            try:
                link.send("begun")
                os.read(gate, 1)
                for i in range(1000000):
                    link.send(i)
            finally:
                os.write(write, b"clean")

        read, write = os.pipe()
        gate, opened = os.pipe()
        for descriptor in (read, write, gate, opened):
            self.addCleanup(os.close, descriptor)
        for start in ("fork", "thread"):
            with self.subTest(start=start):
                worker = self.worker(target, start)
                worker.receive()
                worker._handle.shut()
                os.write(opened, b"x")
                worker.close()
                self.assertEqual(os.read(read, 5), b"clean")

    def test_ends_a_worker_that_waits_for_room(self):
        def target(link):
            link.send(os.getpid())
            for _ in range(1000):
                link.send(bytes(ROOM))
            os.write(write, b"unexpected")

        read, write = os.pipe()
        self.addCleanup(os.close, read)
        for start in ("fork", "thread"):
            with self.subTest(start=start):
                worker = self.worker(target, start)
                worker.receive()
                started = time.monotonic()
                worker.close()
                self.assertLess(time.monotonic() - started, 2)
        os.close(write)
        self.assertEqual(os.read(read, 1), b"")

    def test_leaves_a_blocked_thread_with_one_warning(self):
        event = threading.Event()
        self.addCleanup(event.set)

        def target(link):
            link.send("begun")
            event.wait()

        for way in ("close", "drop"):
            with self.subTest(way=way):
                worker = Worker(target, "thread")
                worker.receive()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if way == "close":
                        worker.close()
                        worker.close()
                    del worker
                    gc.collect()
                self.assertEqual([warning.category for warning in caught], [RuntimeWarning])
                self.assertRegex(str(caught[0].message), "thread is blocked .* start='fork'")

    @linux
    def test_and_forgetting_leave_nothing_behind(self):
        def resources():
            gc.collect()
            with open("/proc/self/task/{0}/children".format(os.getpid())) as file:
                children = file.read()
            descriptors = len(os.listdir("/proc/self/fd"))
            return children, descriptors, threading.active_count(), os.listdir(folder.name), len(_workers._live)

        ways = {
            "close at once": lambda worker: worker.close(),
            "close later": lambda worker: (worker.receive(), worker.close()),
            "forget": lambda worker: worker.receive(),
            "end": lambda worker: self.received(worker),
        }
        with tempfile.TemporaryDirectory() as path, warnings.catch_warnings():
            folder = type("Folder", (), {"name": path})
            warnings.simplefilter("error")
            before, tempfile.tempdir = tempfile.tempdir, path
            try:
                for start, times in (("thread", 100), ("fork", 25), ("spawn", 2)):
                    for name, way in ways.items():
                        with self.subTest(start=start, way=name):
                            Worker(count, start).close()
                            expected = resources()
                            for _ in range(times):
                                way(Worker(count, start))
                            self.assertEqual(resources(), expected)
            finally:
                tempfile.tempdir = before

    @linux
    def test_is_done_for_a_cycle_that_nobody_refers_to(self):
        class Holder:
            pass

        holder = Holder()
        holder.me, holder.worker = holder, Worker(count, "fork")
        pid = holder.worker.pid
        del holder
        gc.collect()
        self.assertFalse(running(pid))

    def test_at_exit_lets_the_target_clean_up(self):
        code = """
            import threading
            from infinibatch._workers import Worker
            def target(link):
                try:
                    link.send("begun")
                    link.receive()
                finally:
                    print("clean")
            def keep(worker):
                threading.Event().wait()
            worker = Worker(target, "fork")
            worker.receive()
            threading.Thread(target=keep, args=(worker,), daemon=True).start()
        """
        self.assertEqual(script(code)[:3], (0, "clean\n", ""))

    def test_of_a_thread_at_exit_is_quiet(self):
        code = """
            import threading
            from infinibatch._workers import Worker
            def target(link):
                link.send(1)
                threading.Event().wait()
            worker = Worker(target, "thread")
            worker.receive()
        """
        status, out, err, seconds = script(code)
        self.assertEqual((status, out, err), (0, "", ""))
        self.assertLess(seconds, 5)


@posix
class ForkOfTheConsumerTest(WorkerCase):
    def test_does_not_disturb_the_worker(self):
        for start in STARTS:
            with self.subTest(start=start):
                worker = self.worker(partial(count, n=2000), start)
                messages = [worker.receive() for _ in range(3)]

                def child(worker=worker):
                    self.assertFalse(worker.owned)
                    for use in (worker.receive, worker.ready, lambda: worker.send(1)):
                        with self.assertRaisesRegex(RuntimeError, "belongs to another process"):
                            use()
                    worker.close()
                    _workers.close([worker])
                    _workers._close_all()

                self.assertEqual(os.waitpid(self.in_fork(child), 0)[1], 0)
                self.assertTrue(worker.owned)
                self.assertEqual(messages + self.received(worker), list(range(2000)))

    def test_may_start_workers_of_its_own(self):
        def child():
            self.assertEqual(self.received(Worker(count, "fork")), [0, 1, 2, 3, 4])

        worker = self.worker(count, "fork")
        worker.receive()
        self.assertEqual(os.waitpid(self.in_fork(child), 0)[1], 0)
        self.assertEqual(self.received(worker), [1, 2, 3, 4])

    def test_may_end_in_any_way(self):
        code = """
            import multiprocessing, os, sys
            from infinibatch._workers import Ended, Worker
            def target(link):
                for i in range(5000):
                    link.send(i)
            worker = Worker(target, "fork")
            got = [worker.receive() for _ in range(10)]
            process = multiprocessing.get_context("fork").Process(target=print, args=("in a child",))
            process.start()
            process.join()
            pid = os.fork()
            if not pid:
                sys.exit(0)
            os.waitpid(pid, 0)
            try:
                while True:
                    got.append(worker.receive())
            except Ended:
                print(got == list(range(5000)))
        """
        status, out, err, _ = script(code)
        self.assertEqual((status, out, err), (0, "in a child\nTrue\n", ""))

    def test_of_torchs_loader(self):
        try:
            import torch.utils.data
        except ImportError:
            self.skipTest("needs torch")
        test = self

        class Data(torch.utils.data.IterableDataset):
            def __init__(self):
                self.worker = test.worker(partial(count, n=2000), "fork")
                self.first = self.worker.receive()

            def __iter__(self):
                worker = self.worker if self.worker.owned else Worker(partial(count, n=2000), "fork")
                with contextlib.suppress(Ended):
                    while True:
                        yield worker.receive()

        data = Data()
        loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
        self.assertEqual(sorted(loader), sorted(list(range(2000)) * 2))
        self.assertEqual(self.received(data.worker), list(range(1, 2000)))


@posix
class SurroundingsTest(WorkerCase):
    def test_a_worker_starts_in_a_daemonic_process(self):
        def child(connection):
            connection.send([self.received(Worker(count, start)) for start in PROCESSES])

        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=child, args=(sender,), daemon=True)
        process.start()
        self.assertEqual(receiver.recv(), [[0, 1, 2, 3, 4]] * 2)
        process.join()
        receiver.close()
        sender.close()

    def test_a_worker_has_workers(self):
        def outer(link):
            worker = Worker(count, "fork")
            with contextlib.suppress(Ended):
                while True:
                    link.send(worker.receive())
            link.send(block_worker.closed)
            blocked = Worker(block, "fork")
            link.send(blocked.receive())
            threading.Event().wait()

        block_worker = self.worker(block, "fork")
        worker = self.worker(outer, "fork")
        self.assertEqual([worker.receive() for _ in range(6)], [0, 1, 2, 3, 4, True])
        inner = worker.receive()
        self.assertTrue(running(inner))
        worker.close()
        self.assertTrue(eventually(lambda: not running(inner), 2))
        self.assertFalse(block_worker.closed)

    def test_the_default_start_method_of_multiprocessing_does_not_matter(self):
        code = """
            import multiprocessing, sys
            from infinibatch._workers import Worker
            def target(link):
                link.send(sys.argv[1])
            if __name__ == "__main__":
                method = sys.argv[1]
                if method != "none":
                    multiprocessing.set_start_method(method)
                for start in ("fork", "spawn"):
                    worker = Worker(target, start)
                    print(worker.receive())
                    worker.close()
                multiprocessing.set_start_method("spawn", force=method != "none")  # still unset
        """
        for method in ("none", "forkserver", "spawn", "fork"):
            with self.subTest(method=method):
                status, out, err, _ = self.script_file(code, method)
                self.assertEqual((status, out, err), (0, 2 * (method + "\n"), ""))

    def script_file(self, code, *arguments):
        """Run a program from a file, which `spawn` can import again."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "program.py")
            with open(path, "w") as file:
                file.write(textwrap.dedent(code))
            process = subprocess.Popen(
                [sys.executable, "-W", "error", path] + list(arguments),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                env=environment(),
            )
            out, err = process.communicate(timeout=30)
            return process.returncode, out, err, None

    def test_spawn_finds_what_the_main_module_defines(self):
        code = """
            import sys
            from infinibatch._workers import Ended, Worker
            class Odd(Exception):
                pass
            def target(link):
                link.send((__name__, sys.argv[1:]))
                raise Odd("odd")
            if __name__ == "__main__":
                worker = Worker(target, "spawn")
                print(worker.receive())
                try:
                    worker.receive()
                except Odd as error:
                    print(error)
        """
        status, out, err, _ = self.script_file(code, "argument")
        self.assertEqual((status, out, err), (0, "('__mp_main__', ['argument'])\nodd\n", ""))

    def test_spawn_works_in_a_program_from_the_standard_input(self):
        code = """
            from infinibatch.iterators import MapIterator, NativeCheckpointableIterator, PrefetchIterator
            letters = MapIterator(NativeCheckpointableIterator("ab"), str.upper)
            with PrefetchIterator(letters, 2, start="spawn") as items:
                print(list(items))
        """
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
            env=environment(),
        )
        out, err = process.communicate(textwrap.dedent(code), timeout=30)
        self.assertEqual((process.returncode, out, err), (0, "['A', 'B']\n", ""))

    def test_spawn_without_a_guard_in_the_main_module_is_explained(self):
        code = """
            from infinibatch._workers import Worker
            def target(link):
                link.send(1)
            Worker(target, "spawn").receive()
        """
        status, _, err, _ = self.script_file(code)
        self.assertEqual(status, 1)
        self.assertIn("if __name__ == '__main__':", err)

    def test_spawn_of_what_cannot_be_pickled_names_it(self):
        class Stage:
            def __init__(self, **parts):
                self.__dict__.update(parts)

        pattern = "the target of a worker with start='spawn' must be picklable, got builtins.function"
        with self.assertRaisesRegex(TypeError, pattern + ": "):
            Worker(lambda link: None, "spawn")
        module = sys.modules[__name__]
        module.Stage = Stage
        Stage.__qualname__ = "Stage"
        self.addCleanup(delattr, module, "Stage")
        stage = Stage(source=[Stage(transform=lambda item: item)])
        with self.assertRaisesRegex(TypeError, pattern + r" at its args\[0\]\.source\[0\]\.transform: .*lambda"):
            Worker(partial(count, stage), "spawn")

    def test_locks_held_by_other_threads_at_the_fork_do_not_block_a_worker(self):
        code = """
            import io, logging, os, select, sys, threading, time
            from infinibatch._workers import Worker
            held, done = threading.Event(), threading.Event()
            read, write = os.pipe()
            parent = os.getpid()

            handler = logging.StreamHandler(sys.stdout)
            logging.getLogger().addHandler(handler)
            def hold_logging():
                with handler.lock:
                    held.set()
                    done.wait()

            sys.path.insert(0, sys.argv[1])
            def hold_import():
                import slow_module

            slow = logging.StreamHandler(io.TextIOWrapper(io.BufferedWriter(io.FileIO(write, "w"))))
            logging.getLogger("slow").addHandler(slow)
            logging.getLogger("slow").propagate = False
            def hold_stream():  # holds the lock of the buffer while the pipe is full
                slow.stream.write("x" * 300000)
                slow.stream.flush()

            threads = [threading.Thread(target=target) for target in (hold_logging, hold_import, hold_stream)]
            for thread in threads:
                thread.start()
            held.wait()
            while not getattr(sys.modules.get("slow_module"), "begun", False):
                time.sleep(0.001)
            while not select.select([read], [], [], 0)[0]:
                time.sleep(0.001)

            def target(link):
                logging.getLogger().warning("logged")
                import slow_module
                link.send(slow_module.answer)
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, write)
                logging.getLogger("slow").warning("logged slowly")
                logging.getLogger("new").addHandler(logging.StreamHandler())
                link.send("end")

            worker = Worker(target, "fork")
            print(worker.receive(), worker.receive())
            done.set()
            sys.modules["slow_module"].event.set()
            threads[0].join()
            threads[1].join()
            sys.stdout.flush()
            os._exit(0)
        """
        module = """
            import os, threading
            begun = True
            event = threading.Event()
            if os.getpid() == {}:
                event.wait()
            answer = 42
        """
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "slow_module.py"), "w") as file:
                file.write(textwrap.dedent(module).format("__import__('__main__').parent"))
            with open(os.path.join(folder, "program.py"), "w") as file:
                file.write(textwrap.dedent(code))
            process = subprocess.Popen(
                [sys.executable, os.path.join(folder, "program.py"), folder],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                universal_newlines=True,
                env=environment(),
            )
            try:
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
                process.wait()
                process.stdout.close()
                process.stderr.close()
        self.assertEqual((process.returncode, out, err), (0, "logged\n42 end\n", ""))

    def test_handlers_of_the_consumer_do_not_run_in_a_worker_and_their_signals_do_not_kill_it(self):
        def target(link):
            link.send(os.getpid())
            link.receive()
            link.send("alive")
            link.send(calls)
            link.send([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)])
            link.send(signal.set_wakeup_fd(-1))
            link.send(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))

        calls = []
        numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM)
        for number in numbers:
            previous = signal.signal(number, lambda *_: calls.append(os.getpid()))
            self.addCleanup(signal.signal, number, previous)
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        os.set_blocking(write, False)
        self.addCleanup(signal.set_wakeup_fd, signal.set_wakeup_fd(write))
        worker = self.worker(target, "fork")
        pid = worker.receive()
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGALRM):
            os.kill(pid, number)
        worker.send("go on")
        self.assertEqual(worker.receive(), "alive")
        self.assertEqual(worker.receive(), [])
        self.assertEqual(worker.receive(), [signal.SIG_IGN, signal.SIG_DFL, signal.SIG_DFL])
        self.assertEqual(worker.receive(), -1)
        self.assertEqual(worker.receive(), sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        spawned = self.worker(echo, "spawn")
        spawned.send("begun")
        spawned.receive()
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGALRM):
            os.kill(spawned.pid, number)
        spawned.send("alive")
        self.assertEqual(spawned.receive(), "alive")

    def test_the_signal_mask_is_restored(self):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        self.addCleanup(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        expected = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        for start in PROCESSES:
            self.worker(count, start)
            self.assertEqual(signal.pthread_sigmask(signal.SIG_BLOCK, []), expected)

    def test_forking_with_threads_gives_no_warning_and_hides_no_other(self):
        event = threading.Event()
        thread = threading.Thread(target=event.wait)
        thread.start()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                worker = self.worker(count, "fork")
                warnings.warn("not hidden", DeprecationWarning, stacklevel=1)
                self.assertEqual([str(warning.message) for warning in caught], ["not hidden"])
                self.assertEqual(self.received(worker), [0, 1, 2, 3, 4])
        finally:
            event.set()
            thread.join()

    def test_a_thread_may_start_a_worker_and_end(self):
        workers = []
        thread = threading.Thread(target=lambda: workers.append(self.worker(echo, "fork")))
        thread.start()
        thread.join()
        workers[0].send("alive")
        self.assertEqual(workers[0].receive(), "alive")

    def test_what_a_worker_prints_comes_before_its_messages(self):
        code = """
            import sys
            from infinibatch._workers import Ended, Worker
            def target(link):
                for i in range(3):
                    print("worker", i)
                    link.send(i)
                    link.receive()
                print("worker's end")
            print("consumer")
            worker = Worker(target, "fork")
            for i in range(3):
                worker.receive()
                print("consumer", i, flush=True)
                worker.send(None)
            try:
                worker.receive()
            except Ended:
                print("consumer's end")
        """
        status, out, err, _ = script(code)
        self.assertEqual((status, err), (0, ""))
        lines = ["consumer", "worker 0", "consumer 0", "worker 1", "consumer 1", "worker 2", "consumer 2"]
        self.assertEqual(out.split("\n")[:7], lines)
        self.assertEqual(sorted(out.split("\n")[7:]), ["", "consumer's end", "worker's end"])

    def test_a_worker_reads_nothing_from_standard_input(self):
        code = """
            import sys
            from infinibatch._workers import Worker
            worker = Worker(lambda link: link.send(sys.stdin.read()), "fork")
            print(repr(worker.receive()), sys.stdin.read())
        """
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
            env=environment(),
        )
        self.assertEqual(process.communicate("typed", timeout=20)[0], "'' typed\n")

    def test_a_worker_may_use_queues_of_multiprocessing(self):
        def target(link):
            queue.put("from the worker")
            link.send("sent")

        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        queue.put("from the consumer")
        self.assertEqual(queue.get(timeout=20), "from the consumer")
        worker = self.worker(target, "fork")
        self.assertEqual(self.received(worker), ["sent"])
        self.assertEqual(queue.get(timeout=20), "from the worker")
        queue.close()
        queue.join_thread()

    def test_nothing_of_the_consumers_exit_runs_in_a_worker(self):
        code = """
            import atexit, os, weakref
            from infinibatch._workers import Ended, Worker
            class Thing:
                pass
            thing = Thing()
            weakref.finalize(thing, print, "finalized", flush=True)
            atexit.register(print, "exit", flush=True)
            worker = Worker(lambda link: None, "fork")
            try:
                worker.receive()
            except Ended:
                print("ended", flush=True)
        """
        status, out, err, _ = script(code)
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(sorted(out.split()), ["ended", "exit", "finalized"])

    def test_failing_to_start_leaves_nothing_behind(self):
        def fork():
            raise OSError("no more processes")

        descriptors = os.listdir("/proc/self/fd")
        original, os.fork = os.fork, fork
        try:
            with self.assertRaisesRegex(OSError, "no more processes"):
                Worker(count, "fork")
        finally:
            os.fork = original
        self.assertEqual(os.listdir("/proc/self/fd"), descriptors)
        self.assertEqual(self.received(self.worker(count, "fork")), [0, 1, 2, 3, 4])

    def test_a_wait_ends_when_another_thread_closes_the_worker(self):
        for start in STARTS:
            with self.subTest(start=start):
                worker = self.worker(echo, start)
                worker.send("begun")
                worker.receive()
                timer = threading.Timer(0.1, worker.close)
                timer.start()
                with self.assertRaisesRegex(RuntimeError, "was closed by another thread"):
                    worker.receive()
                timer.join()

    def test_an_interrupt_of_a_wait_closes_the_worker(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        for start in STARTS:
            with self.subTest(start=start):
                worker = self.worker(echo, start)
                worker.send("begun")
                worker.receive()
                previous = signal.signal(signal.SIGALRM, interrupt)
                signal.setitimer(signal.ITIMER_REAL, 0.1)
                try:
                    with self.assertRaises(KeyboardInterrupt):
                        worker.receive()
                finally:
                    signal.signal(signal.SIGALRM, previous)
                self.assertTrue(worker.closed)
                if start != "thread":
                    self.assertFalse(running(worker.pid))


if __name__ == "__main__":
    unittest.main()
