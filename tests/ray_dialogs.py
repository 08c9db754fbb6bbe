"""What the actors of ``RayLLMCollector`` import: environments, policies, updaters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from channel_collector import Says, policy_of
from counting_dialogs import Counting
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

QUESTIONS = ["How are you?", "What is the capital of France?"]


def says() -> TensorDictModule:
    return policy_of(Says())


def marked(batch: TensorDictBase) -> TensorDictBase:
    return batch.set("marked", torch.ones(batch.batch_size))


def failing(batch: TensorDictBase) -> TensorDictBase:
    raise LookupError("no such batch")


def only_seen(batch: TensorDictBase) -> TensorDictBase:
    return batch.select("seen")


class Pausing(torch.nn.Module):
    """The action is 1000 times its first weight and once its second, read after a pause.

    A call that begins makes the file ``begun``, and goes on once the file ``go_on`` is there.
    """

    def __init__(self, folder: str, value: float = 0.0) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.full((1,), value))
        self.second = torch.nn.Parameter(torch.full((1,), value))
        self.begun, self.go_on = Path(folder, "begun"), Path(folder, "go on")

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        first = self.first.long()
        self.begun.touch()
        while not self.go_on.exists():
            time.sleep(0.005)
        return (1000 * first + self.second.long()).expand(seen.shape)


class LengthReward(Transform):
    """A reward of one for each character of the answer."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("reward", lengths_of(tensordict).view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def lengths_of(batch: TensorDictBase) -> torch.Tensor:
    """How many characters each answer has."""
    return torch.tensor([float(len(answer)) for answer in batch["text", "response"]])


class Failing(Counting):
    """Cannot take its third step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.steps == 2:
            raise LookupError("no third step")
        return super()._step(tensordict)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    class Tenfold(WeightUpdaterBase):
        """One that a user writes for torchrl: it runs where the policy is."""

        factor = 10.0

        def init(self, factor: float) -> None:
            self.factor = factor

        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            collector: Any = self.collector
            with torch.no_grad():
                collector.policy.module.value.copy_(self.factor * server_weights["module", "value"])


def chat_env() -> Any:
    import ray_models
    from torchrl.envs import TransformedEnv
    from torchrl.envs.llm import ChatEnv
    from torchrl.envs.llm.transforms import DataLoadingPrimer

    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=ray_models.tokenizer()))
    return env.append_transform(DataLoadingPrimer(dataloader=_questions()))


def dataset_env() -> Any:
    import ray_models
    from torchrl.envs.llm import DatasetChatEnv

    return DatasetChatEnv.from_dataloader(
        tokenizer=ray_models.tokenizer(), dataloader=_questions(), batch_size=(2,)
    )


def _questions() -> Any:
    return torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS * 4],  # pyright: ignore[reportArgumentType]
        batch_size=2,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )


def generating(**options: Any) -> Any:
    import ray_models
    from torchrl.modules.llm import TransformersWrapper

    return TransformersWrapper(
        ray_models.policy_model(),
        tokenizer=ray_models.tokenizer(),
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 5, **options},
    )


def answering() -> Any:
    """Generates, with log-probs of whole sequences, as inference engines give them."""
    import ray_models
    from torchrl.modules.llm import TransformersWrapper

    class Answering(TransformersWrapper):
        def forward(self, tensordict: TensorDictBase, **options: Any) -> TensorDictBase:
            out = super().forward(tensordict, **options)
            for row in out.unbind(0):
                answer = row["log_probs", "response"]
                before = len(row["tokens", "full"]) - len(answer)
                row["log_probs", "full"] = torch.cat([torch.zeros(before), answer])
            return out

    return Answering(
        ray_models.policy_model(),
        tokenizer=ray_models.tokenizer(),
        input_mode="history",
        pad_output=False,
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True},
    )


class GrpoStep:
    """A step of GRPO on the model of a policy, and what it has seen."""

    def __init__(self, policy: Any) -> None:
        import ray_models
        from torchrl.objectives.llm import GRPOLoss

        self._model = policy.model
        options = {"input_mode": "tokens", "pad_output": False}
        self._loss = GRPOLoss(ray_models.wrapped(self._model, "log_probs", **options))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def __call__(self, batch: TensorDictBase, told: dict[str, Any]) -> None:
        self._loss(batch).mean(reduce=True).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        told["sampled"] += batch.numel()
        told["seen"] = max(told["seen"], *batch["next", "policy_version"].tolist())
        rewards, kl = (batch.get(("next", name), as_list=True) for name in ("reward", "kl_penalty"))
        told["rows"] += zip(rewards, kl, lengths_of(batch), strict=True)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._model.state_dict().items()}


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
