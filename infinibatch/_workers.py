"""
Run a function in another process (or thread) and exchange messages with it, in order, in both directions.

    consumer's process                                                                worker's process

    worker.send(message)                                                              target(link)
      | pickle                                                                          |
      v                                                                                 v
    [queue, no limit] --copy--> [segments of shared memory] ------unpickle-----------> link.receive()

    worker.receive() <-unpickle- [segments of shared memory] <--copy-- [one message] <-pickle-- link.send(...)

         ^                                                                              ^
         +----- socket pair: where new bytes lie, how many were taken out --------------+
         +----- pipe that nobody writes to: its end kills the worker -------------------+

Both ends of a channel are alike (`_Channel`), except that the worker's end (`Link`) blocks until its message is in
shared memory, and the consumer's end never blocks in `send`: it moves what is queued at every later call and during
every wait. So neither end ever waits for one direction only, and two ends that send to each other at the same time
cannot deadlock.

Each direction has segments of shared memory. The writer fills one after the other, always the first that is free, so
that the memory in use is as little as the reader is behind, and stays in the processor's cache. A message is one run of
bytes: a header (kind, number of buffers, length of the pickle), the lengths of the buffers, the buffers (large arrays,
out of band), the pickle. It begins in a new segment if it fits into one but not into what is left of the last; one that
is larger than all segments flows through them in parts. The socket carries pairs of 64-bit integers: (offset, length)
of new bytes, or a negative code and a running total: of bytes taken out, of nanoseconds spent waiting, or of what the
target counts (`grant`), such as items asked for.

A worker is done for in one of four ways: its target returns or raises (the last message says so); `close()` shuts the
socket, which its next use of the link notices, and kills it after a grace time; it dies (every wait of the consumer
is short and followed by a `waitpid`, because a process that the worker has forked may keep the socket open); or the
consumer dies (the kernel ends the pipe and, armed so on Linux, kills the worker).
"""

import copyreg
import gc
import io
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
import weakref
from collections import ChainMap, deque
from heapq import heappop, heappush
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, NoReturn, Optional, Sequence, Set, Tuple, Union

Target = Callable[[Any], None]

_SEGMENT = 1 << 20
# Bytes of the segments in each direction, unless the consumer is to find more ready.
_ROOM = 4 * _SEGMENT
# A long message is announced in parts of this many bytes, so that both ends copy at the same time.
_PART = 512 << 10
# The reader acknowledges after the second number of bytes, or before it waits after the first. Bytes that it has not
# acknowledged never stop the writer: it waits only if no segment is free, and then they are more than that.
_ACKNOWLEDGE_BEFORE_WAIT, _ACKNOWLEDGE = 64 << 10, 512 << 10
# Smaller buffers stay in the pickle: a place of their own costs more than another copy.
_OUT_OF_BAND = 16 << 10
# What a message of a thread counts for, in bytes.
_THREAD_MESSAGE = 256 << 10

_PATIENCE_SECONDS = 0.2
_GRACE_SECONDS = 0.3
_THREAD_GRACE_SECONDS = 1.5  # a thread cannot be killed
_KILL_SECONDS = 0.7

_HEADER = struct.Struct("<iiQ")
_RECORD = struct.Struct("<qq")
_TAKEN, _WAITED, _GRANTED = -1, -2, -3
_MESSAGE, _ERROR, _END = range(3)
_CONSUMER, _WORKER = range(2)

_PROTOCOL = min(pickle.HIGHEST_PROTOCOL, 5)


class Closed(Exception):
    """Raised by the worker's link when the consumer has closed the worker."""


class Ended(Exception):
    """Raised by `Worker.receive` when the target has returned and every message has been received."""


class WorkerTraceback(Exception):
    """The cause of an exception that came from a worker process: the traceback there, as text."""

    def __str__(self) -> str:
        return '\n"""\n{}"""'.format(self.args[0])


def default_start() -> str:
    """Return how workers start on this platform: 'fork', or 'thread' where forking is missing or unsafe."""
    return "fork" if hasattr(os, "fork") and sys.platform != "darwin" else "thread"


# ---------------------------------------------------------------------------------------------------------------------
# What both ends of a channel do
# ---------------------------------------------------------------------------------------------------------------------


