"""What LLMCollector refuses, before it changes anything."""

from __future__ import annotations

import inspect
import queue
from itertools import chain

import pytest
from counting_dialogs import Counting, policy
from torchrl.collectors import Collector, MultiCollector
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs.llm.transforms import PolicyVersion as TorchrlPolicyVersion
from torchrl.weight_update import SharedMemWeightSyncScheme as Other

from fusedrl import AsyncCollector, LLMCollector, RayLLMCollector, WeightHandle

HANDLE = WeightHandle(0, 0, "")


class WithAnArgument(LLMCollector):
    def __init__(self, env, extra, **options):
        super().__init__(env, **options)
        self.extra = extra


LAST = {"yield_only_last_steps": True}
DIALOGS = {"collector_class": LLMCollector}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"queue": queue.Queue(), "replay_buffer": 1}, TypeError, "queue: expected .* got both"),
        ({"policy_factory": lambda: policy}, TypeError, "policy_factory: expected .* got both"),
        ({"weight_updater": 1, "weight_sync_schemes": {}}, TypeError, "weight_updater: .* both"),
        *(
            (
                LAST | {name: value},
                TypeError,
                f"yield_only_last_steps: expected no .*{name}",
            )
            for name, value in (
                ("yield_completed_trajectories", False),
                ("flatten_data", False),
                ("reset_at_each_iter", True),
            )
        ),
        ({"dialog_turns_per_batch": None}, TypeError, "dialog_turns_per_batch: .* got None"),
        ({"dialog_turns_per_batch": 0}, ValueError, "dialog_turns_per_batch: .* got 0"),
        ({"dialog_turns_per_batch": 2.5}, TypeError, "dialog_turns_per_batch: .* got 2.5"),
        ({"total_dialog_turns": 0}, ValueError, "total_dialog_turns: .* got 0"),
        (
            {"async_envs": True},
            RuntimeError,
            "async_envs: expected AsyncEnvPool .* Transformed",
        ),
        (
            {"channel": HANDLE, "weight_updater": 1},
            TypeError,
            "weight_updater: expected it or channel",
        ),
        (
            {"track_policy_version": TorchrlPolicyVersion("uuid")},
            ValueError,
            "track_policy_version: expected True .* got version_type='uuid'",
        ),
        ({"track_policy_version": "int"}, TypeError, "track_policy_version: .* got str"),
        ({"channel": 1}, TypeError, "channel: expected a WeightHandle or WeightReader, got int"),
        ({"max_staleness": 1}, TypeError, "max_staleness: expected track_policy_version with it"),
        (
            {"channel_mode": "copy"},
            TypeError,
            "channel_mode: expected a channel with it, got 'copy'",
        ),
        ({"channel_mode": "x"}, ValueError, "channel_mode: expected 'alias' or 'copy', got 'x'"),
        (
            {"max_staleness": -1, "track_policy_version": True},
            ValueError,
            "max_staleness: expected 0 or more, got -1",
        ),
    ],
)
def test_refused(options, error, message):
    env = TransformedEnv(Counting())
    before = list(env.observation_spec.keys())
    given = {"policy": policy, "dialog_turns_per_batch": 4, "track_policy_version": True}
    if "track_policy_version" not in options and "max_staleness" in options:
        given["track_policy_version"] = False
    with pytest.raises(error, match=message):
        LLMCollector(env, **(given | options))
    assert list(env.observation_spec.keys()) == before


@pytest.mark.parametrize(
    ("cls", "options", "named"),
    [
        (LLMCollector, {}, "LLMCollector"),
        (RayLLMCollector, {}, "LLMCollector"),
        (AsyncCollector, {"frames_per_batch": 4}, "AsyncCollector"),
        (AsyncCollector, {"frames_per_batch": 4} | DIALOGS, "AsyncCollector"),
    ],
)
def test_an_unknown_argument_is_refused_by_its_name(cls, options, named):
    told = rf"^{named}.__init__\(\) got an unexpected keyword argument 'unknown'"
    with pytest.raises(TypeError, match=told):
        cls(Counting, unknown=1, **options)


@pytest.mark.parametrize(
    ("use", "error", "told"),
    [
        (lambda c: setattr(c, "max_staleness", -1) or c.next(), ValueError, "max_staleness: .* -1"),
        (lambda c: c.set_postproc(lambda batch: None) or c.next(), TypeError, "postproc: .* None"),
        (lambda c: c.update_policy_weights_(weights_dict={}), ValueError, "weights_dict: "),
    ],
)
def test_refused_later(collect, use, error, told):
    with pytest.raises(error, match=told):
        use(collect(track_policy_version=True))


