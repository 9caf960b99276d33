"""The device mesh, the rules that place logical axes on it, and the way of host data onto it and back.

Four mesh axes: ``data`` and ``fsdp`` split the prompts, ``group`` the completions of a prompt, ``fsdp`` and
``tensor`` the weights. Arrays name their axes logically ("prompts", "heads", ...) and only this module knows
which mesh axis that is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grpo_jax.config import Config, MeshConfig

MESH_AXES = ("data", "fsdp", "group", "tensor")

# Logical axis -> mesh axes; names that are not here ("layers", "head", ...) stay whole.
RULES: dict[str, str | tuple[str, ...]] = {
    "prompts": ("data", "fsdp"),
    "group": "group",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}

PROMPT_AXES = ("prompts",)
GROUP_AXES = ("prompts", "group")
"""Leading logical axes of [P, ...] and of [P, G, ...] arrays."""

Axes = tuple[str | None, ...]

# Of a row with refill: enough for attention to the prompt to stay a matrix product, few to wait for one another.
_SLOTS_PER_ROW = 4


def initialize_distributed() -> None:
    """Join the other hosts of the run, if there are any; call before any other use of JAX.

    ``GRPO_JAX_COORDINATOR`` (host:port), ``GRPO_JAX_NUM_PROCESSES`` and ``GRPO_JAX_PROCESS_ID`` name them;
    ``GRPO_JAX_COORDINATOR=auto`` leaves that to JAX, which knows TPU pods, Slurm and Kubernetes.

    Raises:
        ValueError: one of the three variables is missing.
    """
    coordinator = os.environ.get("GRPO_JAX_COORDINATOR")
    if coordinator is None:
        return
    if coordinator == "auto":
        jax.distributed.initialize()
        return
    try:
        num_processes = int(os.environ["GRPO_JAX_NUM_PROCESSES"])
        process_id = int(os.environ["GRPO_JAX_PROCESS_ID"])
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]} must be set when GRPO_JAX_COORDINATOR is ({coordinator!r}); "
            "or set GRPO_JAX_COORDINATOR=auto on a TPU pod or under Slurm"
        ) from None
    jax.distributed.initialize(coordinator, num_processes, process_id)


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of all devices (or of those given).

    Raises:
        ValueError: the axis sizes don't multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.group, config.tensor]
    known = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if -1 in sizes or math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh (data={config.data}, fsdp={config.fsdp}, group={config.group}, tensor={config.tensor}) "
            f"does not fit {len(devices)} devices: the product must be {len(devices)} "
            "(one axis may be -1 and takes what the others leave)"
        )
    # In the order of the hosts, so that each holds a contiguous block of prompts. jax.make_mesh would order by
    # the interconnect's topology and interleave the hosts of a TPU pod.
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    grid = np.array(ordered, dtype=object).reshape(sizes)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def check_batch_fits(config: Config, mesh: Mesh) -> None:
    """Refuse batch sizes that the mesh or the hosts cannot split evenly.

    Raises:
        ValueError: names both numbers and the nearest that works.
    """
    rollout, train = config.rollout, config.train
    data_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    shards_why = f"mesh.data * mesh.fsdp ({data_shards})"
    for name, size, parts, why in (
        (
            "rollout.num_prompts",
            rollout.num_prompts,
            data_shards * train.prompt_micro_batches,
            f"{shards_why} * train.prompt_micro_batches ({train.prompt_micro_batches})",
        ),
        (
            "rollout.num_prompts",
            rollout.num_prompts,
            data_shards * rollout.num_parts,
            f"{shards_why} * rollout.overlap_parts ({rollout.num_parts})",
        ),
        (
            "rollout.group_size",
            rollout.group_size,
            mesh.shape["group"] * train.group_micro_batches,
            f"mesh.group ({mesh.shape['group']}) * train.group_micro_batches ({train.group_micro_batches})",
        ),
        (
            "eval.batch_size",
            config.eval.batch_size,
            data_shards,
            shards_why,
        ),
        (
            "warm_start.batch_size",
            config.warm_start.batch_size if config.warm_start.steps > 0 else data_shards,
            data_shards,
            shards_why,
        ),
    ):
        if size % parts:
            nearest = sorted({max(size // parts, 1) * parts, (size // parts + 1) * parts})
            raise ValueError(
                f"{name} ({size}) must be a multiple of {why} = {parts}; "
                f"the nearest that work: {' and '.join(map(str, nearest))}"
            )
    if rollout.num_slots is not None:
        num_prompts = rollout.num_prompts // rollout.num_parts  # sampled at a time
        slot_layout(num_prompts, rollout.group_size, rollout.num_slots, data_shards, mesh.shape["group"])


def slot_layout(
    num_prompts: int, group_size: int, num_slots: int | None, num_shards: int, num_group_shards: int = 1
) -> tuple[int, int]:
    """Rows of decoding slots, and slots a row; a row works on one prompt at a time.

    Without refill a row is a group. With it a row is a part of one, four slots where that divides: a row takes its
    next prompt only when its last slot has ended, so that in wide ones more slots wait. There are never more rows
    than prompts, so that each token reads no more prompts than it would without refill.

    Raises:
        ValueError: the slots make no equal rows on each shard.
    """
    if num_slots is None or num_slots >= num_prompts * group_size:
        return num_prompts, group_size
    per_shard, most_rows = num_slots // num_shards, num_prompts // num_shards
    widths = [
        slots
        for slots in range(num_group_shards, group_size + 1, num_group_shards)
        if per_shard % slots == 0 and per_shard // slots <= most_rows
    ]
    if per_shard == 0 or num_slots % num_shards or not widths:
        step = num_shards * group_size
        raise ValueError(
            f"rollout.num_slots ({num_slots}) must make equal rows on each of mesh.data * mesh.fsdp "
            f"({num_shards}) shards, at most {most_rows} of at most {group_size} slots, a multiple of mesh.group "
            f"({num_group_shards}): for example {max(round(num_slots / step), 1) * step}"
        )
    slots = next((width for width in widths if width >= _SLOTS_PER_ROW), widths[-1])
    return num_slots // slots, slots


def partition_spec(axes: Axes) -> PartitionSpec:
    """The partition of an array whose axes have these logical names."""
    return PartitionSpec(*(None if name is None else RULES.get(name) for name in axes))


def constrain(x: jax.Array, axes: Axes) -> jax.Array:
    """Ask the compiler to keep ``x`` split this way; without a mesh, ``x`` itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes))