class _Channel:
    """One end of a duplex channel between two processes."""

    patience: Optional[float] = None  # seconds that a wait may last before `silence` is called; None: for ever
    patient = False  # whether `put` blocks until the message is where the other end finds it

    def __init__(self, sock: Any, memory: mmap.mmap, base: int) -> None:
        import socket

        sock.setblocking(True)
        if self.patience is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(self.patience * 1e6)))
        self.sock = sock
        self._dont_wait = socket.MSG_DONTWAIT
        self._send_flags = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
        self.view: Any = memoryview(memory)
        self.waited = 0.0  # seconds that this end has waited for the other
        self.peer_waited = 0.0  # seconds that the other end says it has waited for this one
        self.lost = False  # the other end is closed: nothing more will come
        self.deaf = False  # the other end is closed: sending is in vain, but what it sent before may be still unread
        self._granted = self._peer_granted = 0
        # Outgoing: pieces of messages that are not in shared memory yet, and the segments.
        self.pickler = _Pickler()
        self._queue: Deque[Any] = deque()  # bytes-like
        self._head = self._stop = 0  # the next byte, and the end of its segment
        self._free = list(range(base, len(memory) if base else _ROOM, _SEGMENT))  # a heap
        self._full: Deque[Tuple[int, int]] = deque()  # segments in use: bytes sent when they were full, and offset
        self._sent = 0
        self._sent_taken = 0
        self._looked = 0
        self._records = bytearray()
        # Incoming: the bytes from _at to _until, then those of _extents, are there to be read.
        self._at = self._until = 0
        self._extents: Deque[List[int]] = deque()
        self._split = b""
        self._taken = 0
        self._acknowledged = 0
        self._waited_told = 0.0

    def forget(self) -> None:
        """Close what this process holds of the channel; the other end sees it only if no other process holds it."""
        self.sock.close()
        self.view = None
        self._queue.clear()

    # -- sending ------------------------------------------------------------------------------------------------------

    def put(self, kind: int, message: Any) -> None:
        """Send a message."""
        self.put_pickled(kind, *self.pickler.dump(message))

    def put_pickled(self, kind: int, pieces: List[Any], views: List[memoryview], size: int) -> None:
        """Send a message that is pickled already."""
        header = _HEADER.pack(kind, len(views), size)
        if views:
            sizes = [len(view) for view in views]
            header += struct.pack("<{}Q".format(len(sizes)), *sizes)
            size += sum(sizes)
        new = [header, *views, *pieces] if size > _OUT_OF_BAND else [b"".join([header, *pieces])]
        if not self._queue:
            if self._stop and self._sent == self._sent_taken:
                self._head = self._stop - _SEGMENT  # where memory is still in the cache
            if self._stop - self._head < len(header) + size <= _SEGMENT:
                self._leave_segment()
        self._queue.extend(new)
        self.pump()
        while self.patient and (self._queue or self._records):
            self.wait()
        # The caller may change its objects after the call.
        for i in range(-min(len(new), len(self._queue)), 0):
            piece = self._queue[i]
            if type(getattr(piece, "obj", piece)) is not bytes:
                self._queue[i] = bytes(piece)

    def pump(self) -> None:
        """Move queued bytes into shared memory as far as there is room, and tell the other end; never blocks."""
        queue = self._queue
        if self._sent - self._looked >= _ACKNOWLEDGE_BEFORE_WAIT:
            self._looked = self._sent
            self.pull()
        while queue and not self.deaf:
            if self._head == self._stop and not self._enter_segment():
                break
            start = offset = self._head
            end = min(self._stop, start + _PART)
            view = self.view
            while queue and offset < end:
                piece = queue[0]
                size = len(piece)
                if size <= end - offset:
                    view[offset : offset + size] = piece
                    offset += size
                    queue.popleft()
                else:
                    piece = memoryview(piece)
                    view[offset:end] = piece[: end - offset]
                    queue[0] = piece[end - offset :]
                    offset = end
            length = offset - start
            self._head = offset
            self._sent += length
            if offset == self._stop:
                self._leave_segment()
            if self.waited > self._waited_told + 0.001:
                self._waited_told = self.waited
                self._records += _RECORD.pack(_WAITED, int(self.waited * 1e9))
            self._records += _RECORD.pack(start, length)
            self._tell()
        if self._records:
            self._tell()

    def _leave_segment(self) -> None:
        if self._stop:
            self._full.append((self._sent, self._stop - _SEGMENT))
            self._head = self._stop = 0

    def _enter_segment(self) -> bool:
        """Go on in the first segment that is free, if any."""
        while self._full and self._full[0][0] <= self._sent_taken:
            heappush(self._free, self._full.popleft()[1])
        if not self._free:
            return False
        self._head = heappop(self._free)
        self._stop = self._head + _SEGMENT
        return True

    def grant(self, number: int) -> None:
        """Add to the number that the other end reads as `granted`."""
        self._granted += number
        self._records += _RECORD.pack(_GRANTED, self._granted)
        self._tell()

    def _tell(self) -> None:
        """Write what is to be told to the socket, as far as it takes it."""
        try:
            while self._records:
                del self._records[: self.sock.send(self._records, self._send_flags)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.deaf = True
            self._records.clear()
            self._queue.clear()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def get(self, feeding: "Sequence[_Channel]" = ()) -> Tuple[int, Any]:
        """Return kind and content of the next message; blocks until it is there."""
        while self._at == self._until:
            self.wait(feeding)
        at = self._at + _HEADER.size
        if at <= self._until:
            kind, count, size = _HEADER.unpack_from(self.view, self._at)
            if not count and at + size <= self._until:
                with self.view[at : at + size] as view:
                    message = pickle.loads(view)
                self._release(_HEADER.size + size)
                return kind, message
        kind, count, size = _HEADER.unpack(self.read(_HEADER.size, feeding))
        buffers = []
        if count:
            for length in struct.unpack("<{}Q".format(count), self.read(8 * count, feeding)):
                buffer = bytearray(length)
                self.read_into(memoryview(buffer), feeding)
                buffers.append(buffer)
        options: Dict[str, Any] = {"buffers": buffers} if buffers else {}
        if self._until - self._at >= size:
            with self.view[self._at : self._at + size] as view:
                message = pickle.loads(view, **options)
            self._release(size)
        else:
            message = pickle.Unpickler(_Source(self, feeding), **options).load()
        return kind, message

    def read(self, size: int, feeding: "Sequence[_Channel]" = ()) -> bytes:
        """Return the next bytes; blocks until they are there."""
        if self._until - self._at >= size:
            data = bytes(self.view[self._at : self._at + size])
            self._release(size)
            return data
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), feeding)
        return bytes(buffer)

    def read_into(self, target: memoryview, feeding: "Sequence[_Channel]" = ()) -> None:
        """Fill the target with the next bytes; blocks until they are there."""
        done = 0
        while done < len(target):
            while self._at == self._until:
                if not self.pull():
                    self.wait(feeding)
            size = min(self._until - self._at, len(target) - done)
            target[done : done + size] = self.view[self._at : self._at + size]
            done += size
            self._release(size)

    def pull(self, block: bool = False) -> bool:
        """Read what the other end tells; returns whether there was anything."""
        try:
            data = self.sock.recv(1 << 12, 0 if block else self._dont_wait)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self.lost = True
            return False
        data = self._split + data
        whole = len(data) - len(data) % _RECORD.size
        self._split = data[whole:]
        for what, number in _RECORD.iter_unpack(data[:whole]):
            if what == _TAKEN:
                self._sent_taken = number
            elif what == _WAITED:
                self.peer_waited = number / 1e9
            elif what == _GRANTED:
                self._peer_granted = number
            elif self._extents:
                if self._extents[-1][1] == what:
                    self._extents[-1][1] += number
                else:
                    self._extents.append([what, what + number])
            elif self._until == what:
                self._until += number
            elif self._at == self._until:
                self._at, self._until = what, what + number
            else:
                self._extents.append([what, what + number])
        return True

    def readable(self) -> bool:
        """Return whether a message, or a part of it, is there."""
        while self._at == self._until and self.pull():
            pass
        return self._at < self._until

    def _release(self, size: int) -> None:
        """Mark the next bytes as taken out."""
        self._at += size
        self._taken += size
        if self._at == self._until and self._extents:
            self._at, self._until = self._extents.popleft()
        if self._taken - self._acknowledged >= _ACKNOWLEDGE:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._acknowledged = self._taken
        self._records += _RECORD.pack(_TAKEN, self._taken)
        self._tell()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, feeding: "Sequence[_Channel]" = ()) -> None:
        """Block until the other end does something (or for a moment), meanwhile moving what `feeding` has queued."""
        if self._taken - self._acknowledged >= _ACKNOWLEDGE_BEFORE_WAIT:
            self._acknowledge()
        others = [other for other in feeding if other is not self and other._pending()] if feeding else []
        started = time.perf_counter()
        try:
            heard = self._poll([self, *others]) if others or self._records else self.pull(block=True)
        finally:
            self.waited += time.perf_counter() - started
        if self._queue or self._records:
            self.pump()
        if self.lost or not heard:
            self.silence()

    def _pending(self) -> bool:
        return bool(self._queue or self._records) and not self.lost

    def _poll(self, channels: "Sequence[_Channel]") -> bool:
        """Block until one of the channels can go on; returns whether this one can."""
        poll = select.poll()
        for channel in channels:
            poll.register(channel.sock, select.POLLIN | (select.POLLOUT if channel._records else 0))
        ready = {number for number, _ in poll.poll(None if self.patience is None else int(self.patience * 1000))}
        for channel in channels:
            if channel.sock.fileno() in ready:
                channel.pull()
                channel.pump()
        return self.sock.fileno() in ready

    def silence(self) -> None:
        """Find out why the other end says nothing, and raise if it never will."""
        raise NotImplementedError