@pytest.mark.parametrize("make", [lambda: Counting(None), lambda: SerialEnv(2, Counting)])
@pytest.mark.parametrize("option", ["yield_completed_trajectories", "yield_only_last_steps"])
def test_completed_trajectories_take_one_batch_dimension(make, option):
    env = make()
    with pytest.raises(ValueError, match=r"yield_completed_trajectories: .* got batch_size=\("):
        LLMCollector(env, policy=policy, **{option: True})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames_per_batch": None}, TypeError, "frames_per_batch"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch: expected 1 or more, got 0"),
        ({"total_frames": 2.5}, TypeError, "total_frames: .* got 2.5"),
        ({"prefetch": -1}, ValueError, "prefetch: .* got -1"),
        ({"prefetch": None}, TypeError, "prefetch: .* got None"),
        ({"timeout": -1}, ValueError, "timeout: expected .* got -1"),
        ({"channel": 1}, TypeError, "channel: expected a WeightHandle, got int"),
        ({"max_staleness": 1}, TypeError, "max_staleness"),
        ({"channel_mode": "x"}, ValueError, "channel_mode"),
        ({"track_policy_version": TorchrlPolicyVersion("uuid")}, ValueError, "got .*'uuid'"),
        (
            DIALOGS | {"dialog_turns_per_batch": 8},
            TypeError,
            "^frames_per_batch: .* dialog_turns_p",
        ),
        (
            DIALOGS | {"frames_per_batch": None, "total_frames": 8, "total_dialog_turns": 4},
            TypeError,
            "^total_frames: expected it or total_dialog_turns, got both",
        ),
        (DIALOGS | {"split_trajs": True}, TypeError, "split_trajs"),
        ({"flatten_data": True}, TypeError, "flatten_data"),
        ({"collector_class": WithAnArgument}, TypeError, "extra"),
        ({"collector_class": WithAnArgument, "extra": 1, "options": 2}, TypeError, "'options'"),
        (DIALOGS | {"queue": queue.Queue()}, TypeError, "queue.*in your loop"),
        (DIALOGS | {"create_env_kwargs": {}}, TypeError, "create_env_kwargs.*partial"),
        ({"create_env_kwargs": [{}]}, TypeError, "create_env_kwargs: .* single value, got a list"),
        ({"device": ["cpu"]}, TypeError, "device: .* pass its element"),
        ({"num_threads": 1}, TypeError, r"torch.set_num_threads\(\)"),
        ({"verbose": True}, TypeError, "verbose"),
        ({"weight_sync_schemes": {}, "weight_updater": 1}, TypeError, "weight_updater"),
        ({"weight_sync_schemes": {"policy": Other()}}, ValueError, "ChannelWeightSyncScheme"),
        ({"weight_sync_schemes": {"policy": 1}}, ValueError, "ChannelWeightSyncScheme.* got int"),
        (
            {"max_frame_per_traj": 1},
            TypeError,
            "max_frame_per_traj'; Collector has no such argument: correct",
        ),
    ],
)
def test_refused_before_a_process_is_started(options, error, message, monkeypatch):
    monkeypatch.setattr("fusedrl.collectors.process.async_collector.WorkerHandle", None)
    with pytest.raises(error, match=message):
        AsyncCollector(Counting, policy, **({"frames_per_batch": 4} | options))


# Where each argument of torchrl's is followed: add a new one to the place where it works.
FOLLOWED = {
    "by name": """create_env_fn policy policy_factory frames_per_batch total_frames postproc
        replay_buffer weight_updater weight_sync_schemes track_policy_version collector_class""",
    "with the trainer": """split_trajs trajs_per_batch trajs_per_write traj_format device
        storing_device policy_device env_device update_at_each_batch""",
    "in the worker": """create_env_kwargs max_frames_per_traj init_random_frames reset_at_each_iter
        track_traj_ids exploration_type reset_when_done set_truncated use_buffers trust_policy
        compile_policy cudagraph_policy no_cuda_sync auto_register_policy_transforms compact_obs
        return_same_td interruptor worker_idx sync kwargs
        num_sub_threads init_fn pre_collect_hook post_collect_hook""",
    "nowhere": """extend_buffer weight_recv_schemes preemptive_threshold num_threads cat_results
        num_workers backend backend_options num_collectors""",
}


def test_each_argument_of_torchrls_is_followed_somewhere_or_refused():
    theirs = [inspect.signature(kind.__init__).parameters for kind in (Collector, MultiCollector)]
    of_ray = "_ray_trace_ctx"  # added in a process that has made an actor of the class
    assert {*chain(*theirs)} - {"self", of_ray} == {*" ".join(FOLLOWED.values()).split()}
    for name in FOLLOWED["nowhere"].split():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; "):
            AsyncCollector(Counting, policy, frames_per_batch=4, **{name: 1})
