from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from grpo_jax.config import Config, EvalConfig, MeshConfig, RolloutConfig, TrainConfig, WarmStartConfig
from grpo_jax.mesh import (
    GROUP_AXES,
    PROMPT_AXES,
    check_batch_fits,
    constrain,
    host_rows,
    initialize_distributed,
    make_mesh,
    partition_spec,
    place_params,
    slot_layout,
    sum_over_hosts,
    to_every_host,
    to_host,
    to_mesh,
)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (8, 1, 1, 1)),
        ({"data": 2, "fsdp": 2, "group": 2}, (2, 2, 2, 1)),
        ({"data": 2, "tensor": -1}, (2, 1, 1, 4)),
        ({"data": 1, "fsdp": -1, "group": 4}, (1, 2, 4, 1)),
        ({"data": -1, "tensor": 8}, (1, 1, 1, 8)),
    ],
)
def test_mesh_takes_all_devices(sizes: dict[str, int], expected: tuple[int, ...]) -> None:
    mesh = make_mesh(MeshConfig(**sizes))
    assert mesh.shape == dict(zip(("data", "fsdp", "group", "tensor"), expected, strict=True))
    assert set(mesh.devices.flat) == set(jax.devices())


@pytest.mark.parametrize("sizes", [{"data": 3}, {"data": 16}, {"data": -1, "tensor": 3}, {"data": 1}])
def test_mesh_that_does_not_fit_the_devices(sizes: dict[str, int]) -> None:
    config = MeshConfig(**sizes)
    numbers = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())
    with pytest.raises(ValueError, match=re.escape(f"mesh ({numbers}) does not fit 8 devices")):
        make_mesh(config)


def test_mesh_of_some_devices() -> None:
    mesh = make_mesh(MeshConfig(data=2), jax.devices()[4:6])
    assert set(mesh.devices.flat) == set(jax.devices()[4:6])


def make_config(**sections: Any) -> Config:
    sections = {"eval": EvalConfig(batch_size=8), "rollout": RolloutConfig(num_prompts=8, group_size=4)} | sections
    return Config(**sections)


@pytest.mark.parametrize(
    ("sections", "mesh", "message"),
    [
        (
            {"rollout": RolloutConfig(num_prompts=12)},
            {"data": 4, "fsdp": 2},
            "rollout.num_prompts (12) must be a multiple of mesh.data * mesh.fsdp (8) * "
            "train.prompt_micro_batches (1) = 8; the nearest that work: 8 and 16",
        ),
        (
            {"train": TrainConfig(prompt_micro_batches=4)},
            {"data": 4, "tensor": 2},
            "rollout.num_prompts (8) must be a multiple of mesh.data * mesh.fsdp (4) * "
            "train.prompt_micro_batches (4) = 16; the nearest that work: 16",
        ),
        (
            {"rollout": RolloutConfig(num_prompts=8, group_size=6), "train": TrainConfig(group_micro_batches=3)},
            {"data": 2, "group": 4},
            "rollout.group_size (6) must be a multiple of mesh.group (4) * train.group_micro_batches (3) = 12; "
            "the nearest that work: 12",
        ),
        (
            {"eval": EvalConfig(batch_size=20)},
            {"data": 8},
            "eval.batch_size (20) must be a multiple of mesh.data * mesh.fsdp (8) = 8; "
            "the nearest that work: 16 and 24",
        ),
        (
            {"warm_start": WarmStartConfig(steps=1, batch_size=7)},
            {"data": 8},
            "warm_start.batch_size (7) must be a multiple of mesh.data * mesh.fsdp (8) = 8; "
            "the nearest that work: 8",
        ),
        (
            {"rollout": RolloutConfig(num_prompts=8, group_size=4, num_slots=4)},
            {"data": 4, "group": 2},
            "rollout.num_slots (4) must make equal rows on each of mesh.data * mesh.fsdp (4) shards, at most 2 of "
            "at most 4 slots, a multiple of mesh.group (2): for example 16",
        ),
        (
            {"rollout": RolloutConfig(num_prompts=8, group_size=4, num_slots=2)},
            {"data": 1, "group": 4, "tensor": 2},
            "rollout.num_slots (2) must make equal rows on each of mesh.data * mesh.fsdp (1) shards, at most 8 of "
            "at most 4 slots, a multiple of mesh.group (4): for example 4",
        ),
        (
            {"rollout": RolloutConfig(num_prompts=8, group_size=4, overlap=True, overlap_parts=4)},
            {"data": 4, "group": 2},
            "rollout.num_prompts (8) must be a multiple of mesh.data * mesh.fsdp (4) * rollout.overlap_parts (4) "
            "= 16; the nearest that work: 16",
        ),
        (
            {"rollout": RolloutConfig(num_prompts=8, group_size=4, overlap=True, overlap_parts=2, num_slots=4)},
            {"data": 4, "group": 2},
            "rollout.num_slots (4) must make equal rows on each of mesh.data * mesh.fsdp (4) shards, at most 1 of "
            "at most 4 slots, a multiple of mesh.group (2): for example 16",
        ),
    ],
)
def test_batches_that_cannot_be_split(sections: dict[str, Any], mesh: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        check_batch_fits(make_config(**sections), make_mesh(MeshConfig(**mesh)))


@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((32, 16, None, 1), (32, 16)),  # no refill: whole groups
        ((32, 16, 512, 1), (32, 16)),
        ((32, 16, 128, 1), (32, 4)),
        ((32, 16, 256, 1), (32, 8)),  # no more rows than prompts
        ((32, 16, 8, 1), (2, 4)),
        ((32, 16, 128, 8), (32, 4)),
        ((32, 16, 128, 8, 8), (16, 8)),  # each row is split over eight devices
        ((8, 6, 18, 1), (3, 6)),
        ((8, 4, 2, 1), (1, 2)),
    ],
)
def test_rows_of_slots(sizes: tuple[int, ...], layout: tuple[int, int]) -> None:
    assert slot_layout(*sizes) == layout


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"rollout": RolloutConfig(num_prompts=8, group_size=4, num_slots=32)},
        {"rollout": RolloutConfig(num_prompts=8, group_size=4, num_slots=16, overlap=True, overlap_parts=2)},
        {"train": TrainConfig(prompt_micro_batches=2, group_micro_batches=2)},
        # Without a supervised start its batch size is nobody's business.
        {"warm_start": WarmStartConfig(steps=0, batch_size=7)},
    ],
)
def test_batches_that_can_be_split(sections: dict[str, Any]) -> None:
    check_batch_fits(make_config(**sections), make_mesh(MeshConfig(data=4, group=2)))


