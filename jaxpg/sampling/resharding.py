"""A sampler on a mesh of its own: the same devices, another cut of the same parameters.

Training cuts weights over fsdp, since it reads each of them a few times a step. Decoding reads all of them for every
token: cut over fsdp, they would be gathered for every token. So they are gathered once a rollout, in the dtype that
they are computed with, and each device keeps its share over tensor.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpg.models import Model
from jaxpg.parallel import sharding


def on_mesh(draw: Callable, *, model: Model, trained: Mesh, sampled: Mesh) -> Callable:
    """Makes a sampler run on another mesh of the same devices.

    Args:
      draw: (params, tokens, mask, key, *rest) -> arrays with a leading row axis; the rest is handed on as it is.
      model: whose parameters they are.
      trained: mesh of the arguments and of the results.
      sampled: mesh to run on.

    Returns:
      The same function; `draw` itself where both meshes are one.
    """
    if trained == sampled:
        return draw
    move = _mover(make_cast(model, trained), trained, sampled)

    def moved(params, tokens, mask, key, *rest):
        params = move(params)
        tokens, mask = jax.device_put((tokens, mask), sharding.rows(sampled))
        # Each process knows the key, and an array of no mesh goes with all.
        key = jax.random.wrap_key_data(np.asarray(jax.random.key_data(key)), impl=jax.random.key_impl(key))
        with jax.set_mesh(sampled):
            drawn = draw(params, tokens, mask, key, *rest)
        return jax.device_put(drawn, sharding.rows(trained))

    return moved


def _mover(cast: Callable[[dict], dict], trained: Mesh, sampled: Mesh) -> Callable[[dict], dict]:
    """Builds params -> what `cast` makes of them, on the sampler's mesh.

    As one program where the devices have the same order: one collective after the other, while those of many small
    programs at once may wait for each other for ever, where several processes share few cores.
    """
    if list(trained.devices.flat) != list(sampled.devices.flat):
        return lambda params: jax.device_put(cast(params), sharding.shardings(sampled, params))
    compiled = {}  # by the structure of the parameters, of which there is one

    def move(params):
        structure = jax.tree.structure(params)
        if structure not in compiled:
            compiled[structure] = jax.jit(cast, out_shardings=sharding.shardings(sampled, params))
        return compiled[structure](params)

    return move


def make_cast(model: Model, mesh: Mesh) -> Callable[[dict], dict]:
    """Builds params -> params with the sharded ones cast to the compute dtype, each on the devices where it is.

    The model casts them at each use anyway, so that no result changes. The others, such as the scales of norms, it uses
    in their own dtype.
    """

    @jax.jit
    def cast(params):
        places = sharding.shardings(mesh, params)
        return jax.tree.map(lambda x, place: x.astype(model.config.dtype) if any(place.spec) else x, params, places)

    return cast if model.config.dtype != jnp.float32 else lambda params: params
