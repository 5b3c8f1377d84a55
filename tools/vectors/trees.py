"""Cases of file trees: what a tree may hold, and every way out of one that must be refused."""

from __future__ import annotations

import base64

from tools.vectors.encode import Case, Json, bad, binary, canonical, good, repeat, text

Entry = dict[str, Json]

BASE: Entry = {"mode": 0o755, "uid": 0, "gid": 0, "mtime_ns": 0}


def b64(data: bytes) -> str:
    """Base64 with padding."""
    return base64.b64encode(data).decode()


def entry(kind: str, path: str | bytes, **more: Json) -> Entry:
    """An entry of that type; bytes are written as `path_b64`."""
    name: Entry = {"path": path} if isinstance(path, str) else {"path_b64": b64(path)}
    return {**BASE, "type": kind, **name, **more}


def folder(path: str | bytes, **more: Json) -> Entry:
    """A directory."""
    return entry("directory", path, **more)


def file(path: str | bytes, size: int = 0, **more: Json) -> Entry:
    """A file, at the start of stream 0 unless it is empty."""
    place: Entry = {"size": size, "stream": 0, "offset": 0} if size else {}
    return entry("file", path, **{**place, **more})


ROOT = folder("")


def valid_trees() -> list[Case]:
    """Trees that must decode."""
    awkward = '\x01\t"\\é\u2028\uffff\U0001f600\x7f'
    return [
        _good("root only", ROOT),
        _good(
            "every type",
            ROOT,
            folder("a"),
            file("a/empty"),
            file("a/full", 5, offset=3, mode=0o4711, uid=2**32 - 1, gid=1000, mtime_ns=-1),
            entry("hardlink", "a/hard", target="a/full"),
            entry("symlink", "a/soft", target="../../etc/passwd"),
        ),
        # '.' sorts before '/', so children need not stand right behind their directory.
        _good(
            "order of bytes", ROOT, folder("a"), file("a-"), file("a.b"), file("a/b"), file("a0")
        ),
        _good(
            "names that look odd", ROOT, file(" "), file("-"), file("..."), file("..a"), file("~")
        ),
        _good("controls and other planes", ROOT, file(awkward)),
        _good("code points order as bytes", ROOT, file("\uffff"), file("\U0001f600")),
        _good(
            "no UTF-8",
            ROOT,
            file(b"\xff\xfe"),
            entry("symlink", b"\xff\xff", target_b64=b64(b"\x80")),
        ),
        _good("surrogate as bytes", ROOT, file(b"\xed\xa0\x80")),
        _good(
            "attributes",
            folder("", xattrs=[["security.selinux", b64(b"u:r:t\0")], ["user.é", ""]]),
            file("a", xattrs=[["a", ""], ["b", b64(bytes(range(256)))]]),
        ),
        _good("longest component", ROOT, file("a" * 255)),
        _good("longest size", ROOT, file("a", 2**50, stream=2**20 - 1)),
        _good("bounds of times", folder("", mtime_ns=-(2**63)), file("a", mtime_ns=2**63 - 1)),
    ]


def hostile_trees() -> list[Case]:
    """Trees that must be refused."""
    return [*_paths(), *_order(), *_numbers(), *_links(), *_attributes(), *_spelling()]


def _good(name: str, *entries: Entry) -> Case:
    return good(name, canonical(list(entries)), list(entries))


def _bad(name: str, *entries: Entry, error: str = "Malformed") -> Case:
    return bad(name, canonical(list(entries)), error)


def _paths() -> list[Case]:
    outside = {
        "parent": "..",
        "current": ".",
        "absolute": "/etc",
        "root again": "/",
        "trailing slash": "a/",
        "empty component": "a//b",
        "parent inside": "a/../b",
        "parent at the end": "a/..",
        "current inside": "a/./b",
        "NUL": "a\0b",
        "only NUL": "\0",
        "NUL inside": "a/b\0",
    }
    cases = [_bad(f"path: {name}", ROOT, folder("a"), file(path)) for name, path in outside.items()]
    cases += [
        _bad(f"path alone: {name}", ROOT, file(path))
        for name, path in outside.items()
        if path[0] != "a"
    ]
    long_path: list[Entry] = [folder("/".join(["a" * 250] * depth)) for depth in range(1, 17)]
    return [
        *cases,
        _bad("parent listed as a directory", ROOT, folder(".."), file("../a")),
        _bad("root listed as a component", ROOT, folder("/"), file("/etc")),
        _bad("component too long", ROOT, file("a" * 256), error="LimitExceeded"),
        _bad("component too long in bytes", ROOT, file("é" * 128), error="LimitExceeded"),
        _bad(
            "path too long",
            ROOT,
            *long_path,
            file("/".join(["a" * 250] * 16 + ["b" * 82])),
            error="LimitExceeded",
        ),
        _bad("parent in base64", ROOT, folder(b"..")),
        _bad("UTF-8 in base64", ROOT, file(b"a")),
        _bad("empty path in base64", folder(b"")),
        _bad("both forms of a path", ROOT, file("a", path_b64=b64(b"\xff"))),
        _bad("no path", ROOT, {**BASE, "type": "file"}),
        _bad("base64 without padding", ROOT, entry("file", "", path_b64="/w") | {}),
        *(
            bad(f"base64: {name}", canonical([ROOT, {**BASE, "type": "file", "path_b64": form}]))
            for name, form in {
                "no padding": "/w",
                "too much padding": "/w===",
                "stray bits": "/x==",
                "URL alphabet": "_w==",
                "white space": "/w= =",
                "line feed": "/w==\n",
                "not ASCII": "é",
                "text after padding": "/w==/w==",
            }.items()
        ),
    ]


