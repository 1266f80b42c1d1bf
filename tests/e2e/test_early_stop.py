"""The whole way from a commit's event to a stopped run, with the deployment that we ship for evaluations."""

from __future__ import annotations

import logging
from datetime import datetime
from statistics import median
from typing import Any

from tests.e2e.site import Site

_log = logging.getLogger(__name__)
RULE = {"metric": "heldout_loss", "patience": 4, "min_delta": 10.0}


def test_from_the_event_of_a_commit_to_a_stopped_run(site: Site) -> None:
    """The deployment that we ship is there for the first commit; the run is stopped, and another flow run trains on.

    Both of its triggers give it the run's own parameters. Logs the seconds from commits to their evaluations' leases.
    """
    given = {"program": "tests.support.tiny:Tiny", "params": {"step_s": 0.1}}
    checkpoint = {"checkpoint_dir": str(site.runs / "{run_key}")}
    more = {"run_key": "followed", "total_steps": 2000, "batch_steps": 20, "checkpoint": checkpoint}
    site.until_state(site.start("train/byte-lm", **given, **more, early_stop=RULE), "Completed")
    # The server takes events in their order, and may be behind: the second trigger's run comes when it comes.
    started = site.until(
        lambda: found if len(found := following(site)) > 1 else None, 240, "both triggers have started"
    )
    assert set(started) == {"be there when a run starts", "evaluate what is committed"}
    for parameters in started.values():
        assert {name: parameters[name] for name in given} == given
    _log.info("seconds from commits to leases: %s", [round(one, 1) for one in followed_s(site)])
    assert median(followed_s(site)) < 5
    site.until_state(site.start("train/byte-lm", **given, **more, early_stop=RULE), "Completed")
    notes = [note for note in site.run("followed").notes() if note["note"] == "early_stop"]
    assert ["without a better heldout_loss" in note["why"] for note in notes] == [True, True]
    assert notes[0]["step"] >= notes[1]["step"] + 4 * 20  # patience is counted anew


def following(site: Site) -> dict[str, dict[str, Any]]:
    """Return the parameters of the evaluations that triggers have started, by the trigger's name."""
    with site.client() as client:
        runs = [one for one in client.read_flow_runs() if one.parameters.get("run_key") == "followed"]
    return {str(one.created_by.display_value): one.parameters for one in runs if one.created_by}


def followed_s(site: Site) -> list[float]:
    """Return the seconds from commits after the first lease to the leases of their evaluations."""
    history = site.run("followed").history
    committed: dict[int, float] = {}
    leases: list[tuple[int, float]] = []
    for n in range(history.head().next_n):
        entry = history.read_entry(n)[0]
        at_s = datetime.fromisoformat(entry.at).timestamp()
        if entry.event["kind"] == "commit":
            committed[entry.event["step"]] = at_s
        elif entry.event["kind"] == "lease" and not entry.event.get("ended"):
            leases.append((entry.event["step"], at_s))
    return [at_s - committed[step] for step, at_s in leases if committed[step] > leases[0][1]]
