"""Who may do what over S3: credentials that expire, permissions that go, options that are wrong, and no secret told."""

from __future__ import annotations

import logging
import pickle
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ckpt_tasks.errors import CkptError, ConfigError, StoreError
from ckpt_tasks.format.keys import ledger_name
from ckpt_tasks.storage import s3
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from ckpt_tasks.testing import settle
from tests.faults.s3_runs import Place, commits, state_of
from tests.storage.conformance import pattern
from tests.support import answers
from tests.support.answers import Answer
from tests.support.cli_runs import ckpt as ckpt_command
from tests.support.rules import Fault
from tests.support.sweeps import quick_first

Records = pytest.LogCaptureFixture
LARGE = pattern(1_000_003)


class Keys:
    """A credentials file that is rewritten while a process uses it, and a server that takes the newest key alone."""

    def __init__(self, place: Place, path: Path):
        self.place, self.path = place, path
        self.number = 0
        self.rotate()

    def rotate(self, answer: Answer = answers.EXPIRED_TOKEN, **match: Any) -> None:
        """From now on the old key has expired, for requests that match, and the file has a new one."""
        if self.number:
            old = {"authorization": f"Credential=KEY{self.number}/"}
            self.place.chaos.on(Fault(answer=answer), headers=old, **match)
        self.number += 1
        keys = f"aws_access_key_id = KEY{self.number}\naws_secret_access_key = hush\n"
        self.path.write_text(f"[default]\n{keys}aws_session_token = token{self.number}\n", encoding="utf-8")

    def seen(self) -> set[str]:
        """Return which keys requests were signed with."""
        return {one.headers["authorization"].split("Credential=")[1].split("/")[0] for one in self.place.chaos.log}


