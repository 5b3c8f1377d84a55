"""Messages with fds over a socket, and what is no message."""

import array
import json
import os
import socket
from collections.abc import Iterator

import pytest

from snapagent.linux.packets import (
    FDS_MAX,
    PACKET_BYTES_MAX,
    BadPacketError,
    Channel,
    channel_pair,
)
from tests.support.processes import open_fds

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = channel_pair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """Return a plain socket and the channel at its other end."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(other)
    yield one, channel
    one.close()
    channel.close()


def test_message_with_fds(pair: Pair) -> None:
    reader, writer = os.pipe()
    pair[0].send("hold", {"text": "ä", "number": 3, "list": ["a"], "ids": [1, 2]}, [writer])
    os.close(writer)
    packet = pair[1].receive()
    assert packet is not None
    assert packet.kind == "hold"
    assert (packet.text("text"), packet.number("number")) == ("ä", 3)
    assert (packet.texts("list"), packet.numbers("ids")) == (["a"], [1, 2])
    assert not os.get_inheritable(packet.fds[0])
    os.write(packet.fds[0], b"x")
    packet.close_fds()
    assert os.read(reader, 2) == b"x"
    assert os.read(reader, 2) == b""
    os.close(reader)


def test_end_of_the_other_side(pair: Pair) -> None:
    pair[0].send("last", {})
    pair[0].close()
    packet = pair[1].receive()
    assert packet is not None
    assert packet.kind == "last"
    assert pair[1].receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        pair[1].send("late", {})


def test_end_with_unread_messages(pair: Pair) -> None:
    """Goal: what was sent before the end is received, though the socket was reset."""
    pair[1].send("unread", {})
    pair[0].send("last", {})
    pair[0].close()
    packet = pair[1].receive()
    assert packet is not None
    assert packet.kind == "last"
    assert pair[1].receive() is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"[]",
        b"{}",
        b'{"kind": 3}',
        b"[" * 100_000,
        b"\xff",
        b" " * (PACKET_BYTES_MAX + 1),
    ],
)
def test_what_is_no_message(raw: tuple[socket.socket, Channel], data: bytes) -> None:
    before = open_fds()
    rights = array.array("i", [0, 1])
    raw[0].sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    with pytest.raises(BadPacketError):
        raw[1].receive()
    assert open_fds() == before


def test_more_fds_than_are_taken(raw: tuple[socket.socket, Channel]) -> None:
    before = open_fds()
    rights = array.array("i", [0] * (FDS_MAX + 1))
    raw[0].sendmsg([json.dumps({"kind": "x"}).encode()], [(socket.SOL_SOCKET, 1, rights)])
    with pytest.raises(BadPacketError, match="too many"):
        raw[1].receive()
    assert open_fds() == before


def test_too_much_to_send(pair: Pair) -> None:
    with pytest.raises(BadPacketError):
        pair[0].send("x", {}, [0] * (FDS_MAX + 1))
    with pytest.raises(BadPacketError):
        pair[0].send("x", {"text": "x" * PACKET_BYTES_MAX})


def test_values_of_another_type(pair: Pair) -> None:
    pair[0].send("x", {"text": 1, "number": "1", "list": [1], "ids": ["1"], "scalar": 3})
    packet = pair[1].receive()
    assert packet is not None
    with pytest.raises(BadPacketError):
        packet.text("text")
    with pytest.raises(BadPacketError):
        packet.number("number")
    with pytest.raises(BadPacketError):
        packet.number("missing")
    for key in ("list", "scalar"):
        with pytest.raises(BadPacketError):
            packet.texts(key)
    for key in ("ids", "scalar"):
        with pytest.raises(BadPacketError):
            packet.numbers(key)
