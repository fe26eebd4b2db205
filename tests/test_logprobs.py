"""Log-probs and entropy: alignment, temperature, numerics, tokens that do not exist, and chunks from hidden states."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpg.estimators import logprobs
from jaxpg.parallel import sharding

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(2, 4, 5)).astype(np.float32) * 3
TOKENS = np.array([[0, 3, 1, 4], [2, 2, 0, 1]])


def reference(logits, temperature):
    """Log-softmax in float64."""
    scaled = logits.astype(np.float64) / temperature
    return scaled - np.log(np.sum(np.exp(scaled), axis=-1, keepdims=True))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logits_at_t_minus_one_speak_about_token_t(temperature):
    got = logprobs.token_log_probs(LOGITS, TOKENS, temperature=temperature)
    log_p = reference(LOGITS, temperature)
    expected = [[0.0] + [log_p[b, t - 1, TOKENS[b, t]] for t in range(1, 4)] for b in range(2)]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_the_last_logits_and_the_first_token_do_not_matter():
    changed_logits = LOGITS.copy()
    changed_logits[:, -1] = np.nan
    changed_tokens = TOKENS.copy()
    changed_tokens[:, 0] = 4
    got = logprobs.token_log_probs(changed_logits, changed_tokens)
    np.testing.assert_array_equal(got, logprobs.token_log_probs(LOGITS, TOKENS))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_entropy_of_the_tempered_distribution(temperature):
    log_p = reference(LOGITS, temperature)
    expected = -np.sum(np.exp(log_p) * log_p, axis=-1)
    got = logprobs.entropy(LOGITS, temperature=temperature)
    np.testing.assert_allclose(got[:, 1:], expected[:, :-1], rtol=1e-5)
    np.testing.assert_array_equal(got[:, 0], np.zeros(2))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), temperature=st.floats(0.3, 3), scale=st.sampled_from([1e-3, 1.0, 30.0]))
def test_laws_of_a_distribution(seed, temperature, scale):
    """Probabilities add up to 1, entropy is minus their mean log, in [0, log V], and a shift of logits does nothing."""
    logits = np.random.default_rng(seed).normal(size=(2, 5)).astype(np.float32) * np.float32(scale)
    every_next = np.broadcast_to(logits, (5, 2, 5))
    tokens = np.stack([np.zeros(5, int), np.arange(5)], axis=-1)
    log_p = logprobs.token_log_probs(every_next, tokens, temperature=temperature)[:, 1]
    np.testing.assert_allclose(jnp.sum(jnp.exp(log_p)), 1.0, rtol=1e-5)
    entropy = logprobs.entropy(logits, temperature=temperature)[1]
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(log_p) * log_p), rtol=1e-4, atol=1e-5)
    assert 0 <= entropy <= np.log(5) + 1e-6
    moved = logprobs.token_log_probs(every_next + 3, tokens, temperature=temperature)[:, 1]
    np.testing.assert_allclose(moved, log_p, rtol=1e-4, atol=1e-4)


def test_entropy_is_never_negative_and_at_most_log_v():
    sure = jnp.zeros((1, 3, 5)).at[:, :, 1].set(1e4)
    assert np.all(logprobs.entropy(sure) >= 0)
    np.testing.assert_allclose(logprobs.entropy(jnp.zeros((1, 3, 5)))[0, 1:], np.log(5), rtol=1e-6)


def test_filtered_tokens_have_no_probability_and_finite_gradients():
    logits = jnp.asarray(LOGITS).at[:, :, 2].set(-jnp.inf)
    tokens = jnp.array([[0, 3, 1, 4], [0, 3, 0, 1]])

    def objective(x):
        return jnp.sum(logprobs.token_log_probs(x, tokens)) + jnp.sum(logprobs.entropy(x))

    value, gradient = jax.value_and_grad(objective)(logits)
    without = np.delete(LOGITS, 2, axis=-1)
    renumbered = tokens - (tokens > 2)
    expected = jnp.sum(logprobs.token_log_probs(without, renumbered)) + jnp.sum(logprobs.entropy(without))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.all(np.isfinite(gradient))
    assert logprobs.token_log_probs(logits, jnp.full((2, 4), 2))[0, 1] == -jnp.inf


def test_large_logits_keep_their_digits():
    small = logprobs.token_log_probs(LOGITS, TOKENS)
    shifted = logprobs.token_log_probs(LOGITS + np.float32(4096.0), TOKENS)
    np.testing.assert_allclose(shifted, small, atol=2e-3)
    extreme = logprobs.token_log_probs(np.where(LOGITS > 0, np.float32(1e5), np.float32(-1e5)), TOKENS)
    assert np.all(np.isfinite(extreme))


@pytest.mark.parametrize("token", [-1, -5, 5, 99])
def test_tokens_outside_the_vocabulary_are_nan_there_alone(token):
    tokens = TOKENS.copy()
    tokens[1, 2] = token
    got = logprobs.token_log_probs(LOGITS, tokens)
    expected = np.array(logprobs.token_log_probs(LOGITS, TOKENS))
    expected[1, 2] = np.nan
    np.testing.assert_array_equal(got, expected)
    gradient = jax.grad(lambda x: jnp.nansum(jnp.where(tokens == token, 0.0, logprobs.token_log_probs(x, tokens))))(
        LOGITS
    )
    assert np.all(np.isfinite(gradient))


def test_gradient_is_indicator_minus_probability():
    gradient = jax.grad(lambda x: logprobs.token_log_probs(x, TOKENS, temperature=0.5)[0, 2])(jnp.asarray(LOGITS))
    expected = np.zeros(LOGITS.shape)
    expected[0, 1] = (np.eye(5)[TOKENS[0, 2]] - np.exp(reference(LOGITS, 0.5)[0, 1])) / 0.5
    np.testing.assert_allclose(gradient, expected, atol=1e-5)


def test_entropy_gradient_matches_finite_differences(x64):
    jax.test_util.check_grads(
        lambda x: logprobs.entropy(x, temperature=0.7),
        (LOGITS.astype(np.float64),),
        order=1,
        modes=["rev"],
        atol=1e-6,
    )


def test_bfloat16_is_computed_in_float32():
    half = jnp.asarray(LOGITS, jnp.bfloat16)
    for function in (lambda x: logprobs.token_log_probs(x, TOKENS), logprobs.entropy):
        got = function(half)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, function(half.astype(jnp.float32)))


def test_length_one_and_leading_axes():
    np.testing.assert_array_equal(logprobs.token_log_probs(LOGITS[:, :1], TOKENS[:, :1]), np.zeros((2, 1)))
    np.testing.assert_array_equal(logprobs.entropy(LOGITS[:, :1]), np.zeros((2, 1)))
    whole = logprobs.token_log_probs(LOGITS, TOKENS)
    np.testing.assert_allclose(logprobs.token_log_probs(LOGITS[0], TOKENS[0]), whole[0], rtol=1e-6)
    np.testing.assert_allclose(logprobs.token_log_probs(LOGITS[None], TOKENS[None])[0], whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: logprobs.token_log_probs(LOGITS, TOKENS, temperature=0.0),
            "temperature=0.0: must be greater than 0",
        ),
        (lambda: logprobs.entropy(LOGITS, temperature=-1.0), "temperature=-1.0: must be greater than 0"),
        (
            lambda: logprobs.token_log_probs(LOGITS, TOKENS[:, :2]),
            r"tokens has shape \(2, 2\): must be \(2, 4\)",
        ),
        (lambda: logprobs.token_log_probs(LOGITS, TOKENS * 1.0), "tokens has dtype float32: must be integer"),
        (lambda: logprobs.entropy(LOGITS[0, 0]), r"logits has shape \(5,\): must be \[..., T, V\]"),
    ],
)
def test_errors_name_argument_value_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class JitTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters(
        ("log_probs", lambda x: logprobs.token_log_probs(x, TOKENS)), ("entropy", logprobs.entropy)
    )
    def test_same_with_and_without_jit(self, function):
        np.testing.assert_allclose(self.variant(function)(LOGITS), function(LOGITS), rtol=1e-5, atol=1e-6)


# From hidden states.


def project(params, hidden):
    """A vocabulary projection with two parameters; normalising makes its gradient NaN where hidden states are 0."""
    hidden = hidden / jnp.sqrt(jnp.sum(hidden**2, axis=-1, keepdims=True))
    return jnp.einsum("...e,ve->...v", hidden, params["table"]) + params["bias"]


def example(rows=3, length=12, width=6, vocab=11, dtype=np.float32):
    """Parameters, hidden states, tokens, and weights that stand for a loss."""
    rng = np.random.default_rng(1)
    params = {"table": rng.normal(size=(vocab, width)) * 3, "bias": rng.normal(size=vocab)}
    hidden = rng.normal(size=(rows, length, width))
    params, hidden, weights = jax.tree.map(
        lambda x: jnp.asarray(x, dtype), (params, hidden, rng.normal(size=(2, rows, length)))
    )
    return params, hidden, rng.integers(0, vocab, (rows, length)), weights


def plain(params, hidden, tokens, *, temperature=1.0, project=project):
    logits = project(params, hidden)
    return (
        logprobs.token_log_probs(logits, tokens, temperature=temperature),
        logprobs.entropy(logits, temperature=temperature),
    )


def chunked(params, hidden, tokens, *, project=project, **options):
    return logprobs.from_hidden(partial(project, params), hidden, tokens, **options)


def gradients(function, params, hidden, tokens, weights, **options):
    """(loss, log-probs and entropy) and the gradient in parameters and hidden states; masked where weights are 0."""

    def loss(params, hidden):
        pair = jnp.stack(function(params, hidden, tokens, **options))
        return jnp.sum(jnp.where(weights != 0, weights * pair, 0.0)), pair

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, hidden)


fast = jax.jit(gradients, static_argnums=0, static_argnames=("chunk", "temperature"))


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (4, 0.7), (5, 2.0), (11, 1.0), (99, 0.7)])
def test_from_hidden_equals_plain(chunk, temperature):
    case = example()
    got = fast(chunked, *case, chunk=chunk, temperature=temperature)
    chex.assert_trees_all_close(got, fast(plain, *case, temperature=temperature), rtol=1e-5, atol=1e-5)


def test_from_hidden_equals_plain_in_float64(x64):
    case = example(dtype=np.float64)
    got = fast(chunked, *case, chunk=5)
    assert got[0][1].dtype == jnp.float64
    chex.assert_trees_all_close(got, fast(plain, *case), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_from_hidden_of_short_sequences(length):
    case = example(length=length)
    chex.assert_trees_all_close(fast(chunked, *case, chunk=2), fast(plain, *case), rtol=1e-5, atol=1e-5)


def test_from_hidden_takes_any_leading_axes():
    params, hidden, tokens, _ = example()
    function = jax.jit(partial(chunked, chunk=4))
    whole = function(params, hidden, tokens)
    one = function(params, hidden[0], tokens[0])
    chex.assert_trees_all_close(one, jax.tree.map(lambda x: x[0], whole), rtol=1e-5)
    more = function(params, hidden[None], tokens[None])
    chex.assert_trees_all_close(more, jax.tree.map(lambda x: x[None], whole), rtol=1e-5)


@pytest.mark.parametrize("token", [-1, 11])
def test_from_hidden_is_nan_at_tokens_outside_the_vocabulary(token):
    params, hidden, tokens, weights = example()
    tokens[1, 4] = token
    weights = weights.at[0, 1, 4].set(0.0)  # masked
    got = fast(chunked, params, hidden, tokens, weights, chunk=4)
    (loss, (log_probs, entropy)), gradient = got
    np.testing.assert_array_equal(np.isnan(log_probs), tokens == token)
    chex.assert_tree_all_finite((loss, entropy, gradient))
    chex.assert_trees_all_close(got, fast(plain, params, hidden, tokens, weights), rtol=1e-5, atol=1e-5)


def test_from_hidden_ignores_the_last_hidden_state_and_masked_positions():
    params, hidden, tokens, weights = example()
    weights = weights.at[:, :, :3].set(0.0)
    changed = hidden.at[:, :2].set(7.0).at[:, -1].set(jnp.nan)
    (value, _), (in_params, in_hidden) = fast(chunked, params, hidden, tokens, weights, chunk=4)
    (value_2, _), (in_params_2, in_hidden_2) = fast(chunked, params, changed, tokens, weights, chunk=4)
    chex.assert_trees_all_close((value, in_params), (value_2, in_params_2), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(in_hidden[:, 2:-1], in_hidden_2[:, 2:-1], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(in_hidden_2[:, :2], 0.0)
    np.testing.assert_array_equal(in_hidden_2[:, -1], 0.0)


def test_from_hidden_without_entropy():
    params, hidden, tokens, _ = example()
    log_probs, entropy = chunked(params, hidden, tokens, chunk=4, with_entropy=False)
    assert entropy is None
    np.testing.assert_allclose(log_probs, chunked(params, hidden, tokens, chunk=4)[0], rtol=1e-6)
    assert chunked(params, hidden[:, :1], tokens[:, :1], with_entropy=False)[1] is None


def test_from_hidden_in_bfloat16():
    """Log-softmax, and the sum of the projection's gradient over chunks, stay in float32."""
    params, hidden, tokens, weights = example()

    def half(params, hidden):
        table = params["table"].astype(jnp.bfloat16)
        return jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32)

    case = {"table": params["table"]}, hidden.astype(jnp.bfloat16), tokens, weights
    (value, pair), (in_params, in_hidden) = fast(partial(chunked, project=half), *case, chunk=5)
    (value_2, pair_2), (in_params_2, in_hidden_2) = fast(partial(plain, project=half), *case)
    assert pair.dtype == in_params["table"].dtype == jnp.float32
    assert in_hidden.dtype == jnp.bfloat16
    chex.assert_trees_all_close((value, pair), (value_2, pair_2), rtol=1e-5, atol=1e-5)
    # A gradient that leaves a matrix product is rounded to bfloat16: once for each chunk here, once in all there.
    chex.assert_trees_all_close(in_params, in_params_2, rtol=0.02, atol=0.02)
    chex.assert_trees_all_close(*(x.astype(jnp.float32) for x in (in_hidden, in_hidden_2)), rtol=0.01, atol=0.01)


