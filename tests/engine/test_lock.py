"""The search for the holder of a lost lock, while other threads and the garbage collector run."""

import subprocess
import sys

COLLECTING = """
import faulthandler, gc, threading, time
from tidegate.lock import threads_holding

faulthandler.dump_traceback_later(60, exit=True)
gc.callbacks.append(lambda *_: time.sleep(1e-5))  # lets another thread run in the middle of each collection
gc.set_threshold(2)

def deep(levels):
    return deep(levels - 1) if levels else [threads_holding(object()) for _ in range(300)]

threads = [threading.Thread(target=deep, args=(20,)) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert gc.isenabled()
"""


def test_threads_search_stacks_while_garbage_is_collected():
    subprocess.run([sys.executable, "-c", COLLECTING], check=True, timeout=100)
