"""Translation of a server's answer, or of a missing answer, into our errors, which say whether a retry makes sense.

Clients raise different exceptions for a refused condition (412 with and without `<Condition>`, 409, EINVAL), so this
module reads the answer's own status and code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from ckpt_tasks.errors import CkptError, IntegrityError, ObjectExistsError, ObjectNotFoundError, StoreError
from ckpt_tasks.storage.secrets import without_secrets

_MISSING = frozenset({"NoSuchKey", "NotFound", "BlobNotFound"})
_EXISTS = frozenset({"PreconditionFailed", "BlobAlreadyExists", "ConditionNotMet"})
_OVERLOADED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "ServerBusy"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
# After these answers a retry with a new session may succeed; an upload that was under way may be lost or partial.
_AGAIN = _OVERLOADED | _EXPIRED | {"OperationAborted", "ConditionalRequestConflict", "NoSuchUpload", "InternalError"}

_ANOTHER_REGION = "The bucket is in another region: name it (AWS_REGION, or region_name in client_kwargs)."
_HINTS = {
    "NoSuchBucket": "Create the bucket first, or check its name and the endpoint.",
    "NoSuchContainer": "Create the container first, or check its name and the account.",
    "ContainerNotFound": "Create the container first, or check its name and the account.",
    "AccessDenied": "The credentials may not do this; they must be allowed to read, write, list and delete here.",
    "InvalidAccessKeyId": "The credentials are of no user of this endpoint.",
    "SignatureDoesNotMatch": "The secret key is wrong, or something on the way changes requests.",
    "RequestTimeTooSkewed": "The clock of this host is wrong: set it.",
    "EntityTooLarge": "The store takes no object so large.",
    "NotImplemented": "The store does not know this request; one without conditions needs single_writer=True.",
    "PermanentRedirect": _ANOTHER_REGION,
    "AuthorizationHeaderMalformed": _ANOTHER_REGION,
    "QuotaExceeded": "The quota of the bucket or its user is used up: raise it, prune runs, or use another bucket.",
    "StorageFull": "The store has no room left: free some, prune runs, or use another store.",
}
# fsspec's file systems raise these exceptions instead of an answer.
_SAID: dict[type[BaseException], tuple[int, str]] = {
    FileNotFoundError: (404, "NotFound"),
    FileExistsError: (412, "PreconditionFailed"),
    PermissionError: (403, "AccessDenied"),
    RecursionError: (301, "PermanentRedirect"),  # botocore would follow a redirect without a region for ever.
}
_CODES = {"XMinioAdminBucketQuotaExceeded": "QuotaExceeded", "XMinioStorageFull": "StorageFull"}  # Codes of MinIO.
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"
_UNTRUSTED_HINT = "Name the file of the authority that signed it: AWS_CA_BUNDLE, or verify in client_kwargs."
_EXPIRED_HINT = "The credentials have expired: use a profile or a role, which are renewed."

# Clients raise these exceptions for missing credentials or bad options. Names suffice: this module imports no client.
_OURS_TO_MEND = frozenset({
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "ParamValidationError",
    "NoRegionError",
    "InvalidRegionError",
    "TokenRetrievalError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
})  # fmt: skip
_CLIENTS = ("botocore", "aiobotocore", "aiohttp", "azure", "google", "gcsfs", "urllib3", "requests")


def as_ours(error: BaseException, name: str) -> CkptError:
    """Turn a client's exception into our error about the object `name`; it is `transient` if a retry makes sense."""
    if isinstance(error, CkptError):
        error.key = name
        return error
    status, code = answer_of(error)
    if status is None:
        status, code = next((said for kind, said in _SAID.items() if isinstance(error, kind)), (None, ""))
    if code in _MISSING or (status == 404 and code in ("", "404")):
        return ObjectNotFoundError("no such object", key=name)
    if code in _EXISTS or status == 412:
        return ObjectExistsError("the object exists already", key=name)
    if status == 416:
        return IntegrityError("the object ends before the bytes that are wanted", key=name)
    return _without_answer(error, name) if status is None else _refusal(error, name, status, code)


def of_listing(error: BaseException, prefix: str) -> CkptError:
    """Turn a client's exception about a listing into our error; "not found" means that the bucket is missing."""
    ours = as_ours(error, prefix)
    if not isinstance(ours, ObjectNotFoundError):
        return ours
    hint = "Create the bucket, or check the endpoint: it does not end with the bucket's name."
    return StoreError("the store has no such bucket", key=prefix, hint=hint)


def _refusal(error: BaseException, name: str, status: int, code: str) -> StoreError:
    expired = is_expired(error)
    hint = _EXPIRED_HINT if expired else _HINTS.get(_CODES.get(code, code) or ("AccessDenied" if status == 403 else ""))
    failure = StoreError(f"the store answered {status} {code}".rstrip(), key=name, hint=hint)
    waits = code in _OVERLOADED | _EXPIRED or status in (409, 429, 503)
    failure.refused = waits or (300 <= status < 500 and status != 408 and code not in _AGAIN)
    failure.transient = waits or expired or code in _AGAIN or status == 408 or (status >= 500 and status != 501)
    failure.denied = status == 403 and not failure.transient
    return failure


def is_expired(error: BaseException) -> bool:
    """Return True if credentials have expired: a client that reads them again may succeed."""
    return answer_of(error)[1] in _EXPIRED


def answer_of(error: BaseException) -> tuple[int | None, str]:
    """Return status and code of the answer that caused an exception; (None, "") if the store did not answer."""
    for cause in causes_of(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):  # The answer is from botocore.
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            code = str(response.get("Error", {}).get("Code", ""))
            return (int(code) if code.isdecimal() else status), ("" if code.isdecimal() else code)
        status = getattr(cause, "status_code", None) or getattr(cause, "status", None)
        if isinstance(status, int):  # The answer is from azure.core or aiohttp.
            return status, str(getattr(cause, "error_code", "") or "")
        if type(cause).__name__ == "HttpError" and str(getattr(cause, "code", "")).isdecimal():  # gcsfs.
            return int(cause.code), ""  # type: ignore[attr-defined]
    return None, ""


def _without_answer(error: BaseException, name: str) -> StoreError:
    names = {kind.__name__ for cause in causes_of(error) for kind in type(cause).__mro__}
    roots = {type(cause).__module__.partition(".")[0] for cause in causes_of(error)}
    mend = bool(names & _OURS_TO_MEND)
    untrusted = any(_UNTRUSTED in str(cause) for cause in causes_of(error))
    known = bool(roots.intersection(_CLIENTS)) or isinstance(error, (OSError, asyncio.TimeoutError))
    words = " ".join(without_secrets(str(error)).split())[:300]
    message = words or type(error).__name__
    if not mend:
        message = (
            f"no answer from the store ({message})" if known else f"the request failed: {type(error).__name__} {words}"
        )
    hint = "Give credentials: a profile, the environment, an instance role, or storage_options." if mend else None
    failure = StoreError(message.rstrip(), key=name, hint=_UNTRUSTED_HINT if untrusted else hint)
    failure.transient = known and not mend and not untrusted
    return failure


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and the errors that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__  # Do not follow __context__: it may be the answer to an earlier request.
