"""A minimal command line for hf-xet against a store in a local directory, without any network.

    xet_client.py push STORE NAME DIR
    xet_client.py restore STORE NAME DIR

Runs in the interpreter that has hf-xet, so it imports nothing of this project. hf-xet names files
by hash only; the names are kept in STORE/names, which is what the hub's repository does for it.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

# Loaded by name: the type checker of this repository does not have the package.
hf_xet: Any = importlib.import_module("hf_xet")


def session() -> Any:  # noqa: ANN401 - the package has no types
    """Return a session that reports nothing to anybody."""
    return hf_xet.XetSession(hf_xet.XetConfig().with_config("telemetry.enabled", value=False))


def push(store: Path, name: str, source: Path) -> None:
    """Upload every file below a directory in one commit."""
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    store.mkdir(parents=True, exist_ok=True)
    with session().new_upload_commit(endpoint=f"local://{store}") as commit:
        tasks = [commit.start_upload_file(str(path), sha256=hf_xet.SKIP_SHA256) for path in paths]
    files = {}
    for path, task in zip(paths, tasks, strict=True):
        info = task.result().xet_info
        files[str(path.relative_to(source))] = [info.hash, info.file_size]
    (store / "names").mkdir(exist_ok=True)
    (store / "names" / f"{name}.json").write_text(json.dumps(files))


def restore(store: Path, name: str, target: Path) -> None:
    """Download every file of a commit in one group."""
    files = json.loads((store / "names" / f"{name}.json").read_text())
    with session().new_file_download_group(endpoint=f"local://{store}") as group:
        for relative, (digest, size) in files.items():
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            group.start_download_file(hf_xet.XetFileInfo(digest, size), str(path))


def main() -> None:
    """Do what the command line says."""
    verb, store, name, directory = sys.argv[1:]
    {"push": push, "restore": restore}[verb](Path(store), name, Path(directory))


if __name__ == "__main__":
    main()
