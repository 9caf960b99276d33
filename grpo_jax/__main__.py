"""``python -m grpo_jax``: the same as ``grpo-jax``."""

import sys

from grpo_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
