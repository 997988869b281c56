"""Worker processes that are started once and run many tests: each test gets a world of its own size in them."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import time
import traceback
from datetime import timedelta

from processes import fork_context

DEADLINE_S = 60


class WorkerError(AssertionError):
    """A test function failed in a worker; the message is that worker's traceback."""


def _serve(connection, parent_path):
    import torch

    import lockstep

    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # It ends with the pool, and may have loader processes.
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        environ, function, args, timeout, backend = task
        os.environ.update(environ)
        try:
            with lockstep.join(seed=0, timeout=timeout, backend=backend) as world:
                connection.send((True, function(world, *args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Pool:
    """Up to `size` workers; `run(n, function, *args)` calls `function(world, *args)` on n of them."""

    def __init__(self, size=8):
        self.size = size
        self._context = fork_context()
        self._workers = []

    def _start(self):
        os.environ["OMP_NUM_THREADS"] = "1"
        for _ in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, None), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def stop(self):
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def run(self, workers, function, *args, timeout=30, expect_failure=False, backend=None):
        """Results by rank; with `expect_failure`, (ok, result or traceback) by rank."""
        import torch.distributed as dist

        if not self._workers:
            self._start()
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=DEADLINE_S),
        )
        for rank, (_, connection) in enumerate(self._workers[:workers]):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            connection.send((environ, function, args, timeout, backend))
        outcomes = self._collect(workers, max(DEADLINE_S, 2 * timeout))
        del store
        if expect_failure:
            return outcomes
        failures = [f"worker {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failures:
            raise WorkerError("\n".join(failures))
        return [result for _, result in outcomes]

    def _collect(self, workers, deadline_s):
        outcomes = [None] * workers
        give_up = time.monotonic() + deadline_s
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:workers])}
        while waiting:
            ready = multiprocessing.connection.wait(waiting, timeout=max(0, give_up - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                self.stop()
                raise WorkerError(f"workers {late} did not answer within {deadline_s} s; done: {outcomes}")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    self.stop()
                    raise WorkerError(f"worker {rank} died") from None
        return outcomes


class OnBackend:
    """The pool, with worlds over one backend."""

    def __init__(self, pool, backend):
        self._pool, self._backend = pool, backend

    def run(self, *args, **options):
        return self._pool.run(*args, backend=self._backend, **options)
