"""Cases of JSON documents: config, root manifests, refs, leases, marks and the META sections."""

from __future__ import annotations

import json

from tools.vectors.encode import Case, Json, bad, binary, canonical, digest, good, repeat, text

TIME = "2026-11-30T05:00:00Z"
HEX32 = "0123456789abcdef" * 2
ID = digest("snapshot").hex()

CONFIG: dict[str, Json] = {
    "created": TIME,
    "format": "snapstore",
    "parameters": {"digest": "blake3-256"},
    "required_features": [],
    "store_id": HEX32,
    "version": 1,
}
HOST: dict[str, Json] = {
    "rank": "host",
    "manifest": digest("host").hex(),
    "logical_bytes": 4096,
    "data_bytes": 0,
    "files": 1,
}
SNAPSHOT: dict[str, Json] = {
    "created": TIME,
    "format": "snapstore/snapshot",
    "kind": "directory",
    "labels": {},
    "ranks": [HOST],
    "requirements": {},
    "version": 1,
    "writer": {"program": "snapstore", "version": "0.1.0"},
}
RANK_META: dict[str, Json] = {
    "format": "snapstore/rank",
    "placement": {},
    "rank": "host",
    "streams": [],
    "version": 1,
}
EXTERNAL: dict[str, Json] = {
    "sessions": [
        {
            "regions": [
                {
                    "address": 35184372088832,
                    "device": "host",
                    "file": "external/0-1.mem",
                    "huge": False,
                    "length": 67108864,
                    "order": 0,
                    "region": 1,
                }
            ],
            "session": "ab" * 32,
        }
    ],
    "version": 1,
}
LAYOUT_META: dict[str, Json] = {
    "created": TIME,
    "format": "snapstore/layout",
    "nonce": HEX32,
    "rank": ID,
    "version": 1,
}
REF: dict[str, Json] = {
    "created": TIME,
    "format": "snapstore/ref",
    "nonce": HEX32,
    "snapshot": ID,
    "version": 1,
}
LEASE: dict[str, Json] = {
    "created": TIME,
    "format": "snapstore/lease",
    "holder": "pod 7f3a, process 12",
    "nonce": HEX32,
    "snapshot": None,
    "state": "acquired",
    "ttl_s": 900,
    "version": 1,
}
MARK: dict[str, Json] = {
    "created": TIME,
    "format": "snapstore/mark",
    "nonce": HEX32,
    "state": "condemned",
    "version": 1,
}
PAGE_ORDER: dict[str, Json] = {
    "files": ["pages-1.img"],
    "format": "snapstore/page-order",
    "runs": [[0, 7, 2]],
    "version": 1,
}
BASES = {
    "config": CONFIG,
    "snapshot": SNAPSHOT,
    "rank-meta": RANK_META,
    "layout-meta": LAYOUT_META,
    "ref": REF,
    "lease": LEASE,
    "mark": MARK,
    "page-order": PAGE_ORDER,
}


def _with(base: dict[str, Json], **changes: Json) -> dict[str, Json]:
    return {**base, **changes}


def _good(name: str, base: dict[str, Json], **changes: Json) -> Case:
    value = _with(base, **changes)
    return good(name, canonical(value), value)


def _bad(name: str, base: dict[str, Json], error: str = "Malformed", **changes: Json) -> Case:
    return bad(name, canonical(_with(base, **changes)), error)


def _ranks(*numbers: Json) -> Json:
    return [_with(HOST, rank=number) for number in numbers]


