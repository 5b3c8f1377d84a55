"""Settings of the agent: the only module that reads them, from one file and the environment.

Everything is read and checked at once, before anything is done. A wrong value names its key and
what it may be. The environment comes before the file, so that one command can differ.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

import msgspec

import snapstore
from snapagent.errors import ConfigInvalid
from snapstore import SnapError
from snapstore.errors import UsageError
from snapstore.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CONFIG_VARIABLE",
    "CRIU_VARIABLE",
    "RUN_VARIABLE",
    "SOCKET_VARIABLE",
    "STATE_VARIABLE",
    "AgentConfig",
    "Rule",
    "Settings",
    "check_store",
    "load_settings",
    "notify_socket",
    "settings_table",
    "unknown_variables",
]

CONFIG_VARIABLE: Final = "SNAPAGENT_CONFIG"
CRIU_VARIABLE: Final = "SNAPAGENT_CRIU"
RUN_VARIABLE: Final = "SNAPAGENT_RUN_DIR"
STATE_VARIABLE: Final = "SNAPAGENT_STATE_DIR"
SOCKET_VARIABLE: Final = "SNAPAGENT_SOCKET"
BROKER_VARIABLE: Final = "SNAPAGENT_MEMORY_SOCKET"
"""What workloads are told by: `snapagent.workload` reads the same."""
STORE_VARIABLE: Final = "SNAPSTORE_URL"
NODE_CACHE_VARIABLE: Final = "SNAPSTORE_CACHE"

CONFIG_PATH: Final = Path("/etc/snapagent.toml")
CONFIG_BYTES_MAX: Final = 1 << 20

_CHECKOUT_CRIU = Path(__file__).parent.parent / "tools" / "criu" / "criu"
_BROKER_SIZES = ("broker_bytes", "broker_process_bytes", "broker_gpu_bytes")
_GPU_SIZES = ("gpu_pinned_bytes", "gpu_registered_bytes")
_SOCKET_PATH_BYTES_MAX = 107
"""`sun_path`, less its NUL."""
_SOCKET_NAME = "agent.sock"
_BROKER_NAME = "memory.sock"
_HELD_SUFFIX = ".held"
"""The longest socket beside that of the broker."""

Action = Literal["capture", "restore", "read"]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Glob = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settings of one agent; immutable.

    Attributes:
        criu: The CRIU program, 4.2 or later.
        run_directory: Sockets and logs of captures and restores under way; nothing of it outlives
            them. On a file system in memory: the paths of sockets must be short.
        state_directory: What outlives them: the record that `snapagent history` shows.
        broker_socket: Where this node's memory broker is; by default beside the daemon's socket.
        readers: Processes that read memory for restores.
    """

    criu: Path
    run_directory: Path = Path("/run/snapagent")
    state_directory: Path = Path("/var/lib/snapagent")
    broker_socket: Path | None = None
    readers: int = 0

    @property
    def broker_path(self) -> Path:
        """Where this node's memory broker listens, if there is one."""
        return self.broker_socket or self.run_directory / _BROKER_NAME

    @property
    def criu_cache(self) -> Path:
        """File that keeps what CRIU said of this machine."""
        return self.state_directory / "criu.json"

    @property
    def history_file(self) -> Path:
        """The record of captures and restores."""
        return self.state_directory / "history.jsonl"

    @property
    def reasons_directory(self) -> Path:
        """What supervisors wrote whose agent was killed, until it is in the record."""
        return self.state_directory / "reasons"

    @property
    def jobs_directory(self) -> Path:
        """What the daemon has under way, so that the next one knows what was cut short."""
        return self.state_directory / "jobs"

    @classmethod
    def from_environment(cls) -> Self:
        """Take what the environment says, else the configuration file, else the usual places.

        CRIU is taken from `$SNAPAGENT_CRIU`, else from the file, else from the checkout that this
        package runs from, else from `$PATH`. Whether it is there is for preflight to tell.

        Raises:
            ConfigInvalid: A value cannot be.
        """
        return cls.from_settings(load_settings())

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """Take these settings."""
        if settings.criu:
            criu = Path(settings.criu)
        elif _CHECKOUT_CRIU.exists():
            criu = _CHECKOUT_CRIU
        else:
            criu = Path(shutil.which("criu") or "criu")
        return cls(
            criu=criu,
            run_directory=Path(settings.run_directory),
            state_directory=Path(settings.state_directory),
            broker_socket=Path(settings.broker_socket) if settings.broker_socket else None,
            readers=_readers_default() if settings.readers == "auto" else settings.readers,
        )


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rule of the policy: what some users may do with some names.

    Attributes:
        uid: Of which user; with `gid` as well, both have to fit.
        gid: Of which group, the user's own or one of the others that it is in.
        may: What.
        names: Globs of `NAME:TAG`; one without a colon is for every tag. `*` crosses slashes.
        stores: Globs of URLs, for other stores than that of the configuration. Parameters, from `?`
            on, have to fit those of the glob.
        any_process: Whether processes of other users may be captured, or their namespaces entered.
    """

    may: Annotated[tuple[Action, ...], msgspec.Meta(min_length=1, max_length=8)]
    names: Annotated[tuple[_Glob, ...], msgspec.Meta(min_length=1, max_length=256)]
    uid: _Id | None = None
    gid: _Id | None = None
    stores: Annotated[tuple[_Glob, ...], msgspec.Meta(max_length=64)] = ()
    any_process: bool = False


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every key of the configuration file, with its default. `docs/agent.md` has the table."""

    criu: Annotated[
        str, msgspec.Meta(description="The CRIU program; empty: the checkout's, else of `$PATH`")
    ] = ""
    run_directory: Annotated[
        str, msgspec.Meta(pattern="^/", description="Sockets and logs of what is under way")
    ] = "/run/snapagent"
    state_directory: Annotated[
        str, msgspec.Meta(pattern="^/", description="What stays: history, unfinished jobs")
    ] = "/var/lib/snapagent"
    store: Annotated[
        str, msgspec.Meta(description="URL of the store, unless a request names another")
    ] = ""
    memory: Annotated[
        str, msgspec.Meta(description="Budget for buffers and tables of each open store")
    ] = "1GiB"
    threads: Annotated[
        int, msgspec.Meta(ge=0, le=1024, description="Worker threads; 0: one per usable core")
    ] = 0
    readers: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=64)] | Literal["auto"],
        msgspec.Meta(
            description="Processes that read memory for restores, 0 for threads alone; `auto`: one "
            "for four cores from 8 on, 8 at most"
        ),
    ] = "auto"
    cache: Annotated[str, msgspec.Meta(description="Decoded frames that each open store keeps")] = (
        "64MiB"
    )
    node_cache: Annotated[
        str,
        msgspec.Meta(
            pattern="^(/|$)",
            description="Directory of the node's cache, which restores read through; empty: none",
        ),
    ] = ""
    integrity: Annotated[
        Literal["strong", "fast"],
        msgspec.Meta(description="What is checked of what is read, unless a request says it"),
    ] = "strong"
    stores_open: Annotated[
        int, msgspec.Meta(ge=1, le=64, description="Stores that are kept open at most")
    ] = 8
    socket: Annotated[
        str,
        msgspec.Meta(
            pattern="^(/|$)",
            description="The control socket; empty: `agent.sock` in `run_directory`",
        ),
    ] = ""
    socket_group: Annotated[
        str, msgspec.Meta(description="Group that may connect, by name or number; empty: root's")
    ] = ""
    jobs_at_once: Annotated[
        int, msgspec.Meta(ge=1, le=256, description="Captures and restores that run at once")
    ] = 8
    jobs_queued: Annotated[
        int, msgspec.Meta(ge=0, le=4096, description="Further ones that wait; more are refused")
    ] = 64
    jobs_kept: Annotated[
        int, msgspec.Meta(ge=1, le=4096, description="Ended ones that can still be looked at")
    ] = 256
    stop_s: Annotated[
        float, msgspec.Meta(ge=0, le=3600, description="Seconds that SIGTERM gives what is at work")
    ] = 30.0
    broker: Annotated[
        bool, msgspec.Meta(description="Whether the daemon lends external memory to workloads")
    ] = True
    broker_socket: Annotated[
        str,
        msgspec.Meta(
            pattern="^(/|$)",
            description="Where workloads ask for it; empty: `memory.sock` in `run_directory`",
        ),
    ] = ""
    broker_users: Annotated[
        Literal["rules", "all"],
        msgspec.Meta(description="Who may: root and whom a rule lets capture, or all users"),
    ] = "rules"
    broker_bytes: Annotated[
        str, msgspec.Meta(description="What all have together; empty: the machine's memory")
    ] = ""
    broker_process_bytes: Annotated[
        str, msgspec.Meta(description="What one process has; empty: the machine's memory")
    ] = ""
    broker_gpu_bytes: Annotated[
        str, msgspec.Meta(description="What all have together on any one GPU; empty: all of it")
    ] = ""
    broker_processes: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=65536, description="Processes that have some; of one user, a quarter of that"
        ),
    ] = 256
    broker_regions: Annotated[
        int, msgspec.Meta(ge=1, le=1 << 20, description="Pieces in all, each of them an open file")
    ] = 16384
    gpu_prepare: Annotated[
        bool,
        msgspec.Meta(
            description="Whether the daemon makes at its start what each GPU needs, which takes "
            "0.6 GB of its memory; else with the first restore"
        ),
    ] = True
    gpu_workers: Annotated[
        int,
        msgspec.Meta(ge=0, le=256, description="Threads for each GPU; 0: its share of the cores"),
    ] = 0
    gpu_pinned_bytes: Annotated[
        str,
        msgspec.Meta(description="Page-locked memory for each GPU; empty: 24 MiB for each thread"),
    ] = ""
    gpu_registered_bytes: Annotated[
        str,
        msgspec.Meta(description="Of the node's cache, page-locked for all GPUs; empty: nothing"),
    ] = ""
    gpu_check_all: Annotated[
        bool, msgspec.Meta(description="Whether the processor hashes again all that GPUs hashed")
    ] = False
    rules: Annotated[
        tuple[Rule, ...],
        msgspec.Meta(max_length=1024, description="Who may do what, see below; root may all"),
    ] = ()

    def __post_init__(self) -> None:
        for key in ("memory", "cache", *_BROKER_SIZES, *_GPU_SIZES):
            value = getattr(self, key)
            if not value and key not in {"memory", "cache"}:
                continue
            try:
                parse_bytes(value)
            except SnapError as error:
                raise ValueError(f"{error} - at `$.{key}`") from error
        self._check_paths()
        for number, rule in enumerate(self.rules):
            if rule.uid is None and rule.gid is None:
                raise ValueError(f"neither uid nor gid is given - at `$.rules[{number}]`")

    def _check_paths(self) -> None:
        for key in ("criu", "run_directory", "state_directory", "store", "socket", "broker_socket"):
            if "\0" in getattr(self, key):
                raise ValueError(f"a NUL is in it - at `$.{key}`")
        held = Path(f"{self.broker_path}{_HELD_SUFFIX}")
        if len(os.fsencode(self.socket_path)) > _SOCKET_PATH_BYTES_MAX:
            raise ValueError("too long a path for a socket - at `$.socket`")
        if len(os.fsencode(held)) > _SOCKET_PATH_BYTES_MAX:
            raise ValueError("too long a path for a socket - at `$.broker_socket`")
        if self.broker and self.socket_path in {self.broker_path, held}:
            raise ValueError("the memory broker's socket is there - at `$.socket`")

    @property
    def socket_path(self) -> Path:
        """Where the daemon listens."""
        return Path(self.socket) if self.socket else Path(self.run_directory) / _SOCKET_NAME

    @property
    def broker_path(self) -> Path:
        """Where the memory broker listens."""
        return self.agent.broker_path

    @property
    def node_cache_directory(self) -> Path | None:
        """Where the node's cache is, if there is one."""
        return Path(self.node_cache) if self.node_cache else None

    @property
    def agent(self) -> AgentConfig:
        """The part that captures and restores need."""
        return AgentConfig.from_settings(self)


