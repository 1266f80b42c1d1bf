"""No key, secret, token or password of storage_options appears where people and machines read."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckpt_tasks import CheckpointConfig
from ckpt_tasks.errors import CkptError
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.retrying import RetryingStore
from tests.faults.s3_runs import Place, state_of
from tests.support import answers
from tests.support.ledgers import commit
from tests.support.rules import Fault

SECRETS = ("KEYHUSHA1", "secretHUSHb2", "tokenHUSHc3", "userHUSHd4", "passwordHUSHe5", "signatureHUSHf6")


def leaks(text: str | bytes) -> list[str]:
    """List what is in a text and must not be."""
    data = text if isinstance(text, bytes) else text.encode()
    return [secret for secret in SECRETS if secret.encode() in data]


@pytest.fixture
def secretive(place: Place) -> dict[str, Any]:
    """Return options that hold every kind of secret; the server believes any signature."""
    key, secret, token, *_ = SECRETS
    return {**place.options(), "key": key, "secret": secret, "token": token}


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return every word that the package logs."""
    with caplog.at_level(logging.DEBUG, logger="ckpt_tasks"):
        yield caplog


def check(error: BaseException) -> None:
    """Look at an error as a log, a person and another process would."""
    assert leaks(str(error)) == leaks(repr(error)) == []
    assert leaks(pickle.dumps(error)) == []
    assert leaks("".join(traceback.format_exception(error))) == []
    assert leaks(repr(vars(error))) == []


