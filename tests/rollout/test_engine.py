"""The engine against a plain loop over samples and tokens that shares only the drawing of one token."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.config import MeshConfig, ModelConfig
from grpo_jax.mesh import GROUP_AXES, PROMPT_AXES, make_mesh, partition_spec, slot_layout
from grpo_jax.models.config import DecoderConfig
from grpo_jax.models.decoder import Decoder, init_params
from grpo_jax.rollout.engine import generate
from grpo_jax.rollout.sampler import pad_left
from grpo_jax.rollout.sampling import SamplingParams, draw
from grpo_jax.rollout.state import EngineConfig
from grpo_jax.rollout.stop import stop_table
from grpo_jax.types import Rollout
from tests.rollout.counting_model import CountingModel, numpy_logits

V, T, PAD, EOS = 11, 7, 0, (1, 2)
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10], [4, 4], [5, 9, 3], [10], [8, 3], [3, 3, 3, 3]]
KEY = jax.random.key(3)
TOKEN_BYTES = [b"", b"", b"", b"a", b"b", b"ab", b"ba", b"c", b"ca", b"bc", b"d"]

run = jax.jit(generate, static_argnames=("model", "config"))


def head() -> np.ndarray:
    head_VD = np.random.default_rng(0).normal(size=(V, V + 1)).astype(np.float32)
    head_VD[list(EOS)] -= 0.3  # completions of all lengths, some truncated
    return head_VD


def engine_config(**changes: object) -> EngineConfig:
    settings = dict(group_size=4, max_completion_length=T, vocab_size=V - 1, eos_ids=EOS, pad_id=PAD)
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


def rollout(config: EngineConfig, stop: tuple[str, ...] = (), length: int = 5) -> Rollout:
    ids, mask = pad_left(PROMPTS, length, PAD)
    table = stop_table(TOKEN_BYTES, stop)
    table = None if table is None else jnp.asarray(table)
    return run(CountingModel(V), jnp.asarray(head()), jnp.asarray(ids), jnp.asarray(mask), KEY, table, config)


@functools.cache
def expected(
    stop: tuple[str, ...] = (), group_size: int = 4
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, mask, log-probabilities and finished of a plain loop, temperature 1."""
    shape = (len(PROMPTS), group_size, T)
    tokens, logps, mask = np.zeros(shape, int), np.zeros(shape), np.zeros(shape, bool)
    finished = np.zeros(shape[:2], bool)
    for p, prompt in enumerate(PROMPTS):
        for g in range(group_size):
            completion: list[int] = []
            for t in range(T):
                logits = numpy_logits(head(), prompt, completion)
                logits[V - 1 :] = -np.inf
                key = jax.random.fold_in(jax.random.fold_in(KEY, p * group_size + g), t)
                uniforms = jax.random.uniform(key, (1, 2))
                token = int(draw(uniforms, jnp.asarray(logits, jnp.float32)[None])[0][0])
                logps[p, g, t] = logits[token] - np.log(np.exp(logits).sum())
                tokens[p, g, t], mask[p, g, t] = token, True
                completion.append(token)
                text = b"".join(TOKEN_BYTES[i] for i in completion).decode()
                if token in EOS or any(s in text for s in stop):
                    finished[p, g] = True
                    break
    return tokens, mask, logps, finished


def check(result: Rollout, stop: tuple[str, ...] = ()) -> None:
    tokens, mask, logps, finished = expected(stop, result.finished_PG.shape[1])
    assert np.array_equal(result.completion_mask_PGT, mask)
    assert np.array_equal(result.completion_PGT, np.where(mask, tokens, PAD))
    assert np.array_equal(result.finished_PG, finished)
    # float32 against float64 over a handful of additions.
    np.testing.assert_allclose(result.sampler_logps_PGT, np.where(mask, logps, 0), atol=2e-6)