_VARIABLES: Final = {
    "criu": CRIU_VARIABLE,
    "run_directory": RUN_VARIABLE,
    "state_directory": STATE_VARIABLE,
    "store": STORE_VARIABLE,
    "broker_socket": BROKER_VARIABLE,
    "node_cache": NODE_CACHE_VARIABLE,
}
"""Those that are not named after their key."""
_PREFIX: Final = "SNAPAGENT_"
_UNKNOWN_MAX: Final = 16
_SHOWN_MAX: Final = 80
_READERS_MAX: Final = 8
_READERS_CORES_MIN: Final = 8
"""On fewer, processes would take from each other what threads do."""


def _readers_default() -> int:
    """How many processes read memory for restores on this machine."""
    cores = len(os.sched_getaffinity(0))
    return min(cores // 4, _READERS_MAX) if cores >= _READERS_CORES_MIN else 0


def _variable(key: str) -> str | None:
    """Return the variable of the environment for a key; rules have none."""
    return None if key == "rules" else _VARIABLES.get(key, f"{_PREFIX}{key.upper()}")


def load_settings(path: Path | None = None) -> Settings:
    """Read the configuration file and the environment, and check all of it.

    Args:
        path: The file; by default `$SNAPAGENT_CONFIG`, else `/etc/snapagent.toml` if there is one.

    Raises:
        ConfigInvalid: The file cannot be read, or a value cannot be.
    """
    named, values = _named_file(path)
    sources = dict.fromkeys(values, str(named))
    for key in Settings.__struct_fields__:
        variable = _variable(key)
        if variable and (text := os.environ.get(variable)):
            values[key], sources[key] = text, f"${variable}"
    return _convert(values, sources, str(named))


def load_file(path: Path | None = None) -> Settings:
    """Read the configuration file alone, with what variables of the environment take the place of.

    Args:
        path: As for `load_settings`.

    Raises:
        ConfigInvalid: The file cannot be read, or a value cannot be.
    """
    named, values = _named_file(path)
    return _convert(values, dict.fromkeys(values, str(named)), str(named))


def _named_file(path: Path | None) -> tuple[Path, dict[str, object]]:
    named = path or Path(os.environ.get(CONFIG_VARIABLE) or CONFIG_PATH)
    required = path is not None or CONFIG_VARIABLE in os.environ
    return named, _read_file(named, required=required)


def check_store(settings: Settings) -> None:
    """Check the URL of the default store, without touching the store.

    Not done for every command, which may name another one: it loads what reads storages.

    Raises:
        ConfigInvalid: There can be no store at it.
    """
    if not settings.store:
        return
    try:
        snapstore.check_store_url(settings.store)
    except UsageError as error:
        raise ConfigInvalid(f"store: {error}", next_step=error.next_step) from error


def unknown_variables() -> list[str]:
    """Tell of variables of the environment that look like the agent's and are none of them."""
    known = [name for key in Settings.__struct_fields__ if (name := _variable(key))]
    known.append(CONFIG_VARIABLE)
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)
    return [
        f"there is no variable {ascii(name)[1:-1][:_SHOWN_MAX]}, "
        f"the nearest one is {difflib.get_close_matches(name, known, 1, 0)[0]}"
        for name in unknown[:_UNKNOWN_MAX]
    ]