class _Pickler:
    """Turns messages into bytes; kept, because to make a `pickle.Pickler` costs more than a small message."""

    def __init__(self) -> None:
        self._pieces: List[Any] = []
        self._views: List[memoryview] = []
        self.write = self._pieces.append  # what the pickler asks of a file: large bytes arrive uncopied
        if _PROTOCOL < 5:
            self._pickler = pickle.Pickler(self, _PROTOCOL)
        else:
            self._pickler = pickle.Pickler(self, _PROTOCOL, buffer_callback=self._keep)
        self._torch = False

    def dump(self, message: Any) -> Tuple[List[Any], List[memoryview], int]:
        """Return the pickle in pieces, the buffers that are not in it, and the length of the pickle."""
        if not self._torch and "torch" in sys.modules:
            self._torch = True
            self._pickler.dispatch_table = _torch_table()
        try:
            self._pickler.dump(message)
            return self._pieces[:], self._views[:], sum(map(len, self._pieces))
        except Exception as error:  # whatever the classes of its parts raise
            raise _not_picklable("a message to another process", message, error) from error
        finally:
            self._pickler.clear_memo()
            self._pieces.clear()
            self._views.clear()

    def _keep(self, buffer: Any) -> bool:
        """Put a buffer aside, or return True: then it becomes a part of the pickle."""
        view: memoryview = buffer.raw()
        if len(view) < _OUT_OF_BAND:
            return True
        self._views.append(view)
        return False


class _Source:
    """A file to unpickle from: large bytes go from shared memory into their object at once."""

    def __init__(self, channel: _Channel, feeding: Sequence[_Channel]) -> None:
        self._channel = channel
        self._feeding = feeding

    def read(self, size: int) -> bytes:
        return self._channel.read(size, self._feeding)

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        self._channel.read_into(view, self._feeding)
        return len(view)

    def readline(self) -> bytes:
        raise pickle.UnpicklingError("pickles of protocol 0 are not expected here")


# ---------------------------------------------------------------------------------------------------------------------
# The worker's side
# ---------------------------------------------------------------------------------------------------------------------


class Link(_Channel):
    """What the target of a worker process gets: its end of the channel."""

    patient = True
    num_bytes = 0  # of the last message sent
    _taken_up = 0  # of what the consumer has granted

    def send(self, message: Any) -> None:
        """Send a message to the consumer.

        Blocks while `room` bytes are under way.

        Args:
            message: anything that can be pickled; may be changed after the call

        Raises:
            Closed: the consumer has closed the worker
            TypeError: the message cannot be pickled
        """
        _flush_streams()
        pieces, views, size = self.pickler.dump(message)
        self.num_bytes = size + sum(map(len, views))
        self.put_pickled(_MESSAGE, pieces, views, size)

    def receive(self) -> Any:
        """Return the consumer's next message; blocks until it is there.

        Raises:
            Closed: the consumer has closed the worker
        """
        return self.get()[1]

    def granted(self, block: bool) -> int:
        """Return what the consumer has granted since the last call.

        Args:
            block: whether to wait until that is more than 0

        Raises:
            Closed: the consumer has closed the worker
        """
        if not block:
            self.pull()
        while block and self._peer_granted == self._taken_up and not self.lost:
            self.wait()
        if self.lost:
            raise Closed
        number, self._taken_up = self._peer_granted - self._taken_up, self._peer_granted
        return number

    def silence(self) -> None:
        raise Closed

    def finish(self, kind: int, content: Any) -> None:
        """Send the last message."""
        self.put(kind, content)


