"""Policy-gradient post-training of language models as pure JAX functions.

The packages hold what their names say. The modules that people compose by hand also answer to their short names,
`from jaxpg import advantages, losses` and `from jaxpg.update import make_update`; each loads when it is first used.
"""

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else transformers tells that it found no PyTorch

from jaxpg._short_names import install

__getattr__ = install(
    algorithms=("exact",),
    estimators=(
        *("advantages", "aggregate", "kl", "logprobs", "losses", "masked", "preference", "ratios", "returns"),
        *("segments", "value_losses"),
    ),
    parallel=("distributed", "sharding"),
    rollout=("evaluate",),
    run=("checkpoint", "metrics"),
    training=("train_state", "trust_region", "update"),
)
