"""A queue of operations, and a log of what was carried out in it."""

import threading
import time

from lockstep.comm.shm.queue import Queue, Turn


class Log:
    """What was carried out, in which order, by which threads; complains if two are at it at once."""

    def __init__(self):
        self.done, self.threads = [], set()
        self.is_busy = False

    def operation(self, number, seconds=0.0):
        def operate():
            assert not self.is_busy, "two at once"
            self.is_busy = True
            time.sleep(seconds)
            self.done.append(number)
            self.threads.add(threading.current_thread().name)
            self.is_busy = False

        return operate


def make_queue(**options):
    return Queue("lockstep-test", lambda error: error, Turn(), **options)