class ThreadLink:
    """What the target of a worker thread gets; the methods are those of `Link`, messages are passed as they are."""

    num_bytes = 0
    _taken_up = 0  # of what the consumer has granted

    def __init__(self, shared: "_Shared") -> None:
        self._shared = shared

    def send(self, message: Any) -> None:
        self.finish(_MESSAGE, message)

    def finish(self, kind: int, content: Any) -> None:
        shared = self._shared
        self._wait(lambda: len(shared.to_consumer) < shared.messages)
        shared.to_consumer.append((kind, content))
        shared.wake(_CONSUMER)

    def receive(self) -> Any:
        self._wait(lambda: bool(self._shared.to_worker))
        return self._shared.to_worker.popleft()

    def granted(self, block: bool) -> int:
        self._wait(lambda: not block or self._shared.granted > self._taken_up)
        granted = self._shared.granted
        number, self._taken_up = granted - self._taken_up, granted
        return number

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._shared.wait(condition, _WORKER)
        if self._shared.closed:
            raise Closed


def _serve(target: Target, link: Any) -> None:
    """Run the target; its end, or its exception, is the last message."""
    try:
        try:
            try:
                target(link)
            except StopIteration as error:
                # Somewhere on its way it would be taken for the end of the data.
                raise RuntimeError("a worker raised StopIteration: {!r}".format(error)) from error
            link.finish(_END, None)
        except Closed:
            raise
        except BaseException as error:
            link.finish(_ERROR, error if isinstance(link, ThreadLink) else _pack_error(error))
    except Closed:
        pass


# ---------------------------------------------------------------------------------------------------------------------
# The consumer's side
# ---------------------------------------------------------------------------------------------------------------------


class Worker:
    """A function that runs in another process or thread; starts at once.

    Args:
        target: called with the worker's link (`send`, `receive`); must not refer to this object, or to what holds
            it, else a forgotten worker is never collected
        start: 'fork', 'thread' or 'spawn' (the target must be picklable; POSIX only); None: the platform's default
        room: bytes of messages to the consumer that may be under way before the worker waits, at least 4 MiB

    Attributes:
        pid: the worker's process id; this process's own for a thread
        waited: seconds that the consumer has waited for messages
        worker_waited: seconds that the worker has waited for the consumer, as last heard

    >>> def double(link):
    ...     for i in range(3):
    ...         link.send(2 * i)
    >>> worker = Worker(double)
    >>> [worker.receive(), worker.receive(), worker.receive()]
    [0, 2, 4]
    >>> worker.receive()  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    Ended
    """

    Ended = Ended

    def __init__(self, target: Target, start: Optional[str] = None, room: int = _ROOM) -> None:
        start = default_start() if start is None else start
        if start not in ("fork", "spawn", "thread"):
            raise ValueError("start must be 'fork', 'spawn' or 'thread', got {!r}".format(start))
        if start != "thread" and not hasattr(os, "fork"):
            raise ValueError("start must be 'thread' on this platform, got {!r}".format(start))
        self._handle: Union[_Process, _Thread] = (
            _Thread(target, room) if start == "thread" else _Process(target, start, room)
        )
        self._finalizer = weakref.finalize(self, self._handle.close)
        self._finalizer.atexit = False  # _close_all does it for all workers at the same time

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def waited(self) -> float:
        return self._handle.waited

    @property
    def worker_waited(self) -> float:
        return self._handle.peer_waited

    @property
    def owned(self) -> bool:
        """Whether this process has started the worker; False in a forked copy, for which the worker does not work."""
        return self._handle.owner == os.getpid()

    @property
    def closed(self) -> bool:
        """Whether the worker is over: closed, ended, failed or dead."""
        return self._handle.closed

    @property
    def left_behind(self) -> bool:
        """Whether this is a thread that is closed and still runs."""
        return isinstance(self._handle, _Thread) and self._handle.left_behind

    def send(self, message: Any) -> None:
        """Send a message to the worker; never blocks.

        Args:
            message: anything that can be pickled (by a thread: anything)

        Raises:
            TypeError: the message cannot be pickled
            RuntimeError: the worker is closed, or belongs to another process
        """
        self._usable()
        self._handle.send(message)

    def grant(self, number: int) -> None:
        """Tell the worker a number, which is added to those that it has not asked for yet (`granted`); never blocks."""
        self._usable()
        self._handle.grant(number)

    def receive(self, feeding: "Iterable[Worker]" = ()) -> Any:
        """Return the worker's next message; blocks until it is there.

        An exception closes the worker; an interrupt, or the death of the worker, also those of `feeding`.

        Args:
            feeding: other workers whose queued messages are to be moved meanwhile

        Raises:
            Ended: the target has returned
            RuntimeError: the worker has died, is closed, or belongs to another process
            BaseException: what the target raised, with its traceback there as the cause
        """
        self._usable()
        kind, content = self._handle.receive(
            [other._handle for other in feeding if not other.closed] if feeding else ()
        )
        if kind == _MESSAGE:
            return content
        self.close()
        if kind == _END:
            raise Ended
        try:
            raise content if isinstance(content, BaseException) else _unpack_error(content)
        finally:
            del content  # a traceback refers to this frame

    def ready(self) -> bool:
        """Return whether `receive` would find something without waiting for the worker to begin with it."""
        self._usable()
        return self._handle.ready()

    def close(self) -> None:
        """End the worker: it has some tenths of a second to leave its target, then it is killed.

        A thread cannot be killed: if it blocks in its target it is left behind with a warning. Does nothing in a
        forked copy, or if the worker has ended.
        """
        self._handle.close()

    def _usable(self) -> None:
        handle = self._handle
        if handle.owner != os.getpid():
            raise RuntimeError("worker {} belongs to another process: this one is a fork of it".format(self.pid))
        if handle.closed:
            raise RuntimeError("worker {} is closed".format(self.pid))


