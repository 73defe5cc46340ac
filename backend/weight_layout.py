"""The layout of weight files, which the converter writes and the reader reads.

A weight directory has headerless, little-endian, C-order `.bin` files with FasterTransformer's names. A
tensor that is split over tensor ranks has a file per rank, `<name>.<rank>.bin`; any other has `<name>.bin`.
Matrices are stored (in, out). `weight_specs(config)` of a family lists its WeightSpecs.
"""

from __future__ import annotations

from dataclasses import dataclass

from tridecode.backend.errors import ConfigError


@dataclass(frozen=True)
class WeightSpec:
    """One tensor of a model, whole (not of a rank).

    name: the file's stem, e.g. "model.layers.0.attention.query_key_value.weight".
    shape: of the whole tensor; a matrix is (in, out).
    axis: the axis that is split over tensor ranks, or None for a tensor that every rank reads whole.
    sections: sizes of consecutive parts along `axis`, each split evenly by itself. Rank r's shard is the
        concatenation of the r-th slice of each section: the fused query_key_value of FasterTransformer, (H,
        3, H/t) a file, is sections (H, H, H). Empty: one section.
    divided: a file holds the tensor divided by the number of ranks it was written for, as FasterTransformer's
        ranks add their copies up; the reader gives the whole value.
    layer: the layer it belongs to, or None; a pipeline stage reads its own layers only.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    sections: tuple[int, ...] = ()
    layer: int | None = None
    divided: bool = False

    def __post_init__(self) -> None:
        if self.axis is not None and self.sections:
            assert sum(self.sections) == self.shape[self.axis], self

    @property
    def parts(self) -> tuple[int, ...]:
        if self.axis is None:
            return ()
        return self.sections or (self.shape[self.axis],)

    def file_name(self, rank: int) -> str:
        return f"{self.name}.bin" if self.axis is None else f"{self.name}.{rank}.bin"

    def shard_shape(self, world: int) -> tuple[int, ...]:
        """Shape of a rank's file at tensor-parallel degree `world`. ConfigError if it cannot be split."""
        if self.axis is None:
            return self.shape
        self.check_divides(world)
        shape = list(self.shape)
        shape[self.axis] = sum(part // world for part in self.parts)
        return tuple(shape)

    def check_divides(self, world: int) -> None:
        for part in self.parts:
            if part % world:
                raise ConfigError(
                    f"{self.name} {self.shape} cannot be split over tensor_para_size = {world}: "
                    f"{part} (of axis {self.axis}) is not a multiple of it"
                )

    def slices(self, rank: int, world: int) -> list[tuple[int, int]]:
        """Rank's shard as (start, stop) along `axis` of the whole tensor, a pair per section."""
        out, start = [], 0
        for part in self.parts:
            size = part // world
            out.append((start + rank * size, start + (rank + 1) * size))
            start += part
        return out


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Layers of a pipeline stage: blocks of ceil(num_layers / num_stages), FasterTransformer's rule."""
    size = -(-num_layers // num_stages)
    return range(min(stage * size, num_layers), min((stage + 1) * size, num_layers))