def group_shards() -> int:
    """Parts into which the current mesh splits each group; 1 without a mesh."""
    return dict(jax.sharding.get_abstract_mesh().shape).get("group", 1)


def shardings(axes_tree: Any, mesh: Mesh) -> Any:
    """A tree of logical axes (tuples) turned into shardings."""
    return jax.tree.map(
        lambda axes: NamedSharding(mesh, partition_spec(axes)),
        axes_tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def place_params(params: Any, axes_tree: Any, mesh: Mesh) -> Any:
    """Put host parameters, equal on every host, onto the mesh.

    Raises:
        ValueError: an axis does not divide by the mesh axes that it is split over.
    """

    def place(path: Any, x: Any, sharding: NamedSharding) -> jax.Array:
        try:
            sharding.shard_shape(x.shape)
        except ValueError as error:
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} of shape {tuple(x.shape)} cannot be split as "
                f"{sharding.spec} over mesh {dict(mesh.shape)}: choose a smaller mesh.tensor or mesh.fsdp"
            ) from error
        return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x[index]))

    return jax.tree.map_with_path(place, params, shardings(axes_tree, mesh))


def to_mesh(x: np.ndarray, axes: Axes, mesh: Mesh) -> jax.Array:
    """This host's rows of a batch -> the global array; ``axes`` name the leading axes, the rest is whole."""
    spec = partition_spec(axes)
    return multihost_utils.host_local_array_to_global_array(x, mesh, spec)


def to_host(x: jax.Array, axes: Axes, mesh: Mesh) -> np.ndarray:
    """The global array -> this host's rows, as :func:`to_mesh` took them."""
    return np.asarray(multihost_utils.global_array_to_host_local_array(x, mesh, partition_spec(axes)))


def host_rows(size: int, mesh: Mesh) -> slice:
    """Which of ``size`` prompts this host holds."""
    sharding = NamedSharding(mesh, partition_spec(PROMPT_AXES))
    held = sharding.addressable_devices_indices_map((size,)).values()
    spans = [index[0].indices(size) for index in held if index is not None]
    return slice(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))


def sum_over_hosts(counts: np.ndarray) -> np.ndarray:
    """The sum of the hosts' arrays, on every host."""
    if jax.process_count() == 1:
        return counts
    return np.asarray(multihost_utils.process_allgather(counts)).sum(axis=0)


def to_every_host(x: jax.Array) -> np.ndarray:
    """The whole of a global array, on every host."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