def _order() -> list[Case]:
    return [
        bad("no entries", "[]"),
        _bad("no root", file("a")),
        _bad("root a file", file("")),
        _bad("root a symlink", entry("symlink", "", target="/")),
        _bad("root not first", folder("a"), ROOT),
        _bad("root twice", ROOT, ROOT),
        _bad("unsorted", ROOT, file("b"), file("a")),
        _bad("path twice", ROOT, file("a"), file("a")),
        _bad("path twice, other type", ROOT, folder("a"), entry("symlink", "a", target="/")),
        _bad("sorted by component", ROOT, folder("a"), file("a/b"), file("a.b")),
        _bad("sorted by UTF-16", ROOT, file("\U0001f600"), file("\uffff")),
        _bad("child of a symlink", ROOT, entry("symlink", "a", target="/etc"), file("a/b")),
        _bad("child of a file", ROOT, file("a"), file("a/b")),
        _bad(
            "child of a hardlink", ROOT, file("a"), entry("hardlink", "b", target="a"), file("b/c")
        ),
        _bad("no parent", ROOT, file("a/b")),
        _bad("no grandparent", ROOT, folder("a"), file("a/b/c")),
        _bad("parent after the child", ROOT, file("a/b"), folder("a")),
    ]


def _numbers() -> list[Case]:
    return [
        _bad("mode too high", folder("", mode=4096)),
        _bad("mode negative", folder("", mode=-1)),
        _bad("user too high", folder("", uid=2**32)),
        _bad("group negative", folder("", gid=-1)),
        _bad("time beyond 64 bits", folder("", mtime_ns=2**63)),
        _bad("time below 64 bits", folder("", mtime_ns=-(2**63) - 1)),
        _bad("size 0 written out", ROOT, entry("file", "a", size=0, stream=0, offset=0)),
        _bad("size negative", ROOT, file("a", -1)),
        _bad("size too large", ROOT, file("a", 2**50 + 1)),
        _bad("size beyond 64 bits", ROOT, file("a", 2**64)),
        _bad("offset negative", ROOT, file("a", 1, offset=-1)),
        _bad("offset too large", ROOT, file("a", 1, offset=2**50 + 1)),
        _bad("stream negative", ROOT, file("a", 1, stream=-1)),
        _bad("stream too high", ROOT, file("a", 1, stream=2**20)),
        _bad("size without stream", ROOT, entry("file", "a", size=1)),
        _bad("size without offset", ROOT, entry("file", "a", size=1, stream=0)),
        _bad("stream without size", ROOT, entry("file", "a", stream=0, offset=0)),
        _bad("size of a directory", folder("", size=1, stream=0, offset=0)),
        _bad(
            "size of a symlink", ROOT, entry("symlink", "a", target="b", size=1, stream=0, offset=0)
        ),
        _bad(
            "size of a hardlink",
            ROOT,
            file("a", 1),
            entry("hardlink", "b", target="a", size=1, stream=0, offset=0),
        ),
        _bad("size null", ROOT, entry("file", "a", size=None)),
        _bad("mode null", folder("", mode=None)),
        _bad("mode as string", folder("", mode="755")),
        _bad("no mode", {name: value for name, value in ROOT.items() if name != "mode"}),
    ]


