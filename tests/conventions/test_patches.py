"""What tests replace of the project's own is listed here, with the reason.

A test that replaces a function proves what its replacement does. Clocks, waits and chance are given instead
(tests/support/systems.py), and so are stores that fail (tests/support, tests/faults).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.sources import files, parse, walk

# Other places than this machine has: its shared memory belongs to everybody, and its size cannot be chosen.
PLACES = {
    "checkpoint.memory.cache.default_directory",
    "checkpoint.memory.memory_room.SHARED_MEMORY",
    "checkpoint.memory.memory_room.open",
}
# The time that a slow machine needs to reach the ranks' store.
MACHINE = {"checkpoint.agreement.find_exchange"}
# A gang whose fork server, which takes seconds to import torch, stays for the next one of the process.
KEPT = {"flows.engines.Gang"}
# Something happens between two steps of one function, or is counted there.
BETWEEN = {
    "run.opening.*",
    "checkpoint.transfer.export.plan_export",
    "checkpoint.transfer.export.write_export",
    "flows.prefect.abandoned.datetime",
    "checkpoint.ranks.exchange.Connection",
    "checkpoint.save.prepared.*",
    "checkpoint.save.rank_saver.RankSaver.seal",
    "checkpoint.save.rank_saver.digest_image",
    "checkpoint.save.tenure.Line.reusable",
    "checkpoint.memory.first.FirstCopy.write",
    "checkpoint.extensions.local_copies.LocalCopies.write",
    "storage.local.LocalStore.put_if_absent",
    "storage.objects.ObjectStore.put",
    "storage.objects.S3Requests",
    "checkpoint.transfer.publishing.os",
    "storage.local_fs.os",
}
# Protections that tests/property/test_protocol.py takes out, to see that it notices.
TAKEN_OUT = {
    "format.ledger.State.keeps",
    "run.ledger.history.History._read_back",
    "run.ledger.history.check_owner",
    "checkpoint.save.commit.Committer.commit",
    "checkpoint.save.commit.refuse_retired",
    "checkpoint.save.pruning.orphans",
    "checkpoint.save.pruning.retire",
    "run.upkeep.verifying.plan_retention",
}


def replaced(path: Path) -> Iterator[str]:
    """Yield the names of ours that a test file replaces with `setattr(target, name, …)`."""
    tree = parse(path)
    homes: dict[str, str] = {}
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_tasks"):
            homes |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"):
            continue
        target, name = node.args[:2]
        if isinstance(target, ast.Constant):
            yield str(target.value)
        elif isinstance(target, ast.Name) and target.id in homes:
            yield f"{homes[target.id]}.{ast.literal_eval(name) if isinstance(name, ast.Constant) else '*'}"


def test_a_test_replaces_nothing_of_ours_without_a_reason() -> None:
    """Whatever a test replaces of ckpt_tasks is in a list with its reason; a constant in capitals may be made small."""
    found = {name for path in files("tests") for name in replaced(path) if name.startswith("ckpt_tasks.")}
    known = {f"ckpt_tasks.{name}" for name in PLACES | MACHINE | KEPT | BETWEEN | TAKEN_OUT}
    functions = {name for name in found if not name.rpartition(".")[2].isupper()}
    assert functions <= known, "give it in, or provoke it: a store that fails, a real signal, a System of tests/support"
