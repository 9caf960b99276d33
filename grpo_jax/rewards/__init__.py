"""Rewards: functions of completions, and the runner that survives their failures.

One file a family: ``exact`` (the answer as text), ``number`` (the answer as a number), ``format`` (the form).
"""

from grpo_jax.rewards.base import Reward, RewardFn
from grpo_jax.rewards.runner import RewardResult, RewardRunner

__all__ = ["Reward", "RewardFn", "RewardResult", "RewardRunner"]
