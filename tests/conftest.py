"""Eight virtual CPU devices, one canonical platform, one compilation cache, set before JAX is imported; and tiers."""

import gc
import os
import re
from pathlib import Path

from launching import QUICK_COMPILATION, compiled_programs

# XLA ends the process when one of the eight devices has not come to a collective within 40 seconds, which may happen on
# a loaded machine: it waits for two minutes.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + f" {QUICK_COMPILATION}"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=120"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled_programs()
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import jax
import pytest


@pytest.fixture
def key():
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings():
    """Drops the compiled programs of a process that has many.

    Each takes three or more of the 65,530 memory mappings that Linux allows a process; where none is left, XLA's
    compiler ends it with a segmentation fault.
    """
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and len(mappings.read_text().splitlines()) > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def quick_compilation():
    """Nothing any more: every test reads what another has compiled. Leave it out of new tests."""


@pytest.fixture
def x64():
    """Runs a test in float64, for oracles and proofs."""
    with jax.enable_x64(True):
        yield


SLOWEST_FIRST = (
    "test_recipes",
    "test_rlhf",
    "test_distributed",
    "test_sampler_modes",
    "test_faults",
    "test_run",
    "test_compile_for_tpu",
    "test_meshes",
    "test_quickstart",
    "test_games",
    "test_real_models",
    "test_algorithms",
    "test_step_level",
    "test_notebooks",
    "test_sampler",
    "test_exact",
    "test_models",
    "test_laws",
    "test_lora",
    "test_update",
    "test_hf_parity_fixtures",
    "test_attention",
    "test_trust_region",
)

# Algorithms that differ in what a law of all algorithms is about. The others differ from one of them in a function that
# is tested by itself.
KINDS = "supervised|reinforce|remax|actor_critic_gae|trpo|ppo_penalty|ppo|grpo|gdpo|gspo|with_truncated_importance"

# What `make test` leaves out and `make test-all` runs, beside the tests that are marked where they stand: a pattern of
# a file's stem and a test's name, and what still guards the law in `make test`.
EXHAUSTIVE = {
    r"test_algorithms::test_micro_batches_change_nothing\[(?!(%s)\])": "one algorithm of each kind",
    r"test_algorithms::test_padding_and_what_stands_under_the_mask_change_nothing\[(?!(%s)\])": "one of each kind",
    r"test_checkpoint::test_whatever_file_is_damaged_.*\[(truncate|delete)\]": "a flipped bit, the hardest to notice",
    r"test_compile_for_tpu::": "only CI has libtpu",
    r"test_distributed::test_a_run_goes_on_with_another_number_of_processes": "test_checkpoint, on other meshes",
    r"test_distributed::test_sigterm_to_some_stops_all_": "SIGTERM to one process alone, in test_faults",
    r"test_distributed::test_what_one_process_alone_meets_.*\[(scorer|interrupt)-1\]": "a bug, which ends alike",
    r"test_draw::test_frequencies_match_the_probabilities\[(1|7|256)\]": "one size below a block and one above",
    r"test_exact::test_step_level_algorithms_are_unbiased_.*": "the estimators that these algorithms consist of",
    r"test_faults::test_a_run_that_is_killed_ends_as_one_that_is_not\[KILL\]": "test_quickstart stops as abruptly",
    r"test_games::test_smoke_gets_better_on_eight_devices\[(actor_critic|a3c)\]": "ppo, a critic too, and trpo",
    r"test_hf_parity_fixtures::.*\[(gemma3_flat|llama2|llama3_flat|llama_linear|llama_yarn|mistral_window|qwen2_yarn"
    r"|qwen3_moe_unnormalized|smollm2)\b": "one model of each family",
    r"test_hf_parity_fixtures::test_log_probs_equal_transformers": "the logits, and the laws of log-probs",
    r"test_laws::test_same_with_and_without_jit": "tests of each function, most of them within jit",
    r"test_models::test_cached_decoding_equals_the_full_pass\[(1-False|2-|4-True)": "each layout of layers once",
    r"test_notebooks::test_a_notebook_runs_": "what the notebooks call",
    r"test_policies::test_an_actor_has_the_log_probs_.*\[(vocabulary|top-p|top-k|penalty|min-p)\]": "all at once",
    r"test_policies::test_each_loss_reaches_what_it_trains\[.*-full\]": "adapters, which train the less",
    r"test_quickstart::test_mesh_and_microbatches_change_no_metric": "test_meshes, of losses and gradients",
    r"test_real_models::test_grpo_trains_a_checkpoint_near_its_reference_.*\[2\]": "the same without adapters",
    r"test_recipes::test_granularities_train_": "the estimators of the study, and the other recipes on this mesh",
    r"test_resharding::test_the_samples_are_those_of_the_trainers_mesh\[(?!bfloat16-None)": "the default, in bfloat16",
    r"test_rlhf::test_the_steps_follow_each_other_": "each of the steps by itself",
    r"test_sampler::test_log_probs_are_those_of_the_trainer\[(0.5|1.0)\]": "the temperature that changes log-probs",
    r"test_sampler_modes::test_a_conversation_is_what_one_sequence_would_be\[False\]": "the other layout of layers",
    r"test_sampler_modes::test_a_partial_rollout_goes_on_.*\[9\]": "a cut after the first token",
    r"test_sampler_modes::test_bfloat16_sampler_and_trainer_stay_near\[chosen0\]": "the other choice of options",
    r"test_sampler_modes::test_frequencies_of_all_sequences_.*\[(k|p|min-p)\]": "all other filters together",
    r"test_sampler_modes::test_same_on_eight_devices_with_heads_over_tensor": "the same on rows, and test_meshes",
    r"test_trust_region::test_microbatches_change_nothing\[(?!token_mean\])": "one aggregation",
    r"test_update::test_sharded_update_equals_the_plain_one_": "test_meshes; test_quickstart counts compilations",
}
EXHAUSTIVE = {pattern.replace("%s", KINDS): still for pattern, still in EXHAUSTIVE.items()}


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(config, items):
    """Marks the exhaustive tests, and starts with the slowest files: two processes would else wait for the last one.

    The Makefile asks pytest-xdist for this order (--no-loadscope-reorder), or it would begin with what has most tests.

    Raises:
      pytest.UsageError: for a pattern that fits no test of its file.
    """
    unused = {pattern for pattern in EXHAUSTIVE if not any("::" in argument for argument in config.args)}
    for item in items:
        name = f"{item.path.stem}::{item.name}"
        for pattern in EXHAUSTIVE:
            if re.match(pattern, name):
                item.add_marker(pytest.mark.exhaustive)
                unused.discard(pattern)
    collected = {item.path.stem for item in items}
    if wrong := sorted(pattern for pattern in unused if pattern.partition("::")[0] in collected):
        raise pytest.UsageError(f"EXHAUSTIVE in tests/conftest.py has patterns that fit no test: {', '.join(wrong)}")
    order = {name: place for place, name in enumerate(SLOWEST_FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
