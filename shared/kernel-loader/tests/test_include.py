"""The files through which CUDA is given kernels' texts: there as long as the process that wrote them."""

import subprocess
import sys
from itertools import takewhile
from pathlib import Path

FIRST_CALLS_OF_THREADS = """
from threading import Barrier, Thread
from mlx_kv_kernels.include import included

together, texts = Barrier(16), []


def first_call(i):
    together.wait()
    texts.extend(included(f"k{i}", "header", "body", []))


threads = [Thread(target=first_call, args=(i,)) for i in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("".join(texts) + "end", flush=True)
input()
"""
CHILD_THAT_EXITS = """
import os, sys
from mlx_kv_kernels.include import included

print(*included("k", "header", "body", []), sep="", flush=True)
if os.fork() == 0:
    sys.exit()
os.wait()
print(*included("k2", "header", "body", []), "end", sep="", flush=True)
input()
"""


def files_while_and_after(program):
    """The included files' texts while a program waits for a line, and which files there are once it has ended."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        lines = list(takewhile(lambda line: line != "end\n", process.stdout))
        assert process.poll() is None
        paths = [Path(line.split('"')[1]) for line in lines if line.strip()]
        texts = [path.read_text() for path in paths]
        process.communicate("\n")
    assert process.returncode == 0
    return texts, [path for path in paths if path.exists()]


def test_threads_that_come_first_together_share_a_folder():
    texts, left = files_while_and_after(FIRST_CALLS_OF_THREADS)
    assert sorted(texts) == ["body"] * 16 + ["header"] * 16
    assert left == []


def test_a_forked_child_leaves_its_parents_files():
    texts, left = files_while_and_after(CHILD_THAT_EXITS)
    assert texts == ["header", "body"] * 2
    assert left == []