def close(workers: Iterable[Worker]) -> None:
    """Close several workers in the time of one."""
    _close_handles([worker._handle for worker in workers])


class _Process(_Channel):
    """A worker process and the consumer's end of the channel to it."""

    patience = _PATIENCE_SECONDS

    def __init__(self, target: Target, start: str, room: int) -> None:
        import socket

        self.pid = 0
        self.owner = os.getpid()
        self.closed = False
        self._life = -1
        self._shut_at: Optional[float] = None
        self._status: Optional[int] = None
        self._gone = False
        _prepare_process()
        theirs = [_memory_file(_ROOM + room) if start == "spawn" else -1]
        try:
            memory = mmap.mmap(theirs[0], 0 if start == "spawn" else _ROOM + room)
            ours, other = socket.socketpair()
            theirs.append(other.detach())
            super().__init__(ours, memory, base=0)
            _live[id(self)] = self
            try:
                read, self._life = os.pipe()
                theirs.append(read)
                if start == "spawn":
                    self._spawn(target, theirs)
                else:
                    self._fork(target, theirs, memory)
            except BaseException:
                self.close()
                raise
        finally:
            for descriptor in theirs:
                if descriptor >= 0:
                    os.close(descriptor)

    def _fork(self, target: Target, descriptors: List[int], memory: mmap.mmap) -> None:
        _flush_streams()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _signals())
        try:
            with warnings.catch_warnings():
                # Forking with threads is what this module is built for.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = _fork()
            if not self.pid:
                try:
                    ignored = [number for number in _signals() if callable(signal.getsignal(number))]
                    _run(target, descriptors, memory, self.owner, ignored, mask)
                finally:
                    os._exit(1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _spawn(self, target: Target, descriptors: List[int]) -> None:
        from multiprocessing import spawn, util

        spawn._check_not_importing_main()  # type: ignore[attr-defined]
        try:
            pickled = pickle.dumps(target, _PROTOCOL)
        except Exception as error:
            raise _not_picklable("the target of a worker with start='spawn'", target, error) from error
        ignored = [int(number) for number in _signals() if callable(signal.getsignal(number))]
        code = "import sys; sys.path[:] = {!r}; from {} import _spawned; _spawned({!r}, {}, {!r})".format(
            sys.path, __name__, descriptors, self.owner, ignored
        )
        executable = os.fsencode(spawn.get_executable())
        arguments = [executable] + util._args_from_interpreter_flags() + ["-c", code]  # type: ignore[attr-defined]
        _flush_streams()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _signals())
        try:
            self.pid = util.spawnv_passfds(executable, arguments, descriptors)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.put(_MESSAGE, (_main_module(), pickled))

    def send(self, message: Any) -> None:
        pickled = self.pickler.dump(message)
        try:
            self.put_pickled(_MESSAGE, *pickled)
        except BaseException as error:
            self._broken(error)
            raise

    def receive(self, feeding: "Sequence[Union[_Process, _Thread]]") -> Tuple[int, Any]:
        others = [other for other in feeding if isinstance(other, _Process)] if feeding else ()
        try:
            if self._queue or self._records:
                self.pump()
            return self.get(others)
        except BaseException as error:
            self._broken(error, others)
            raise

    def ready(self) -> bool:
        try:
            self.pump()
            return self.readable() or self.lost
        except BaseException as error:
            self._broken(error)
            raise

    def _broken(self, error: BaseException, others: "Sequence[_Process]" = ()) -> None:
        """Close what an exception, an interrupt above all, may have left in the middle of a message."""
        if self.closed and isinstance(error, (OSError, TypeError)):  # no socket or no memory left to use
            raise RuntimeError("worker {} was closed by another thread".format(self.pid)) from error
        _close_handles([self, *others])

    def silence(self) -> None:
        if self._at < self._until:
            return  # sent before the end, and read before it
        # A process that has closed its end has a moment to be gone as well.
        if (self._wait_for_end(1.0) if self.lost else self._has_ended()) and not self.pull():
            raise RuntimeError(self._obituary())
        if self.lost and not self._gone:
            raise RuntimeError("worker process {} has closed its end of the channel".format(self.pid))

    def shut(self) -> None:
        """Tell the worker to end; returns at once."""
        if self._shut_at is None:
            self._shut_at = time.monotonic()
            self.closed = True
            self.forget()

    def close(self, quiet: bool = False) -> None:
        """End the worker, at the latest some tenths of a second after `shut`."""
        if self.owner != os.getpid() or self._shut_at is not None and self._life < 0:
            return
        try:
            self.shut()
            assert self._shut_at is not None
            self._wait_for_end(self._shut_at + _GRACE_SECONDS - time.monotonic())
        finally:
            if self._life >= 0:
                os.close(self._life)
                self._life = -1
            if not self._has_ended():
                os.kill(self.pid, signal.SIGKILL)
                self._wait_for_end(_KILL_SECONDS)
            _live.pop(id(self), None)

    def forget(self) -> None:
        if self.owner != os.getpid():
            # In a forked copy: an open end there would keep the worker alive after its consumer.
            self.closed = True
            if self._life >= 0:
                os.close(self._life)
                self._life = -1
        super().forget()

    def _has_ended(self) -> bool:
        if not self._gone and self.pid:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = status
                    self._gone = True
            except ChildProcessError:
                self._gone = True
        return self._gone or not self.pid

    def _wait_for_end(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        pause = 0.0005
        while not self._has_ended():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.02)
        return True

    def _obituary(self) -> str:
        if self._status is None:
            return (
                "worker process {} has died; how is unknown, because something else in this program took its exit "
                "status (or SIGCHLD is ignored)".format(self.pid)
            )
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            names = [name.name for name in signal.Signals if name == number]
            hint = "; the usual reason is that memory ran out" if number == signal.SIGKILL else ""
            return "worker process {} was killed by signal {}{}".format(
                self.pid, " ".join(names + ["({})".format(number)]), hint
            )
        return "worker process {} exited with status {} before its work was done".format(
            self.pid, os.WEXITSTATUS(self._status)
        )