FAULTS = {
    "no answer": Fault(drop_answer=True),
    "truncated": Fault(truncate_answer_at=1),
    "denied": Fault(answer=answers.ACCESS_DENIED),
    "expired": Fault(answer=answers.EXPIRED_TOKEN),
    "skewed": Fault(answer=answers.TIME_TOO_SKEWED),
    "signature": Fault(
        answer=answers.error(403, "SignatureDoesNotMatch", AWSAccessKeyId=SECRETS[0], StringToSign=SECRETS[2])
    ),
    "told back": Fault(answer=answers.error(400, "InvalidArgument", f"{SECRETS[1]} is not a secret")),
    "unknown key": Fault(answer=answers.error(403, "InvalidAccessKeyId", f"{SECRETS[0]} is unknown")),
    "html": Fault(answer=answers.Answer(502, f"<html>{SECRETS[1]}</html>".encode())),
    "conflict": Fault(answer=answers.CONDITIONAL_CONFLICT),
    "overload": Fault(answer=answers.SLOW_DOWN),
    "not implemented": Fault(answer=answers.NOT_IMPLEMENTED),
    "no bucket": Fault(answer=answers.error(404, "NoSuchBucket")),
}
REQUESTS: dict[str, Callable[[RetryingStore], object]] = {
    "get": lambda store: store.get("there", 100),
    "names": lambda store: store.names(""),
    "put": lambda store: store.put("new", [b"abc"]),
    "put_if_absent": lambda store: store.put_if_absent("new", b"abc"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_error_of_the_network_tells(
    place: Place, secretive: dict[str, Any], logged: pytest.LogCaptureFixture, fault: str
) -> None:
    """Whatever the server says and whatever breaks: errors, their pickles and tracebacks, and logs hold no secret."""
    place.past.put("there", b"0123456789")
    store = RetryingStore(ObjectStore(place.url, secretive), deadline_s=0.1)
    given = FAULTS[fault]
    place.chaos.on(given, **({"method": "GET"} if given.truncate_answer_at else {}))
    raised = 0
    for verb, request in REQUESTS.items():
        if given.truncate_answer_at and verb.startswith("put"):
            continue
        with pytest.raises(CkptError) as caught:
            request(store)
        assert leaks(str(caught.value)) == leaks(pickle.dumps(caught.value)) == []
        assert leaks(repr(vars(caught.value))) == []
        raised += 1
    assert raised >= 2
    assert leaks(logged.text) == []


def bad_options(endpoint: str) -> dict[str, dict[str, Any]]:
    host = endpoint.removeprefix("http://")
    return {
        "misspelled": {"secrett": SECRETS[1]},
        "password in the endpoint": {"endpoint_url": f"http://{SECRETS[3]}:{SECRETS[4]}@{host}"},
        "nobody there": {"endpoint_url": f"http://{SECRETS[3]}:{SECRETS[4]}@127.0.0.1:9"},
        "no endpoint": {"endpoint_url": f"{SECRETS[3]}:{SECRETS[4]}@nonsense"},
        "signature in the endpoint": {"endpoint_url": f"http://127.0.0.1:9/?sig={SECRETS[5]}"},
        "newline in the token": {"token": f"{SECRETS[2]}\n"},
        "newline in the key": {"key": f"{SECRETS[0]}\n"},
        "proxy": {"config_kwargs": {"proxies": {"http": f"http://{SECRETS[3]}:{SECRETS[4]}@127.0.0.1:9"}}},
        "bad config": {"config_kwargs": {"read_timeout": SECRETS[1]}},
    }


@pytest.mark.parametrize("which", bad_options("http://127.0.0.1:1"))
def test_no_mistake_in_the_options_tells(
    place: Place, secretive: dict[str, Any], logged: pytest.LogCaptureFixture, which: str
) -> None:
    """Options that are misspelled, or of another form, or with a newline at their end: what is wrong, and no value."""
    options = {**secretive, **bad_options(place.chaos.endpoint)[which]}
    options.pop("session")  # what is given with a session is not looked at
    store = RetryingStore(ObjectStore(place.url, options), deadline_s=0.1)
    with pytest.raises(CkptError) as caught:
        store.names("")
    assert leaks(str(caught.value)) == leaks(repr(caught.value)) == []
    assert leaks(pickle.dumps(caught.value)) == []
    assert leaks(logged.text) == []
    assert leaks(store.endpoint or "") == leaks(repr(store)) == []


def test_no_url_with_a_password_is_repeated() -> None:
    """A password in the place itself is refused, and not said again."""
    with pytest.raises(CkptError) as caught:
        ObjectStore(f"s3://{SECRETS[0]}:{SECRETS[4]}@bucket/run")
    assert leaks(str(caught.value)) == []


def test_nothing_that_a_run_writes_tells(
    place: Place, secretive: dict[str, Any], logged: pytest.LogCaptureFixture
) -> None:
    """A run with faults and a fall-back: format.json, ledger, manifests, heartbeats, logs and reprs hold no secret."""
    host = place.chaos.endpoint.removeprefix("http://")
    place.chaos.on(Fault(drop_answer=True), operation="PutObject", probability=0.2, seed=5)
    place.chaos.on(Fault(answer=answers.SLOW_DOWN), probability=0.1, seed=6)
    with place.run(storage_options=secretive, best_metric="loss", keep_best=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), metrics={"loss": 1.0 / step})
        ckpt.note("failure", why="on purpose")
        history = ckpt.run.history
        assert leaks(repr(ckpt.config)) == leaks(repr(ckpt)) == leaks(repr(history.store)) == []
        assert leaks(repr(vars(history))) == []
    names = place.past.names()
    assert {"format.json"} < {*names}
    assert [name for name in names if leaks(place.past.get(name))] == []
    assert host in place.past.get("format.json").decode()
    assert leaks(logged.text) == []
    assert commit(place.truth, 9, owner=None) > 0


def test_a_config_does_not_show_its_options(secretive: dict[str, Any]) -> None:
    """Neither does the error of a config that is wrong."""
    assert leaks(repr(CheckpointConfig(checkpoint_dir=Location("s3://b/r", storage_options=secretive)))) == []
    for wrong in ({SECRETS[0]: 1, 2: SECRETS[1]}, [SECRETS[1]], SECRETS[1]):
        with pytest.raises(CkptError) as caught:
            CheckpointConfig(checkpoint_dir=Location("s3://b/r", storage_options=wrong))  # type: ignore[arg-type]
        check(caught.value)
