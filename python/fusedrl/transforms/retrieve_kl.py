"""Log-probs of policy and reference, their KL and the penalised reward in one transform."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import Compose, Transform
from torchrl.envs.llm.transforms import RetrieveKL as _RetrieveKL
from torchrl.modules.llm.policies import LLMWrapperBase

from fusedrl.compat import torchrl
from fusedrl.models import WithAdapter, WithoutAdapters
from fusedrl.models.other_adapters import OtherAdapters
from fusedrl.models.ranks import together
from fusedrl.transforms import columns
from fusedrl.transforms.kl_computation import KLComputation
from fusedrl.transforms.retrieve_log_prob import RetrieveLogProb, model_of
from fusedrl.transforms.wrapper_tokens import TokenBatch


class RetrieveKL(_RetrieveKL):
    """Score a conversation under a policy and a reference, and write their per-token KL.

    A drop-in for :class:`torchrl.envs.llm.transforms.RetrieveKL`: a ``Compose`` of two
    :class:`fusedrl.RetrieveLogProb` and a :class:`fusedrl.KLComputation`. If both models read the
    data in the same way, each conversation is rendered and tokenised once for both. With
    ``"from_collector"`` the policy is that of the collector, looked up at the first step.

    Args:
        gen_model: the policy as a log-prob wrapper, or ``"from_collector"``.
        ref_model: the reference as a log-prob wrapper, or the policy's model in a
            :class:`fusedrl.models.WithAdapter`; ``None`` uses a peft policy with its adapters
            disabled. The last two need no second copy of the weights.
        gen_model_factory: a function that makes ``gen_model``.
        ref_model_factory: a function that makes ``ref_model``.
        assistant_only: set the KL of all other tokens to 0; requires ``input_mode="history"``.
        history_key: key of the conversation, which must be the input key of the models.
        tokenizer_kwargs: see :class:`fusedrl.RetrieveLogProb`.
        detach: compute without a gradient graph.
        device: device of the models.
        tokenizer: the tokenizer of the assistant mask; by default that of each model.
        padding_side: side of the padding of ``[B, T]`` log-probs.
        gen_log_probs_full_key: key of the policy's log-probs, a tuple that ends in ``"full"``.
        ref_log_probs_full_key: key of the reference's log-probs, likewise.
        kl_key: key of the KL.
        add_to_reward: replace ``"reward"`` by ``reward - coeff * kl``.
        coeff: weight of the KL, a float or a 0-dim tensor.
        max_tokens_per_forward: see :class:`fusedrl.RetrieveLogProb`.
        share_prefixes: see :class:`fusedrl.RetrieveLogProb`.
        use_ray_service: torchrl's old spelling of ``service_backend="ray"``, which builds a
            :class:`fusedrl.RayRetrieveKL`; ``actor_name`` then names its actor.

    Attributes:
        takes_policy: whether the policy is that of a collector. Each turn is then scored with the
            version of the weights that generated it.

    Raises:
        ValueError: a model is missing, passed twice or not a log-prob wrapper, or the two models
            have different padding or the same ``log_probs_key``.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict, set_list_to_stack
        >>> from torchrl.data.llm import History
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> from torchrl.modules.llm.policies import ChatHistory
        >>> from fusedrl import RetrieveKL
        >>> from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained
        >>> tokenizer = make_tokenizer(["2 + 2? It is 4."])
        >>> def wrapper(key):
        ...     return TransformersWrapper(make_model(len(tokenizer)), tokenizer=tokenizer,
        ...         generate=False, return_log_probs=True, log_probs_key=key)
        >>> chats = [
        ...     [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}]
        ...     for answer in ("4", "It is 4.")
        ... ]
        >>> transform = RetrieveKL(wrapper("log_probs"), wrapper("ref_log_probs"), coeff=0.05)
        >>> with set_list_to_stack(True):
        ...     history = ChatHistory(full=History.from_chats(chats))
        ...     data = TensorDict(history=history, batch_size=(2,)).to_lazystack(0)
        ...     data["reward"] = torch.ones(2, 1, 1)
        ...     data = transform(data)
        >>> [len(row) for row in data.get("kl_penalty", as_list=True)]
        [25, 28]
        >>> [tuple(row.shape) for row in data.get("reward", as_list=True)]
        [(25, 1), (28, 1)]
    """

    def __init__(
        self,
        gen_model: LLMWrapperBase | Literal["from_collector"] | None = "from_collector",
        ref_model: LLMWrapperBase | WithAdapter | None = None,
        *,
        gen_model_factory: Callable[[], LLMWrapperBase] | None = None,
        ref_model_factory: Callable[[], LLMWrapperBase | WithAdapter] | None = None,
        assistant_only: bool = True,
        history_key: str = "history",
        tokenizer_kwargs: dict[str, Any] | None = None,
        detach: bool = True,
        device: torch.device | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        gen_log_probs_full_key: NestedKey = ("log_probs", "full"),
        ref_log_probs_full_key: NestedKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float | Tensor = 1.0,
        use_ray_service: bool = False,
        max_tokens_per_forward: int | None = None,
        share_prefixes: bool = True,
        **older: Any,
    ) -> None:
        gen_log_probs_full_key, ref_log_probs_full_key, coeff = columns.renamed(
            older, gen_log_probs_full_key, ref_log_probs_full_key, coeff
        )
        if gen_model == "from_collector" and gen_model_factory is not None:
            gen_model = None
        policy = _one_of("gen_model", gen_model, gen_model_factory)
        reference = _one_of("ref_model", ref_model, ref_model_factory)
        if policy is None:
            raise ValueError(
                "gen_model: expected a log-prob wrapper or gen_model_factory, got neither; pass "
                "one, or 'from_collector'"
            )
        self._scoring = {
            "assistant_only": assistant_only,
            "tokenizer_kwargs": tokenizer_kwargs,
            "detach": detach,
            "device": device,
            "tokenizer": tokenizer,
            "padding_side": padding_side,
            "max_tokens_per_forward": max_tokens_per_forward,
            "share_prefixes": share_prefixes,
        }
        self._keys = (gen_log_probs_full_key, ref_log_probs_full_key)
        self._history_key = history_key
        # torchrl would look up the collector when specs are read, before it exists.
        self._initialized = True
        self._pending = self.takes_policy = policy == "from_collector"
        if self._pending:
            for name, key in zip(("gen", "ref"), self._keys, strict=True):
                _check_full(f"{name}_log_probs_full_key", key)
            # Wrapped once the policy is known; in a tuple, so that it is not registered as a child.
            needs_policy = reference is None or isinstance(reference, OtherAdapters)
            self._unwrapped_reference = (reference,)
            scorers = [] if needs_policy else [self._scorer(reference, 1)]
        else:
            reference = _wrapped(reference, policy, self._keys[1])
            _check_pair(policy, reference)
            scorers = [self._scorer(policy, 0), self._scorer(reference, 1)]
        computation = KLComputation(
            self._keys[0], self._keys[1], kl_key=kl_key, add_to_reward=add_to_reward, coeff=coeff
        )
        transforms = [*scorers, computation]
        Compose.__init__(self, *transforms)

    def _scorer(self, model: Any, which: int) -> RetrieveLogProb:
        _check_history_key(model, self._history_key)
        return RetrieveLogProb(model, log_probs_full_key=self._keys[which], **self._scoring)

    def _init_deferred(self) -> None:
        """Build the scorers that need the collector's policy, and share its weights."""
        container = self.container
        if container is None:
            raise ValueError(
                "gen_model: 'from_collector' expected this transform in an environment, got none; "
                "append it to the environment of a collector, or pass a model"
            )
        collector = container.collector
        if collector is None:
            raise ValueError(
                "gen_model: 'from_collector' expected an environment of a collector, got one "
                "without; build the collector before stepping, or pass a model"
            )
        policy: Any = collector.policy
        first: Any = self.transforms[0]
        given = first.model if isinstance(first, RetrieveLogProb) else None
        scoring_policy = _new_version(
            policy,
            self._keys[0],
            generate=False,
            return_log_probs=True,
            input_mode="history" if given is None else given.input_mode,
            input_key=(self._history_key, "full") if given is None else given.input_key,
            pad_output=policy.pad_output if given is None else given.pad_output,
        )
        scorers = [self._scorer(scoring_policy, 0)]
        if given is None:
            reference = _wrapped(self._unwrapped_reference[0], scoring_policy, self._keys[1])
            scorers.append(self._scorer(reference, 1))
        for place, scorer in enumerate(scorers):
            self.transforms.insert(place, scorer)
            scorer.set_container(self)
        self._pending = False

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        with self._turn_version():
            if self._pending:
                self._init_deferred()
            with self._joint_call():
                if tensordict.batch_dims == 0:
                    return columns.step_one(self._score, tensordict, next_tensordict)
                return self._score(tensordict, next_tensordict)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        for key in self._keys if self._pending else ():
            tensordict_reset = columns.begin(tensordict, tensordict_reset, key)
        return super()._reset(tensordict, tensordict_reset)

    def _turn_version(self) -> AbstractContextManager[Any]:
        """Context in which the collector's policy has the version of the turn being scored."""
        container = self.container if self.takes_policy else None
        scoring = getattr(getattr(container, "collector", None), "scoring", None)
        return nullcontext() if scoring is None else scoring()

    def _joint_call(self) -> AbstractContextManager[Any]:
        """Context for a joint call of the scoring models on all ranks that share one of them."""
        return together("RetrieveKL", *map(model_of, self._scorers()))

    def _scorers(self) -> list[RetrieveLogProb]:
        return [each for each in self if isinstance(each, RetrieveLogProb)]

    def _score(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # Both scorers read before either writes.
        batch: TokenBatch | None = None
        batches = [batch := each.read(tensordict, shared=batch) for each in self._scorers()]
        remaining = iter(batches)
        for transform in self:
            if isinstance(transform, RetrieveLogProb):
                next_tensordict = transform.score(tensordict, next_tensordict, next(remaining))
            else:
                next_tensordict = torchrl.step(transform, tensordict, next_tensordict)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        with self._joint_call():
            return columns.run(self, self._step, tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Transform a whole transition, as a replay buffer asks for with ``invert=True``."""
        return self.forward(next_tensordict)

    def clone(self) -> RetrieveKL:
        """A copy that shares the models and is not yet in an environment.

        Wrapping an environment clones its transforms. torchrl's class becomes a plain ``Compose``
        then, which no longer looks up the policy of a collector.
        """
        copied = Transform.clone(self)
        transforms = [transform.clone() for transform in self]
        copied.transforms = torch.nn.ModuleList(transforms)
        for transform in transforms:
            transform.set_container(copied)
        return copied

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        output_spec = super().transform_output_spec(output_spec)
        self._declare_pending(output_spec["full_observation_spec"])
        return output_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        return self._declare_pending(super().transform_observation_spec(observation_spec))

    def _declare_pending(self, observation_spec: Composite) -> Composite:
        if self._pending:
            for key in self._keys:
                columns.declare_tokens(observation_spec, key)
        return observation_spec


def _one_of(name: str, model: Any, factory: Callable[[], Any] | None) -> Any:
    if model is not None and factory is not None:
        raise ValueError(f"{name}: expected a model or {name}_factory, got both; drop one")
    return model if factory is None else factory()


def _wrapped(reference: Any, policy: Any, key: NestedKey) -> Any:
    """The reference as a wrapper; for ``None``, the policy without its adapters."""
    if reference is None:
        model: Any = getattr(policy, "model", None)
        try:
            reference = WithoutAdapters(model)
        except TypeError:
            raise ValueError(
                "ref_model: expected a log-prob wrapper or ref_model_factory, got neither; only "
                f"a policy with peft adapters has a default, not a {type(model).__name__}"
            ) from None
    if isinstance(reference, OtherAdapters):
        return _new_version(policy, key, model=reference)
    return reference


def _new_version(wrapper: Any, key: NestedKey, **options: Any) -> Any:
    """A version of ``wrapper`` that writes its log-probs under ``key``.

    The settings are explicit: ``get_new_version`` would edit the policy's tokenizer arguments, and
    with the policy's ``num_samples`` each conversation would be scored that many times.
    """
    _check_full("log_probs_full_key", key)
    settings = {"tokenizer_kwargs": {}, "generate_kwargs": {}, "num_samples": None}
    name = key[0] if len(key) == 2 else key[:-1]
    return wrapper.get_new_version(log_probs_key=name, **settings, **options)


def _check_full(name: str, key: NestedKey) -> None:
    if not isinstance(key, tuple) or key[-1] != "full":
        raise ValueError(
            f"{name}: expected a tuple that ends in 'full', got {key!r}; pass (key, 'full')"
        )


def _check_history_key(model: Any, history_key: str) -> None:
    read = getattr(model, "input_key", None)
    if history_key != "history" and read != (history_key, "full"):
        raise ValueError(
            f"history_key: expected the key that the models read, {read!r}, got {history_key!r}; "
            f"build the wrappers with input_key={(history_key, 'full')!r}"
        )


def _check_pair(gen_model: Any, ref_model: Any) -> None:
    if gen_model.pad_output != ref_model.pad_output:
        raise ValueError(
            f"gen_model: pad_output mismatch: expected {ref_model.pad_output} as in ref_model, "
            f"got {gen_model.pad_output}; build both with the same pad_output"
        )
    if gen_model.log_probs_key == ref_model.log_probs_key:
        raise ValueError(
            f"gen_model: expected another log_probs_key than ref_model's, got "
            f"{gen_model.log_probs_key!r} in both; set another log_probs_key in one wrapper"
        )