def test_the_reference_has_every_kind_of_completion() -> None:
    _, mask, _, finished = expected()
    lengths = mask.sum(axis=-1)
    assert (lengths == 1).any() and (lengths == T).any() and not finished.all()
    assert (finished & (lengths == T)).any(), "an EOS at the very last position is finished, not truncated"


@pytest.mark.parametrize("num_slots", [None, 32, 16, 8, 4, 2, 1])
def test_equals_the_plain_loop_for_any_number_of_slots(num_slots: int | None) -> None:
    check(rollout(engine_config(num_slots=num_slots)))


def test_rows_narrower_than_a_group_take_prompts_in_turn() -> None:
    assert slot_layout(len(PROMPTS), 8, 12, 1) == (3, 4)
    check(rollout(engine_config(group_size=8, num_slots=12)))


@pytest.mark.parametrize("num_slots", [None, 4])
def test_a_cache_that_grows_changes_nothing(num_slots: int | None) -> None:
    config = engine_config(num_slots=num_slots, num_segments=3)
    assert config.capacities == (3, 5, 7)
    check(rollout(config))


def test_long_completions_have_a_cache_that_grows() -> None:
    lengths = {length: engine_config(max_completion_length=length).capacities for length in (127, 130, 4096)}
    assert lengths == {127: (127,), 130: (65, 130), 4096: (1024, 2048, 3072, 4096)}


@pytest.mark.parametrize("num_slots", [None, 8, 2])
def test_stop_strings_end_a_completion_across_token_borders(num_slots: int | None) -> None:
    stop = ("abc", "dd")
    assert (expected(stop)[3] & ~np.isin(_last_tokens(*expected(stop)[:2]), EOS)).any()
    check(rollout(engine_config(num_slots=num_slots), stop), stop)


