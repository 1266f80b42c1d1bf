"""Live objects of a class, while other threads make objects of their own."""

from __future__ import annotations

import threading

from torch import nn

from ckpt_tasks.state.living import live_objects


def test_live_objects_are_those_of_the_class_and_its_subclasses() -> None:
    """Objects of every subclass are there, once each, and no object that only says that it is one."""

    class Pretender:
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} was asked for")

    class Deeper(nn.Linear):
        pass

    deeper, linear, pretender = Deeper(1, 1), nn.Linear(1, 1), Pretender()
    seen = [id(one) for one in live_objects(nn.Linear)]
    assert seen.count(id(deeper)) == seen.count(id(linear)) == 1
    assert id(pretender) not in seen


def test_other_threads_make_tuples_meanwhile() -> None:
    """A list of all objects would hold a tuple that another thread is making, and CPython then fails to resize it."""
    over, failures = threading.Event(), list[BaseException]()

    def make() -> None:
        try:
            while not over.is_set():
                assert len(tuple(n for n in range(50))) == 50
        except BaseException as error:  # noqa: BLE001 (SystemError; the test says so)
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(40):
        live_objects(nn.Module)
    over.set()
    for thread in threads:
        thread.join()
    assert failures == []
