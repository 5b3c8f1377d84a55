"""The programs that snapstore is compared with, and snapstore itself, behind one small protocol.

A peer does not run anything: it returns commands, which `measure.run_measured` runs and measures.
Each is used at its best-known fair setting; every class says which, and why. They differ in what
they promise: snapstore, restic and borg flush what they store before they return, the others leave
it to the kernel. The benchmarks therefore report the time of the sync after each step beside it.

`install_peers.sh` puts the programs into `.cache/bench`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from tools.bench.measure import CACHE, ROOT, Command, capture, first_line

BENCH = Path(__file__).resolve().parent

PlaceT_contra = TypeVar("PlaceT_contra", contravariant=True)


class Peer(Protocol[PlaceT_contra]):
    """A program that stores directories under names and gives them back.

    What a place for a store is, a directory or a bucket, is the benchmark's.
    """

    @property
    def name(self) -> str:
        """The name of its row."""
        ...

    def missing(self) -> str | None:
        """Say why it cannot be measured here; None when it can."""
        ...

    def version(self) -> str:
        """Return the version of the program."""
        ...

    def init(self, store: PlaceT_contra, /) -> Command | None:
        """Return what makes a store in an empty place, if anything has to."""
        ...

    def push(self, source: Path, store: PlaceT_contra, ref: str, /) -> Command:
        """Return what stores a directory under a name."""
        ...

    def restore(self, ref: str, store: PlaceT_contra, target: Path, /) -> Command:
        """Prepare, untimed, and return what writes a stored directory to a new one."""
        ...


def client_state(store: Path) -> Path:
    """Return the place of what a program keeps at the client: caches, locks, logs.

    It lives and dies with the store, so that every round starts cold, and it is no part of the
    stored bytes.
    """
    return store.with_name(store.name + "-client")


def slug(ref: str) -> str:
    """Return a name as a file name that every peer accepts."""
    return ref.replace("/", "-").replace(":", "-")


@dataclass(frozen=True)
class Tool:
    """A program that install_peers.sh installs."""

    name: str
    prefix: Path

    @property
    def path(self) -> str:
        """Where the program is."""
        return str(self.prefix / "bin" / self.name)

    def missing(self) -> str | None:
        """Say why the program is not there; None when it is."""
        reason = self.prefix / "missing" / self.name
        if reason.exists():
            return " / ".join(reason.read_text().split("\n")).strip(" /")
        if not Path(self.path).exists():
            return f"{self.path} is absent; run tools/bench/install_peers.sh"
        return None

    def package_version(self) -> str:
        """Return the version of the Debian package, which some programs do not tell themselves."""
        packages = self.prefix / "packages.txt"
        if packages.exists():
            for line in packages.read_text().splitlines():
                name, _, version = line.partition("\t")
                if name == self.name:
                    return version
        return "?"


@dataclass(frozen=True)
class Installed:
    """A peer that is one program of install_peers.sh."""

    tool: Tool

    def missing(self) -> str | None:
        """Say why it cannot be measured here; None when it can."""
        return self.tool.missing()


@dataclass(frozen=True)
class ResticProgram(Installed):
    """restic, wherever its repository is: encrypted, as it always is; compression auto.

    `--no-scan` saves the pass that only feeds a progress bar. `--sparse` leaves holes for zeros on
    restore, which is faster here than the default and is what snapstore does. The key derivation
    costs about half a second a command and cannot be turned off.
    """

    name: str = "restic"

    def version(self) -> str:
        """Return the version of the program."""
        return first_line(capture(self.tool.path, "version"))

    def init_at(self, where: Sequence[str]) -> Command:
        """Return what makes a repository with a trivial password."""
        return self._command(where, "init")

    def push_to(self, where: Sequence[str], source: Path, ref: str) -> Command:
        """Return a backup of `.`, so that the snapshot holds no absolute path."""
        return self._command(where, "backup", "--no-scan", "--tag", slug(ref), ".", cwd=source)

    def restore_from(self, where: Sequence[str], ref: str, target: Path) -> Command:
        """Return a restore of the snapshot that has this tag."""
        options = ("--tag", slug(ref), "--sparse", "--target", str(target))
        return self._command(where, "restore", "latest", *options)

    def _command(
        self, where: Sequence[str], verb: str, *options: str, cwd: Path | None = None
    ) -> Command:
        program = ("env", "RESTIC_PASSWORD=x", self.tool.path)
        return Command((*program, verb, *where, "--quiet", *options), cwd)


@dataclass(frozen=True)
class Restic(ResticProgram):
    """restic in a directory; default packs and connections."""

    def init(self, store: Path) -> Command | None:
        """Return what makes a repository."""
        return self.init_at(self._where(store))

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return a backup."""
        return self.push_to(self._where(store), source, ref)

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Return a restore to a new directory."""
        return self.restore_from(self._where(store), ref, target)

    def _where(self, store: Path) -> tuple[str, ...]:
        return ("--repo", str(store), "--cache-dir", str(client_state(store)))


@dataclass(frozen=True)
class Borg(Installed):
    """borg 1.4: no encryption; compression lz4, the default, or as its row says.

    `extract --sparse` leaves holes for zeros, which is no slower than the default here. The state
    of the client is kept beside the store, so that the second push has the caches of a user.
    """

    compression: str = "lz4"

    @property
    def name(self) -> str:
        """The name of its row."""
        setting = self.compression.replace(",", "-")
        return "borg" if setting == "lz4" else f"borg {setting}"

    def version(self) -> str:
        """Return the version of the program."""
        return first_line(capture(self.tool.path, "--version"))

    def init(self, store: Path) -> Command | None:
        """Return what makes a repository without encryption."""
        return self._command(store, "init", "--encryption", "none", str(store))

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return the creation of an archive of `.`."""
        compression = ("--compression", self.compression)
        return self._command(
            store, "create", *compression, f"{store}::{slug(ref)}", ".", cwd=source
        )

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Make the directory, since borg extracts into the current one; return the extraction."""
        target.mkdir()
        return self._command(store, "extract", "--sparse", f"{store}::{slug(ref)}", cwd=target)

    def _command(self, store: Path, *options: str, cwd: Path | None = None) -> Command:
        state = f"BORG_BASE_DIR={client_state(store)}"
        known = "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK=yes"
        return Command(("env", state, known, self.tool.path, *options), cwd)


@dataclass(frozen=True)
class Casync(Installed):
    """casync: every setting at its default (64 KiB chunks on average, zstd, holes for zeros)."""

    name: str = "casync"

    def version(self) -> str:
        """Return the version of the package; the program says `2` only."""
        return f"casync {self.tool.package_version()}"

    def init(self, store: Path) -> None:
        """Return nothing: the first push makes the store."""
        del store

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return the making of an index and its chunks."""
        index = str(store / f"{slug(ref)}.caidx")
        chunks = f"--store={store / 'chunks'}"
        return Command((self.tool.path, "make", chunks, index, str(source)))

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Return the extraction of an index, without any seed."""
        index = str(store / f"{slug(ref)}.caidx")
        chunks = f"--store={store / 'chunks'}"
        return Command((self.tool.path, "extract", chunks, index, str(target)))


@dataclass(frozen=True)
class Desync(Installed):
    """desync: casync's format from another hand, in parallel; every setting at its default.

    One pass with `tar -i`, which needs no intermediate archive.
    """

    name: str = "desync"

    def version(self) -> str:
        """Return the version of the package; the program tells none."""
        return f"desync {self.tool.package_version()}"

    def init(self, store: Path) -> Command | None:
        """Return what makes the directory of the chunks, which desync expects to exist."""
        return Command(("mkdir", str(store / "chunks")))

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return the making of an index and its chunks."""
        index = str(store / f"{slug(ref)}.caidx")
        chunks = str(store / "chunks")
        return Command((self.tool.path, "tar", "-i", "-s", chunks, index, str(source)))

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Make the directory, which desync expects; return the extraction, without any seed."""
        target.mkdir()
        index = str(store / f"{slug(ref)}.caidx")
        chunks = str(store / "chunks")
        return Command((self.tool.path, "untar", "-i", "-s", chunks, index, str(target)))


@dataclass(frozen=True)
class HfXet:
    """hf-xet, the storage client of the Hugging Face hub, against a `local://` store: no network.

    All files in one commit, so that it works on them in parallel; the SHA-256 that only the hub
    wants is skipped, and so is telemetry. Its own caches are part of the directory of the store.
    """

    prefix: Path
    name: str = "hf-xet"

    @property
    def python(self) -> str:
        """The interpreter that has the package."""
        return str(self.prefix / "venv" / "bin" / "python")

    def missing(self) -> str | None:
        """Say why it cannot be measured here; None when it can."""
        reason = self.prefix / "missing" / "hf-xet"
        if reason.exists():
            return first_line(reason.read_text())
        if not Path(self.python).exists():
            return f"{self.python} is absent; run tools/bench/install_peers.sh"
        return None

    def version(self) -> str:
        """Return the version of the package."""
        code = "import importlib.metadata as m; print(m.version('hf-xet'))"
        return f"hf-xet {first_line(capture(self.python, '-c', code))}"

    def init(self, store: Path) -> None:
        """Return nothing: the first push makes the store."""
        del store

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return the upload of all files."""
        return self._command("push", store, ref, source)

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Return the download of all files."""
        return self._command("restore", store, ref, target)

    def _command(self, verb: str, store: Path, ref: str, directory: Path) -> Command:
        home = f"HF_HOME={client_state(store)}"
        client = (self.python, str(BENCH / "xet_client.py"))
        return Command(("env", home, *client, verb, str(store), slug(ref), str(directory)))


@dataclass(frozen=True)
class PlainCopy:
    """`cp -r`, without any option: what users do today on a shared volume."""

    name: str = "cp"

    def missing(self) -> str | None:
        """Say why it cannot be measured here; None when it can."""
        return None

    def version(self) -> str:
        """Return the version of coreutils."""
        return first_line(capture("cp", "--version"))

    def init(self, store: Path) -> None:
        """Return nothing: the store is a directory."""
        del store

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return a copy into the store."""
        return Command(("cp", "-r", str(source), str(store / slug(ref))))

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Return a copy out of the store."""
        return Command(("cp", "-r", str(store / slug(ref)), str(target)))


@dataclass(frozen=True)
class TarZstd(Installed):
    """`tar | zstd -1 -T0`: the fastest level that is worth its bytes, on all cores."""

    name: str = "tar+zstd -1"

    def version(self) -> str:
        """Return the versions of both programs."""
        tar, zstd = capture("tar", "--version"), capture(self.tool.path, "--version")
        return f"{first_line(tar)}; {first_line(zstd)}"

    def init(self, store: Path) -> None:
        """Return nothing: the store is a directory."""
        del store

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return the writing of one compressed archive."""
        script = 'tar -C "$1" -cf - . | "$2" -q -1 -T0 -o "$3"'
        return self._pipe(script, str(source), self.tool.path, self._archive(store, ref))

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Make the directory; return the extraction of the archive."""
        target.mkdir()
        script = '"$2" -q -d -T0 -c "$3" | tar -C "$1" -xf -'
        return self._pipe(script, str(target), self.tool.path, self._archive(store, ref))

    def _archive(self, store: Path, ref: str) -> str:
        return str(store / f"{slug(ref)}.tar.zst")

    def _pipe(self, script: str, *arguments: str) -> Command:
        return Command(("bash", "-o", "pipefail", "-c", script, "pipe", *arguments))


@dataclass(frozen=True)
class Snapstore:
    """snapstore through its command line, as a user runs it; all rows at the default setting.

    `options` go to push: the row of `--compression max` is a second instance.
    """

    executable: Path
    name: str = "snapstore"
    options: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Say why it cannot be measured here; None when it can."""
        if not self.executable.exists():
            return f"{self.executable} is absent; install the project: pip install -e ."
        return None

    def version(self) -> str:
        """Return the version of the package."""
        code = "import importlib.metadata as m; print(m.version('snapstore'))"
        python = self.executable.with_name("python")
        return f"snapstore {first_line(capture(str(python), '-c', code))}"

    def init(self, store: Path) -> Command | None:
        """Return what makes a store."""
        return self._command("init", store)

    def push(self, source: Path, store: Path, ref: str) -> Command:
        """Return a push of a directory."""
        return self._command("push", store, str(source), ref, *self.options)

    def restore(self, ref: str, store: Path, target: Path) -> Command:
        """Return a pull to a new directory."""
        return self._command("pull", store, ref, str(target))

    def _command(self, verb: str, store: Path, *arguments: str) -> Command:
        where = ("--store", f"file://{store}", "--json", "--quiet")
        return Command((str(self.executable), verb, *arguments, *where))


def all_peers(
    prefix: Path = CACHE, snapstore: Path = ROOT / ".venv/bin/snapstore"
) -> list[Peer[Path]]:
    """Return every row of the comparison, present or not, in the order of the report."""
    maximal = ("--compression", "max")
    return [
        Snapstore(snapstore),
        Snapstore(snapstore, "snapstore max", maximal),
        Restic(Tool("restic", prefix)),
        Borg(Tool("borg", prefix)),
        Borg(Tool("borg", prefix), "zstd,1"),
        Casync(Tool("casync", prefix)),
        Desync(Tool("desync", prefix)),
        HfXet(prefix),
        TarZstd(Tool("zstd", prefix)),
        PlainCopy(),
    ]


def main(prefixes: Sequence[str]) -> None:
    """Print what is installed, and what is missing and why, as JSON."""
    peers = all_peers(Path(prefixes[0])) if prefixes else all_peers()
    found = {peer.name: peer.missing() or peer.version() for peer in peers}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
