"""The programs that the S3 benchmark compares with, each as commands against one bucket.

Only names, options and versions; nothing is run here. All get the same credentials by the usual
variables, path-style addresses, and, where they have it, as many requests at once as snapstore.
"""

from dataclasses import dataclass
from pathlib import Path

from tools.bench.measure import Command, capture, first_line
from tools.bench.peers import Installed, Peer, ResticProgram, Tool, slug

PARALLEL = 8


@dataclass(frozen=True)
class Place:
    """A bucket of a running server, and a directory for what a client keeps."""

    endpoint: str
    bucket: str
    state: Path


S3Peer = Peer[Place]


@dataclass(frozen=True)
class Snapstore:
    """This repository's program, every setting at its default."""

    program: Path
    name: str = "snapstore"

    def missing(self) -> str | None:
        """Say why it cannot be measured here; None when it can."""
        return None if self.program.exists() else f"{self.program} is absent; run make setup"

    def version(self) -> str:
        """Return the version of the program."""
        return f"snapstore {first_line(capture(str(self.program), '--version'))}"

    def init(self, place: Place) -> Command | None:
        """Return the making of a store."""
        return self._command(place, "init")

    def push(self, source: Path, place: Place, ref: str) -> Command:
        """Return a push."""
        return self._command(place, "push", str(source), ref)

    def restore(self, ref: str, place: Place, target: Path) -> Command:
        """Return a pull."""
        return self._command(place, "pull", ref, str(target))

    def _command(self, place: Place, verb: str, *arguments: str) -> Command:
        url = f"s3://{place.bucket}/store?endpoint={place.endpoint}"
        return Command((str(self.program), verb, *arguments, "--store", url, "--quiet"))


@dataclass(frozen=True)
class Rclone(Installed):
    """rclone copy: plain files, tuned as its users do for large ones."""

    name: str = "rclone"

    def version(self) -> str:
        """Return the version of the program."""
        return first_line(capture(self.tool.path, "version"))

    def init(self, place: Place) -> None:
        """Return nothing: the store is the bucket."""
        del place

    def push(self, source: Path, place: Place, ref: str) -> Command:
        """Return a copy into the bucket."""
        return self._command(place, str(source), f":s3:{place.bucket}/{slug(ref)}")

    def restore(self, ref: str, place: Place, target: Path) -> Command:
        """Return a copy out of the bucket."""
        return self._command(place, f":s3:{place.bucket}/{slug(ref)}", str(target))

    def _command(self, place: Place, source: str, target: str) -> Command:
        options = (
            "--config=/dev/null",
            "--s3-provider=Other",
            "--s3-env-auth",
            f"--s3-endpoint={place.endpoint}",
            "--s3-chunk-size=64M",
            f"--s3-upload-concurrency={PARALLEL // 2}",
            f"--transfers={PARALLEL // 2}",
            f"--multi-thread-streams={PARALLEL // 2}",
            "--s3-disable-checksum",
            "--ignore-checksum",
        )
        return Command((self.tool.path, "copy", source, target, *options))


@dataclass(frozen=True)
class S5cmd(Installed):
    """s5cmd cp: plain files, in parallel parts."""

    name: str = "s5cmd"

    def version(self) -> str:
        """Return the version of the program."""
        return f"s5cmd {first_line(capture(self.tool.path, 'version'))}"

    def init(self, place: Place) -> None:
        """Return nothing: the store is the bucket."""
        del place

    def push(self, source: Path, place: Place, ref: str) -> Command:
        """Return a copy into the bucket."""
        return self._command(place, f"{source}/", f"s3://{place.bucket}/{slug(ref)}/")

    def restore(self, ref: str, place: Place, target: Path) -> Command:
        """Return a copy out of the bucket."""
        return self._command(place, f"s3://{place.bucket}/{slug(ref)}/*", f"{target}/")

    def _command(self, place: Place, source: str, target: str) -> Command:
        parts = ("--concurrency", str(PARALLEL), "--part-size", "64")
        return Command(
            (self.tool.path, "--endpoint-url", place.endpoint, "cp", *parts, source, target)
        )


@dataclass(frozen=True)
class ResticS3(ResticProgram):
    """restic: as in the local benchmark, with as many connections as the others."""

    def init(self, place: Place) -> Command | None:
        """Return what makes a repository."""
        return self.init_at(self._where(place))

    def push(self, source: Path, place: Place, ref: str) -> Command:
        """Return a backup."""
        return self.push_to(self._where(place), source, ref)

    def restore(self, ref: str, place: Place, target: Path) -> Command:
        """Return a restore to a new directory."""
        return self.restore_from(self._where(place), ref, target)

    def _where(self, place: Place) -> tuple[str, ...]:
        repository = f"s3:{place.endpoint}/{place.bucket}"
        state = ("--cache-dir", str(place.state))
        return ("--repo", repository, *state, "-o", f"s3.connections={PARALLEL}")


def all_s3_peers(prefix: Path, program: Path) -> list[S3Peer]:
    """Return all of them, snapstore first."""
    return [
        Snapstore(program),
        Rclone(Tool("rclone", prefix)),
        ResticS3(Tool("restic", prefix)),
        S5cmd(Tool("s5cmd", prefix)),
    ]
