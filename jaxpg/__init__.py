"""Policy-gradient post-training of language models as pure JAX functions."""
