"""The policies that are trained, of any model: an actor alone or with a critic, and what a reference policy says.

Each applies the sampler's temperature and filters, and none holds the logits [B, T, V] of long sequences. Parameters
are the model's own, with adapters as their entry "lora" or not; with a critic they are {"actor": ..., "critic": ...}:

    kind    critic                           its trunk
    head    {"head"}                         the actor's; both losses train it
    copy    {"trunk", "head"}                a copy of the actor's base, trained by the value loss alone
    lora    {"lora", "head"}                 the actor's base under adapters of the critic's own

    params = {"actor": params, "critic": policies.init_critic(key, model, params, kind="copy")}
    policy = policies.actor_critic(model, sampling)  # of `algorithms.make_loss_fn`
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxpg.algorithms.algorithm import Policy
from jaxpg.estimators import checks, logprobs
from jaxpg.models import Model, heads
from jaxpg.models import lora as lora_lib
from jaxpg.sampling import Sampling
from jaxpg.sampling import filters as filters_lib
from jaxpg.sampling.scoring import adjustment
from jaxpg.types import Array, Batch, Rollout

CRITICS = ("head", "copy", "lora")


def actor(model: Model, sampling: Sampling) -> Policy:
    """Builds the policy without a critic.

        log π(a_t | s_t) = log softmax(filters(logits_{t−1} / temperature))[tokens_t]

    For supervised learning pass `Sampling()`: demonstrations are not drawn, hence not filtered.

    Args:
      model: of the parameters.
      sampling: of the sampler; its temperature must be positive.

    Returns:
      (params, batch) -> log-probs [B, T] and entropy [B, T] of the filtered distribution, float32, nats. Both carry
      gradient to params.

    Raises:
      ValueError: if the temperature is 0; when traced, if rows are packed and a filter reads a row's history.
    """
    _check_drawn(sampling)

    def policy(params, batch: Batch):
        return _log_probs(model, sampling, params, _hidden(model, params, batch), batch)

    return policy


def actor_critic(model: Model, sampling: Sampling) -> Policy:
    """Builds the policy of `actor` with the critic's values as third output, on {"actor", "critic"} of any kind.

    Where the critic has no trunk of its own, the hidden states are computed once. Where it has adapters, the value loss
    trains these and the head, but not the base under them.

    Raises:
      ValueError: as `actor`.
    """
    _check_drawn(sampling)

    def policy(params, batch: Batch):
        hidden = _hidden(model, params["actor"], batch)
        outputs = _log_probs(model, sampling, params["actor"], hidden, batch)
        trunk = _trunk(params)
        if trunk is not None:
            hidden = _hidden(model, trunk, batch)
        return *outputs, heads.values(params["critic"]["head"], hidden)

    return policy


def logits(model: Model, sampling: Sampling) -> Callable[[dict, Batch], Array]:
    """Builds (params, batch) -> the tempered and filtered logits [B, T, V] float32 of the policy of `actor`.

    Index t predicts the token at t + 1, as in `Model.logits`; the last index is tempered alone. They are held whole:
    for methods that compare whole distributions, such as `trust_region.make_update`, and sequences that are short.

    Raises:
      ValueError: as `actor`.
    """
    _check_drawn(sampling)

    def of(params, batch: Batch) -> Array:
        tempered = model.unembed(params, _hidden(model, params, batch)) / sampling.temperature
        adjust = _adjustment(model, sampling, batch)
        if adjust is None:
            return tempered
        drawn = batch.tokens[:, 1:]
        index = jnp.broadcast_to(jnp.arange(1, drawn.shape[1] + 1), drawn.shape)
        return jnp.concatenate([adjust(tempered[:, :-1], drawn, index), tempered[:, -1:]], axis=1)

    return of


def values(model: Model) -> Callable[[dict, Batch | Rollout], Array]:
    """Builds (params, rollout or batch) -> the critic's V before each token [B, T] float32, on {"actor", "critic"}."""

    def of(params, rows: Batch | Rollout) -> Array:
        trunk = _trunk(params)
        return heads.values(params["critic"]["head"], _hidden(model, params["actor"] if trunk is None else trunk, rows))

    return of


