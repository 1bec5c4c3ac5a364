"""Tile sizes by kind of device, and how a number of tokens is cut into tiles."""

import jax
from jax.sharding import Mesh

from kljax.log_probs._options import HeadSharding, Tile

# A row for each kind of device, by the start of `Device.device_kind`. `python -m benchmarks.search_tiles`
# finds one by timing; those of TPUs are from the plans of their compiler, `python -m benchmarks.head_aot --tiles`.
TILES = {
    "TPU v5 lite": Tile(4096, 3456),
    "TPU v5": Tile(16384, 896),
    "TPU v6": Tile(4096, 2304),
    "TPU": Tile(4096, 2048),
    "NVIDIA": Tile(4096, 2048),
    "AMD": Tile(4096, 2048),
    "cpu": Tile(512, 4096),
}


def device_kind(sharding: HeadSharding | None) -> str:
    """The kind of the devices of the mesh, which need not be those of this process, or of the default device."""
    mesh = sharding and sharding.resolved_mesh()
    if isinstance(mesh, Mesh):
        return str(mesh.devices.flat[0].device_kind)
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        return str(abstract.device_kind)
    return str(jax.devices()[0].device_kind)


def default_tile(kind: str) -> Tile:
    """The row of the table with the longest name that `kind` starts with; that of the CPU if there is none."""
    found = [name for name in TILES if kind.startswith(name)]
    return TILES[max(found, key=len, default="cpu")]


def tile_rows(tokens: int, limit: int) -> tuple[int, int]:
    """Rows of one tile and how many tiles cover `tokens`: all of one size, as even as multiples of 8 allow."""
    count = max(1, -(-tokens // limit))
    if count == 1:
        return max(1, tokens), 1
    rows = -(-tokens // count)
    return min(limit, -(-rows // 8) * 8), count
