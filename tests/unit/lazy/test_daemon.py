"""The daemon with real userfaultfds of a real process that stands for a restored one."""

import pytest

from tests.support.lazy_pages import WAIT_S, Stage, random_image, whole_map

pytestmark = pytest.mark.slow


def test_fills_all_memory(stage: Stage) -> None:
    daemon, peer = stage.start(random_image(1000), [(3, 500, 6, 0), (600, 500, 6, 500)], 1200)
    assert daemon.wait_restored(WAIT_S)
    assert daemon.wait_filled(WAIT_S)
    stage.release()
    peer.check()
    assert daemon.stats.fill_bytes == 1000 * 4096
    assert not stage.errors


def test_serves_faults_alone(stage: Stage) -> None:
    daemon, peer = stage.start(random_image(1000), whole_map(1000), 1200, fill=False)
    peer.check(how="read_by_threads")
    assert daemon.stats.fault_bytes == 1000 * 4096
    daemon.start_fill()
    assert daemon.wait_filled(WAIT_S)
