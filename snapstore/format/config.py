"""The configuration of a store, `snapstore.json` (`format_spec/01-objects.md`, section 5)."""

from typing import Final, Literal

import msgspec

from snapstore.errors import UnsupportedFeature
from snapstore.format import limits
from snapstore.format.canonical import (
    Hex32,
    Time,
    check_time,
    decode_document,
    decode_head,
    encode,
)
from snapstore.units import BytesLike

__all__ = ["Parameters", "StoreConfig", "decode_config", "encode_config"]

FORMAT: Final = "snapstore"
DIGEST: Final = "blake3-256"
WHAT = "store configuration"


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What holds for all objects of a store.

    Attributes:
        digest: How chunks are named.
    """

    digest: Literal["blake3-256"] = DIGEST


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a store is, once and for all.

    Attributes:
        created: When it was made.
        store_id: 32 random hexadecimal digits.
    """

    created: Time
    store_id: Hex32
    format: Literal["snapstore"] = FORMAT
    parameters: Parameters = Parameters()
    required_features: tuple[str, ...] = ()
    version: Literal[1] = 1


class _Digest(msgspec.Struct, frozen=True):
    digest: str = DIGEST


class _Needs(msgspec.Struct):
    """What may make a store unreadable for this program, whatever else it says."""

    required_features: list[str] = []
    parameters: _Digest = _Digest()


def encode_config(config: StoreConfig) -> bytes:
    """Encode the configuration of a new store.

    Raises:
        Malformed: It is not what the format says.
        UnsupportedFeature: It requires a feature, of which version 1 has none.
    """
    data = encode(config, what=WHAT)
    decode_config(data)
    return data


def decode_config(data: BytesLike) -> StoreConfig:
    """Check and decode the configuration of a store.

    Raises:
        FormatError: It is not what the format says.
        UnsupportedVersion: The store is of a newer version.
        UnsupportedFeature: The store needs something this program does not know.
    """
    needs = decode_head(
        data, _Needs, format_word=FORMAT, what=WHAT, limit_bytes=limits.CONFIG_BYTES_MAX
    )
    if needs.required_features:
        raise UnsupportedFeature(
            f"this store requires {needs.required_features[0][:80]!r}, which this snapstore does "
            "not know",
            next_step="upgrade snapstore",
        )
    if needs.parameters.digest != DIGEST:
        raise UnsupportedFeature(
            f"this store names chunks by {needs.parameters.digest[:80]!r}, which this snapstore "
            "does not know",
            next_step="upgrade snapstore",
        )
    config = decode_document(
        data, StoreConfig, format_word=FORMAT, what=WHAT, limit_bytes=limits.CONFIG_BYTES_MAX
    )
    check_time(config.created, what=f"{WHAT} created")
    return config