def valid_documents() -> dict[str, list[Case]]:
    """Documents that must decode, by kind."""
    awkward = "".join(map(chr, range(0x20))) + '"\\/\x7f\x80é\u2028\uffff\U0001f600'
    by_code_point: Json = {"\U0001f600": 1, "\uffff": 2, "z": 3, "": 4, "A": 5, "\x7f": 6}
    open_value: Json = {
        "integers": [-(2**63), -1, 0, 2**63 - 1],
        "nested": [[], {}, [{"a": [None, True, False]}]],
        "order of keys": by_code_point,
        "text": awkward,
    }
    return {
        "config": [_good("plain", CONFIG)],
        "snapshot": [
            _good("one rank", SNAPSHOT),
            _good("host and ranks", SNAPSHOT, ranks=_ranks("host", 0, 1, 2, 10, 65535)),
            _good("ranks without host", SNAPSHOT, ranks=_ranks(3, 7)),
            _good("open values", SNAPSHOT, requirements=open_value, writer=open_value),
            _good("labels", SNAPSHOT, labels={"k" * 128: "v" * 4096, awkward: awkward, "e": ""}),
            _good("32 levels", SNAPSHOT, requirements={"a": _nested(30)}),
        ],
        "rank-meta": [
            _good("host", RANK_META),
            _good("placement", RANK_META, rank=3, placement=open_value),
            _good("external memory", RANK_META, placement={"external": EXTERNAL}),
            _good(
                "streams",
                RANK_META,
                streams=[
                    {"class": "pages", "origin": "pages-1.img"},
                    _stream("new-class", awkward),
                ],
            ),
        ],
        "layout-meta": [_good("plain", LAYOUT_META)],
        "ref": [_good("snapshot", REF), _good("deleted", REF, snapshot=None)],
        "lease": [
            _good("acquired", LEASE),
            _good("renewed, empty holder", LEASE, state="renewed", holder="", ttl_s=1),
            _good("committed", LEASE, state="committed", snapshot=ID, ttl_s=31_622_400),
            _good("released", LEASE, state="released"),
            _good("revoked", LEASE, state="revoked"),
        ],
        "mark": [
            _good(word, MARK, state=word)
            for word in ("condemned", "revived", "deleting", "deleted")
        ],
        "page-order": _page_orders(),
    }


def _page_orders() -> list[Case]:
    def order(name: str, files: list[Json], runs: list[list[int]]) -> Case:
        value = _with(PAGE_ORDER, files=files, runs=runs)  # type: ignore[arg-type]
        return good(name, canonical(value), [[files[file], *pages] for file, *pages in runs])

    return [
        order("one run", ["pages-1.img"], [[0, 7, 2]]),
        order("nothing", [], []),
        order("two files by turns", ["a/b", "..."], [[0, 9, 1], [1, 0, 3], [0, 0, 9], [0, 9, 1]]),
        order("last page of the longest file", ["\u00e9"], [[0, 2**38 - 1, 1], [0, 0, 2**38]]),
        order("longest path", ["/".join(["a" * 255] * 16)], [[0, 0, 1]]),
    ]


def hostile_documents() -> dict[str, list[Case]]:
    """Documents that must be refused, by kind."""
    return {
        kind: _common(base) + _own(kind) + (_times(base) if "created" in base else [])
        for kind, base in BASES.items()
    }


def _stream(name: str, origin: str) -> Json:
    return {"class": name, "origin": origin}


def _nested(levels: int) -> Json:
    value: Json = 0
    for _ in range(levels):
        value = [value]
    return value


def _common(base: dict[str, Json]) -> list[Case]:
    """What every document must refuse."""
    plain = canonical(base)
    inside = plain[1:-1]
    no_version = {key: value for key, value in base.items() if key != "version"}
    keys_reversed = json.dumps(dict(sorted(base.items(), reverse=True)), separators=(",", ":"))
    return [
        bad("empty", ""),
        bad("null", "null"),
        bad("array", "[]"),
        bad("empty object", "{}"),
        bad("truncated", plain[:-1]),
        bad("line feed after it", plain + "\n"),
        bad("space before it", " " + plain),
        bad("two documents", plain + plain),
        bad("byte order mark", "\ufeff" + plain),
        bad("NUL after it", plain + "\0"),
        bad("white space", json.dumps(base, sort_keys=True)),
        bad("keys in another order", keys_reversed),
        bad("key twice, same value", "{" + inside + ',"version":1}'),
        bad("key twice, other value", '{"version":2,' + inside + "}", "Malformed"),
        bad("escape that is none", plain.replace('"format"', '"\\u0066ormat"')),
        bad("escaped solidus", plain.replace("/", "\\/") if "/" in plain else plain + " "),
        bad("version as float", plain.replace('"version":1', '"version":1.0')),
        bad("version as exponent", plain.replace('"version":1', '"version":1e0')),
        bad("version with zero before", plain.replace('"version":1', '"version":01')),
        bad("version as string", plain.replace('"version":1', '"version":"1"')),
        bad("version true", plain.replace('"version":1', '"version":true')),
        bad("version minus zero", plain.replace('"version":1', '"version":-0')),
        bad("version 0", canonical(_with(base, version=0))),
        bad("version negative", canonical(_with(base, version=-1))),
        bad("version 2", canonical(_with(base, version=2)), "UnsupportedVersion"),
        bad("version beyond 64 bits", plain.replace('"version":1', '"version":' + "9" * 30)),
        bad(
            "version 2 with new keys",
            canonical({"version": 2, "format": base["format"], "new": [1.5]}),  # type: ignore[list-item]
            "UnsupportedVersion",
        ),
        bad("no version", canonical(no_version)),
        bad("format of another object", canonical(_with(base, format="snapstore/other"))),
        bad("unknown key", canonical(_with(base, unknown=1))),
        bad("not a number", plain.replace('"version":1', '"version":NaN')),
        bad("deep nesting", [repeat(b"[", 40_000)]),
        bad("deep nesting in a key", [text('{"a":'), repeat(b"[", 40_000)], "LimitExceeded"),
        bad("not UTF-8", binary(plain.encode().replace(b"snapstore", b"snapst\xff\xfere"))),
        bad("overlong UTF-8", binary(plain.encode().replace(b"snapstore", b"snap\xc1\xb3tore"))),
        bad("surrogate", binary(plain.encode().replace(b"snapstore", b"sn\xed\xa0\x80tore"))),
        bad("escaped surrogate", plain.replace("snapstore", "snap\\ud800")),
        *(_bad(f"without {key}", _without(base, key)) for key in sorted(base) if key != "version"),
    ]