@pytest.fixture
def keys(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """Return the credentials file that clients find through the environment."""
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return Keys(place, tmp_path / "credentials")


def unkeyed(place: Place) -> dict[str, Any]:
    """Return storage options without credentials: they come from where clients look."""
    return {name: value for name, value in place.options().items() if name not in ("key", "secret", "session")}


# ── expired credentials ──────────────────────────────────────────────────────────────────────────────────────────

REQUESTS: dict[str, Callable[[RetryingStore], object]] = {
    "get": lambda store: store.get("there", 10),
    "read": lambda store: store.read("there", 1, memoryview(bytearray(2))),
    "size": lambda store: store.size("there"),
    "names": lambda store: store.names(""),
    "put": lambda store: store.put("new", [b"abc"]),
    "put_if_absent": lambda store: store.put_if_absent("once", b"abc"),
    "replace": lambda store: store.replace("beat", b"abc"),
    "delete": lambda store: store.delete("new"),
}


def test_every_request_is_made_again_with_renewed_credentials(place: Place, keys: Keys) -> None:
    """An expired token is answered; the next try reads the credentials anew, and it works; whatever the request was."""
    place.past.put("there", b"0123")
    store = RetryingStore(ObjectStore(place.url, unkeyed(place)), deadline_s=20)
    for number, request in enumerate(REQUESTS.values(), 1):
        request(store)
        if "new" in place.past.names():
            place.past.delete("new")
        place.past.delete("once")
        keys.rotate(answers.EXPIRED_TOKEN if number % 2 else answers.EXPIRED_TOKEN_403)
        request(store)
        assert f"KEY{number + 1}" in keys.seen()


def test_credentials_that_expire_within_an_upload(place: Place, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the parts are there when the token expires: the upload is made again with the new one, and is whole."""
    monkeypatch.setattr(s3, "PART_BYTES", 1 << 16)
    store = RetryingStore(ObjectStore(place.url, unkeyed(place)), deadline_s=20)
    assert store.names("") == []
    keys.rotate(operation="UploadPart", query={"partNumber": "^(9|1[0-6])$"})
    store.put("large", [LARGE])
    parts = place.chaos.requests(operation="UploadPart")
    assert {one.status for one in parts} >= {200, 400}
    assert keys.seen() == {"KEY1", "KEY2"}
    assert place.past.get("large") == LARGE


# ── no permission ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_head_that_is_refused_without_a_word(place: Place) -> None:
    """The answer to a HEAD says no reason: the size is asked for with a GET, which has it, or says why not."""
    place.past.put("there", b"0123")
    place.past.put("empty", b"")
    place.chaos.on(Fault(answer=answers.ACCESS_DENIED), operation="HeadObject")
    store = place.store()
    assert (store.size("there"), store.size("empty")) == (4, 0)
    place.chaos.on(Fault(answer=answers.error(403, "SignatureDoesNotMatch")), operation="GetObject")
    with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
        store.size("there")


@pytest.mark.parametrize(
    ("verbs", "answer"),
    quick_first(
        [
            ("PutObject GetObject ledger", answers.ACCESS_DENIED),  # all is there but the entry that would name it
            ("GetObject", answers.ACCESS_DENIED),
            ("PutObject", answers.TIME_TOO_SKEWED),
            ("DeleteObjects", answers.ACCESS_DENIED),
        ]
    ),
)
def test_what_a_refused_verb_says(place: Place, caplog: Records, verbs: str, answer: Answer) -> None:
    """P67: rights or the clock change in mid-run: what to do is logged once, training goes on, and later commits.

    An answer that says no is a no: it is not called unknown whether the entry is there, though it cannot be read.
    """
    said = r"403 .*(may not do this|clock of this host)"
    with place.run(on_flush_failure="warn", step_interval=1, max_num_checkpoints=1) as ckpt:
        ckpt.save(1, state_of(1))
        key = ledger_name(place.truth.head().next_n) if "ledger" in verbs else ""  # and its read-back
        for operation in verbs.removesuffix(" ledger").split():
            place.chaos.on(Fault(answer=answer), operation=operation, key=key)
        for step in (2, 3):
            ckpt.step(step, state_of(step))
            with suppress(StoreError):  # CommitUncertainError is none
                ckpt.wait()
                settle(ckpt)
        told = [line for line in map(logging.LogRecord.getMessage, caplog.records) if re.search(said, line)]
        if verbs == "DeleteObjects":
            assert len(told) == 1
            assert "objects of removed checkpoints are not deleted" in told[0]
            assert any("checkpoint_000000000001" in name for name in place.past.names())
        elif verbs != "GetObject":
            assert place.truth.head().state.live[-1].step == 1
        place.chaos.off()
        ckpt.save(4, state_of(4))
    assert commits(place.truth)[-1] == 4
    with place.run() as ckpt:  # the next one sweeps what was whole but for its entry
        ckpt.acquire()
        ckpt.prune()
    if verbs != "GetObject":
        left = {name.split("/")[0] for name in place.past.names() if "checkpoint_" in name}
        assert left == {"checkpoint_000000000004"}


@pytest.mark.slow
def test_a_prune_that_may_not_delete_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """P67: `ckpt prune` and `ckpt rm` say how many objects stay, never "Removed", and exit with 1.

    Once it may delete, `ckpt prune` deletes them.
    """
    with place.run() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step))
    for name, value in place.server.through(place.chaos.endpoint).environment.items():
        monkeypatch.setenv(name, value)
    place.chaos.on(Fault(answer=answers.ACCESS_DENIED), operation="DeleteObjects")
    by_hand = ckpt_command("rm", f"{place.url}@1")
    told = ckpt_command("prune", place.url, "--max-num-checkpoints", "1")
    assert by_hand.status == told.status == 1
    assert "Not deleted: 4 objects." in by_hand.out
    assert "8 objects of retired checkpoints could not be deleted" in told.out
    assert "emoved" not in told.out
    place.chaos.off()
    assert ckpt_command("prune", place.url, "--max-num-checkpoints", "1").status == 0
    assert {name.split("/")[0] for name in place.past.names() if "checkpoint_" in name} == {"checkpoint_000000000003"}


def several(place: Place) -> RetryingStore:
    for name in ("a", "b", "c"):
        place.past.put(name, b"x")
    return place.store(deadline_s=5)


def test_what_is_said_of_each_object_is_read(place: Place) -> None:
    """P64: one request deletes several: a key that may not go is returned, one that failed for the moment asked again.

    A key of which the answer says nothing is asked for alone.
    """
    store, key = several(place), f"<Key>{place.prefix}/{{}}</Key>"
    errors = [f"<Error>{key.format(name)}<Code>{code}</Code></Error>" for name, code in REASONS.items()]
    said = f"<DeleteResult>{''.join(errors)}</DeleteResult>".encode()
    place.chaos.on(Fault(answer=Answer(200, said, (("Content-Type", "application/xml"),))), operation="DeleteObjects")
    refused = store.delete_all(["a", "b", "c"])
    assert [*refused] == ["a"]
    assert "403 AccessDenied" in str(refused["a"])
    assert "may not do this" in str(refused["a"].hint)
    assert [one.operation for one in place.chaos.log] == ["DeleteObjects", "DeleteObject", "DeleteObject"]
    assert place.past.names() == {"a"}


REASONS = {"a": "AccessDenied", "b": "InternalError"}


def test_a_store_that_deletes_one_at_a_time(place: Place, caplog: Records) -> None:
    """P64: a store that does not know the request is asked for each object from then on, and one line says so."""
    caplog.set_level(logging.INFO, "ckpt_tasks")
    place.chaos.on(Fault(answer=answers.NOT_IMPLEMENTED), operation="DeleteObjects")
    store = several(place)
    assert store.delete_all(["a", "b"]) == {}
    place.past.put("a", b"x")
    assert store.delete_all(["a", "c"]) == {}
    assert place.past.names() == set()
    assert [one.operation for one in place.chaos.log] == ["DeleteObjects", *["DeleteObject"] * 4]
    told = [record.getMessage() for record in caplog.records if "at once" in record.getMessage()]
    assert len(told) == 1
    assert "501 NotImplemented" in told[0]


# ── options that are wrong ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "error", "message"),
    quick_first(
        [
            ({"secrett": "x"}, ConfigError, "storage_options are not what s3 takes: .*secrett"),
            ({"key": None, "secret": None}, StoreError, "Give credentials"),
            ({"config_kwargs": {"read_timeoutt": 1}}, ConfigError, "storage_options are not what s3 takes"),
            ({"endpoint_url": "nonsense"}, ConfigError, "are not what s3 takes: .*nonsense.*begins with https"),
            ({"profile": "nobody"}, StoreError, "nobody.*Give credentials"),
            ({"key": "half", "secret": None}, StoreError, "Give credentials"),
        ],
        2,
    ),
    ids=lambda it: "-".join(it) if isinstance(it, dict) else "",
)
def test_bad_options_are_named(place: Place, options: dict[str, Any], error: type[CkptError], message: str) -> None:
    """A misspelled option or missing credentials are found by the first request, and nothing is tried again."""
    given = {**unkeyed(place), "key": "me", "secret": "hush", **options}
    store = RetryingStore(ObjectStore(place.url, given), deadline_s=20)
    with pytest.raises(error, match=message) as caught:
        store.names("")
    assert not getattr(caught.value, "transient", False)
    assert place.chaos.log == []


def test_an_endpoint_that_is_no_servers(place: Place) -> None:
    """A listing through `https://host/bucket` asks for an object, and port 9 has no server: the error says which."""
    options = place.options()
    bucket = ObjectStore(place.url, {**options, "endpoint_url": f"{options['endpoint_url']}/{place.bucket}"})
    nobody = RetryingStore(ObjectStore(place.url, {**options, "endpoint_url": "http://127.0.0.1:9"}), deadline_s=0.2)
    for store, says in ((bucket, r"no such bucket.*does not end with the bucket's name"), (nobody, "no answer from")):
        with pytest.raises(StoreError, match=says):
            store.names("")


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────

SECRETS = ("KEYHUSHA1", "secretHUSHb2", "tokenHUSHc3", "userHUSHd4", "passwordHUSHe5", "signatureHUSHf6")
NOBODY = f"http://{SECRETS[3]}:{SECRETS[4]}@127.0.0.1:9"
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "misspelled": {"secrett": SECRETS[1]},
    "nobody there": {"endpoint_url": NOBODY},
    "no endpoint": {"endpoint_url": f"{SECRETS[3]}:{SECRETS[4]}@nonsense"},
    "signature in the endpoint": {"endpoint_url": f"http://127.0.0.1:9/?sig={SECRETS[5]}"},
    "newline in the token": {"token": f"{SECRETS[2]}\n"},
    "proxy": {"config_kwargs": {"proxies": {"http": NOBODY}}},
    "bad config": {"config_kwargs": {"read_timeout": SECRETS[1]}},
}
TOLD_BACK = {
    "no answer": Fault(drop_answer=True),
    "signature": Fault(
        answer=answers.error(403, "SignatureDoesNotMatch", AWSAccessKeyId=SECRETS[0], StringToSign=SECRETS[2])
    ),
    "told back": Fault(answer=answers.error(400, "InvalidArgument", f"{SECRETS[1]} is not a secret")),
    "html": Fault(answer=Answer(502, f"<html>{SECRETS[1]}</html>".encode())),
}


def leaks(*texts: str | bytes) -> list[str]:
    """List what is in a text and must not be."""
    data = b"".join(text if isinstance(text, bytes) else text.encode() for text in texts)
    return [secret for secret in SECRETS if secret.encode() in data]


@pytest.mark.parametrize("what", quick_first([*BAD_OPTIONS, *TOLD_BACK], 3))
def test_no_error_tells_a_secret(place: Place, caplog: Records, what: str) -> None:
    """Whatever is wrong with the options, or said by the server: errors, pickles and logs hold no secret."""
    caplog.set_level(logging.DEBUG, "ckpt_tasks")
    key, secret, token, *_ = SECRETS
    options = {**place.options(), "key": key, "secret": secret, "token": token, **BAD_OPTIONS.get(what, {})}
    if what in BAD_OPTIONS:
        options.pop("session")  # what is given with a session is not looked at
    else:
        place.chaos.on(TOLD_BACK[what])
    store = RetryingStore(ObjectStore(place.url, options), deadline_s=0.1)
    for name in ("get", "names", "put", "put_if_absent"):
        with pytest.raises(CkptError) as caught:
            REQUESTS[name](store)
        error = caught.value
        assert leaks(str(error), repr(error), pickle.dumps(error), repr(vars(error))) == []
        assert leaks("".join(traceback.format_exception(error))) == []
    assert leaks(caplog.text, store.endpoint or "", repr(store)) == []


def test_nothing_that_a_run_writes_tells(place: Place, caplog: Records) -> None:
    """A run with faults: format.json, ledger, manifests, heartbeats, logs and reprs hold no secret."""
    caplog.set_level(logging.DEBUG, "ckpt_tasks")
    key, secret, token, *_ = SECRETS
    place.chaos.on(Fault(drop_answer=True), operation="PutObject", probability=0.2, seed=5)
    place.chaos.on(Fault(answer=answers.SLOW_DOWN), probability=0.1, seed=6)
    with place.run(storage_options={**place.options(), "key": key, "secret": secret, "token": token}) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), metrics={"loss": 1.0 / step})
        ckpt.note("failure", why="on purpose")
        assert leaks(repr(ckpt.config), repr(ckpt), repr(vars(ckpt.run.history))) == []
    assert "format.json" in place.past.names()
    assert leaks(caplog.text, *place.past.everything().values()) == []
