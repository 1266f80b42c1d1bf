"""What each answer means: the table of statuses and codes, and what clients make of them."""

from __future__ import annotations

import pickle
import re
import ssl
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import botocore.exceptions as boto
import pytest
from s3fs.errors import translate_boto_error

from ckpt_tasks.errors import CkptError, ConfigError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.run.ledger.targets import split_target
from ckpt_tasks.storage.answers import answer_of, as_ours, is_expired
from ckpt_tasks.storage.locations import Location
from ckpt_tasks.storage.objects import ObjectStore
from ckpt_tasks.storage.secrets import Redactor, secret_options, without_secrets

NAME = "ledger/1.json"


def answered(status: int, code: str = "", **more: Any) -> boto.ClientError:
    """Make what botocore raises; the answer to a HEAD has its status for a code."""
    said = {"Code": code or str(status), "Message": "on purpose", **more}
    return boto.ClientError({"Error": said, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")


def through_s3fs(error: boto.ClientError) -> BaseException:
    """Make what s3fs raises: some other exception, with the first one as its cause."""
    found = translate_boto_error(error)
    found.__cause__ = error
    assert not isinstance(found, boto.ClientError)
    return found  # type: ignore[no-any-return]


def of_azure(status: int, code: str) -> Exception:
    from azure.core.exceptions import HttpResponseError  # in these two: clients that few tests need are heavy

    error = HttpResponseError("on purpose")
    error.status_code, error.error_code = status, code  # type: ignore[attr-defined]
    return error


def of_google(status: int) -> Exception:
    from gcsfs.retry import HttpError

    return HttpError({"code": status, "message": "on purpose"})  # type: ignore[no-any-return]


# status, code → our class, whether another try makes sense, whether the store said that it did nothing
TABLE: list[tuple[int, str, type[CkptError], bool, bool]] = [
    (404, "NoSuchKey", ObjectNotFoundError, False, False),
    (404, "", ObjectNotFoundError, False, False),
    (404, "NoSuchBucket", StoreError, False, True),
    (404, "NoSuchUpload", StoreError, True, False),
    (412, "PreconditionFailed", ObjectExistsError, False, False),
    (412, "", ObjectExistsError, False, False),
    (409, "BlobAlreadyExists", ObjectExistsError, False, False),
    (409, "ConditionalRequestConflict", StoreError, True, True),
    (409, "OperationAborted", StoreError, True, True),
    (416, "InvalidRange", IntegrityError, False, False),
    (503, "SlowDown", StoreError, True, True),
    (503, "", StoreError, True, True),
    (429, "TooManyRequests", StoreError, True, True),
    (400, "RequestTimeout", StoreError, True, True),
    (500, "InternalError", StoreError, True, False),
    (502, "", StoreError, True, False),
    (504, "", StoreError, True, False),
    (408, "", StoreError, True, False),
    (501, "NotImplemented", StoreError, False, False),
    (400, "ExpiredToken", StoreError, True, True),
    (403, "ExpiredToken", StoreError, True, True),
    (400, "", StoreError, False, True),
    (403, "AccessDenied", StoreError, False, True),
    (403, "RequestTimeTooSkewed", StoreError, False, True),
    (403, "SignatureDoesNotMatch", StoreError, False, True),
    (400, "InvalidArgument", StoreError, False, True),
    (400, "EntityTooLarge", StoreError, False, True),
    (301, "PermanentRedirect", StoreError, False, True),
    (403, "QuotaExceeded", StoreError, False, True),
]


@pytest.mark.parametrize(("status", "code", "ours", "transient", "refused"), TABLE)
def test_an_answer_means_one_of_our_errors(
    status: int, code: str, ours: type[CkptError], transient: bool, refused: bool
) -> None:
    """P32: by status and code, never by what a client makes of it; it names the object and survives pickling."""
    error = answered(status, code)
    found = as_ours(error, NAME)
    assert type(found) is ours
    assert found.key == NAME
    assert (getattr(found, "transient", False), getattr(found, "refused", False)) == (transient, refused)
    for same in (pickle.loads(pickle.dumps(found)), as_ours(through_s3fs(error), NAME)):
        assert (type(same), str(same), vars(same)) == (ours, str(found), vars(found))
    if ours is StoreError:
        assert str(status) in str(found)
        assert code in str(found)
        assert getattr(found, "denied", False) == (status == 403 and code != "ExpiredToken")
        assert is_expired(error) == is_expired(through_s3fs(error)) == (code == "ExpiredToken")


UNTRUSTED = ssl.SSLCertVerificationError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate (_ssl.c:1006)")


def of_azure_alone() -> Exception:
    from azure.core.exceptions import ServiceRequestError

    return ServiceRequestError("cannot connect")


def unconnected() -> Exception:
    import aiohttp

    return aiohttp.ClientConnectionError(str(UNTRUSTED))


# (the error, or what makes it, our class, whether another try makes sense, what is said)
OTHERS: list[tuple[BaseException | Callable[[], BaseException], type[CkptError], bool, str]] = [
    (partial(of_azure, 409, "BlobAlreadyExists"), ObjectExistsError, False, ""),
    (partial(of_azure, 412, "ConditionNotMet"), ObjectExistsError, False, ""),
    (partial(of_azure, 404, "BlobNotFound"), ObjectNotFoundError, False, ""),
    (partial(of_azure, 404, "ContainerNotFound"), StoreError, False, ""),
    (partial(of_azure, 503, "ServerBusy"), StoreError, True, ""),
    (partial(of_azure, 403, "AuthenticationFailed"), StoreError, False, ""),
    (of_azure_alone, StoreError, True, ""),
    (partial(of_google, 404), ObjectNotFoundError, False, ""),
    (partial(of_google, 412), ObjectExistsError, False, ""),
    (partial(of_google, 429), StoreError, True, ""),
    (partial(of_google, 503), StoreError, True, ""),
    (partial(of_google, 403), StoreError, False, ""),
    (FileNotFoundError("bucket/key"), ObjectNotFoundError, False, ""),
    (FileExistsError("bucket/key"), ObjectExistsError, False, ""),
    (PermissionError("bucket/key"), StoreError, False, ""),
    (boto.NoCredentialsError(), StoreError, False, "Give credentials"),
    (boto.ProfileNotFound(profile="nobody"), StoreError, False, "Give credentials"),
    (boto.NoRegionError(), StoreError, False, "Give credentials"),
    (boto.SSLError(endpoint_url="https://host", error=UNTRUSTED), StoreError, False, "AWS_CA_BUNDLE"),
    (unconnected, StoreError, False, "AWS_CA_BUNDLE"),
    (RecursionError("maximum recursion depth exceeded"), StoreError, False, "another region"),
    (answered(400, "AuthorizationHeaderMalformed"), StoreError, False, "another region"),
    (answered(403, "XMinioAdminBucketQuotaExceeded"), StoreError, False, "quota .* raise it"),
    (answered(507, "XMinioStorageFull"), StoreError, True, "no room left"),
    (answered(400, "TokenRefreshRequired"), StoreError, True, "have expired"),
    (answered(403), StoreError, False, "may not do this"),
    (answered(403, "RequestTimeTooSkewed"), StoreError, False, "clock of this host is wrong"),
    (answered(403, "SignatureDoesNotMatch"), StoreError, False, "secret key is wrong"),
    (answered(403, "InvalidAccessKeyId"), StoreError, False, "no user of this endpoint"),
    (answered(404, "NoSuchBucket"), StoreError, False, "Create the bucket first"),
    (answered(301, "PermanentRedirect"), StoreError, False, "another region"),
    (KeyError("ContentLength"), StoreError, False, "^(?!.*no answer).*KeyError"),  # a mistake of ours
    (MemoryError(), StoreError, False, "^(?!.*no answer).*MemoryError"),
    (RuntimeError("closed"), StoreError, False, "^(?!.*no answer).*RuntimeError"),
]


@pytest.mark.parametrize(("error", "ours", "transient", "says"), OTHERS)
def test_other_clients_say_the_same_in_their_words(
    error: Exception | Callable[[], Exception], ours: type[CkptError], transient: bool, says: str
) -> None:
    """P28, P32: Azure's and Google's clients, what the user has to mend, and mistakes, which are not silence."""
    found = as_ours(error if isinstance(error, Exception) else error(), NAME)
    assert type(found) is ours
    assert getattr(found, "transient", False) == transient
    assert re.search(says, str(found))


def no_answers() -> list[BaseException]:
    import aiohttp

    url = "http://127.0.0.1:1/bucket/key"
    return [
        boto.EndpointConnectionError(endpoint_url=url, error="refused"),
        boto.ConnectTimeoutError(endpoint_url=url, error="late"),
        boto.ReadTimeoutError(endpoint_url=url, error="late"),
        boto.ConnectionClosedError(endpoint_url=url, error="reset"),
        boto.ResponseStreamingError(error="short"),
        aiohttp.ClientPayloadError("short"),
        TimeoutError("late"),
        ConnectionResetError(104, "reset"),
        OSError(101, "Network is unreachable"),
    ]


@pytest.mark.parametrize("error", no_answers(), ids=lambda error: type(error).__name__)
def test_no_answer_is_worth_another_try_and_is_no_refusal(error: BaseException) -> None:
    """P32: silence may be a lost answer: never `refused`, so nobody repeats a put-if-absent blindly."""
    found = as_ours(error, NAME)
    assert type(found) is StoreError
    assert (found.transient, found.refused) == (True, False)
    assert "no answer from the store" in str(found)
    assert answer_of(error) == (None, "")


def test_an_earlier_answer_is_not_this_ones() -> None:
    """P32: a request that got no answer while another's answer was dealt with: silence, not that other answer."""
    for earlier in (answered(404), answered(412, "PreconditionFailed"), answered(503, "SlowDown")):
        silence = boto.ConnectionClosedError(endpoint_url="http://host")
        silence.__context__, silence.__suppress_context__ = earlier, True  # as `raise … from None` leaves it
        found = as_ours(silence, NAME)
        assert type(found) is StoreError
        assert (found.transient, found.refused) == (True, False)


def test_our_own_errors_stay_and_get_the_objects_name() -> None:
    """An error of ours keeps its class, and names the object as the run does, without the prefix."""
    error = IntegrityError("too short", key="run/ledger/1.json")
    assert as_ours(error, NAME) is error
    assert error.key == NAME


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("cannot reach http://me:hush@host:9000/bucket/key", "cannot reach http://host:9000/bucket/key"),
        ('"https://a.blob.core.windows.net/c?sv=1&sig=hush"', '"https://a.blob.core.windows.net/c"'),
        ("https://host/key?X-Amz-Signature=hush (timed out)", "https://host/key (timed out)"),
        ("http://host:9/?sig=hush", "http://host:9/"),
        ("http://hush@host:9/a", "http://host:9/a"),
        ("Invalid endpoint: me:hush@nonsense", "Invalid endpoint: nonsense"),
        ("what? me@home said so", "what? me@home said so"),
        ("http://host/a@b", "http://host/a@b"),
    ],
)
def test_urls_lose_passwords_and_signatures(text: str, left: str) -> None:
    """Clients put the whole URL into their messages."""
    assert without_secrets(text) == left