def _without(base: dict[str, Json], key: str) -> dict[str, Json]:
    return {name: value for name, value in base.items() if name != key}


def _times(base: dict[str, Json]) -> list[Case]:
    times = {
        "no such day": "2026-02-30T05:00:00Z",
        "month 13": "2026-13-01T05:00:00Z",
        "hour 24": "2026-11-30T24:00:00Z",
        "second 60": "2026-11-30T05:00:60Z",
        "year 0": "0000-11-30T05:00:00Z",
        "fraction": "2026-11-30T05:00:00.5Z",
        "offset": "2026-11-30T05:00:00+00:00",
        "no zone": "2026-11-30T05:00:00",
        "lower case": "2026-11-30t05:00:00z",
        "line feed": TIME + "\n",
        "other digits": "२०२६-11-30T05:00:00Z",
    }
    return [_bad(f"time: {name}", base, created=value) for name, value in times.items()]


def _own(kind: str) -> list[Case]:
    return _OWN[kind]()


def _config() -> list[Case]:
    return [
        _bad("feature", CONFIG, "UnsupportedFeature", required_features=["encryption"]),
        _bad("feature and new key", CONFIG, "UnsupportedFeature", required_features=["a"], b=1),
        _bad("feature of another type", CONFIG, required_features=[1]),
        _bad("digest", CONFIG, "UnsupportedFeature", parameters={"digest": "sha-256"}),
        _bad("feature, digest, version", CONFIG, "UnsupportedVersion", version=3, parameters={}),
        _bad("no digest", CONFIG, parameters={}),
        _bad("unknown parameter", CONFIG, parameters={"digest": "blake3-256", "level": 3}),
        _bad("store id in capitals", CONFIG, store_id=HEX32.upper()),
        _bad("store id too short", CONFIG, store_id=HEX32[:-1]),
        _bad("store id with line feed", CONFIG, store_id=HEX32 + "\n"),
        bad("too large", [text(canonical(CONFIG)), repeat(b" ", 65536)], "LimitExceeded"),
    ]