def _last_tokens(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.take_along_axis(tokens, mask.sum(axis=-1, keepdims=True) - 1, axis=-1)[..., 0]


@pytest.mark.parametrize("num_slots", [None, 4, 1])
def test_parts_of_a_batch_have_the_draws_of_the_whole(num_slots: int | None) -> None:
    ids, mask = pad_left(PROMPTS, 5, PAD)
    for numbers in ([1, 4, 7], [0, 5]):
        config = engine_config(num_slots=num_slots)
        arguments = (jnp.asarray(head()), jnp.asarray(ids[numbers]), jnp.asarray(mask[numbers]), KEY, None, config)
        result = run(CountingModel(V), *arguments, prompt_number_P=jnp.asarray(numbers))
        tokens, token_mask, *_ = (x[numbers] for x in expected())
        assert np.array_equal(result.completion_PGT, np.where(token_mask, tokens, PAD))


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA of JAX 0.10 copies the cache all the same")
def test_the_cache_is_written_in_place() -> None:
    """A loop that copies its cache at each token spends more time on that than on the model."""
    decoder = DecoderConfig.from_model_config(ModelConfig(), vocab_size=V)
    params = init_params(decoder, jax.random.key(0))
    ids, mask = pad_left(PROMPTS, 5, PAD)
    config = engine_config(max_completion_length=37)
    lowered = run.lower(Decoder(decoder), params, jnp.asarray(ids), jnp.asarray(mask), KEY, None, config)
    heads, width = decoder.num_kv_heads, decoder.head_width
    cache = rf"f32\[{len(PROMPTS)},{heads},4,37,{width}\]\S*"
    # The loops' bodies; the entry, which stands last, copies zeros into each layer's cache once.
    loops, _ = lowered.compile().as_text().split("\nENTRY ")
    assert re.search(rf"= {cache} ", loops), "the cache has another shape now"
    assert not re.findall(rf"= {cache} copy\(", loops)


def test_padding_does_not_matter() -> None:
    check(rollout(engine_config(), length=9))


def test_ids_beyond_the_tokenizer_are_never_sampled() -> None:
    assert np.asarray(rollout(engine_config()).completion_PGT).max() < V - 1


@pytest.mark.parametrize(
    ("mesh_config", "num_slots"),
    [
        (MeshConfig(data=4, group=2), None),
        (MeshConfig(data=2, fsdp=2, group=2), 16),
        (MeshConfig(data=2, fsdp=2, group=2), 8),
        (MeshConfig(data=8), 8),
    ],
)
def test_draws_do_not_depend_on_the_mesh(mesh_config: MeshConfig, num_slots: int | None) -> None:
    mesh = make_mesh(mesh_config)
    ids, mask = pad_left(PROMPTS, 5, PAD)
    sharding = jax.NamedSharding(mesh, partition_spec(PROMPT_AXES))
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    with jax.set_mesh(mesh):
        result = run(
            CountingModel(V),
            jnp.asarray(head()),
            jax.device_put(ids, sharding),
            jax.device_put(mask, sharding),
            KEY,
            None,
            engine_config(num_slots=num_slots, num_shards=shards),
        )
    check(result)
    if num_slots is None:
        split = jax.NamedSharding(mesh, partition_spec(GROUP_AXES))
        assert result.completion_PGT.sharding.is_equivalent_to(split, 3)


def test_greedy_takes_the_most_probable_token() -> None:
    result = rollout(engine_config(sampling=SamplingParams(temperature=0)))
    for p, prompt in enumerate(PROMPTS):
        completion = np.asarray(result.completion_PGT[p, 0])[np.asarray(result.completion_mask_PGT[p, 0])]
        for t, token in enumerate(completion):
            logits = numpy_logits(head(), prompt, completion[:t].tolist())[: V - 1]
            assert token == logits.argmax()
            logp = logits[token] - np.log(np.exp(logits).sum())
            assert abs(float(result.sampler_logps_PGT[p, 0, t]) - logp) < 2e-6
    assert (result.completion_PGT == result.completion_PGT[:, :1]).all(), "greedy samples of a group are equal"


def test_log_probabilities_are_of_the_distribution_really_sampled_from() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=4, top_p=0.9, min_p=0.05)
    result = rollout(engine_config(sampling=sampling))
    for p, prompt in enumerate(PROMPTS):
        for g in range(4):
            completion = np.asarray(result.completion_PGT[p, g])[np.asarray(result.completion_mask_PGT[p, g])]
            for t, token in enumerate(completion):
                probs = truncated(numpy_logits(head(), prompt, completion[:t].tolist())[: V - 1])
                assert probs[token] > 0
                assert abs(float(result.sampler_logps_PGT[p, g, t]) - np.log(probs[token])) < 5e-6


def truncated(logits: np.ndarray) -> np.ndarray:
    """Temperature 0.7, then the best 4, then the smallest set of 90 %, then 5 % of the best; in float64."""
    probs = np.exp(logits / 0.7 - (logits / 0.7).max())
    order = np.argsort(-probs)
    probs[order[4:]] = 0
    probs /= probs.sum()
    before = np.concatenate([[0], np.cumsum(probs[order])[:-1]])
    probs[order[before >= 0.9]] = 0
    probs /= probs.sum()
    probs[probs < 0.05 * probs.max()] = 0
    return probs / probs.sum()


def test_every_draw_of_a_batch_differs() -> None:
    """Same prompt everywhere and a uniform policy: what differs can only come from the keys."""
    ids, mask = pad_left([[3]] * 4, 1, PAD)
    config = engine_config(group_size=16, eos_ids=(V,), vocab_size=V)
    zeros = jnp.zeros((V, V + 1))
    result = run(CountingModel(V), zeros, jnp.asarray(ids), jnp.asarray(mask), KEY, None, config)
    assert len({tuple(row) for row in np.asarray(result.completion_PGT).reshape(64, T).tolist()}) == 64
    other = run(CountingModel(V), zeros, jnp.asarray(ids), jnp.asarray(mask), jax.random.key(4), None, config)
    assert not np.array_equal(result.completion_PGT, other.completion_PGT)
