"""The loop of object stores works for as long as the process: also when Python has shut its executors down."""

from __future__ import annotations

import asyncio
import multiprocessing
import textwrap

from ckpt_tasks.storage.loop import io_loop
from tests.support.interpreters import python

AT_THE_END = """
    import asyncio, atexit
    from ckpt_tasks.storage.loop import io_loop

    async def look_up():
        found = await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        return bool(found), await asyncio.to_thread(len, "four")

    @atexit.register
    def end():
        print(asyncio.run_coroutine_threadsafe(look_up(), io_loop()).result(60))

    {start}
"""


def test_blocking_calls_run_after_python_has_shut_its_executors_down() -> None:
    """P72: host names can be looked up in an atexit function, where asyncio's own executor refuses."""
    code = textwrap.dedent(AT_THE_END).format(start="io_loop()")
    done = python("-c", code, whole_end=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(True, 4)\n", "")


def _child() -> None:
    assert asyncio.run_coroutine_threadsafe(asyncio.to_thread(len, "four"), io_loop()).result(60) == 4


def test_a_forked_child_has_a_loop_of_its_own() -> None:
    """A child that is made by fork has none of the threads: it starts its own, and the parent's go on."""
    before = io_loop()
    process = multiprocessing.get_context("fork").Process(target=_child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert io_loop() is before
    _child()
