"""Supervisors with ordinary programs in the place of CRIU: whoever is killed, nothing is left."""

import json
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapagent.errors import AgentError, PreflightFailed, WorkloadLost
from snapagent.linux import namespaces, processes
from snapagent.linux.network import fresh_network
from snapagent.supervision import Place, Supervisor, _spawn
from tests.support.placeholder import placeholder_container
from tests.support.processes import open_fds, stop_process
from tests.support.supervised import (
    agent_role,
    has_ended,
    marked,
    namespaces_in_use,
    needs_root,
    stubborn_tree,
    wait_for_tree,
)
from tests.support.waiting import wait_until

pytestmark = [needs_root, pytest.mark.slow]

PLACES = ["here", "fresh pids", "fresh network", "all fresh", "joined"]
LOOPS = 30
END_S_MAX = 30


@pytest.fixture
def mark() -> Iterator[str]:
    """Return a name for this test's processes; none of them is left after it."""
    name = f"supervised-{secrets.token_hex(6)}"
    yield name
    left = marked(name)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Return each kind of place."""
    match request.param:
        case "fresh pids":
            yield Place(pids="fresh")
        case "fresh network":
            yield Place(network="fresh")
        case "all fresh":
            yield Place(network="fresh", pids="fresh", addresses=("192.0.2.77",))
        case "joined":
            with placeholder_container(tmp_path / "container") as container:
                yield Place(join_pid=container.pid)
        case _:
            yield Place()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return a work directory with something in it."""
    folder = tmp_path / "work"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("x")
    (folder / "link").symlink_to(tmp_path)
    return folder


def own_namespaces(supervisor: Supervisor) -> dict[str, int]:
    """Return the namespaces that were made for a supervisor's keeper, with an fd of each.

    While it is open the kernel gives the namespace's number to no other.
    """
    made = {}
    for kind in ("pid", "net", "mnt"):
        name = namespaces.namespace_id(supervisor.keeper_pid, kind)
        if name is not None and name != namespaces.namespace_id(os.getpid(), kind):
            made[name] = os.open(f"/proc/{supervisor.keeper_pid}/ns/{kind}", os.O_RDONLY)
    return made


# -- told to --------------------------------------------------------------------------------------


def test_kill_leaves_nothing(place: Place, work: Path, mark: str, tmp_path: Path) -> None:
    supervisor = Supervisor.start(place, work)
    made = own_namespaces(supervisor) if place.join_pid is None else {}
    assert supervisor.run(stubborn_tree(mark)).status == 0
    pids = wait_for_tree(mark)
    assert {process.pid for process in supervisor.processes()} == set(pids)
    supervisor.kill("the test says so")
    assert marked(mark) == []
    assert not work.exists()
    assert tmp_path.exists()
    assert not made.keys() & namespaces_in_use()
    for fd in made.values():
        os.close(fd)
    assert has_ended(supervisor.keeper_pid)()
    supervisor.kill("again")
    with pytest.raises(WorkloadLost, match="the test says so"):
        supervisor.run(["/bin/true"])


def test_kill_while_a_program_runs(place: Place, work: Path, mark: str) -> None:
    """Goal: `kill` from another thread ends what runs, and `run` says why."""
    with Supervisor.start(place, work) as supervisor:
        problems: list[BaseException] = []

        argv = ["/bin/bash", "-c", f"exec -a {mark} sleep 1000"]
        thread = threading.Thread(target=collect, args=(problems, lambda: supervisor.run(argv)))
        thread.start()
        wait_for_tree(mark, 1)
        supervisor.kill("no more pages")
        thread.join()
        assert "no more pages" in str(problems[0])