def _read_file(path: Path, *, required: bool) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
        if len(data) > CONFIG_BYTES_MAX:
            raise ConfigInvalid(f"{path} is larger than {CONFIG_BYTES_MAX} bytes")
        return tomllib.loads(data.decode())
    except FileNotFoundError as error:
        if not required:
            return {}
        raise ConfigInvalid(f"there is no {path}", next_step="give another --config") from error
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigInvalid(
            f"{path} is no TOML: {error}", next_step="write `key = value` lines; see docs/agent.md"
        ) from error


def _convert(values: dict[str, object], sources: Mapping[str, str], path: str) -> Settings:
    # Values of the environment are text, those of the file are not: `threads = "2"` is an error.
    loose = {key: value for key, value in values.items() if sources[key].startswith("$")}
    try:
        checked = msgspec.convert(loose, Settings, strict=False)
        typed = {key: getattr(checked, key) for key in loose}
        return msgspec.convert(values | typed, Settings)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), sources, path) from error


def _invalid(said: str, sources: Mapping[str, str], path: str) -> ConfigInvalid:
    """Name the key of what was said, where it stands, and what it is for."""
    message, _, where = said.partition(" - at `$")
    where = where.rstrip("`").lstrip(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", message)
    if unknown:
        key = f"{where}.{unknown[1]}".lstrip(".")
        known = Rule if where.startswith("rules") else Settings
        return ConfigInvalid(
            f"{path}: {key}: there is no such key",
            next_step=f"use one of {', '.join(known.__struct_fields__)}",
        )
    key = re.split(r"[\[.]", where)[0]
    meaning = {name: text for name, _, _, text in settings_table()}.get(key, "")
    return ConfigInvalid(
        f"{sources.get(key, path)}: {where}: {message}",
        next_step=f"{key} means: {meaning}" if meaning else "see docs/agent.md",
    )


def settings_table() -> list[tuple[str, str, str, str]]:
    """Return of each key its name, variable, default as TOML, and meaning."""
    rows = []
    for field in msgspec.structs.fields(Settings):
        (meta,) = field.type.__metadata__
        default = "" if field.name == "rules" else msgspec.json.encode(field.default).decode()
        rows.append((field.name, _variable(field.name) or "", default, meta.description or ""))
    return rows


def notify_socket() -> str | None:
    """Return where systemd wants to be told that the daemon is ready, if it started it."""
    return os.environ.get("NOTIFY_SOCKET") or None
