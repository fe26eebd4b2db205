"""From a policy to scored completions, and what is told about them."""