def test_released_tree_lives_on(place: Place, work: Path, mark: str) -> None:
    """Goal: after a release only the tree is left, and in fresh process ids its init, which ends
    with it; it reaps and has no files open.
    """
    with Supervisor.start(place, work) as supervisor:
        supervisor.run(stubborn_tree(mark))
        pids = wait_for_tree(mark)
        supervisor.release()
    assert not work.exists()
    assert set(marked(mark)) == set(pids)
    wait_until(has_ended(supervisor.pid), "the supervisor's end")
    keeper = supervisor.keeper_pid
    if place.pids == "fresh":
        assert set(processes.children(keeper)) == set(pids)
        assert sorted(fd.name for fd in Path(f"/proc/{keeper}/fd").iterdir()) == ["0", "1", "2"]
        assert Path(f"/proc/{keeper}/fd/2").readlink() == Path("/dev/null")
        assert b"snapagent: init" in Path(f"/proc/{keeper}/cmdline").read_bytes()
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: pids[0] not in processes.children(keeper), "its being reaped")
    else:
        wait_until(has_ended(keeper), "the keeper's end")
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: marked(mark) == [], "the end of the tree")
    wait_until(has_ended(keeper), "the end of the keeper")


def test_nothing_grows(work: Path, mark: str) -> None:
    """Goal: many supervisors, one after the other, leave no fd, process, mount or thread."""
    mounts = Path("/proc/self/mountinfo")
    proc_mounts = mounts.read_text().count(" - proc ")
    before = None
    for number in range(LOOPS):
        work.mkdir(exist_ok=True)
        kinds: list[Place] = [Place(), Place(pids="fresh"), Place(network="fresh")]
        supervisor = Supervisor.start(kinds[number % 3], work)
        supervisor.run(stubborn_tree(mark))
        supervisor.kill("next")
        supervisor._watcher.join()
        now = (open_fds(), threading.active_count())
        before = before or now
        assert now == before
    assert mounts.read_text().count(" - proc ") == proc_mounts


def test_userfaultfds_close_after_the_tree_is_dead(place: Place, work: Path, mark: str) -> None:
    """Goal: what is held is closed when nothing is alive any more, not before.

    Method: hold the only write end of a pipe. When its read end says that it is closed, there must
    be no process left.
    """
    reader, writer = os.pipe()
    with Supervisor.start(place, work) as supervisor:
        supervisor.hold(writer)
        os.close(writer)
        supervisor.run(stubborn_tree(mark))
        wait_for_tree(mark)
        killer = threading.Thread(target=supervisor.kill, args=("test",))
        killer.start()
        assert os.read(reader, 1) == b""
        assert marked(mark) == []
        killer.join()
    os.close(reader)


def test_files_and_directories_reach_the_program(place: Place, work: Path) -> None:
    with Supervisor.start(place, work) as supervisor:
        ours, theirs = socket.socketpair()
        script = "echo told >&{fd0}; cat {work}/inner/file >&{fd0}; echo out"
        argv = ["/bin/bash", "-c", script]
        assert supervisor.run(argv, pass_fds=[theirs.fileno()]).status == 0
        theirs.close()
        with ours.makefile() as answer:
            assert answer.read() == "told\nx"
        ours.close()
        assert (work / "criu.out").read_text() == "out\n"
        assert supervisor.run(["/bin/sh", "-c", "kill -9 $$"]).status == -signal.SIGKILL
        missing = supervisor.run(["/nowhere/criu"])
        assert missing.status == 127
        assert "/nowhere/criu" in missing.message


# -- killed ---------------------------------------------------------------------------------------


def test_agent_killed(place: Place, work: Path, mark: str) -> None:
    with agent_role(place, work, stubborn_tree(mark)) as agent:
        wait_for_tree(mark)
        agent.process.kill()
        wait_until(has_ended(agent.supervisor_pid), "the supervisor's end")
        assert marked(mark) == []
        assert not work.exists()
        reason = json.loads(work.with_name("reasons").read_text())
        assert reason["ended"] == "the agent ended without releasing it"


def test_agent_killed_while_a_program_runs(place: Place, work: Path, mark: str) -> None:
    argv = ["/bin/bash", "-c", f"exec -a {mark} sleep 1000"]
    with agent_role(place, work, argv, step="running") as agent:
        wait_for_tree(mark, 1)
        agent.process.kill()
        wait_until(has_ended(agent.supervisor_pid), "the supervisor's end")
        assert marked(mark) == []
        assert not work.exists()


