"""Children of processes whose threads were in the middle of something."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import channel_workers as workers
import pytest
from channel_workers import model_of_zeros, publish
from children import end_by_signals, held_by_another_thread, in_child


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="open the handle again in this process"):
        call()


def test_a_child_goes_on_whatever_lock_another_thread_had(channel, reader):
    publish(channel)
    policy = model_of_zeros()
    reader.load_into(policy)
    follower = channel.handle.open().follow(model_of_zeros())
    follower.load()
    locks = (
        reader._lock,
        follower._lock,
        follower.reader._lock,
    )

    def use() -> None:
        refused(lambda: reader.load_into(policy))
        refused(lambda: channel.publish(workers.weights_of(2)))
        refused(follower.load)
        assert float(policy["a"].detach()[0]) == 1
        refused(follower.call)
        reader.close()
        follower.close()
        with channel.handle.open() as again:
            assert again.load_into(policy) == 1
        channel.close()

    with held_by_another_thread(*locks):
        assert in_child(use) == 0
    # The parent's are what they were.
    publish(channel)
    assert reader.load_into(policy) == 2
    assert [r.alive for r in channel.readers()] == [True, True]
    follower.close()
    follower.reader.close()


@pytest.mark.heavy
@pytest.mark.parametrize("ends", ["raises", "returns", "writes"])
def test_a_child_that_leaves_the_writing_block_of_its_parent_changes_nothing(channel, ends):
    """It leaves the block once the parent has published what the block wrote, and more."""
    chance = random.Random(0)
    publish(channel)
    with channel.handle.open() as reader:
        for _ in range(3):
            child, (told, tell) = -1, os.pipe()
            try:
                with channel.writing() as writing:
                    for view in writing.views:
                        view.fill_(writing.version)
                    child = os.fork()
                    if child == 0:
                        end_by_signals()
                        os.read(told, 1)
                        if ends == "writes":
                            writing.views[0].fill_(-1)
                        if ends == "raises":
                            raise KeyError
            except KeyError:
                os._exit(0 if child == 0 and ends == "raises" else 3)
            except RuntimeError as error:  # the slot is the parent's
                os._exit(0 if child == 0 and "forked child" in str(error) else 2)
            if child == 0:
                os._exit(4)
            for _ in range(chance.randrange(3)):
                publish(channel)
            os.write(tell, b"x")
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert ended == (-signal.SIGSEGV if ends == "writes" else 0)
            os.close(told), os.close(tell)
            with reader.lease() as lease:
                assert workers.version_in(lease.weights) == lease.version == channel.version
            publish(channel)
