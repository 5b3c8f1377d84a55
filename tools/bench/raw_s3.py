"""What this machine and this server can do without any store: plain files by ranged requests.

    raw_s3.py put|get ENDPOINT BUCKET PREFIX DIRECTORY

`put` sends every file in parts of 64 MiB, four at once; `get` fetches every file in ranges of
8 MiB, four at once (more are slower on two cores), into buffers that are used again, and writes
them; each thread has a share of neighbouring ranges, since several writers of one file wait for one
another. Prints JSON.
"""

import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from os import pread, pwrite
from pathlib import Path
from typing import Any

import boto3
import botocore.config

from snapstore.backend.http_pool import HttpPool
from snapstore.clock import SystemClock

PART_BYTES = 64 << 20
RANGE_BYTES = 8 << 20
PUTTERS, GETTERS = 4, 4
URL_S = 3600


class Raw:
    """Plain files in a bucket."""

    def __init__(self, endpoint: str, bucket: str, prefix: str) -> None:
        config = botocore.config.Config(s3={"addressing_style": "path"}, signature_version="s3v4")
        self.client: Any = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", config=config
        )
        self.bucket, self.prefix = bucket, prefix
        self.pool = HttpPool(SystemClock())

    def put(self, directory: Path) -> int:
        """Send all files; return their bytes."""
        jobs: list[Callable[[], object]] = []
        uploads = []
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            key = f"{self.prefix}/{path.relative_to(directory)}"
            size = path.stat().st_size
            if size <= PART_BYTES:
                jobs.append(partial(self._whole, path, key))
                continue
            target = {"Bucket": self.bucket, "Key": key}
            upload = self.client.create_multipart_upload(**target)["UploadId"]
            count = -(-size // PART_BYTES)
            tags: list[str] = [""] * count
            uploads.append((target, upload, tags))
            jobs += [
                partial(self._part, path, key, upload, tags, number) for number in range(count)
            ]
        in_threads(PUTTERS, jobs)
        for target, upload, tags in uploads:
            parts = [{"PartNumber": number + 1, "ETag": tag} for number, tag in enumerate(tags)]
            self.client.complete_multipart_upload(
                **target, UploadId=upload, MultipartUpload={"Parts": parts}
            )
        return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

    def get(self, directory: Path) -> int:
        """Fetch all files; return their bytes."""
        buffers = threading.local()
        jobs: list[Callable[[], object]] = []
        total = 0
        for page in self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=f"{self.prefix}/"
        ):
            for item in page.get("Contents", ()):
                path = directory / item["Key"].removeprefix(f"{self.prefix}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                fd = open(path, "wb", buffering=0)  # noqa: SIM115, PTH123 - all stay open
                url = self._sign("get_object", item["Key"])
                total += item["Size"]
                for offset in range(0, item["Size"], RANGE_BYTES):
                    length = min(RANGE_BYTES, item["Size"] - offset)
                    jobs.append(partial(self._range, buffers, fd, url, offset, length))
        share = -(-len(jobs) // GETTERS)
        shares = [jobs[first : first + share] for first in range(0, len(jobs), share)]
        in_threads(GETTERS, [partial(in_turn, one) for one in shares])
        return total

    def _range(self, buffers: Any, file: Any, url: str, offset: int, length: int) -> None:  # noqa: ANN401
        if not hasattr(buffers, "view"):
            buffers.view = memoryview(bytearray(RANGE_BYTES))
        into = buffers.view[:length]
        reply = self.pool.get(url, {"Range": f"bytes={offset}-{offset + length - 1}"}, into)
        if not reply.received:
            raise RuntimeError(f"GET answered {reply.status}")
        done = 0
        while done < length:
            done += pwrite(file.fileno(), into[done:], offset + done)

    def _whole(self, path: Path, key: str) -> None:
        self._put("put_object", key, path.read_bytes())

    def _part(self, path: Path, key: str, upload: str, tags: list[str], number: int) -> None:
        with path.open("rb") as file:
            data = pread(file.fileno(), PART_BYTES, number * PART_BYTES)
        more = {"UploadId": upload, "PartNumber": number + 1}
        tags[number] = self._put("upload_part", key, data, **more)

    def _put(self, operation: str, key: str, data: bytes, **more: object) -> str:
        reply = self.pool.put(self._sign(operation, key, **more), {}, [memoryview(data)])
        if reply.status != 200:
            raise RuntimeError(f"PUT answered {reply.status}: {reply.body[:200]!r}")
        return reply.headers.get("etag", "")

    def _sign(self, operation: str, key: str, **more: object) -> str:
        params = {"Bucket": self.bucket, "Key": key, **more}
        url: str = self.client.generate_presigned_url(operation, Params=params, ExpiresIn=URL_S)
        return url


def in_threads(count: int, jobs: Iterable[Callable[[], object]]) -> None:
    """Run all jobs; the first error ends the program."""
    with ThreadPoolExecutor(count) as executor:
        for future in [executor.submit(job) for job in jobs]:
            future.result()


def in_turn(jobs: Iterable[Callable[[], object]]) -> None:
    """Run jobs one after the other."""
    for job in jobs:
        job()


def main() -> None:
    """Do one direction and print what it took."""
    verb, endpoint, bucket, prefix, directory = sys.argv[1:]
    raw = Raw(endpoint, bucket, prefix)
    started_s = time.perf_counter()
    moved = (raw.put if verb == "put" else raw.get)(Path(directory))
    wall_s = time.perf_counter() - started_s
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    print(json.dumps({"bytes": moved, "wall_s": wall_s, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