def reference(model: Model, sampling: Sampling) -> Callable[[dict, Rollout | Batch], Array]:
    """Builds (params, rollout) -> log-probs [B, T] of the policy with these parameters, as `actor` has them.

    The parameters are the reference's: a copy, or `lora.base(policies.acting(state.params))` where adapters are trained
    on a base that stays as it is, which costs no memory.

    Raises:
      ValueError: as `actor`.
    """
    _check_drawn(sampling)

    def of(params, rows: Rollout | Batch) -> Array:
        return _log_probs(model, sampling, params, _hidden(model, params, rows), rows, with_entropy=False)[0]

    return of


def init_critic(key: Array, model: Model, params: dict, *, kind: str, rank: int = 16) -> dict:
    """Draws the parameters of a critic that says 0 everywhere.

    Args:
      key: a typed PRNG key.
      model: of the actor.
      params: of the actor. A "copy" starts from its base, without adapters; the arrays are copies, since those of a
        donated state must not be shared.
      kind: of `CRITICS`.
      rank: of the adapters of kind "lora".

    Returns:
      {"head"}, {"trunk", "head"} or {"lora", "head"}.

    Raises:
      ValueError: for an unknown kind, or a rank below 1.
    """
    _check_kind(kind)
    head = {"head": heads.init(key, model.config.hidden_size)}
    if kind == "copy":
        return {"trunk": jax.tree.map(jnp.copy, lora_lib.base(params))} | head
    if kind == "lora":
        targets = lora_lib.ATTENTION if model.config.num_experts else None
        return {"lora": lora_lib.init(jax.random.fold_in(key, 1), model.config, rank=rank, targets=targets)} | head
    return head


def acting(params: dict) -> dict:
    """Picks what samples and is evaluated: the actor's parameters where there is a critic, else all of them."""
    return params["actor"] if "critic" in params else params


def trainable_paths(lora: bool, critic_kind: str | None = None) -> Callable[[str], bool] | None:
    """Says which parameters are trained, by their path, for `train_state.init` and `update.make_update`.

    Args:
      lora: does the actor have adapters? Then these and the whole critic are trained, and the actor's base stays.
      critic_kind: of `CRITICS`; None without a critic.

    Returns:
      A predicate of paths such as "actor/lora/layers/mlp/up/a"; None where everything is trained. A critic of kind
      "lora" never trains the base: without `lora` the actor's loss does.
    """
    if critic_kind is not None:
        _check_kind(critic_kind)
    if not lora:
        return None
    return lambda path: path.startswith("critic/") or lora_lib.is_adapter(path)


def _hidden(model: Model, params: dict, rows: Batch | Rollout) -> Array:
    return model.hidden(params, rows.tokens, rows.token_mask, _documents(rows))


def _documents(rows: Batch | Rollout) -> Array | None:
    """Which document each token belongs to, where rows are packed; those of a rollout never are."""
    return rows.documents if isinstance(rows, Batch) else None


def _log_probs(model: Model, sampling: Sampling, params, hidden: Array, rows, *, with_entropy: bool = True):
    """Log-probs and entropy [B, T] from the hidden states [B, T, E]."""
    return logprobs.from_hidden(
        partial(model.unembed, params),
        hidden,
        rows.tokens,
        temperature=sampling.temperature,
        with_entropy=with_entropy,
        adjust=_adjustment(model, sampling, rows),
    )


def _adjustment(model: Model, sampling: Sampling, rows: Batch | Rollout):
    """The sampler's filters as `scoring.adjustment` applies them."""
    if _documents(rows) is not None and filters_lib.needs_history(sampling.filters):
        raise ValueError(
            f"filters={sampling.filters}: one reads which tokens a row has had, and packed rows hold several "
            "documents; pass Sampling() for supervised learning, or do not pack"
        )
    return adjustment(sampling.filters, rows.tokens, rows.token_mask, vocabulary=model.config.vocab_size)


def _trunk(params: dict) -> dict | None:
    """The parameters under the critic's head; None where they are the actor's."""
    critic = params["critic"]
    if "lora" in critic:
        return jax.lax.stop_gradient(lora_lib.base(params["actor"])) | {"lora": critic["lora"]}
    return critic.get("trunk")


def _check_drawn(sampling: Sampling) -> None:
    checks.positive("temperature", sampling.temperature)


def _check_kind(kind: str) -> None:
    if kind not in CRITICS:
        raise ValueError(f"kind={kind!r}: a critic is one of {', '.join(CRITICS)}")