def test_supervisor_killed(place: Place, work: Path, mark: str) -> None:
    reasons: list[str] = []
    died = threading.Event()

    def on_death(reason: str) -> None:
        reasons.append(reason)
        died.set()

    with Supervisor.start(place, work, on_death=on_death) as supervisor:
        supervisor.run(stubborn_tree(mark))
        wait_for_tree(mark)
        os.kill(supervisor.pid, signal.SIGKILL)
        assert died.wait(END_S_MAX)
        assert marked(mark) == []
        assert "killed" in reasons[0]
        assert not work.exists()
        with pytest.raises(WorkloadLost):
            supervisor.release()


def test_keeper_killed(place: Place, work: Path, mark: str) -> None:
    reasons: list[str] = []
    died = threading.Event()

    def on_death(reason: str) -> None:
        reasons.append(reason)
        died.set()

    with Supervisor.start(place, work, on_death=on_death) as supervisor:
        supervisor.run(stubborn_tree(mark))
        pids = wait_for_tree(mark)
        os.kill(supervisor.keeper_pid, signal.SIGKILL)
        assert died.wait(END_S_MAX)
        assert "keeper" in reasons[0]
        if place.join_pid is not None:
            # Nothing tells them from the container's own: the test gave no ids to know them by.
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        assert not work.exists()
        wait_until(lambda: marked(mark) == [], "the end of the tree")