@pytest.mark.parametrize("password", ["sl/a@sh", "c:o:l", "p%40ss"])
@pytest.mark.parametrize("form", ["s3://KEY:{}@bucket/run@500", "at http://KEY:{}@h:9/x."])
def test_no_character_of_a_password_stays(form: str, password: str) -> None:
    """Whatever stands in a password, no part of it and no user stays in a text with its URL."""
    shown = without_secrets(form.format(password))
    assert "KEY" not in shown
    assert all(part not in shown for part in (password, *password.replace("/", "@").split("@")) if len(part) > 1)


SECRETS = {"key": "KEYhush", "secret": "se/cr+et@hush", "token": "tok:hush", "client_kwargs": {"password": "pw hush"}}


def test_a_redactor_knows_the_values() -> None:
    """However a client words a secret that it was given, it goes; what is short or public stays."""
    redactor = Redactor({**SECRETS, "endpoint_url": "http://me:hush9@host", "region_name": "eu-west"})
    for secret in ("KEYhush", "se/cr+et@hush", "se%2Fcr%2Bet%40hush", "tok:hush", "pw hush", "hush9"):
        assert "hush" not in redactor.text(f"the client says <{secret}>, in eu-west")
        assert "eu-west" in redactor.text(f"the client says <{secret}>, in eu-west")
        cause = redactor.cause(ValueError(f"no {secret}"))
        assert "hush" not in "".join(traceback.format_exception(cause))
        assert "ValueError" in str(cause)
    assert Redactor({"key": "eu"}).text("in eu-west") == "in eu-west"
    options = {"token": "anon", "endpoint_url": "http://me:hush@host"}
    assert secret_options(options) == ["storage_options.endpoint_url"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"token": "tok hush\n"}, "invalid header 'tok hush'"),
        ({"secret": "p%20hush"}, "no user with 'p hush'"),
        ({"client_kwargs": {"credential": {"value": "keyhush"}}}, "keyhush"),
        ({"token": "abcd", "secret": "abcdhush"}, "abcdhush"),
        ({"token": ["keyhush"]}, "keyhush"),
        ({"endpoint_url": "https://host/c?sig=hush9"}, "sig=hush9 is refused"),
        ({"conn": "AccountName=me;AccountKey=hush9"}, "hush9 is not base64"),
        ({"conn": "Name=me;SharedAccessSignature=hush9"}, "hush9 has expired"),
    ],
)
def test_a_redactor_knows_every_form_of_a_value(options: dict[str, Any], said: str) -> None:
    """Trimmed, decoded, nested, in a list, in a URL or a connection string, and with another secret as its start."""
    assert "hush" not in Redactor(options).text(said)


CLIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "s3": ("s3://bucket/run", {"key": "KEYhush", "secret": "se/cr@hush", "endpoint_url": "http://127.0.0.1:9"}),
    "azure": ("az://box/run", {"account_name": "me", "account_key": "not base64, hush"}),
    "gcs": ("gs://bucket/run", {"token": {"private_key": "keyhush", "type": "service_account"}, "project": "p"}),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_tells_its_secrets(client: str) -> None:
    """Whatever a store's client raises, our error and all that is behind it in a traceback hold no secret."""
    url, options = CLIENTS[client]
    store = ObjectStore(url, options)
    with pytest.raises(CkptError) as caught:
        store.get("format.json", 100)
    error: BaseException | None = caught.value
    assert "hush" not in "".join(traceback.format_exception(caught.value, chain=True))
    while error is not None:
        assert "hush" not in f"{error} {error!r} {error.args} {vars(error)}"
        error = error.__cause__ or error.__context__
    if client != "s3":
        assert not getattr(caught.value, "transient", False)  # nothing but other credentials helps


@pytest.mark.parametrize("url", ["s3://KEY:hush@bucket/run", "s3://KEY:hu/sh@bucket/run", "s3://KEY:hush@b/run@500"])
def test_a_url_with_a_password_is_refused_without_it(url: str) -> None:
    """A place whose URL has a user is refused, also where its password looks like a directory."""
    with pytest.raises(ConfigError) as caught:
        Location(split_target(url)[0]).open()
    assert not re.search("KEY|hu", "".join(traceback.format_exception(caught.value))[-200:])
    with pytest.raises(ConfigError) as caught:
        split_target(f"{url}@newest")
    assert not re.search("KEY|hu", str(caught.value))
