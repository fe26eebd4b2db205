"""Calls in processes of their own, with a time limit that holds: a call that hangs is killed with its process.

Neither threads nor `concurrent.futures` can end a call, and a signal's alarm works on the main thread alone. Here the
caller waits on sockets, on whatever thread it is, and kills what is late. The processes are fresh Pythons rather than
`multiprocessing`'s: they do not run the main script again, and know nothing of its accelerator.
"""

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

_GRACE = 2  # seconds beyond the limit after which a worker whose caller is gone kills itself


class WorkerError(Exception):
    """A call came to no result; the subclasses say why."""


class WorkerTimeoutError(WorkerError):
    """The call took longer than it may, and was killed."""


class WorkerDiedError(WorkerError):
    """The process ended in the middle of the call."""


class WorkerRaisedError(WorkerError):
    """The function raised an exception."""


class Workers:
    """Processes that call one function, each call within a time limit. Close them, or use them in a `with`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        count: int = 2,
        timeout: float = 5.0,
        start_timeout: float = 60.0,
        memory: int = 8 << 30,
    ):
        """Notes what to call; the processes start with the first calls.

        Args:
          function: of a module that can be imported; takes and returns what pickle can carry.
          count: of processes.
          timeout: seconds for one call.
          start_timeout: seconds for a process to start and import the function's module.
          memory: bytes of address space for a process; beyond them the call raises MemoryError, or dies.

        Raises:
          ValueError: for a function that pickle cannot name, or of the main script; limits that are not positive.
        """
        for name, value in {
            "count": count,
            "timeout": timeout,
            "start_timeout": start_timeout,
            "memory": memory,
        }.items():
            if not value > 0:
                raise ValueError(f"{name}={value}: must be greater than 0")
        self._task = _pickled(function)
        self._count, self._timeout, self._start_timeout, self._memory = count, timeout, start_timeout, memory
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()  # two threads take turns with the processes
        weakref.finalize(self, _kill_all, self._workers)

    def map(self, calls: Sequence[tuple]) -> list[Any]:
        """Calls the function with each tuple of arguments, several at a time.

        Returns:
          A result for each call in their order, or the WorkerError that came instead of it.
        """
        results: list[Any] = [None] * len(calls)
        left = list(enumerate(calls))[::-1]
        busy: dict[Connection, tuple[_Worker, int]] = {}
        with self._lock:
            try:
                while left or busy:
                    while left and len(busy) < self._count:
                        index, arguments = left.pop()
                        worker = self._idle(busy)
                        worker.call(arguments, self._timeout)
                        busy[worker.connection] = worker, index
                    for worker, index in self._wait(busy):
                        del busy[worker.connection]
                        results[index] = self._result(worker)
            finally:  # interrupted: a call on its way must not answer the next one
                for worker, _ in busy.values():
                    self._end(worker)
        return results

    def close(self) -> None:
        """Ends the processes; a later call starts new ones."""
        with self._lock:
            _kill_all(self._workers)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _idle(self, busy: dict) -> "_Worker":
        for worker in self._workers:
            if worker.connection not in busy:
                return worker
        self._workers.append(_Worker(self._task, self._memory, self._timeout, self._start_timeout))
        return self._workers[-1]

    def _wait(self, busy: dict) -> "list[tuple[_Worker, int]]":
        """Waits until a call is over or late."""
        first = min(worker.deadline for worker, _ in busy.values())
        spoke = wait(list(busy), timeout=max(0.0, first - time.monotonic()))
        over = []
        for connection, (worker, index) in busy.items():
            if connection in spoke and not worker.take(self._timeout):
                continue  # it has started, and goes to work only now
            if connection in spoke or time.monotonic() >= worker.deadline:
                over.append((worker, index))
        return over

    def _result(self, worker: "_Worker") -> Any:
        if worker.answer is None:
            what, limit = ("call", self._timeout) if worker.started else ("start", self._start_timeout)
            died = worker.died
            code = self._end(worker)
            if died:
                return WorkerDiedError(f"the process ended with code {code} during its {what}")
            return WorkerTimeoutError(f"{what} took longer than {limit} seconds")
        kind, value = worker.answer
        return value if kind == "result" else WorkerRaisedError(value)

    def _end(self, worker: "_Worker") -> int:
        self._workers.remove(worker)
        return worker.kill()


class _Worker:
    """One process, which answers "ready" and then one message a call."""

    def __init__(self, task: bytes, memory: int, timeout: float, start_timeout: float):
        ours, theirs = socket.socketpair()
        with theirs:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from jaxpg.tasks import workers; "
                f"workers.serve({theirs.fileno()}, {memory}, {timeout})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # stderr stays, for what goes wrong
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # else a function that uses JAX asks for the accelerator
            )
        self.connection = Connection(ours.detach())
        self.connection.send_bytes(task)
        self.started = self.died = False
        self.answer: tuple[str, Any] | None = None
        self.deadline = time.monotonic() + start_timeout
        self._asked: tuple = ()

    def call(self, arguments: tuple, timeout: float) -> None:
        """Asks for a call, whose time runs from when the process is ready."""
        self.answer = None
        self._asked = arguments
        if self.started:
            self._send(timeout)

    def take(self, timeout: float) -> bool:
        """Reads a message, and says whether it ends the call."""
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.died = True
            return True
        except Exception as error:  # a result that cannot be unpickled here
            message = "raised", f"{type(error).__name__}: {error}"
        if self.started:
            self.answer = message
            return True
        self.started = True
        self._send(timeout)
        return False

    def _send(self, timeout: float) -> None:
        # Only to a process that reads: a long message to one that does not start would block the caller.
        with contextlib.suppress(OSError):  # it died; `take` meets the end of the connection
            self.connection.send(self._asked)
        self.deadline = time.monotonic() + timeout

    def kill(self) -> int:
        """Ends the process, whatever it does, and returns its exit code."""
        if self.died:
            try:
                return self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                pass  # it closed the connection, and lives
            finally:
                self.connection.close()
        self._process.kill()
        self.connection.close()
        return self._process.wait()


def serve(descriptor: int, memory: int, timeout: float) -> None:
    """What a process runs: it calls the function it is sent with the arguments it is sent, until the caller is gone."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # control-C is the caller's to handle
    connection = Connection(descriptor)
    try:
        function = pickle.loads(connection.recv_bytes())
        connection.send("ready")
        while True:
            arguments = connection.recv()
            # The caller kills a late call. If the caller itself was killed, the kernel's alarm does.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, timeout + _GRACE)
            _answer(connection, function, arguments)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


def _answer(connection: Connection, function: Callable, arguments: tuple) -> None:
    try:
        message = pickle.dumps(("result", function(*arguments)))
    except Exception as error:
        message = pickle.dumps(("raised", f"{type(error).__name__}: {str(error)[:2000]}"))
    connection.send_bytes(message)


def _pickled(function: Callable) -> bytes:
    inner = getattr(function, "func", function)  # of functools.partial
    if getattr(inner, "__module__", None) == "__main__":
        raise ValueError(f"function={function!r} is of the main script: move it to a module that can be imported")
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ValueError(f"function={function!r}: must be a function of a module's top level: {error}") from error


def _kill_all(workers: "list[_Worker]") -> None:
    while workers:
        workers.pop().kill()
