"""Reading a compiled program: loops multiply, groups are found on the mesh's axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from launching import ROOT, load

from jaxpg.parallel import sharding

hlo = load(ROOT / "tools" / "hlo.py")
MESH = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    "written, axes",
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("replica_groups=[4,2]<=[8]", ("tensor",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("data",)),
        ("replica_groups=[2,4]<=[8]", ("fsdp", "tensor")),
        ("replica_groups=[1,8]<=[8]", ("data", "fsdp", "tensor")),
        ("replica_groups={}", ("data", "fsdp", "tensor")),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'b'}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", ("fsdp",)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2], device_ids=([2,2,2]<=[2,2,2]T(2,1,0)) {'a'}", ("tensor",)),
        ("source_target_pairs={{0,4},{4,0}}", ("data",)),
    ],
)
def test_groups_lie_on_axes(written, axes):
    line = f"  %x.1 = f32[8]{{0}} all-gather(%p), channel_id=1, {written}, dimensions={{0}}"
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{line}\n}}"
    (one,) = hlo.Program(text).collectives(MESH)
    assert one.axes == axes and one.kind == "all-gather"


def test_a_device_receives_what_it_lacks():
    def received(op, groups="replica_groups=[2,4]<=[8]"):
        text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %x = {op}(%p), channel_id=1, {groups}\n}}"
        return hlo.Program(text).collectives(MESH)[0].bytes

    assert received("f32[100]{0} all-gather") == 300
    assert received("(f32[25]{0}, f32[100]{0}) all-gather-start") == 300
    assert received("f32[100]{0} all-reduce") == 600
    assert received("f32[25]{0} reduce-scatter") == 300
    assert received("bf16[100]{0} all-to-all") == 150
    assert received("f32[100]{0} collective-permute", "source_target_pairs={{0,1},{1,0}}") == 400


def test_loops_multiply_products():
    scan = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0])
    program = hlo.Program(scan.lower(jnp.zeros((16, 32)), jnp.zeros((5, 32, 32))).compile().as_text())
    assert program.unknown_loops == [] and program.flops() == 5 * 2 * 16 * 32 * 32


def test_loops_multiply_collectives():
    mesh = sharding.make_mesh("data=2,fsdp=2,tensor=2")
    place = NamedSharding(mesh, PartitionSpec(None, "tensor"))

    def body(x, _):  # contracts what is cut over tensor
        return jax.lax.with_sharding_constraint(jnp.tanh(x) @ w, place), None

    w = jnp.ones((32, 32))
    scan = jax.jit(lambda x: jax.lax.scan(body, x, length=5)[0])
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=place)
    found = hlo.Program(scan.lower(x).compile().as_text()).collectives(mesh.shape)
    assert max(one.times for one in found if "tensor" in one.axes) == 5 and {one.times for one in found} <= {1, 5}
