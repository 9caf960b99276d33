from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_jax.data import PromptStream
from grpo_jax.tasks.base import Example

# Grain's shuffle takes about 30 ms an epoch of few examples, so there are few runs of few epochs here.
FEW = settings(max_examples=10)


def examples(count: int) -> list[Example]:
    return [Example(prompt=str(number), answer="") for number in range(count)]


def stream(count: int, num_prompts: int, *, seed: int = 0, host: int = 0, hosts: int = 1) -> PromptStream:
    return PromptStream(
        examples(count), num_prompts=num_prompts, seed=seed, process_index=host, process_count=hosts
    )


def take(prompts: PromptStream, batches: int) -> list[list[str]]:
    return [[example.prompt for example in next(prompts)] for _ in range(batches)]


@FEW
@given(
    count=st.integers(1, 30),
    per_host=st.integers(1, 4),
    hosts=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(-5, 2**40),
    batches=st.integers(1, 3),
)
def test_the_hosts_parts_make_the_single_hosts_batch(count, per_host, hosts, seed, batches) -> None:
    num_prompts = per_host * hosts
    count += num_prompts
    whole = take(stream(count, num_prompts, seed=seed), batches)
    parts = [take(stream(count, num_prompts, seed=seed, host=h, hosts=hosts), batches) for h in range(hosts)]
    assert all(len(part[b]) == per_host for part in parts for b in range(batches))
    assert [sum((part[b] for part in parts), []) for b in range(batches)] == whole


@FEW
@given(num_prompts=st.integers(1, 4), count=st.integers(4, 20), seed=st.integers(0, 9))
def test_each_epoch_covers_everything_once(num_prompts, count, seed) -> None:
    # num_prompts epochs are a whole number of batches.
    flat = sum(take(stream(count, num_prompts, seed=seed), count), [])
    for epoch in range(num_prompts):
        assert sorted(flat[epoch * count : (epoch + 1) * count], key=int) == [str(i) for i in range(count)]


def test_epochs_and_seeds_differ_in_order() -> None:
    # Of 20! orders: two that are equal were not drawn apart.
    orders = {seed: take(stream(20, 20, seed=seed), 5) for seed in range(5)}
    distinct = {tuple(order) for epochs in orders.values() for order in epochs}
    assert len(distinct) == 25
    assert orders[0] == take(stream(20, 20, seed=0), 5)


@FEW
@given(
    count=st.integers(8, 20),
    before=st.integers(0, 8),
    astray=st.integers(0, 3),
    hosts=st.sampled_from([1, 2]),
)
def test_a_restored_stream_goes_on_as_the_saved_one(count, before, astray, hosts) -> None:
    saved = stream(count, 4)
    take(saved, before)
    position = json.loads(json.dumps(saved.position()))
    expected = take(saved, 4)
    # On other hosts, and wherever the stream stood before.
    restored = [stream(count, 4, host=host, hosts=hosts) for host in range(hosts)]
    for part in restored:
        take(part, astray)
        part.restore(position)
        assert part.position() == position
    parts = [take(part, 4) for part in restored]
    assert [sum((part[b] for part in parts), []) for b in range(4)] == expected


def test_a_position_in_other_data_is_refused() -> None:
    position = stream(20, 4).position()
    for other in (stream(21, 4), stream(20, 5), stream(20, 4, seed=1)):
        with pytest.raises(ValueError, match=r"was taken with (num_examples=20|num_prompts=4|seed=0), but"):
            other.restore(position)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"count": 3, "num_prompts": 4},
            r"num_prompts must be between 1 and the number of training problems \(3\), got 4",
        ),
        ({"count": 0, "num_prompts": 1}, r"number of training problems \(0\), got 1"),
        (
            {"count": 9, "num_prompts": 5, "hosts": 2},
            r"num_prompts \(5\) must be a multiple of .* hosts \(2\)",
        ),
        (
            {"count": 9, "num_prompts": 4, "hosts": 2, "host": 2},
            "process_index must be between 0 and 1, got 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        stream(**arguments)


def test_by_default_the_hosts_are_those_of_jax() -> None:
    assert take(PromptStream(examples(9), num_prompts=3, seed=0), 4) == take(stream(9, 3), 4)
