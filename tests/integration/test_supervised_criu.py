"""CRIU under a supervisor: restores into every kind of place, captures, and ends in the middle."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapagent.linux import namespaces, processes
from snapagent.supervision import Place, Supervisor, criu_command
from tests.support.placeholder import placeholder_container
from tests.support.supervised import agent_role, has_ended, inside_network, needs_root
from tests.support.waiting import wait_until
from tools.live_process import Criu, LiveProcess

pytestmark = [needs_root, pytest.mark.criu, pytest.mark.slow]

SIZE_MIB = 8
NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup")
RESTORE = ["restore", "--restore-detached"]


@dataclass(frozen=True)
class Dumped:
    """A process that CRIU has dumped and that is gone."""

    process: LiveProcess
    images: Path
    home: Path
    memory: str

    @property
    def pid(self) -> int:
        return self.process.pid


@dataclass(frozen=True)
class Setting:
    """How to run CRIU under a supervisor."""

    command: list[str]
    directories: dict[str, Path]
    work: Path

    def argv(self, *arguments: str) -> list[str]:
        where = ["--images-dir", "{images}", "--work-dir", "{work}", "--log-file", "criu.log"]
        return [*self.command, *arguments, *where, "-v3"]

    def log(self) -> str:
        return (self.work / "criu.log").read_text(errors="replace")


@pytest.fixture
def dumped(criu: Criu, work_dir: Path) -> Iterator[Dumped]:
    home, images = work_dir / "home", work_dir / "images"
    home.mkdir()
    images.mkdir()
    with LiveProcess(home, size_mib=SIZE_MIB) as process:
        memory = process.memory_hash()
        criu.dump(process.pid, images)
        process.reap()
        yield Dumped(process, images, home, memory)


@pytest.fixture
def settings(criu: Criu, dumped: Dumped, work_dir: Path) -> Callable[[str], Setting]:
    """Return a function that makes a setting with a work directory of that name."""

    def make(name: str) -> Setting:
        command, home = criu_command(criu.program)
        work = work_dir / name
        work.mkdir()
        return Setting(command, {"criu": home, "images": dumped.images}, work)

    return make


def restore(supervisor: Supervisor, setting: Setting, dumped: Dumped) -> int:
    """Restore under a supervisor, check the memory, and return the root process."""
    result = supervisor.run(setting.argv(*RESTORE))
    assert result.status == 0, setting.log()
    root = supervisor.root(dumped.pid)
    assert root is not None
    assert [process.pid for process in supervisor.processes()] == [root]
    assert inside_network(root, dumped.process.memory_hash) == dumped.memory
    return root


def test_two_restores_at_once_into_fresh_process_ids(
    dumped: Dumped, settings: Callable[[str], Setting]
) -> None:
    place = Place(network="fresh", pids="fresh")
    one, other = settings("one"), settings("other")
    with (
        Supervisor.start(place, one.work, directories=one.directories, pids=[dumped.pid]) as first,
        Supervisor.start(place, other.work, directories=other.directories) as second,
    ):
        roots = [restore(first, one, dumped), restore(second, other, dumped)]
        assert roots[0] != roots[1]
        first.release()
        second.kill("enough")
        assert not has_ended(roots[0])()
        assert has_ended(roots[1])()
        assert inside_network(roots[0], dumped.process.memory_hash) == dumped.memory
        inside_network(roots[0], lambda: dumped.process.ask("quit"))
        wait_until(has_ended(first.keeper_pid), "the end of the init, with the last process")


def test_restore_into_a_fresh_network(dumped: Dumped, settings: Callable[[str], Setting]) -> None:
    place = Place(network="fresh", addresses=("192.0.2.80",))
    setting = settings("one")
    with Supervisor.start(place, setting.work, directories=setting.directories) as supervisor:
        root = restore(supervisor, setting, dumped)
        assert root == dumped.pid
        supervisor.release()
        inside_network(root, lambda: dumped.process.ask("quit"))
        wait_until(has_ended(root), "the end of the process")


def test_restore_into_a_container_and_capture_there(
    dumped: Dumped, settings: Callable[[str], Setting], work_dir: Path
) -> None:
    """Goal: a restored process is in all namespaces of a container and below its root directory,
    with no file open but its own, and can be captured again there.
    """
    setting = settings("restore")
    with placeholder_container(work_dir / "container", also=[dumped.home]) as container:
        place = Place(join_pid=container.pid)
        with Supervisor.start(place, setting.work, directories=setting.directories) as supervisor:
            root = restore(supervisor, setting, dumped)
            for kind in NAMESPACES:
                wanted = namespaces.namespace_id(container.pid, kind)
                assert namespaces.namespace_id(root, kind) == wanted
            assert Path(f"/proc/{root}/root").samefile(f"/proc/{container.pid}/root")
            targets = [str(fd.readlink()) for fd in Path(f"/proc/{root}/fd").iterdir()]
            assert not [target for target in targets if "criu" in target or "images" in target]
            supervisor.release()
        state = processes.read_state(root)
        assert state is not None
        assert state.parent == container.pid

        setting = settings("capture")
        images = work_dir / "images-again"
        images.mkdir()
        setting.directories["images"] = images
        with Supervisor.start(
            place, setting.work, task="capture", directories=setting.directories
        ) as supervisor:
            dump = setting.argv("dump", "--tree", str(dumped.pid), "--leave-running")
            result = supervisor.run(dump)
            assert result.status == 0, setting.log()
        assert (images / "inventory.img").exists()
        assert inside_network(root, dumped.process.memory_hash) == dumped.memory


def write_script(work: Path, action: str, command: str) -> Path:
    script = work / "script"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != {action} ] || {{ {command}; }}\n')
    script.chmod(0o700)
    return script


@pytest.mark.parametrize("place", [Place(), Place(network="fresh", pids="fresh")])
@pytest.mark.parametrize("action", ["pre-restore", "pre-resume"])
def test_criu_killed_in_a_restore(
    dumped: Dumped, settings: Callable[[str], Setting], place: Place, action: str
) -> None:
    """Goal: what CRIU leaves when it is killed is ended, and the next restore succeeds."""
    setting = settings("one")
    with Supervisor.start(place, setting.work, directories=setting.directories) as supervisor:
        write_script(setting.work, action, "kill -9 $PPID")
        argv = setting.argv(*RESTORE, "--action-script", "{work}/script")
        assert supervisor.run(argv).status == -signal.SIGKILL
        left = supervisor.processes()
        assert left or action != "pre-resume"
        supervisor.kill("CRIU was killed")
        assert all(has_ended(process.pid)() for process in left)
    setting = settings("two")
    with Supervisor.start(place, setting.work, directories=setting.directories) as supervisor:
        restore(supervisor, setting, dumped)


@pytest.mark.parametrize("place", [Place(), Place(network="fresh", pids="fresh")])
def test_agent_killed_in_a_restore(
    dumped: Dumped, settings: Callable[[str], Setting], place: Place
) -> None:
    """Goal: the same for an agent that is killed while CRIU waits for it, before it resumes."""
    setting = settings("one")
    script = write_script(
        setting.work, "pre-resume", f"echo here > {setting.work}/told; sleep 1000"
    )
    argv = setting.argv(*RESTORE, "--action-script", str(script))
    directories = {name: str(path) for name, path in setting.directories.items()}
    with agent_role(place, setting.work, argv, step="running", directories=directories) as agent:
        wait_until((setting.work / "told").exists, "the pause before resuming")
        found = processes.descendants(agent.keeper_pid)
        assert len(found) >= 3
        agent.process.kill()
        wait_until(has_ended(agent.supervisor_pid), "the supervisor's end")
        assert all(has_ended(pid)() for pid in found)
        assert not setting.work.exists()
    setting = settings("two")
    with Supervisor.start(place, setting.work, directories=setting.directories) as supervisor:
        restore(supervisor, setting, dumped)


def test_agent_killed_in_a_capture(
    criu: Criu, live_process: LiveProcess, work_dir: Path, tmp_path: Path
) -> None:
    """Goal: CRIU finishes its dump without the agent, and the source goes on unharmed.

    Method: pause CRIU in a script while the processes are frozen, kill the agent, let it go on.
    """
    command, home = criu_command(criu.program)
    images, work = work_dir / "images", work_dir / "work"
    images.mkdir()
    work.mkdir()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    memory = live_process.memory_hash()
    setting = Setting(command, {"criu": home, "images": images}, work)
    script = write_script(work, "post-dump", f"echo here > {work}/told; read -r _ < {fifo}")
    argv = setting.argv("dump", "--tree", str(live_process.pid), "--leave-running")
    argv += ["--action-script", str(script)]
    directories = {name: str(path) for name, path in setting.directories.items()}
    with agent_role(
        Place(), work, argv, step="running", task="capture", directories=directories
    ) as agent:
        wait_until((work / "told").exists, "the pause at the end of the dump")
        agent.process.kill()
        agent.process.wait()
        with fifo.open("w") as line:
            assert not has_ended(agent.supervisor_pid)()
            line.write("go on\n")
        wait_until(has_ended(agent.supervisor_pid), "the supervisor's end")
    assert not work.exists()
    assert (images / "inventory.img").exists()
    assert live_process.memory_hash() == memory
