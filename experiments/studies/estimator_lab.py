"""The estimator lab: exact bias and variance of every algorithm of the ladder, without a single sample.

    python experiments/studies/estimator_lab.py                 # two tables, and runs/estimator_lab/bias_variance.png

A policy over 3 tokens answers two prompts, one that it nearly always solves and one that it rarely solves, in at most 3
tokens. Every group of completions is enumerated, so the numbers are expectations, not averages. Columns:

  scale      ⟨E[g], ∇J⟩/|∇J|²: 1 if unbiased; a constant factor is only a learning rate
  direction  sine of the angle between E[g] and ∇J: the bias that no learning rate undoes
  easy:hard  how much more weight the easy prompt gets than in ∇J, relative to the hard one; 1 is right
  variance   E|g − E[g]|² / |∇J|²
  SNR        |E[g]|² / E|g − E[g]|², which does not depend on the estimator's scale

The first table is on policy. In the second one the policy has moved since it sampled, as in a second epoch; critics
have learned V of the policy that sampled.
"""

import dataclasses
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxpg import algorithms
from jaxpg.algorithms import exact
from jaxpg.run import cli, report
from jaxpg.run import folder as run_folder


@dataclasses.dataclass(frozen=True)
class Config:
    """Options of the lab."""

    group_size: int = 3  # completions of a prompt
    horizon: int = 3  # tokens a completion may have
    drift: float = 0.3  # how far the policy has moved in the second table: std of the change of its logits
    critic_error: float = 0.3  # std of the error of the wrong critic
    seed: int = 0
    run_dir: Path = Path("runs/estimator_lab")


def solved(prompt: int, completion: tuple[int, ...]) -> float:
    """The easy prompt (0) wants a token 1 somewhere, the hard one (1) wants two tokens 2. Token 0 stops."""
    return float(1 in completion) if prompt == 0 else float(completion.count(2) >= 2)


def on_policy(horizon: int) -> dict[str, tuple[algorithms.Algorithm, str]]:
    """The algorithms, each with its critic: none, the true V, or a wrong one."""
    a = algorithms
    return {
        "REINFORCE": (a.reinforce(), "none"),
        "+ constant baseline": (a.reinforce_baseline(lambda e: 0.5), "none"),
        "+ true V (actor-critic)": (a.actor_critic(n=horizon), "true"),
        "+ wrong V": (a.actor_critic(n=horizon), "wrong"),
        "TD(0), true V": (a.actor_critic(n=1), "true"),
        "TD(0), wrong V": (a.actor_critic(n=1), "wrong"),
        "A3C n=2, wrong V": (a.actor_critic(n=2), "wrong"),
        "GAE λ=0.95, wrong V": (a.actor_critic_gae(), "wrong"),
        "TRPO's gradient, true V": (a.trpo(), "true"),
        "PPO, true V": (a.ppo(), "true"),
        "ReMax": (a.remax(), "none"),
        "RLOO": (a.rloo(), "none"),
        "GRPO": (a.grpo(), "none"),
        "Dr. GRPO": (a.dr_grpo(max_new_tokens=horizon), "none"),
        "DAPO": (a.dapo(limit=horizon + 1, margin=1), "none"),
        "REINFORCE++": (a.reinforce_pp(), "none"),
        "REINFORCE++ baseline": (a.reinforce_pp_baseline(), "none"),
        "Lite PPO": (a.lite_ppo(), "none"),
        "OPO": (a.opo(), "none"),
        "MaxRL": (a.maxrl(), "none"),
        "pass@2": (a.pass_at_k(k=2), "none"),
        "GSPO": (a.gspo(), "none"),
        "GMPO": (a.gmpo(), "none"),
        "CISPO": (a.cispo(), "none"),
        "SAPO": (a.sapo(), "none"),
    }


def off_policy(horizon: int) -> dict[str, tuple[algorithms.Algorithm, str]]:
    """The losses that are made for samples of an older policy."""
    a = algorithms
    return {
        "RLOO, no correction": (a.rloo(), "none"),
        "RLOO, full ratio, no clip": (a.rloo_clip(clip_low=1.0, clip_high=1e9), "none"),
        "RLOO, full ratio, clip": (a.rloo_clip(), "none"),
        "TRPO's surrogate, true V": (a.trpo(), "true"),
        "PPO-penalty β=1, true V": (a.ppo_penalty(kl_coef=1.0), "true"),
        "PPO, true V": (a.ppo(), "true"),
        "Dr. GRPO": (a.dr_grpo(max_new_tokens=horizon), "none"),
        "GRPO": (a.grpo(), "none"),
        "DAPO": (a.dapo(limit=horizon + 1, margin=1), "none"),
        "GSPO, wide clip": (a.gspo(clip_low=0.2, clip_high=0.2), "none"),
        "GMPO": (a.gmpo(), "none"),
        "CISPO": (a.cispo(), "none"),
        "SAPO": (a.sapo(), "none"),
    }