def _links() -> list[Case]:
    return [
        _bad("symlink without target", ROOT, entry("symlink", "a")),
        _bad("symlink to nothing", ROOT, entry("symlink", "a", target="")),
        _bad("symlink to nothing in base64", ROOT, entry("symlink", "a", target_b64="")),
        _bad("symlink with NUL", ROOT, entry("symlink", "a", target="b\0c")),
        _bad(
            "symlink too long",
            ROOT,
            entry("symlink", "a", target="b" * 4096),
            error="LimitExceeded",
        ),
        _bad("target of UTF-8 in base64", ROOT, entry("symlink", "a", target_b64=b64(b"b"))),
        _bad(
            "both forms of a target",
            ROOT,
            entry("symlink", "a", target="b", target_b64=b64(b"\xff")),
        ),
        _bad("target of a file", ROOT, file("a", target="b")),
        _bad("empty target of a file", ROOT, file("a", target="")),
        _bad("target of a directory", folder("", target="b")),
        _bad("hardlink without target", ROOT, entry("hardlink", "a")),
        _bad("hardlink to what is missing", ROOT, entry("hardlink", "a", target="b")),
        _bad("hardlink to a later file", ROOT, entry("hardlink", "a", target="b"), file("b")),
        _bad("hardlink to itself", ROOT, entry("hardlink", "a", target="a")),
        _bad("hardlink to a directory", ROOT, folder("a"), entry("hardlink", "b", target="a")),
        _bad("hardlink to the root", ROOT, entry("hardlink", "b", target="")),
        _bad(
            "hardlink to a symlink",
            ROOT,
            entry("symlink", "a", target="/"),
            entry("hardlink", "b", target="a"),
        ),
        _bad(
            "hardlink to a hardlink",
            ROOT,
            file("a"),
            entry("hardlink", "b", target="a"),
            entry("hardlink", "c", target="b"),
        ),
        _bad("hardlink outside", ROOT, file("a"), entry("hardlink", "b", target="../a")),
        _bad("hardlink by another spelling", ROOT, file("a"), entry("hardlink", "b", target="./a")),
        _bad("hardlink absolute", ROOT, file("a"), entry("hardlink", "b", target="/a")),
        _bad("unknown type", ROOT, entry("socket", "a")),
        _bad("type null", ROOT, {**file("a"), "type": None}),
    ]


def _attributes() -> list[Case]:
    many: Json = [[f"{number:04}", ""] for number in range(1025)]
    head, tail = canonical([folder("", xattrs=[["a", "VALUE"]])]).split("VALUE")
    return [
        _bad("attributes empty", folder("", xattrs=[])),
        _bad("attributes null", folder("", xattrs=None)),
        _bad("attributes unsorted", folder("", xattrs=[["b", ""], ["a", ""]])),
        _bad("attribute twice", folder("", xattrs=[["a", ""], ["a", ""]])),
        _bad("attribute of three", folder("", xattrs=[["a", "", ""]])),
        _bad("attribute of one", folder("", xattrs=[["a"]])),
        _bad("attribute without name", folder("", xattrs=[["", ""]])),
        _bad("attribute name with NUL", folder("", xattrs=[["a\0", ""]])),
        _bad("attribute not base64", folder("", xattrs=[["a", "?"]])),
        _bad("attribute null", folder("", xattrs=[["a", None]])),
        _bad(
            "attribute name too long", folder("", xattrs=[["a" * 256, ""]]), error="LimitExceeded"
        ),
        _bad("too many attributes", folder("", xattrs=many), error="LimitExceeded"),
        bad(
            "attribute too large",
            [text(head), repeat(b"AAAA", 349_526), text(tail)],
            "LimitExceeded",
        ),
    ]


def _spelling() -> list[Case]:
    plain = canonical([folder("", mode=7), file("a", 7)])
    return [
        bad("object", "{}"),
        bad("null", "null"),
        bad("null entry", "[null]"),
        bad("array entry", "[[]]"),
        bad("truncated", plain[:-1]),
        bad("line feed after it", plain + "\n"),
        bad("space", plain.replace(",", ", ", 1)),
        bad("keys in another order", plain.replace('"gid":0,"mode":7', '"mode":7,"gid":0', 1)),
        bad("key twice", plain.replace('"gid":0', '"gid":0,"gid":0', 1)),
        bad("unknown key", plain.replace('"gid":0', '"device":0,"gid":0', 1)),
        bad("float", plain.replace('"mode":7', '"mode":7.0')),
        bad("exponent", plain.replace('"mode":7', '"mode":7e0')),
        bad("minus zero", plain.replace('"gid":0', '"gid":-0')),
        bad("zero before", plain.replace('"mode":7', '"mode":07')),
        bad("escaped letter", plain.replace('"path":"a"', '"path":"\\u0061"')),
        bad("escaped parent", plain.replace('"path":"a"', '"path":"\\u002e."')),
        bad("escaped surrogate", plain.replace('"path":"a"', '"path":"\\udc80"')),
        bad("no UTF-8", binary(plain.encode().replace(b'"path":"a"', b'"path":"\xff"'))),
        bad("deep nesting", [repeat(b"[", 100_000)]),
        bad("deep nesting in a key", [text('[{"gid":'), repeat(b"[", 100_000)]),
        bad("many empty entries", [text("["), repeat(b"{},", 10_000), text("{}]")]),
    ]
