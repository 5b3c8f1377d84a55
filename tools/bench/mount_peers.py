"""Mounts of plain S3 objects by others: rclone, s3fs and JuiceFS, as far as they can be had.

rclone and juicefs are looked for where `install_peers.sh` puts programs, and on the path; s3fs is
Debian's. Each is set up as its users do for large files, without a cache of its own on disk that
would outlive a round.
"""

import contextlib
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from tools import seaweed
from tools.bench.measure import CACHE, BenchError, Report

__all__ = ["MountPeer", "find_peers"]

READY_S = 60.0
THREADS = "8"


def _find(name: str) -> Path | None:
    for path in (CACHE / "bin" / name, CACHE / "venv" / "bin" / name):
        if path.exists():
            return path
    on_path = shutil.which(name)
    return Path(on_path) if on_path else None


class MountPeer(ABC):
    """A program that mounts the plain file of a bucket."""

    name: str

    def __init__(self, program: Path, folder: Path, server: seaweed.S3Server, bucket: str) -> None:
        self._program = program
        self._folder = folder / self.name
        self._folder.mkdir()
        self._server = server
        self._bucket = bucket

    def prepare(self, source: Path) -> None:
        """Do what is done once, such as storing the file in a format of its own."""
        del source  # It is in the bucket as it is.

    @abstractmethod
    def command(self, directory: Path) -> list[str]:
        """The program and its arguments; it stays in the foreground."""

    def file_in(self, directory: Path, source: Path) -> Path:
        """Where the file is."""
        return directory / source.name

    @contextlib.contextmanager
    def mounted(self, source: Path) -> Iterator[Path]:
        """Mount while the block runs; gives the path of the file."""
        directory = self._folder / "mount"
        directory.mkdir(exist_ok=True)
        log = (self._folder / "log").open("ab")
        with log, subprocess.Popen(self.command(directory), stdout=log, stderr=log) as process:  # noqa: S603
            try:
                path = self.file_in(directory, source)
                end_s = time.monotonic() + READY_S
                while not path.exists():
                    if process.poll() is not None or time.monotonic() > end_s:
                        raise BenchError(f"{self.name} did not mount: see {log.name}")
                    time.sleep(0.05)
                yield path
            finally:
                subprocess.run(["umount", "--lazy", str(directory)], check=False)  # noqa: S603, S607
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()


class RcloneMount(MountPeer):
    """`rclone mount`."""

    name = "rclone"

    @override
    def command(self, directory: Path) -> list[str]:
        settings = self._folder / "rclone.conf"
        settings.write_text(
            f"[s3]\ntype = s3\nprovider = SeaweedFS\nendpoint = {self._server.endpoint}\n"
            f"access_key_id = {seaweed.ACCESS_KEY}\nsecret_access_key = {seaweed.SECRET_KEY}\n"
        )
        return [
            *(str(self._program), "mount", f"s3:{self._bucket}/plain", str(directory)),
            *("--config", str(settings), "--read-only", "--vfs-read-chunk-streams", THREADS),
            *("--vfs-read-chunk-size", "8M", "--buffer-size", "64M"),
        ]


class S3fsMount(MountPeer):
    """`s3fs`."""

    name = "s3fs"

    @override
    def command(self, directory: Path) -> list[str]:
        secret = self._folder / "secret"
        secret.write_text(f"{seaweed.ACCESS_KEY}:{seaweed.SECRET_KEY}\n")
        secret.chmod(0o600)
        return [
            *(str(self._program), f"{self._bucket}:/plain", str(directory), "-f"),
            *("-o", f"passwd_file={secret},url={self._server.endpoint},use_path_request_style"),
            *("-o", f"ro,parallel_count={THREADS},multipart_size=16"),
        ]


class JuiceFsMount(MountPeer):
    """`juicefs mount`, whose data has to be stored through it; the names are in SQLite."""

    name = "juicefs"

    @property
    def _names(self) -> str:
        return f"sqlite3://{self._folder / 'names.db'}"

    @override
    def prepare(self, source: Path) -> None:
        bucket = f"{self._server.endpoint}/{self._bucket}"
        keys = ["--access-key", seaweed.ACCESS_KEY, "--secret-key", seaweed.SECRET_KEY]
        where = ["--storage", "s3", "--bucket", bucket, *keys]
        self._run("format", self._names, "juice", "--trash-days", "0", *where)
        with self.mounted_empty() as directory:
            shutil.copy(source, directory / source.name)
            os.sync()

    @contextlib.contextmanager
    def mounted_empty(self) -> Iterator[Path]:
        """Mount to write the file."""
        directory = self._folder / "mount"
        directory.mkdir(exist_ok=True)
        self._run("mount", "--background", *self._options(), self._names, str(directory))
        try:
            yield directory
        finally:
            self._run("umount", str(directory))

    @override
    def command(self, directory: Path) -> list[str]:
        arguments = ["mount", "--read-only", *self._options(), self._names, str(directory)]
        return [str(self._program), *arguments]

    def _options(self) -> list[str]:
        # Nothing on disk: else only the first round would read from S3.
        return ["--no-usage-report", "--cache-size", "0", "--max-downloads", "50"]

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(  # noqa: S603
            [str(self._program), *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise BenchError(f"juicefs {arguments[0]}: {done.stderr[-500:]}")


def find_peers(
    report: Report, folder: Path, server: seaweed.S3Server, bucket: str, source: Path
) -> list[MountPeer]:
    """Find those that are here and work; what is not is noted in the report."""
    found: list[MountPeer] = []
    for kind in (RcloneMount, S3fsMount, JuiceFsMount):
        program = _find(kind.name)
        if program is None:
            report.missing[kind.name] = "not installed"
            continue
        try:
            peer = kind(program, folder, server, bucket)
            peer.prepare(source)
            with peer.mounted(source):
                pass
        except (BenchError, OSError) as error:
            report.missing[kind.name] = str(error)
            continue
        found.append(peer)
        report.versions[kind.name] = _version(program)
    return found


def _version(program: Path) -> str:
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)  # noqa: S603
    return (done.stdout or done.stderr).splitlines()[0]
