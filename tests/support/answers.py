"""Answers of S3 that a working server gives too rarely to wait for: status, fields and document as they are sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """An answer that no server gave."""

    status: int
    document: bytes = b""
    fields: tuple[tuple[str, str], ...] = ()


def error(status: int, code: str, message: str = "on purpose", **more: str) -> Answer:
    """Return an answer with an error document; `more` becomes further elements of it."""
    elements = {"Code": code, "Message": message, **more, "RequestId": "0000000000000000"}
    inner = "".join(f"<{name}>{value}</{name}>" for name, value in elements.items())
    document = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'
    return Answer(status, document.encode(), (("Content-Type", "application/xml"),))


SLOW_DOWN = error(503, "SlowDown", "Please reduce your request rate.")
INTERNAL_ERROR = error(500, "InternalError", "We encountered an internal error. Please try again.")
CONDITIONAL_CONFLICT = error(409, "ConditionalRequestConflict")
# S3 names the condition; Ceph and ministack leave it out, and s3fs tells a lost race by that element alone.
PRECONDITION_FAILED = error(412, "PreconditionFailed")
PRECONDITION_FAILED_NAMED = error(412, "PreconditionFailed", Condition="If-None-Match")
NO_SUCH_KEY = error(404, "NoSuchKey")
NO_SUCH_UPLOAD = error(404, "NoSuchUpload")
NOT_IMPLEMENTED = error(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
# CompleteMultipartUpload sends its status before it knows how it ends.
FAILED_AFTER_200 = error(200, "InternalError", "We encountered an internal error. Please try again.")
EXPIRED_TOKEN = error(400, "ExpiredToken", "The provided token has expired.")
EXPIRED_TOKEN_403 = error(403, "ExpiredToken", "The provided token has expired.")
ACCESS_DENIED = error(403, "AccessDenied")
TIME_TOO_SKEWED = error(403, "RequestTimeTooSkewed")