class _Shared:
    """
    What the two ends of a worker thread share.

    No lock guards it, for Ctrl-C can come between the taking of a lock and the statement that would release it again:
    each attribute is written by one end alone, or a deque.
    """

    def __init__(self, messages: int) -> None:
        self.messages = messages  # that may be under way to the consumer before the worker waits
        self.to_worker: Deque[Any] = deque()
        self.to_consumer: Deque[Tuple[int, Any]] = deque()
        self.closed = False
        self.granted = 0  # since the start
        self.waited = [0.0, 0.0]  # seconds, of the consumer and of the worker
        self._bells = [threading.Lock(), threading.Lock()]  # free once rung, and taken by who hears it
        for bell in self._bells:
            bell.acquire()

    def wait(self, condition: Callable[[], bool], end: int) -> None:
        """Wait, at one end, for the condition or for `closed`."""
        if self.closed or condition():
            return
        started = time.perf_counter()
        try:
            while not (self.closed or condition()):
                # Not for ever: an interrupt may have come between hearing the bell and looking.
                self._bells[end].acquire(timeout=_PATIENCE_SECONDS)
        finally:
            self.waited[end] += time.perf_counter() - started

    def wake(self, end: int) -> None:
        """Let the other end look at its condition again."""
        try:
            self._bells[end].release()
        except RuntimeError:
            pass  # rung before, and not heard yet


class _Thread:
    """A worker thread, with the interface of `_Process`."""

    def __init__(self, target: Target, room: int) -> None:
        self.pid = self.owner = os.getpid()
        self._shared = _Shared(room // _THREAD_MESSAGE)
        self._shut_at: Optional[float] = None
        self._over = False
        self._thread = threading.Thread(
            target=_serve, args=(target, ThreadLink(self._shared)), name="infinibatch-worker", daemon=True
        )
        _prepare_process()
        self._thread.start()
        _live[id(self)] = self

    @property
    def waited(self) -> float:
        return self._shared.waited[_CONSUMER]

    @property
    def peer_waited(self) -> float:
        return self._shared.waited[_WORKER]

    @property
    def closed(self) -> bool:
        return self._shared.closed

    def send(self, message: Any) -> None:
        self._shared.to_worker.append(message)
        self._shared.wake(_WORKER)

    def grant(self, number: int) -> None:
        self._shared.granted += number
        self._shared.wake(_WORKER)

    def receive(self, feeding: Any) -> Tuple[int, Any]:
        shared = self._shared
        try:
            shared.wait(lambda: bool(shared.to_consumer), _CONSUMER)
            if shared.closed:
                raise RuntimeError("worker {} was closed by another thread".format(self.pid))
            message = shared.to_consumer.popleft()
            shared.wake(_WORKER)
            return message
        except BaseException:
            self.close()
            raise

    def ready(self) -> bool:
        return bool(self._shared.to_consumer)

    def shut(self) -> None:
        if self._shut_at is None:
            self._shut_at = time.monotonic()
            self._shared.closed = True
            self._shared.wake(_CONSUMER)
            self._shared.wake(_WORKER)

    def close(self, quiet: bool = False) -> None:
        if self.owner != os.getpid() or self._over:
            return
        self.shut()
        self._over = True
        _live.pop(id(self), None)
        if threading.current_thread() is self._thread:
            return
        assert self._shut_at is not None
        self._thread.join(max(0.0, self._shut_at + _THREAD_GRACE_SECONDS - time.monotonic()))
        if self._thread.is_alive() and not quiet:
            warnings.warn(
                "a worker thread is blocked in the code that it runs and is left behind; with start='fork' or "
                "start='spawn' it could be killed",
                RuntimeWarning,
                stacklevel=3,
            )

    @property
    def left_behind(self) -> bool:
        return self._over and self._thread.is_alive() and self.owner == os.getpid()

    def forget(self) -> None:
        self._shared.closed = True


# ---------------------------------------------------------------------------------------------------------------------
# All workers of this process
# ---------------------------------------------------------------------------------------------------------------------

_live: "Dict[int, Union[_Process, _Thread, Link]]" = {}
_prepared = False


def _prepare_process() -> None:
    """Set up, once, what ends all workers with this process and keeps their channels out of its forks."""
    global _prepared
    if _prepared:
        return
    import atexit

    if hasattr(os, "fork"):
        import fcntl  # noqa: F401  # here, because each worker would have to load it
    atexit.register(_close_all)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_all)
    elif hasattr(os, "fork"):
        from multiprocessing import util

        util.register_after_fork(Worker, lambda _: _forget_all())
    _prepared = True


def _forget_all() -> None:
    """In a forked child: give up the channels of the process that it was forked from."""
    while _live:
        _live.popitem()[1].forget()


def _close_all() -> None:
    _close_handles([handle for handle in list(_live.values()) if not isinstance(handle, Link)], quiet=True)


