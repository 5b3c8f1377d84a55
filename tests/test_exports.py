"""The façade: everything public is in it, can be imported, and says what it is."""

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType

import pytest

import snapstore
from snapstore import errors

NOT_EXPORTED = {
    "Backend": "made by `open_store` and `init_store` only",
    "BytesLike": "bytes, a bytearray, or a view of them",
    "Clock": "public in `snapstore.clock`; only tests bring their own",
    "CodecSummary": "a part of `SnapshotSummary`, read through its attributes",
    "Content": "how a `NodeCache` sees a file; `SnapshotFile` makes it",
    "FileContent": "how a `NodeCache` sees a file; `SnapshotFile` makes it",
    "FileKey": "what `NodeCache.find` is asked for, by pulls; `FileContent` makes it",
    "FoundFile": "what `NodeCache.find` gives to pulls",
    "FrameCache": "made by the store, which bounds it by `StoreOptions.cache_bytes`",
    "HasContent": "a `SnapshotFile`",
    "IngestTotals": "a part of `PushResult`, read through its attributes",
    "LoadedRank": "what `Snapshot.rank` gives, read through its attributes",
    "PackerTotals": "a part of `PushResult`, read through its attributes",
    "PackId": "of a `PieceGroup`, for `SnapshotFile.open_pack`",
    "Pin": "what `NodeCache.pins` gives, read through its attributes; `Store.pin` makes it",
    "RankNumber": "a number, or the word host",
    "RankSummary": "a part of `SnapshotSummary`, read through its attributes",
    "StoredFrame": "a part of `FilePiece`, for the library",
    "RootManifest": "a part of `Snapshot`, read through its attributes",
}
"""Types that signatures of the façade mention and that are no part of it, each with the reason."""


def exported() -> list[tuple[str, object]]:
    return [(name, getattr(snapstore, name)) for name in snapstore.__all__]


def is_documented_here(thing: object) -> bool:
    return inspect.isclass(thing) or inspect.isfunction(thing)


def test_the_list_is_sorted_and_complete() -> None:
    """Nothing is public by accident: what is in the module and no submodule is in the list."""
    names = snapstore.__all__
    assert exported()  # which loads them: they are not there before
    assert len(set(names)) == len(names)
    assert names == sorted(
        names, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    public = {
        name
        for name, value in vars(snapstore).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    } - {"TYPE_CHECKING", "annotations"}
    assert public == set(names)


def test_every_name_has_a_home() -> None:
    """Names are loaded when first used, so one without a home would be missed late."""
    assert set(snapstore._HOMES) == set(snapstore.__all__)
    assert set(snapstore.__all__) <= set(dir(snapstore))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = snapstore.nothing  # type: ignore[attr-defined]


def test_everything_can_be_imported_with_a_star() -> None:
    found: dict[str, object] = {}
    exec("from snapstore import *", found)  # noqa: S102 - what users may write
    assert set(snapstore.__all__) <= set(found)


@pytest.mark.parametrize(("name", "thing"), exported(), ids=snapstore.__all__)
def test_everything_is_documented(name: str, thing: object) -> None:
    if is_documented_here(thing):
        documentation = inspect.getdoc(thing)
    else:
        documentation = documentation_of_constant(name)
    assert documentation, name
    first = documentation.splitlines()[0]
    assert first.endswith((".", "::", ":")), first
    assert len(first) <= 100


@pytest.mark.parametrize(
    ("name", "thing"), [(name, thing) for name, thing in exported() if inspect.isclass(thing)]
)
def test_every_public_method_is_documented(name: str, thing: type) -> None:
    for member, value in vars(thing).items():
        if not member.startswith("_") and (inspect.isfunction(value) or is_property(value)):
            assert inspect.getdoc(value), f"{name}.{member}"


def is_property(value: object) -> bool:
    return isinstance(value, property | cached_property)


def documentation_of_constant(name: str) -> str:
    """Find what is said below the assignment of a constant or alias, or by its module."""
    for module in modules():
        body = ast.parse(inspect.getsource(module)).body
        for node, following in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                    return str(following.value.value)
                return inspect.getdoc(module) or ""
    return ""


def modules() -> list[ModuleType]:
    found = [module for name, module in sys.modules.items() if name.startswith("snapstore.")]
    return sorted(found, key=lambda module: module.__name__)


# -- signatures -----------------------------------------------------------------------------------


def signatures(thing: object) -> Iterator[object]:
    """Give the functions of an exported thing, and itself if its fields are public."""
    if inspect.isfunction(thing):
        yield thing
    elif inspect.isclass(thing):
        if dataclasses.is_dataclass(thing):
            yield thing
        for name, value in vars(thing).items():
            if name.startswith("_"):
                continue
            if isinstance(value, property):
                yield value.fget
            elif isinstance(value, cached_property):
                yield value.func
            elif inspect.isfunction(value):
                yield value


def own_types(thing: object) -> Iterator[str]:
    """Name the types of this library that a signature mentions."""
    module = sys.modules[typing.cast("type", thing).__module__]
    known = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("snapstore.")
        for alias in node.names
    }
    known |= {name for name, value in vars(module).items() if inspect.isclass(value)}
    for annotation in typing.cast("type", thing).__annotations__.values():
        text = annotation if isinstance(annotation, str) else repr(annotation)
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Name) and node.id in known:
                yield node.id


def test_signatures_mention_only_what_is_exported() -> None:
    """Goal: whoever uses the façade never has to import from below it.

    Method: take the annotations of all exported functions, methods and fields; what is of this
    library must be exported, or be listed above with the reason. The list has nothing else.
    """
    mentioned = {
        name
        for _, thing in exported()
        for function in signatures(thing)
        for name in own_types(function)
    }
    from_elsewhere = {
        "Path",
        "Iterator",
        "Mapping",
        "Sequence",
        "Self",
        "TracebackType",
        "ClassVar",
    }
    missing = mentioned - set(snapstore.__all__) - from_elsewhere
    assert missing == set(NOT_EXPORTED)


def test_all_errors_have_the_exported_root() -> None:
    """One handler is enough, and each class is drawn in the tree of the module."""
    classes = [
        value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and name != "ClassVar"
    ]
    assert {one.__name__ for one in classes} == set(errors.__all__)
    for one in classes:
        assert issubclass(one, snapstore.SnapError)
        assert not issubclass(one, ValueError | OSError)
        assert inspect.getdoc(one)
        assert one.__name__ in (errors.__doc__ or "")
        assert 1 <= one.exit_code <= 8 or one.exit_code == 130


def test_the_package_is_typed() -> None:
    assert (Path(snapstore.__file__).parent / "py.typed").exists()


def test_the_example_of_the_facade_works(tmp_path: Path) -> None:
    """What the docstring shows, with real paths."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "file").write_bytes(b"content")
    snapstore.init_store(f"file://{tmp_path / 'snapshots'}").close()
    with snapstore.open_store(f"file://{tmp_path / 'snapshots'}") as store:
        store.push(tmp_path / "job", "team/model/engine:v1")
        store.pull("team/model/engine:v1", tmp_path / "restored")
    assert (tmp_path / "restored" / "file").read_bytes() == b"content"