def temporary_bytes(function, *, rows, length, width, vocab):
    """Temporary memory of the gradient of a loss; compiled, never run."""

    def loss(table, hidden, tokens):
        log_probs, entropy = function(table, hidden, tokens, project=lambda w, h: jnp.einsum("...e,ve->...v", h, w))
        return jnp.mean(log_probs) + 0.01 * jnp.mean(entropy)

    shapes = (
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
    )
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_from_hidden_never_holds_the_logits():
    sizes = {"rows": 8, "length": 4096, "width": 64, "vocab": 150_000}
    needed = temporary_bytes(chunked, **sizes)
    assert needed < temporary_bytes(plain, **sizes) / 10
    logits = 4 * sizes["rows"] * sizes["length"] * sizes["vocab"]
    assert needed < logits / 5


@pytest.mark.parametrize("mesh", ["data=8", "data=2,fsdp=2,tensor=2"])
def test_from_hidden_on_eight_devices(mesh, capfd):
    """The same loss and gradient as on one, with rows left where they are."""
    mesh = sharding.make_mesh(mesh)
    params, hidden, tokens, weights = example(rows=8, width=8)
    expected = fast(chunked, params, hidden, tokens, weights, chunk=4)
    places = {
        "table": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tensor")),
        "bias": sharding.replicated(mesh),
    }
    rows = sharding.rows(mesh)
    weights_at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, ("data", "fsdp")))
    with jax.set_mesh(mesh):
        compiled = jax.jit(
            partial(gradients, chunked, chunk=4),
            in_shardings=(places, rows, rows, weights_at),
            out_shardings=(None, (places, rows)),
        )
        got = compiled(params, hidden, tokens, weights)
    chex.assert_trees_all_close(jax.device_get(got), jax.device_get(expected), rtol=1e-5, atol=1e-5)
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("mesh", "vocab", "chunks"),
    [("data=1", 12, 11), ("data=2,fsdp=2,tensor=2", 12, 2), ("data=2,fsdp=2,tensor=2", 13, 4)],
)
def test_chunks_are_as_large_as_fits_a_device(mesh, vocab, chunks, monkeypatch):
    """A device has 8·12 logits of a position, or an eighth of them, or a quarter where tensor divides no vocabulary."""
    monkeypatch.setattr(logprobs, "LOGITS_AT_A_TIME", 8 * 12)
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 1)
    _, hidden, tokens, _ = example(rows=8, width=8)
    table = jnp.ones((vocab, 8))
    mesh = sharding.make_mesh(mesh, devices=jax.devices()[:1] if mesh == "data=1" else None)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(partial(chunked, project=lambda w, h: jnp.einsum("...e,ve->...v", h, w)))(
            table, hidden, tokens
        )
    (loop,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "scan")
    assert loop.params["length"] == chunks


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk=0: must be at least 1"),
        ({"temperature": 0.0}, "temperature=0.0: must be greater than 0"),
        ({"tokens": TOKENS}, r"tokens has shape \(2, 4\): must be \(3, 12\)"),
        ({"hidden": np.zeros(3)}, r"hidden has shape \(3,\): must be \[..., T, E\]"),
        ({"project": lambda w, h: h[:, 0]}, r"unembed maps \(3, 11, 6\) to \(3, 6\): must be \[..., E\] -> \[..., V\]"),
    ],
)
def test_errors_of_from_hidden(change, message):
    params, hidden, tokens, _ = example()
    with pytest.raises(ValueError, match=message):
        chunked(**{"params": params, "hidden": hidden, "tokens": tokens} | change)


class FromHiddenTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_same_with_and_without_jit(self):
        case = example()
        got = self.variant(partial(gradients, chunked, chunk=5))(*case)
        chex.assert_trees_all_close(got, fast(plain, *case), rtol=1e-5, atol=1e-5)
