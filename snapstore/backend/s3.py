"""Objects in a bucket: the only file that speaks S3.

Signing, listing, small requests and the frame of multipart uploads are botocore's: boto3 without
its resources, which take a while to load. Data goes over presigned URLs and plain connections into
and out of the caller's own buffers (`http_pool`), which takes half of the processor time of a
client that returns its bytes.

Put-if-absent is `If-None-Match: *`. A server that ignores it would let writers overwrite each
other, so a store is only made where `probe` has seen it honoured.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import re
import secrets
import ssl
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import botocore.config
import botocore.exceptions
import botocore.loaders
import botocore.session
from isal import isal_zlib

from snapstore.backend import layout
from snapstore.backend.base import CONTENT_NAMED, Capabilities, ObjectInfo, ObjectKind
from snapstore.backend.files import as_views
from snapstore.backend.http_pool import HttpPool, Reply, Timeouts
from snapstore.backend.layout import object_text
from snapstore.backend.pacing import Pacer
from snapstore.errors import (
    AccessDenied,
    BackendError,
    CapabilityMissing,
    ObjectExists,
    ObjectNotFound,
    OutOfSpace,
    RangeNotSatisfiable,
    SnapError,
    StoreNotFound,
    TransientBackendError,
    UsageError,
)
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from snapstore.backend.s3_location import S3Location
    from snapstore.clock import Clock
    from snapstore.units import BytesLike

__all__ = ["S3Backend"]

SINGLE_PUT_BYTES_MAX = 256 * MIB
PART_BYTES = 128 * MIB
READERS_IN_PARALLEL = 8
READ_BYTES_BEST = 8 * MIB

_URL_VALID_S = 3600
_URL_REUSED_S = 900.0
_URLS_MAX = 4096
_COMPARED_BYTES = 4 * MIB
_OFFSET_MAX = (1 << 63) - 1

_CODE = re.compile(rb"<Code>([A-Za-z0-9._-]{1,80})</Code>")
_SLOW_DOWN = frozenset(
    {"SlowDown", "ServiceUnavailable", "TooManyRequests", "RequestLimitExceeded"}
)
_TRANSIENT_CODES = _SLOW_DOWN | {
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
}
_TRANSIENT_STATUS = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FULL_CODES = frozenset(
    {"InsufficientStorage", "QuotaExceeded", "ServiceQuotaExceeded", "XMinioStorageFull"}
)
_STALE_CREDENTIALS = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
_CREDENTIALS_STEP = "give credentials the usual AWS way, by environment or profile"
_DENIED_STEPS = {
    "ExpiredToken": "renew the session's credentials and run it again",
    "InvalidAccessKeyId": "check the access key and the endpoint",
    "RequestTimeTooSkewed": "set this machine's clock",
    "SignatureDoesNotMatch": "check the secret key and the region",
}


class S3Backend:
    """A store below a prefix of a bucket (`Backend`)."""

    def __init__(
        self,
        location: S3Location,
        clock: Clock,
        *,
        readonly: bool = False,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Prepare; nothing is asked of the server yet.

        Raises:
            UsageError: There is no such profile, or the certificates cannot be read.
        """
        self._where = location
        self._clock = clock
        self._readonly = readonly
        timeouts = timeouts or Timeouts()
        self._client, tls = _connect(location, timeouts)
        self._pool = HttpPool(clock, timeouts=timeouts, tls=tls)
        self._pacer = Pacer(clock)
        self._urls: collections.OrderedDict[str, tuple[float, str]] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return Capabilities(
            url=self._where.url(),
            writable=not self._readonly,
            readers_in_parallel=READERS_IN_PARALLEL,
            read_bytes_best=READ_BYTES_BEST,
        )

    # --- reading ---

    def get_range(self, kind: ObjectKind, name: str, offset: int, into: memoryview) -> None:
        """See `Backend.get_range`."""
        view = into if into.format == "B" else into.cast("B")
        what = object_text(kind, name)
        if offset < 0 or offset + view.nbytes > _OFFSET_MAX:
            raise RangeNotSatisfiable(f"{what} has no offset {offset}")
        if not view.nbytes:
            size = self.stat(kind, name).size_bytes
            if offset > size:
                raise RangeNotSatisfiable(f"{what} has {size} bytes, no offset {offset}")
            return
        key = self._key(kind, name)
        span = f"bytes={offset}-{offset + view.nbytes - 1}"
        reply = self._get(key, span, view)
        if reply.status == 403 and _code(reply) in _STALE_CREDENTIALS:
            # Whoever gave the credentials may have renewed them since the URL was signed.
            with self._lock:
                self._urls.pop(key, None)
            reply = self._get(key, span, view)
        if reply.status != 206:
            self._refuse_read(reply, what, offset)
        self._check_span(reply, what, offset, view.nbytes)

    def stat(self, kind: ObjectKind, name: str) -> ObjectInfo:
        """See `Backend.stat`."""
        key = self._key(kind, name)
        with self._calling(f"stat {object_text(kind, name)}"):
            found = self._client.head_object(Bucket=self._where.bucket, Key=key)
            modified_ns = int(found["LastModified"].timestamp() * 1e9)
            return ObjectInfo(name, int(found["ContentLength"]), modified_ns)

    def list(self, kind: ObjectKind, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Backend.list`."""
        start = layout.listing_prefix(kind, prefix)
        return iter(()) if start is None else self._pages(kind, start)

    # --- writing ---

    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        """See `Backend.put_new`."""
        key = self._key(kind, name)
        doing = f"write {object_text(kind, name)}"
        self._require_writable(doing)
        views = as_views(pieces)
        size_bytes = sum(view.nbytes for view in views)
        if kind in CONTENT_NAMED and self._has_length(kind, name, size_bytes):
            return
        put = self._put_whole if size_bytes <= SINGLE_PUT_BYTES_MAX else self._put_parts
        if not put(key, views, doing) and not self._is_there(kind, name, views, size_bytes):
            raise ObjectExists(f"{key} exists with other content")

    def delete(self, kind: ObjectKind, name: str) -> None:
        """See `Backend.delete`."""
        key = self._key(kind, name)
        doing = f"delete {object_text(kind, name)}"
        self._require_writable(doing)
        with contextlib.suppress(ObjectNotFound), self._calling(doing):
            self._client.delete_object(Bucket=self._where.bucket, Key=key)

    def close(self) -> None:
        """See `Backend.close`."""
        self._pool.close()
        self._client.close()

    def probe(self) -> None:
        """Check that a store can be here: the bucket exists, and no writer overwrites another.

        Raises:
            StoreNotFound: There is no such bucket.
            CapabilityMissing: The server does not honour `If-None-Match`.
            AccessDenied: The credentials may not write here.
        """
        # A name of its own for each, since another program may be trying it out right now.
        name = f"contract/{secrets.token_hex(16)}"
        key = self._key(ObjectKind.HINT, name)
        try:
            won = [self._put_whole(key, [memoryview(b"probe")], "try it out") for _ in range(2)]
        finally:
            with contextlib.suppress(BackendError):
                self.delete(ObjectKind.HINT, name)
        if won[1]:
            raise CapabilityMissing(
                f"{self._where.url()} overwrites objects in spite of If-None-Match",
                next_step="use a storage with conditional writes",
            )

    def _get(self, key: str, span: str, view: memoryview) -> Reply:
        url = self._url_to_read(key)
        self._pacer.wait()
        return self._noted(self._pool.get(url, {"Range": span}, view))

    def _refuse_read(self, reply: Reply, what: str, offset: int) -> NoReturn:
        if reply.status == 416:
            raise RangeNotSatisfiable(f"{what} ends before offset {offset}")
        if reply.status == 200:
            raise CapabilityMissing(
                f"{self._where.url()} ignores byte ranges", next_step="use a storage that has them"
            )
        self._refuse(reply, f"read {what}")

    def _check_span(self, reply: Reply, what: str, offset: int, length: int) -> None:
        """Check that the bytes in the buffer are those that were asked for."""
        span, _, total = reply.headers.get("content-range", "").partition("/")
        if total.isdecimal() and int(total) < offset + length:
            raise RangeNotSatisfiable(f"{what} has {total} bytes, not {offset} + {length}")
        if not reply.received or span != f"bytes {offset}-{offset + length - 1}":
            raise TransientBackendError(f"read {what}: the server sent {span[:60]!r} instead")

    def _pages(self, kind: ObjectKind, start: str) -> Iterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            with self._calling(f"list {start}"):
                page = self._client.list_objects_v2(
                    Bucket=self._where.bucket, Prefix=self._where.prefix + start, **more
                )
            for item in page.get("Contents", ()):
                name = layout.name_of(kind, item["Key"].removeprefix(self._where.prefix))
                if name is not None:
                    modified_ns = int(item["LastModified"].timestamp() * 1e9)
                    yield ObjectInfo(name, int(item["Size"]), modified_ns)
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _put_whole(self, key: str, views: Sequence[memoryview], doing: str) -> bool:
        """Store in one request; False if the name is taken."""
        checksum = 0
        for view in views:
            checksum = isal_zlib.crc32(view, checksum)
        text = base64.b64encode(checksum.to_bytes(4, "big")).decode()
        url = self._sign("put_object", key, IfNoneMatch="*", ChecksumCRC32=text)
        self._pacer.wait()
        headers = {"If-None-Match": "*", "x-amz-checksum-crc32": text}
        reply = self._noted(self._pool.put(url, headers, views))
        if reply.status == 412:
            return False
        if not 200 <= reply.status < 300:
            self._refuse(reply, doing)
        return True

    def _put_parts(self, key: str, views: Sequence[memoryview], doing: str) -> bool:
        """Store in several requests that take effect together; False if the name is taken."""
        bucket = self._where.bucket
        with self._calling(doing):
            upload = self._client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
        try:
            parts = []
            for number, part in enumerate(_split(views, PART_BYTES), start=1):
                url = self._sign("upload_part", key, UploadId=upload, PartNumber=number)
                self._pacer.wait()
                reply = self._noted(self._pool.put(url, {}, part))
                if not 200 <= reply.status < 300:
                    self._refuse(reply, doing)
                parts.append({"PartNumber": number, "ETag": reply.headers.get("etag", "")})
            with self._calling(doing):
                self._client.complete_multipart_upload(
                    Bucket=bucket,
                    Key=key,
                    UploadId=upload,
                    IfNoneMatch="*",
                    MultipartUpload={"Parts": parts},
                )
        except BaseException as error:
            # Parts of an upload that nobody completes are paid for until somebody removes them.
            with contextlib.suppress(BackendError), self._calling("give an upload up"):
                self._client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload)
            if isinstance(error, ObjectExists):
                return False
            raise
        return True

    def _has_length(self, kind: ObjectKind, name: str, size_bytes: int) -> bool:
        try:
            return self.stat(kind, name).size_bytes == size_bytes
        except ObjectNotFound:
            return False

    def _is_there(
        self, kind: ObjectKind, name: str, views: Sequence[memoryview], size_bytes: int
    ) -> bool:
        """Whether the object is what we wanted to store; a lost reply looks like a taken name."""
        try:
            if self.stat(kind, name).size_bytes != size_bytes:
                return False
            return kind in CONTENT_NAMED or self._has_bytes(kind, name, views)
        except ObjectNotFound as error:
            raise TransientBackendError(
                f"{object_text(kind, name)} was there and went away"
            ) from error

    def _has_bytes(self, kind: ObjectKind, name: str, views: Sequence[memoryview]) -> bool:
        offset = 0
        for view in views:
            for start in range(0, view.nbytes, _COMPARED_BYTES):
                ours = bytes(view[start : start + _COMPARED_BYTES])
                theirs = bytearray(len(ours))
                self.get_range(kind, name, offset, memoryview(theirs))
                if theirs != ours:
                    return False
                offset += len(ours)
        return True

    def _key(self, kind: ObjectKind, name: str) -> str:
        return self._where.prefix + layout.key_of(kind, name)

    def _url_to_read(self, key: str) -> str:
        """A signed URL, used for a while: signing takes half a millisecond and holds the GIL."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            until_s, url = self._urls.get(key, (0.0, ""))
        if now_s < until_s:
            return url
        url = self._sign("get_object", key)
        with self._lock:
            self._urls[key] = (now_s + _URL_REUSED_S, url)
            self._urls.move_to_end(key)
            while len(self._urls) > _URLS_MAX:
                self._urls.popitem(last=False)
        return url

    def _sign(self, operation: str, key: str, **more: object) -> str:
        """Sign a URL; botocore renews credentials that are about to expire when it signs."""
        with self._calling("sign a request", paced=False):
            url: str = self._client.generate_presigned_url(
                operation,
                Params={"Bucket": self._where.bucket, "Key": key, **more},
                ExpiresIn=_URL_VALID_S,
            )
            return url

    def _noted(self, reply: Reply) -> Reply:
        """Tell the pacer how the server is."""
        if reply.status in {429, 503} or (reply.status >= 400 and _code(reply) in _SLOW_DOWN):
            self._pacer.slow_down()
        else:
            self._pacer.answered()
        return reply

    def _refuse(self, reply: Reply, doing: str) -> NoReturn:
        code = _code(reply)
        says = f"{doing}: {self._where.url()} says {code or f'status {reply.status}'}"
        raise _error_of(code, reply.status, says)

    @contextlib.contextmanager
    def _calling(self, doing: str, *, paced: bool = True) -> Iterator[None]:
        """Make a call of botocore, at the common pace, and translate its errors."""
        if paced:
            self._pacer.wait()
        try:
            yield
        except botocore.exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            self._noted(Reply(status, {}, b"<Code>%s</Code>" % code.encode("ascii", "replace")))
            says = f"{doing}: {self._where.url()} says {code}"
            raise _error_of(code, status, says) from error
        except _CREDENTIAL_ERRORS as error:
            raise AccessDenied(f"{doing}: {error}", next_step=_CREDENTIALS_STEP) from error
        except botocore.exceptions.SSLError as error:
            raise BackendError(
                f"{doing}: {error}",
                next_step="name the file of the authority's certificate: ca=FILE in the URL",
            ) from error
        except (botocore.exceptions.BotoCoreError, OSError) as error:
            raise TransientBackendError(f"{doing}: {error}") from error
        else:
            if paced:
                self._pacer.answered()

    def _require_writable(self, doing: str) -> None:
        if self._readonly:
            raise AccessDenied(
                f"{doing}: {self._where.url()} is open for reading only",
                next_step="open it for writing",
            )


# The descriptions of the service, which take longer to read than a small store. Thread-safe.
_MODELS = botocore.loaders.create_loader()

_CREDENTIAL_ERRORS = (
    botocore.exceptions.NoCredentialsError,
    botocore.exceptions.PartialCredentialsError,
    botocore.exceptions.CredentialRetrievalError,
    botocore.exceptions.TokenRetrievalError,
)


def _connect(location: S3Location, timeouts: Timeouts) -> tuple[Any, ssl.SSLContext | None]:
    """Make a client and what the data connections need to trust the same servers, if they do."""
    addressing = location.addressing
    if addressing == "auto" and location.endpoint:
        addressing = "path"
    config = botocore.config.Config(
        signature_version="s3v4",
        connect_timeout=timeouts.connect_s,
        read_timeout=timeouts.silence_s,
        max_pool_connections=2 * READERS_IN_PARALLEL,
        # Trying again is the business of the wrapper, which knows what may be repeated.
        retries={"total_max_attempts": 1},
        s3={"addressing_style": addressing},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        session = botocore.session.Session(profile=location.profile)
        session.register_component("data_loader", _MODELS)
        # The variable and the setting by which AWS's own programs name a private authority.
        ca = location.ca or session.get_config_variable("ca_bundle")
        # Reading all authorities of the system takes longer than all else here.
        is_plain = (location.endpoint or "").startswith("http://") and not ca
        tls = None if is_plain else ssl.create_default_context(cafile=ca)
        client = session.create_client(
            "s3",
            endpoint_url=location.endpoint,
            region_name=location.region or session.get_config_variable("region") or "us-east-1",
            verify=ca,
            config=config,
        )
    except (botocore.exceptions.BotoCoreError, ValueError, OSError) as error:
        raise UsageError(f"{location.url()}: {error}") from error
    return client, tls


def _split(views: Sequence[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """Divide pieces into runs of `part_bytes`, the last one shorter."""
    part: list[memoryview] = []
    room = part_bytes
    for view in views:
        rest = view
        while rest.nbytes:
            part.append(rest[:room])
            rest, room = rest[room:], room - part[-1].nbytes
            if not room:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


def _code(reply: Reply) -> str:
    """The code in an error document; empty if there is none."""
    found = _CODE.search(reply.body)
    return found[1].decode("ascii") if found else ""


def _error_of(code: str, status: int, says: str) -> SnapError:
    """Translate what a server says into one of ours."""
    if code == "NoSuchBucket":
        return StoreNotFound(says, next_step="create the bucket, or check the URL")
    if code in _FULL_CODES or status == 507:
        return OutOfSpace(says, next_step="make room or raise the quota, then run it again")
    if code in _TRANSIENT_CODES or status in _TRANSIENT_STATUS:
        return TransientBackendError(says)
    if status in {401, 403}:
        step = _DENIED_STEPS.get(code, "check what the credentials may do in this bucket")
        return AccessDenied(says, next_step=step)
    by_status = {404: ObjectNotFound, 412: ObjectExists, 501: CapabilityMissing}
    return by_status.get(status, BackendError)(says)