def prepare(config: Config) -> tuple[Config, exact.TokenMDP]:
    """Checks the options before anything is computed."""
    if config.group_size < 2:
        raise ValueError(f"--group-size={config.group_size}: group baselines need at least 2 completions")
    if config.horizon < 2:
        raise ValueError(f"--horizon={config.horizon}: must be at least 2, the hard prompt wants two tokens")
    for name in ("drift", "critic_error"):
        if getattr(config, name) < 0:
            raise ValueError(f"--{name.replace('_', '-')}={getattr(config, name)}: must not be negative")
    mdp = exact.TokenMDP(rewards=solved, horizon=config.horizon, num_prompts=2, stop_token=0)
    exact.check_groups(mdp, config.group_size)
    run_folder.make_folder("--run-dir", config.run_dir)
    return config, mdp


def run(prepared: tuple[Config, exact.TokenMDP]) -> None:
    """Computes, prints and draws."""
    config, mdp = prepared
    console, rng = Console(), np.random.default_rng(config.seed)
    table = rng.normal(size=mdp.table_shape)
    table[0] += np.array([0.0, 1.5, 0.0])  # makes the first prompt easy
    table[1] += np.array([0.5, 0.5, -0.5])  # and the second one hard
    drifted = table + config.drift * rng.normal(size=table.shape)
    probability = [float(x) for x in exact.success(mdp, table)]
    console.print(
        f"G = {config.group_size}; solved with probability {probability[0]:.2f} (easy), {probability[1]:.2f} (hard)"
    )
    critics = critic_values(mdp, table, config)  # of the policy that sampled, in both tables
    measured = {}
    for title, estimators, params in (
        ("On policy", on_policy(config.horizon), table),
        (f"Off policy: logits moved by {config.drift:g} since sampling", off_policy(config.horizon), drifted),
    ):
        measured[title] = {
            name: exact.moments(
                mdp,
                params,
                algorithm,
                config.group_size,
                sampling_params=table,
                values=critics[critic],
            )
            for name, (algorithm, critic) in estimators.items()
        }
        columns = ("estimator", "scale", "direction", "easy:hard", "variance", "SNR")
        console.print(report.table(title, columns, [row(name, m, mdp) for name, m in measured[title].items()]))
    run_folder.write_json(
        config.run_dir / "moments.json", {t: {n: numbers(m, mdp) for n, m in ms.items()} for t, ms in measured.items()}
    )
    points = {
        title: {name: (m.direction_error, 1 / m.signal_to_noise) for name, m in moments.items()}
        for title, moments in measured.items()
    }
    picture = config.run_dir / "bias_variance.png"
    report.draw_points(picture, points, x="bias: sine of the angle to ∇J", y="noise: 1 / SNR")
    console.print(f"Drawn in {picture}")


def critic_values(mdp: exact.TokenMDP, params, config: Config) -> dict[str, np.ndarray | None]:
    """No critic, the true V, and one whose error depends on the prefix, as a network's would."""
    true = exact.true_values(mdp, params)
    listed = exact.trajectories(mdp).batch
    wrong = true.copy()
    for t in range(1, true.shape[1]):
        prefixes, index = np.unique(listed.tokens[:, :t], axis=0, return_inverse=True)
        error = np.random.default_rng((config.seed, t)).normal(size=len(prefixes)) * config.critic_error
        wrong[:, t] += np.where(listed.action_mask[:, t], error[index.reshape(-1)], 0.0)
    return {"none": None, "true": true, "wrong": wrong}


def numbers(m: exact.Moments, mdp: exact.TokenMDP) -> dict[str, float]:
    """The five numbers of a row."""
    truth, mean = m.gradient.reshape(mdp.table_shape), m.mean.reshape(mdp.table_shape)
    easy, hard = ((mean[p] * truth[p]).sum() / (truth[p] ** 2).sum() for p in (0, 1))
    return {
        "scale": m.scale,
        "direction": m.direction_error,
        "easy:hard": float(easy / hard),
        "variance": m.total_variance / float(m.gradient @ m.gradient),
        "snr": m.signal_to_noise,
    }


def row(name: str, m: exact.Moments, mdp: exact.TokenMDP) -> list[str]:
    """The numbers as text; rounding noise is shown as 0."""
    return [name, *(f"{0.0 if abs(x) < 1e-9 else x:.3f}" for x in numbers(m, mdp).values())]


if __name__ == "__main__":
    cli.main(Config, prepare, run, description=__doc__)