@pytest.mark.parametrize("task", ["restore", "capture"])
def test_signals_to_all_but_the_agent_change_nothing(task: str, work: Path, mark: str) -> None:
    """Goal: who ends a service by SIGTERM to all of it ends it through the agent, in order."""
    argv = ["/bin/bash", "-c", f"exec -a {mark} sleep 1000"]
    with Supervisor.start(Place(), work, task=task) as supervisor:  # type: ignore[arg-type]
        thread = threading.Thread(target=lambda: supervisor.run(argv))
        thread.start()
        (pid,) = wait_for_tree(mark, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(supervisor.pid, number)
            os.kill(supervisor.keeper_pid, number)
        os.kill(pid, signal.SIGTERM)
        thread.join()
        assert supervisor.run(["/bin/true"]).status == 0


# -- captures -------------------------------------------------------------------------------------


def test_capture_outlives_its_agent(work: Path, mark: str) -> None:
    """Goal: CRIU that dumps is never killed; the supervisor waits for it and then cleans up.

    Method: a program that waits for a line from a FIFO, long after the agent was killed.
    """
    fifo = work.with_name("fifo")
    os.mkfifo(fifo)
    argv = ["/bin/bash", "-c", f"read -r line < {fifo}; echo $line > {fifo}.done", mark]
    with agent_role(Place(), work, argv, step="running", task="capture") as agent:
        wait_for_tree(mark, 1)
        agent.process.kill()
        agent.process.wait()
        with fifo.open("w") as line:
            assert not has_ended(agent.supervisor_pid)()
            line.write("late\n")
        wait_until(has_ended(agent.supervisor_pid), "the supervisor's end")
        assert Path(f"{fifo}.done").read_text() == "late\n"
        assert not work.exists()


def test_capture_outlives_its_supervisor(work: Path, mark: str) -> None:
    fifo = work.with_name("fifo")
    os.mkfifo(fifo)
    argv = ["/bin/bash", "-c", f"read -r line < {fifo}; echo $line > {fifo}.done", mark]
    with agent_role(Place(), work, argv, step="running", task="capture") as agent:
        wait_for_tree(mark, 1)
        os.kill(agent.supervisor_pid, signal.SIGKILL)
        with fifo.open("w") as line:
            line.write("late\n")
        wait_until(has_ended(agent.keeper_pid), "the keeper's end")
        wait_until(lambda: Path(f"{fifo}.done").exists(), "the end of the program")


@pytest.mark.parametrize("victim", ["supervisor", "keeper"])
def test_capture_is_told_before_criu_ends(victim: str, work: Path, mark: str) -> None:
    """Goal: CRIU waits for the agent, which must learn that it has to let CRIU fail, not finish.

    Method: a program that waits for a FIFO, which is only written by `on_death`.
    """
    fifo = work.with_name("fifo")
    os.mkfifo(fifo)

    def on_death(_: str) -> None:
        fifo.write_text("fail\n")

    argv = ["/bin/bash", "-c", f"read -r line < {fifo}; echo $line > {fifo}.done", mark]
    with Supervisor.start(Place(), work, task="capture", on_death=on_death) as supervisor:
        problems: list[BaseException] = []
        thread = threading.Thread(target=collect, args=(problems, lambda: supervisor.run(argv)))
        thread.start()
        wait_for_tree(mark, 1)
        victims = {"supervisor": supervisor.pid, "keeper": supervisor.keeper_pid}
        os.kill(victims[victim], signal.SIGKILL)
        thread.join()
        assert isinstance(problems[0], WorkloadLost)
        assert Path(f"{fifo}.done").read_text() == "fail\n"
        assert not work.exists()


def collect(problems: list[BaseException], call: Callable[[], object]) -> None:
    """Call something in a thread and keep its error."""
    try:
        call()
    except AgentError as error:
        problems.append(error)


@pytest.mark.parametrize("task", ["restore", "capture"])
def test_agent_killed_while_the_place_is_prepared(task: str, place: Place, work: Path) -> None:
    """Goal: the supervisor ends and cleans up when its agent goes before it is ready.

    Method: send the first message and close the socket at once, or without any message.
    """
    if task == "capture" and place.pids == "fresh":
        return  # There is no such place for a capture; `Supervisor.start` refuses it.
    values = start_message(place, work, task=task)
    network = fresh_network(place.addresses) if place.network == "fresh" else None
    fds = [] if network is None else [network]
    for has_message in (False, True):
        process, channel, trace = _spawn()
        if has_message:
            channel.send("start", values, fds)
        channel.close()
        assert process.wait(END_S_MAX) == 0
        assert work.exists() is not has_message
        trace.seek(0)
        assert trace.read() == b""
        trace.close()
    for fd in fds:
        os.close(fd)


def start_message(place: Place, work: Path, *, task: str) -> dict[str, object]:
    return {
        "task": task,
        "work": str(work),
        "reasons": "",
        "pids": [],
        "ghosts": [],
        "fresh_pids": int(place.pids == "fresh"),
        "join": place.join_pid or 0,
        "network": int(place.network == "fresh"),
        "names": [],
        "paths": [],
    }


# -- places ---------------------------------------------------------------------------------------


def test_fresh_network_has_the_addresses(work: Path) -> None:
    """Goal: each address can be listened on and connected to inside, and is not there outside."""
    addresses = ("192.0.2.77", "2001:db8::77/64", "127.0.0.9", "::1")
    script = """
import socket, sys
for address in sys.argv[1:]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 7777), family=family) as server:
        with socket.create_connection((address, 7777), timeout=5) as client:
            print(server.getsockname()[0])
"""
    hosts = [address.split("/")[0] for address in addresses]
    with Supervisor.start(Place(network="fresh", addresses=addresses), work) as supervisor:
        status = supervisor.run([sys.executable, "-c", script, *hosts]).status
        output = (work / "criu.out").read_text()
        assert status == 0, output
        assert output.split() == hosts
        with socket.socket() as outside, pytest.raises(OSError, match="assign"):
            outside.bind(("192.0.2.77", 0))


def test_fresh_process_ids_leave_those_of_the_snapshot_free(work: Path) -> None:
    with Supervisor.start(Place(pids="fresh"), work, pids=[2, 3, 4, 1500]) as supervisor:
        supervisor.run(["/bin/sh", "-c", "echo $$"])
        assert int((work / "criu.out").read_text()) == 2001


def test_joining_includes_control_groups(work: Path, tmp_path: Path, mark: str) -> None:
    """Goal: what is restored into a container has its limits, and a capture is not on its account.

    Method: a group of the first hierarchy that lets us make one, with the container's init in it.
    """
    group = make_group(f"snapagent-{mark}")
    try:
        with placeholder_container(tmp_path / "container") as container:
            (group / "cgroup.procs").write_text(str(container.pid))
            place = Place(join_pid=container.pid)
            with Supervisor.start(place, work) as supervisor:
                supervisor.run(stubborn_tree(mark))
                members = (group / "cgroup.procs").read_text().split()
                assert set(map(str, wait_for_tree(mark))) <= set(members)
            with Supervisor.start(place, task="capture") as supervisor:
                members = (group / "cgroup.procs").read_text().split()
                assert str(supervisor.keeper_pid) not in members
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group's being empty")
        group.rmdir()


def make_group(name: str) -> Path:
    """Return a new control group that can hold processes."""
    for hierarchy in ("pids", "unified", "."):
        group = Path("/sys/fs/cgroup", hierarchy, name)
        if (group.parent / "cgroup.procs").exists():
            try:
                group.mkdir()
            except OSError:
                continue
            return group
    pytest.skip("no control groups can be made here")


def test_keeper_killed_in_a_container_with_ids_known(work: Path, tmp_path: Path, mark: str) -> None:
    """Goal: the last resort finds orphans in a container by the ids that were to be restored."""
    died = threading.Event()
    with (
        placeholder_container(tmp_path / "container") as container,
        Supervisor.start(
            Place(join_pid=container.pid),
            work,
            pids=range(2, 200),
            on_death=lambda _: died.set(),
        ) as supervisor,
    ):
        supervisor.run(stubborn_tree(mark))
        wait_for_tree(mark)
        others = set(processes.children(container.pid)) - set(marked(mark))
        os.kill(supervisor.keeper_pid, signal.SIGKILL)
        assert died.wait(END_S_MAX)
        assert marked(mark) == []
        assert {pid for pid in others if not has_ended(pid)()} == others - {supervisor.keeper_pid}


def test_container_ends(work: Path, tmp_path: Path, mark: str) -> None:
    """Goal: who ends the container ends what is restored into it, and the agent is told."""
    died = threading.Event()
    with placeholder_container(tmp_path / "container") as container:
        supervisor = Supervisor.start(
            Place(join_pid=container.pid), work, on_death=lambda _: died.set()
        )
        supervisor.run(stubborn_tree(mark))
        wait_for_tree(mark)
    assert died.wait(END_S_MAX)
    assert marked(mark) == []
    assert not work.exists()
    with pytest.raises(WorkloadLost):
        supervisor.processes()
    supervisor.kill("it is gone")


def test_both_killed(place: Place, work: Path, mark: str) -> None:
    """Goal: when supervisor and keeper are killed at once, the agent ends what they leave."""
    died = threading.Event()
    with Supervisor.start(place, work, pids=[], on_death=lambda _: died.set()) as supervisor:
        supervisor.run(stubborn_tree(mark))
        pids = wait_for_tree(mark)
        known = {processes.inner_pid(pid) or 0 for pid in pids}
        assert supervisor._strays is not None
        supervisor._strays = supervisor._strays._replace(pids=known)
        stop_process(supervisor.pid)
        os.kill(supervisor.keeper_pid, signal.SIGKILL)
        os.kill(supervisor.pid, signal.SIGKILL)
        assert died.wait(END_S_MAX)
        assert marked(mark) == []
        assert not work.exists()


def test_places_that_cannot_be(work: Path) -> None:
    with pytest.raises(PreflightFailed):
        Place(join_pid=1, pids="fresh")
    with pytest.raises(PreflightFailed):
        Place(addresses=("192.0.2.1",))
    with pytest.raises(AgentError, match="No such process"):
        Supervisor.start(Place(join_pid=2**22 - 1), work)
    work.mkdir()  # It was removed, as always.
    with pytest.raises(AgentError, match="is no IPv4"):
        Supervisor.start(Place(network="fresh", addresses=("nowhere",)), work)
