"""Documents: what the encoders refuse, so that no reader ever has to."""

import msgspec
import pytest

from snapstore.errors import LimitExceeded, Malformed, SnapError, UnsupportedFeature
from snapstore.format import config, lease, limits, mark, rank, ref, snapshot
from snapstore.ids import RankId, SnapshotId

TIME = "2026-11-30T05:00:00Z"
NONCE = "0" * 32


def root_manifest(**more: object) -> snapshot.RootManifest:
    entry = snapshot.RankEntry(
        rank=rank.HOST, manifest="a" * 64, logical_bytes=0, data_bytes=0, files=0
    )
    plain: dict[str, object] = {"created": TIME, "kind": "criu", "ranks": (entry,)}
    return snapshot.RootManifest(**{**plain, **more})


def test_a_root_manifest_names_its_ranks() -> None:
    data, snapshot_id = snapshot.encode_snapshot(root_manifest())
    assert snapshot_id == SnapshotId.of(data)
    assert snapshot.decode_snapshot(data).ranks[0].rank_id == RankId.parse("a" * 64)


@pytest.mark.parametrize(
    "odd",
    [
        {"created": "yesterday"},
        {"kind": "Not A Word"},
        {"ranks": ()},
        {"labels": {"": "x"}},
        {"labels": {"x": "\ud800"}},
        {"requirements": {"x": 1.5}},
        {"requirements": {"x": 2**63}},
        {"writer": {"x": 0.5}},
    ],
)
def test_what_a_root_manifest_cannot_say(odd: dict[str, object]) -> None:
    with pytest.raises(SnapError):
        snapshot.encode_snapshot(root_manifest(**odd))


def test_a_root_manifest_that_is_too_large() -> None:
    with pytest.raises(LimitExceeded):
        snapshot.encode_snapshot(root_manifest(writer={"x": "y" * limits.SNAPSHOT_BYTES_MAX}))


def test_a_config_with_features_is_not_written() -> None:
    good = config.StoreConfig(created=TIME, store_id=NONCE)
    assert config.decode_config(config.encode_config(good)) == good
    with pytest.raises(UnsupportedFeature, match="'sealed'"):
        config.encode_config(msgspec.structs.replace(good, required_features=("sealed",)))


def test_a_ref_may_be_deleted() -> None:
    gone = ref.Ref(created=TIME, nonce=NONCE, snapshot=None)
    assert ref.decode_ref(ref.encode_ref(gone)).snapshot_id is None
    there = ref.Ref(created=TIME, nonce=NONCE, snapshot="b" * 64)
    assert ref.decode_ref(ref.encode_ref(there)).snapshot_id == SnapshotId.parse("b" * 64)
    with pytest.raises(Malformed):
        ref.encode_ref(ref.Ref(created=TIME, nonce="short", snapshot=None))


def test_only_committed_leases_have_a_snapshot() -> None:
    for state in lease.LeaseState:
        for name in (None, "b" * 64):
            one = lease.Lease(
                created=TIME, holder="test", nonce=NONCE, snapshot=name, state=state, ttl_s=1
            )
            if (name is not None) == (state is lease.LeaseState.COMMITTED):
                assert lease.decode_lease(lease.encode_lease(one)) == one
            else:
                with pytest.raises(Malformed):
                    lease.encode_lease(one)


def test_lease_chains_end_and_mark_chains_do_not() -> None:
    """Nothing follows a lease that ended; an object that was deleted may be stored anew."""
    for ended in (lease.LeaseState.COMMITTED, lease.LeaseState.RELEASED, lease.LeaseState.REVOKED):
        assert not any(lease.may_follow(state, ended) for state in lease.LeaseState)
    states = mark.MarkState
    after_deleting = [state for state in states if mark.may_follow(state, states.DELETING)]
    assert after_deleting == [states.DELETED]
    assert [state for state in states if mark.may_follow(state, states.DELETED)] == [states.REVIVED]


def test_a_mark_of_another_time() -> None:
    with pytest.raises(Malformed):
        mark.encode_mark(
            mark.Mark(created="2026-02-29T00:00:00Z", nonce=NONCE, state=mark.MarkState.REVIVED)
        )


def test_stream_classes_are_words() -> None:
    odd = rank.StreamInfo(data_class="Not A Word", origin="")
    with pytest.raises(Malformed):
        rank.encode_meta(rank.RankMeta(rank=0, streams=(odd,)))
