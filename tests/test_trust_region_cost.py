"""TRPO's cost: the passes through the model that its metrics state are those that ran."""

import collections

import jax
import pytest
from test_trust_region import logits_fn, make_batch, make_params, nothing, step


def counting_logits(calls):
    """The policy, which counts every pass that runs: forward, backward, and those of a forward-mode derivative."""

    def counted(name):
        @jax.custom_jvp
        def identity(x):
            jax.debug.callback(lambda: calls.update([name]))
            return x

        @identity.defjvp
        def tangent(primals, tangents):
            jax.debug.callback(lambda: calls.update([name, name]))  # the pass and its derivative
            return primals[0], tangents[0]

        return identity

    forward, backward = counted("forward"), counted("backward")
    watch = jax.custom_vjp(forward)
    watch.defvjp(lambda x: (forward(x), None), lambda _, x: (backward(x),))
    return lambda params, batch: logits_fn({"w": watch(params["w"])}, batch)


@pytest.mark.parametrize("case", ["all iterations", "early stop", "backtracks", "nothing", "micro-batches"])
def test_passes_are_those_that_ran(case):
    batch, params = nothing("zero advantages" if case == "nothing" else "else")
    parts = 2 if case == "micro-batches" else 1
    keywords = {"cg_iterations": 5, "cg_tolerance": 0.5 if case == "early stop" else 0.0, "num_microbatches": parts}
    if case == "backtracks":
        batch, params = make_batch(2), make_params(2, size=3)
        keywords |= {"max_kl": 0.5}
    calls = collections.Counter()
    _, metrics = step(batch, params, counting_logits(calls), **keywords)
    jax.effects_barrier()
    passes = {name: parts * metrics[f"passes_{name}"] for name in ("forward", "backward")}
    assert passes == calls
    low, high = {"nothing": (0, 0), "early stop": (1, 4)}.get(case, (5, 5))
    assert low <= metrics["cg_iterations"] <= high
    assert (metrics["backtracks"] > 0) == (case == "backtracks")
