"""A store behind TLS with a certificate of a private authority."""

import ssl
from pathlib import Path

import pytest
import trustme

from snapstore.errors import BackendError
from snapstore.repository.store import init_store, open_store
from tests.support.damage import age, tree_state
from tests.support.s3_proxy import Proxy
from tools.seaweed import S3Server

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def test_a_private_authority(
    s3: S3Server, s3_bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: `ca=FILE` and `AWS_CA_BUNDLE` are enough, for calls and for data; without, it says so.

    Method: something that speaks TLS in front of a real server.
    """
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(ca))
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "file").write_bytes(b"over TLS" * 10_000)
    age(tree)
    with Proxy(s3.endpoint, tls=context).running() as proxy:
        url = f"s3://{s3_bucket}/store?endpoint={proxy.endpoint}"
        with pytest.raises(BackendError) as caught:
            init_store(url)
        assert "ca=FILE" in caught.value.next_step
        with init_store(f"{url}&ca={ca}") as store:
            store.push(tree, "name:v1")
        monkeypatch.setenv("AWS_CA_BUNDLE", str(ca))
        with open_store(url) as store:
            store.pull("name:v1", tmp_path / "out")
    assert tree_state(tmp_path / "out") == tree_state(tree)
