"""Policy-gradient post-training of language models as pure JAX functions."""

import os

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # else transformers tells that it found no PyTorch