def _snapshot() -> list[Case]:
    number = canonical(_with(SNAPSHOT, requirements={"n": 7}))
    entry = _with(HOST)
    by_utf16 = '{"\U0001f600":1,"\uffff":2}'
    return [
        _bad("no ranks", SNAPSHOT, ranks=[]),
        _bad("host twice", SNAPSHOT, ranks=_ranks("host", "host")),
        _bad("host last", SNAPSHOT, ranks=_ranks(0, "host")),
        _bad("rank twice", SNAPSHOT, ranks=_ranks(1, 1)),
        _bad("ranks descending", SNAPSHOT, ranks=_ranks(2, 1)),
        _bad("rank negative", SNAPSHOT, ranks=_ranks(-1)),
        _bad("rank too high", SNAPSHOT, ranks=_ranks(65536)),
        _bad("rank as string", SNAPSHOT, ranks=_ranks("0")),
        _bad("rank true", SNAPSHOT, ranks=_ranks(*[True])),
        _bad("manifest in capitals", SNAPSHOT, ranks=[_with(entry, manifest=ID.upper())]),
        _bad("manifest is a path", SNAPSHOT, ranks=[_with(entry, manifest="../" * 21 + "a")]),
        _bad("bytes negative", SNAPSHOT, ranks=[_with(entry, logical_bytes=-1)]),
        _bad("bytes beyond 64 bits", SNAPSHOT, ranks=[_with(entry, data_bytes=2**63)]),
        _bad("unknown key of a rank", SNAPSHOT, ranks=[_with(entry, unknown=1)]),
        _bad("label not a string", SNAPSHOT, labels={"a": 1}),
        _bad("label without key", SNAPSHOT, labels={"": "a"}),
        _bad("label key too long", SNAPSHOT, labels={"a" * 129: "a"}),
        _bad("label too long", SNAPSHOT, labels={"a": "a" * 4097}),
        _bad("kind with space", SNAPSHOT, kind="a b"),
        _bad("kind empty", SNAPSHOT, kind=""),
        _bad("kind too long", SNAPSHOT, kind="a" * 65),
        _bad("requirements an array", SNAPSHOT, requirements=[]),
        bad("float", number.replace(":7", ":7.5")),
        bad("whole float", number.replace(":7", ":7.0")),
        bad("exponent", number.replace(":7", ":7e3")),
        bad("minus zero", number.replace(":7", ":-0")),
        bad("plus", number.replace(":7", ":+7")),
        bad("above 64 bits", number.replace(":7", f":{2**63}")),
        bad("below 64 bits", number.replace(":7", f":{-(2**63) - 1}")),
        bad("unsigned 64 bits", number.replace(":7", f":{2**64 - 1}")),
        bad("very long number", [text(number.partition("7}")[0]), repeat(b"7", 10_000)]),
        bad("keys in the order of UTF-16", number.replace('{"n":7}', by_utf16)),
        bad("key twice inside", number.replace('{"n":7}', '{"n":7,"n":7}')),
        bad("capital digits in an escape", number.replace('"n"', '"\\u001F"')),
        bad("long form of an escape", number.replace('"n"', '"\\u000a"')),
        bad("escaped U+007F", number.replace('"n"', '"\\u007f"')),
        bad("escaped letter", number.replace('"n"', '"\\u0041"')),
        bad("escaped pair of surrogates", number.replace('"n"', '"\\ud83d\\ude00"')),
        bad("bare control character", number.replace('"n"', '"\x01"')),
        _bad("33 levels", SNAPSHOT, "LimitExceeded", requirements={"a": _nested(31)}),
        bad(
            "100,000 levels",
            [text(number.partition("7}")[0]), repeat(b"[", 100_000)],
            "LimitExceeded",
        ),
    ]


def _rank_meta() -> list[Case]:
    return [
        _bad("rank too high", RANK_META, rank=65536),
        _bad("rank as string", RANK_META, rank="1"),
        _bad("rank null", RANK_META, rank=None),
        _bad("placement null", RANK_META, placement=None),
        bad("placement with float", canonical(RANK_META).replace("{}", '{"a":0.5}')),
        _bad("stream without class", RANK_META, streams=[{"origin": ""}]),
        _bad("stream with unknown key", RANK_META, streams=[{"class": "a", "origin": "", "x": 1}]),
        _bad("class with capital", RANK_META, streams=[_stream("Pages", "")]),
        _bad("class empty", RANK_META, streams=[_stream("", "")]),
        _bad("origin too long", RANK_META, streams=[_stream("pages", "a" * 4097)]),
    ]


def _layout_meta() -> list[Case]:
    return [
        _bad("rank is no id", LAYOUT_META, rank="host"),
        _bad("nonce too long", LAYOUT_META, nonce=HEX32 + "0"),
        bad("too large", [text(canonical(LAYOUT_META)), repeat(b" ", 65536)], "LimitExceeded"),
    ]