def test_logical_axes() -> None:
    assert partition_spec((*GROUP_AXES, None)) == PartitionSpec(("data", "fsdp"), "group", None)
    assert partition_spec(("layers", "embed", "mlp")) == PartitionSpec(None, "fsdp", "tensor")


@pytest.mark.parametrize("sizes", [{"data": 2, "group": 4}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_host_data_goes_onto_the_mesh_and_back(sizes: dict[str, int]) -> None:
    mesh = make_mesh(MeshConfig(**sizes))
    x_PGT = np.arange(8 * 4 * 3).reshape(8, 4, 3)
    for axes in (PROMPT_AXES, GROUP_AXES, (None, None)):
        placed = to_mesh(x_PGT, axes, mesh)
        assert placed.sharding.is_equivalent_to(jax.NamedSharding(mesh, partition_spec(axes)), 3)
        np.testing.assert_array_equal(to_host(placed, axes, mesh), x_PGT)
        np.testing.assert_array_equal(to_every_host(placed), x_PGT)
    # One host has all rows.
    assert host_rows(8, mesh) == slice(0, 8)
    np.testing.assert_array_equal(sum_over_hosts(np.array([1, 2])), [1, 2])


def test_parameters_are_split_by_name_or_refused() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = {"up": jnp.arange(24.0).reshape(1, 4, 6), "norm": jnp.ones((1, 4))}
    axes = {"up": ("layers", "embed", "mlp"), "norm": ("layers", None)}
    placed = place_params(params, axes, mesh)
    assert placed["up"].sharding.shard_shape((1, 4, 6)) == (1, 2, 3)
    assert placed["norm"].sharding.is_fully_replicated
    for name, x in params.items():
        np.testing.assert_array_equal(placed[name], x)
    with pytest.raises(
        ValueError, match=r"parameter \['up'\] of shape \(1, 4, 5\) cannot be split .* mesh\.tensor"
    ):
        place_params({"up": jnp.ones((1, 4, 5))}, {"up": axes["up"]}, mesh)


def test_constrain_splits_under_a_mesh_and_does_nothing_without_one() -> None:
    x_PG = jnp.ones((8, 4))
    assert constrain(x_PG, GROUP_AXES) is x_PG
    mesh = make_mesh(MeshConfig(data=4, group=2))
    with jax.set_mesh(mesh):
        split = jax.jit(lambda x: constrain(x, GROUP_AXES))(x_PG)
    assert split.sharding.shard_shape((8, 4)) == (2, 2)


def test_hosts_that_are_named_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GRPO_JAX_COORDINATOR", "GRPO_JAX_NUM_PROCESSES", "GRPO_JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    initialize_distributed()  # nothing named: one host
    monkeypatch.setenv("GRPO_JAX_COORDINATOR", "10.0.0.1:1234")
    with pytest.raises(ValueError, match=r"GRPO_JAX_NUM_PROCESSES must be set .*'10\.0\.0\.1:1234'"):
        initialize_distributed()
    monkeypatch.setenv("GRPO_JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match="GRPO_JAX_PROCESS_ID must be set"):
        initialize_distributed()