def _close_handles(handles: "List[Union[_Process, _Thread]]", quiet: bool = False) -> None:
    mine = [handle for handle in handles if handle.owner == os.getpid()]
    try:
        for handle in mine:
            handle.shut()
    finally:
        for handle in mine:
            handle.close(quiet)


# ---------------------------------------------------------------------------------------------------------------------
# The start of a worker process
# ---------------------------------------------------------------------------------------------------------------------


def _run(
    target: Target,
    descriptors: List[int],
    memory: mmap.mmap,
    consumer: int,
    ignored: Sequence[int],
    mask: Iterable[int],
) -> NoReturn:
    """Be the worker process."""
    import socket

    status = 1
    try:
        if descriptors[0] < 0:  # a fork
            _forget_all()
            _repair_after_fork()
        _leave_signals_to_consumer(ignored)
        _die_with_consumer(descriptors[2], consumer)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if sys.stdin is not None:
            sys.stdin = open(os.open(os.devnull, os.O_RDONLY), closefd=False)
        if hasattr(gc, "freeze"):
            gc.freeze()  # what the consumer left as garbage is not finalized here, and its pages stay shared
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)  # its thread pool does not survive a fork, and would hang
        link = Link(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=descriptors[1]), memory, _ROOM)
        _live[id(link)] = link
        _serve(target, link)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        try:
            if "multiprocessing.util" in sys.modules:
                sys.modules["multiprocessing.util"]._run_finalizers()
            _flush_streams()
        finally:
            os._exit(status)


def _spawned(descriptors: List[int], consumer: int, ignored: List[int]) -> NoReturn:
    """Be the worker process, in a fresh interpreter."""
    memory = mmap.mmap(descriptors[0], 0)
    os.close(descriptors[0])
    _prepare_process()
    _run(_unpickle_and_run, descriptors, memory, consumer, ignored, ())


def _unpickle_and_run(link: Link) -> None:
    from multiprocessing import process, spawn

    main_module, pickled = link.receive()
    current: Any = process.current_process()
    current._inheriting = True  # a main module without a guard gets multiprocessing's explanation
    try:
        spawn.prepare(main_module)
        target = pickle.loads(pickled)
    finally:
        del current._inheriting
    target(link)


def _main_module() -> Dict[str, Any]:
    """Return what `multiprocessing.spawn.prepare` needs to make a fresh interpreter like this one."""
    # Not get_preparation_data, which as a side effect fixes the program's default start method.
    from multiprocessing import process

    start = process.ORIGINAL_DIR  # type: ignore[attr-defined]
    data: Dict[str, Any] = {"sys_path": sys.path, "sys_argv": sys.argv, "orig_dir": start, "dir": os.getcwd()}
    main = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    path = getattr(main, "__file__", None)
    if name is not None:
        data["init_main_from_name"] = name
    elif path is not None:
        path = os.path.normpath(os.path.join(start or "", path))
        if os.path.exists(path):  # not '<stdin>'
            data["init_main_from_path"] = path
    return data


def _fork() -> int:
    try:
        return os.fork()
    except OSError as error:  # "Resource temporarily unavailable"
        reason = "{} (a limit on processes?)".format(error.strerror or error)
        raise OSError(error.errno, "no worker process could be started: " + reason) from error


def _memory_file(size: int) -> int:
    """Return a descriptor of shared memory without a name, of less than `size` bytes if that takes a file on disk."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("infinibatch")
        os.ftruncate(descriptor, size)
        return descriptor
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(bytes(2 * _ROOM))  # a full disk must fail here, not kill whoever writes to the memory
        file.flush()
        return os.dup(file.fileno())


def _signals() -> Set[int]:
    if hasattr(signal, "valid_signals"):
        return set(signal.valid_signals())
    last = getattr(signal, "SIGRTMAX", -1)  # real-time signals, which macOS does not have
    return set(signal.Signals) | set(range(getattr(signal, "SIGRTMIN", 0), last + 1))


def _leave_signals_to_consumer(ignored: Iterable[int]) -> None:
    """Take no part in what the consumer's handlers do, and let nothing but the consumer end this process."""
    signal.set_wakeup_fd(-1)
    for number in ignored:
        # An ignored SIGCHLD would take the exit status of the target's own children.
        signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _die_with_consumer(life: int, consumer: int) -> None:
    """Arrange that this process is killed when the other end of the pipe is closed, at the latest by its end."""
    # Not PR_SET_PDEATHSIG: that fires when the thread that forked ends.
    try:
        import fcntl

        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    except (AttributeError, OSError):

        def watch() -> None:
            while os.getppid() == consumer:
                time.sleep(0.5)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()
    poll = select.poll()
    poll.register(life, select.POLLIN)
    if poll.poll(0):
        os._exit(1)  # closed before the pipe was armed


def _repair_after_fork() -> None:
    """Free what other threads of the consumer held at the fork, for they do not exist here."""
    bootstrap: Any = sys.modules["_frozen_importlib"]
    me = threading.get_ident()
    for name, reference in list(bootstrap._module_locks.items()):
        lock = reference()
        if lock is not None and lock.owner not in (None, me):
            # Imported, half, by a thread that is not here to finish it.
            del bootstrap._module_locks[name]
            if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
                del sys.modules[name]
    bootstrap._blocking_on.clear()
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    if "logging" in sys.modules:
        import logging

        logging._lock = threading.RLock()  # type: ignore[attr-defined]
        for reference in list(logging._handlerList):  # type: ignore[attr-defined]
            handler = reference()
            if handler is not None:
                handler.createLock()
                streams.append(getattr(handler, "stream", None))
    for stream in streams:
        if type(stream) is io.TextIOWrapper and type(stream.buffer) is io.BufferedWriter:
            # Initialised anew in place: what is left in them is the consumer's, which will write it itself.
            stream.buffer.__init__(stream.buffer.raw)  # type: ignore[misc]
            stream.__init__(  # type: ignore[misc]
                stream.buffer, stream.encoding, stream.errors, "\n", stream.line_buffering
            )
    if "multiprocessing.util" in sys.modules:
        # What a process of multiprocessing does at its start, for queues and the like that the target uses.
        util: Any = sys.modules["multiprocessing.util"]
        util._finalizer_registry.clear()
        util._run_after_forkers()


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # none, broken or closed: not this module's business