def _ref() -> list[Case]:
    return [
        _bad("snapshot in capitals", REF, snapshot=ID.upper()),
        _bad("snapshot too short", REF, snapshot=ID[:-1]),
        _bad("snapshot empty", REF, snapshot=""),
        _bad("snapshot a number", REF, snapshot=0),
        _bad("nonce null", REF, nonce=None),
        bad("too large", [text(canonical(REF)), repeat(b" ", 65536)], "LimitExceeded"),
    ]


def _lease() -> list[Case]:
    return [
        _bad("committed without snapshot", LEASE, state="committed"),
        _bad("acquired with snapshot", LEASE, snapshot=ID),
        _bad("revoked with snapshot", LEASE, state="revoked", snapshot=ID),
        _bad("unknown state", LEASE, state="held"),
        _bad("no time to live", LEASE, ttl_s=0),
        _bad("negative time to live", LEASE, ttl_s=-1),
        _bad("endless", LEASE, ttl_s=31_622_401),
        _bad("holder null", LEASE, holder=None),
        _bad("holder too long", LEASE, holder="a" * 1025),
    ]


def _mark() -> list[Case]:
    return [
        _bad("unknown state", MARK, state="removed"),
        _bad("state null", MARK, state=None),
        _bad("state in capitals", MARK, state="Condemned"),
    ]


def _page_order() -> list[Case]:
    def runs(name: str, *runs: Json) -> Case:
        return _bad(name, PAGE_ORDER, runs=[*runs])

    def path(name: str, text: str, error: str = "Malformed") -> Case:
        return _bad(f"path: {name}", PAGE_ORDER, error, files=[text])

    return [
        runs("no such file", [1, 0, 1]),
        runs("file negative", [-1, 0, 1]),
        runs("page negative", [0, -1, 1]),
        runs("no pages", [0, 0, 0]),
        runs("pages negative", [0, 0, -1]),
        runs("page beyond any file", [0, 2**38, 1]),
        runs("too many pages", [0, 0, 2**38 + 1]),
        runs("ends beyond any file", [0, 2**38 - 1, 2]),
        runs("pages beyond 64 bits", [0, 0, 2**64 + 1]),
        runs("run too short", [0, 0]),
        runs("run too long", [0, 0, 1, 1]),
        runs("run an object", {"file": 0}),
        runs("page as string", [0, "0", 1]),
        runs("page true", [0, True, 1]),
        runs("page null", [0, None, 1]),
        bad("page as float", canonical(PAGE_ORDER).replace("7", "7.0")),
        _bad("runs null", PAGE_ORDER, runs=None),
        _bad("file not used", PAGE_ORDER, files=["pages-1.img", "b"]),
        _bad("file twice", PAGE_ORDER, files=["a", "a"], runs=[[0, 0, 1], [1, 0, 1]]),
        _bad("files in another order", PAGE_ORDER, files=["a", "b"], runs=[[1, 0, 1], [0, 0, 1]]),
        _bad("file a number", PAGE_ORDER, files=[1]),
        path("empty", ""),
        path("absolute", "/etc/passwd"),
        path("slash at the end", "a/"),
        path("upwards", "a/../../b"),
        path("here", "./a"),
        path("NUL", "a\0b"),
        path("too long", "a" * 4097, "LimitExceeded"),
        bad("too large", [text(canonical(PAGE_ORDER)), repeat(b" ", 4 << 20)], "LimitExceeded"),
    ]


_OWN = {
    "config": _config,
    "snapshot": _snapshot,
    "rank-meta": _rank_meta,
    "layout-meta": _layout_meta,
    "ref": _ref,
    "lease": _lease,
    "mark": _mark,
    "page-order": _page_order,
}


def transitions() -> dict[str, list[Case]]:
    """Which state may follow which, written out."""
    live = ("acquired", "renewed")
    first: dict[str, set[str | None]] = {"acquired": {None}}
    lease = first | {word: set(live) for word in ("renewed", "committed", "released", "revoked")}
    mark: dict[str, set[str | None]] = {
        "condemned": {None, "revived"},
        "revived": {"condemned", "deleted"},
        "deleting": {"condemned"},
        "deleted": {"deleting"},
    }
    return {
        kind: [
            {
                "name": f"{new} after {previous or 'nothing'}",
                "input": {"previous": previous, "new": new},
                "expect": previous in allowed[new],
            }
            for new in allowed
            for previous in (None, *allowed)
        ]
        for kind, allowed in (("lease-transition", lease), ("mark-transition", mark))
    }
