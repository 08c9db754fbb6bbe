"""AsyncCollector where something goes wrong, or ends."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pty
import resource
import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import programs
import pytest
from async_workers import Deaf, Failing, FailingEnv, Odd, Slow, no_env, no_policy, ones
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.testing.mocking_classes import CountingEnv

from fusedrl import AsyncCollector

from .ends import is_there, runs, until

pytestmark = pytest.mark.heavy

TESTS = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("env", "policy", "error", "text"),
    [
        (CountingEnv, Failing(LookupError, "lost"), LookupError, "in __call__"),
        (CountingEnv, Failing(Odd, "odd", 1), RuntimeError, "Odd: odd"),
        (FailingEnv, ones, ZeroDivisionError, "in _step"),
    ],
    ids=["policy", "unreadable", "environment"],
)
@pytest.mark.usefixtures("forked")
def test_the_workers_exception_arrives_with_its_traceback(make, env, policy, error, text):
    collector = make(env, policy)
    pid = collector.procs[0].pid
    with pytest.raises(error) as raised:
        list(collector)
    assert text in str(raised.value.__cause__) and "async_workers.py" in str(raised.value.__cause__)
    assert collector.closed and not is_there(pid)
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()


@pytest.mark.parametrize(
    ("env", "factory", "error", "function"),
    [(no_env, None, ValueError, "no_env"), (CountingEnv, no_policy, LookupError, "no_policy")],
    ids=["environment", "policy"],
)
@pytest.mark.usefixtures("prepared")
def test_what_a_factory_raises_is_raised_when_the_collector_is_made(
    make, env, factory, error, function
):
    with pytest.raises(error, match="today") as raised:
        make(env, None, policy_factory=factory)
    assert f"in {function}" in str(raised.value.__cause__)


def test_what_cannot_be_sent_to_a_process_is_refused(make):
    with pytest.raises(TypeError, match="create_env_fn, policy"):
        make(policy=(n for n in ()))


@pytest.mark.parametrize("how", ["exits", "killed"])
@pytest.mark.usefixtures("forked")
def test_a_worker_that_is_gone_is_an_error(make, how):
    collector = make(policy=Failing() if how == "exits" else ones)
    pid = collector.procs[0].pid
    if how == "killed":
        collector.next()
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"{pid} .* exit code {3 if how == 'exits' else -9}"):
        list(collector)
    assert not is_there(pid)


@pytest.mark.usefixtures("prepared")
def test_shutdown_in_the_middle_of_a_batch_closes_the_environment(make, tmp_path):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    collector = make(partial(Slow, str(tmp_path)), replay_buffer=buffer)
    pid = collector.procs[0].pid
    collector.start()
    until((tmp_path / "steps").exists)
    assert collector.is_running()
    collector.async_shutdown()
    assert (tmp_path / "closed").exists() and not is_there(pid)
    assert not collector.is_running()
    collector.shutdown()
    for use in (collector.next, collector.state_dict, collector.reset):
        with pytest.raises(RuntimeError, match="shut down"):
            use()


@pytest.mark.usefixtures("forked")
def test_ctrl_c_at_the_end_of_the_constructor_leaves_no_worker(make, monkeypatch):
    def interrupted(self):
        there.extend(multiprocessing.active_children())
        pop_all(self)
        raise KeyboardInterrupt

    there, pop_all = [], ExitStack.pop_all
    monkeypatch.setattr(ExitStack, "pop_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    gc.collect()
    assert there and not {*there} & {*multiprocessing.active_children()}


@pytest.mark.usefixtures("forked")
def test_a_trainer_without_a_descriptor_is_told(make):
    collector = make()
    pid, limits = collector.procs[0].pid, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"open files.*ulimit -n"):
            collector.next()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not is_there(pid)


def test_a_terminal_does_not_stop_the_worker(tmp_path):
    line = f"import async_workers as w; w.collect_in_a_script({str(tmp_path)!r}, 1, w.AtTerminal)"
    script, terminal = pty.fork()
    if not script:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *sys.path])
        os.execv(sys.executable, [sys.executable, "-c", line])
    try:
        until((tmp_path / "collecting").exists)
    finally:
        os.kill(script, signal.SIGKILL)
        os.waitpid(script, 0)
        os.close(terminal)


@pytest.mark.usefixtures("forked")
def test_a_worker_that_does_not_end_is_killed(make, tmp_path):
    collector = make(partial(Deaf, str(tmp_path)), prefetch=1)
    pid = collector.procs[0].pid
    collector._worker.ask(1)
    until((tmp_path / "steps").exists)
    collector.shutdown(timeout=0.1)
    assert not is_there(pid)


@pytest.mark.usefixtures("prepared")
def test_collectors_leave_nothing_behind():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    def collect(explicit: bool) -> None:
        collector = AsyncCollector(CountingEnv, ones, frames_per_batch=4, total_frames=8)
        pid = collector.procs[0].pid
        batches = list(collector)
        maps = "".join(Path(f"/proc/{n}/maps").read_text() for n in (os.getpid(), pid))
        in_shm = [line for line in maps.splitlines() if "/dev/shm/" in line]
        assert all(line.endswith("(deleted)") for line in in_shm)
        assert len(batches) == 2 and "/memfd:fusedrl" in maps
        if explicit:
            collector.shutdown()
        del collector
        assert not is_there(pid)

    collect(explicit=True)  # multiprocessing keeps what it needs once
    before = descriptors()
    for explicit in (True, False):
        collect(explicit)
    assert descriptors() == before


@pytest.mark.parametrize("end", ["killed", "killed, with a fork", "ctrl-c", "exit"])
def test_no_process_outlives_a_script(tmp_path, end):
    batches = 2 if end == "exit" else 10**9
    line = f"import async_workers as w; w.collect_in_a_script({str(tmp_path)!r}, {batches})"
    if end == "killed, with a fork":
        line = f"import async_workers as w; w.collect_beside_a_fork({str(tmp_path)!r})"
    if end != "exit":  # a worker that is spawned imports for seconds
        line = line.replace("; ", "; w.fork_workers(); ", 1)
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    with (tmp_path / "told").open("w+") as told:
        files = {"stdout": told, "stderr": told}
        script = programs.start("-c", line, env=environ, **files, taken_apart=True)
        try:
            until(lambda: (tmp_path / "collecting").exists() or script.ended())
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            if end == "killed":
                script.kill()
            elif end == "killed, with a fork":
                script.kill()
                until(lambda: not any(map(runs, pids)))
                os.killpg(script.pid, signal.SIGKILL)  # its child
            elif end == "ctrl-c":
                os.killpg(script.pid, signal.SIGINT)
            until(script.ended)
            until(lambda: not any(map(runs, pids)))
        finally:
            script.kill()
        text = (tmp_path / "told").read_text()
    if end == "exit":
        assert script.wait() == 0 and "Traceback" not in text
    if end == "ctrl-c":
        assert text.count("Traceback") == 1 and "KeyboardInterrupt" in text