# ---------------------------------------------------------------------------------------------------------------------
# Objects that pickle does not take as they are
# ---------------------------------------------------------------------------------------------------------------------


def _not_picklable(what: str, value: Any, error: BaseException) -> TypeError:
    path, culprit = _culprit(value, "")
    return TypeError(
        "{} must be picklable, got {}.{}{}: {}".format(
            what,
            type(culprit).__module__,
            type(culprit).__qualname__,
            " at its {}".format(path.lstrip(".")) if path else "",
            error,
        )
    )


def _culprit(value: Any, path: str, depth: int = 20) -> Tuple[str, Any]:
    """Return the innermost part of a value that cannot be pickled, and the way to it."""
    parts: Iterable[Tuple[str, Any]] = ()
    if isinstance(value, (list, tuple)):
        parts = [("[{}]".format(i), part) for i, part in enumerate(value)]
    elif isinstance(value, dict):
        parts = [("[{!r}]".format(key), part) for key, part in value.items()]
    elif hasattr(value, "__self__") and callable(value):
        parts = [(".__self__", value.__self__)]
    elif not isinstance(value, type) and type(value).__name__ != "function":
        parts = [(".func", value.func), (".args", value.args)] if hasattr(value, "func") else []
        parts += [("." + name, part) for name, part in getattr(value, "__dict__", {}).items()]
    for step, part in parts:
        try:
            pickle.dumps(part, _PROTOCOL)
        except Exception:
            return _culprit(part, path + step, depth - 1) if depth else (path + step, part)
    return path, value


def _pack_error(error: BaseException) -> Tuple[str, List[Any]]:
    """Return, for pickling, a traceback's text and an exception with its chain of causes."""
    import traceback

    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    chain: List[Any] = []
    link: Optional[BaseException] = error
    while link is not None and len(chain) < 10:
        chain.append(_pack_exception(link))
        link = link.__cause__
    return text, chain


def _pack_exception(error: BaseException) -> Tuple[Any, ...]:
    kind = type(error)
    name = "{}.{}".format(kind.__module__, kind.__qualname__)
    try:
        message = str(error)
    except Exception as failure:
        message = "(its message cannot be shown: {!r})".format(failure)
    pickled = _try_pickle(error)
    try:
        copy = pickle.loads(pickled)
        if type(copy) is not kind or str(copy) != message:
            pickled = b""
    except Exception:
        pickled = b""
    arguments = tuple(argument if _try_pickle(argument) else repr(argument) for argument in error.args)
    attributes = {key: value for key, value in vars(error).items() if _try_pickle(value)}
    return pickled, name, message, _try_pickle(kind), id(kind), arguments, attributes


def _try_pickle(value: Any) -> bytes:
    try:
        return pickle.dumps(value, _PROTOCOL)
    except Exception:
        return b""


def _unpack_error(packed: Tuple[str, List[Any]]) -> BaseException:
    text, chain = packed
    errors = [_unpack_exception(*parts) for parts in chain]
    for outer, inner in zip(errors, errors[1:]):
        outer.__cause__ = inner
    errors[-1].__cause__ = WorkerTraceback(text)
    return errors[0]


def _unpack_exception(
    pickled: bytes, name: str, message: str, kind: bytes, kind_id: int, arguments: Any, attributes: Any
) -> BaseException:
    try:
        if pickled:
            error: BaseException = pickle.loads(pickled)
            return error
        # A class without a name to import it by exists here if it is older than the fork, in the same place.
        cls = pickle.loads(kind) if kind else _exception_class(name, kind_id)
        error = cls.__new__(cls, *arguments)  # its constructor may want other arguments than those it passed on
        error.__dict__.update(attributes)
        return error
    except Exception:
        return RuntimeError("{}: {}".format(name, message))


def _exception_class(name: str, kind_id: int) -> Any:
    seen: Set[Any] = set()
    todo: List[Any] = [BaseException]
    while todo:
        cls = todo.pop()
        if id(cls) == kind_id and "{}.{}".format(cls.__module__, cls.__qualname__) == name:
            return cls
        if cls not in seen:
            seen.add(cls)
            todo += type.__subclasses__(cls)
    raise LookupError(name)


_table: Optional[Mapping[Any, Any]] = None


def _torch_table() -> Any:
    global _table
    if _table is None:
        _table = ChainMap({sys.modules["torch"].Tensor: _reduce_tensor}, copyreg.dispatch_table)
    return _table


def _reduce_tensor(tensor: Any) -> Any:
    """Reduce a plain dense CPU tensor to the array that it wraps, any other one in its own way."""
    torch = sys.modules["torch"]
    if (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.__dict__
    ):
        try:
            if tensor.dtype is torch.bfloat16:
                return _tensor, (tensor.view(torch.int16).numpy(), "bfloat16")
            return _tensor, (tensor.numpy(),)
        except (RuntimeError, TypeError):
            pass  # no NumPy, or no such type in it
    return tensor.__reduce_ex__(_PROTOCOL)


def _tensor(array: Any, dtype: Optional[str] = None) -> Any:
    torch = __import__("torch")
    tensor = torch.from_numpy(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))
