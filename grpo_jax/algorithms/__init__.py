"""The mathematics of GRPO: pure functions of arrays.

Read ``advantages`` (rewards to advantages), ``objectives`` (the loss), ``kl`` and ``logprobs`` in that order.
None takes a model, a configuration or a tokenizer; none does input or output.
"""
