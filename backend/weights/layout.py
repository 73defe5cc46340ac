"""The layout of weight files, which the converter writes and the reader reads.

A weight directory has headerless, little-endian, C-order `.bin` files with FasterTransformer's names. A
tensor that is split over tensor ranks has a file per rank, `<name>.<rank>.bin`; any other has `<name>.bin`.
Matrices are stored (in, out). `weight_specs(config)` of a family lists its WeightSpecs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tridecode.backend.base.errors import ConfigError

#: a padded share is a multiple of this, FasterTransformer's rule: 16-byte vector loads of 16-bit values
PADDED_MULTIPLE = 8


@dataclass(frozen=True)
class WeightSpec:
    """One whole tensor of a model (not a rank's shard).

    name: the file's stem, e.g. "model.layers.0.attention.query_key_value.weight".
    shape: of the whole tensor; a matrix is (in, out).
    axis: the axis that is split over tensor ranks; None: every rank reads the whole tensor. sections: sizes
    of consecutive parts along `axis`; each part is split evenly. Rank r's shard is the
        concatenation of the r-th slice of each section: the fused query_key_value of FasterTransformer, (H,
        3, H/t) a file, is sections (H, H, H). Empty: one section.
    divided: a file holds the tensor divided by the number of ranks that it was written for, because
    FasterTransformer's ranks sum their copies; the reader returns the whole value. layer: the layer it
    belongs to, or None; a pipeline stage reads its own layers only. heads: the number of heads of each
    section. Ranks get whole heads; if there are fewer heads than ranks,
        world / heads consecutive ranks get the same one. Empty: a section may be cut anywhere.
    padded, aligned: a share is padded with zeros at its end (see share_size).
    one_file: a single file `<name>.bin` at any degree, even if ranks split it (vocabulary rows). dtype: of
    its files, if it differs from the directory's weight_data_type: "int8", "uint8", "int32", "fp8" or
        "fp32" (backend/weights/quantization.py).
    pairs: sizes along `axis` count bytes that hold two columns each; shares have the sizes of column shares.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    sections: tuple[int, ...] = ()
    layer: int | None = None
    divided: bool = False
    heads: tuple[int, ...] = ()
    padded: bool = False
    aligned: bool = False
    one_file: bool = False
    dtype: str = ""
    pairs: bool = False

    def __post_init__(self) -> None:
        if self.axis is not None and self.sections:
            assert sum(self.sections) == self.shape[self.axis], self
        if self.heads:
            assert len(self.heads) == len(self.parts), self
            assert all(part % heads == 0 for part, heads in zip(self.parts, self.heads)), self

    @property
    def parts(self) -> tuple[int, ...]:
        if self.axis is None:
            return ()
        return self.sections or (self.shape[self.axis],)

    def num_files(self, stored: int) -> int:
        """Files of the tensor in a directory that was written at degree `stored`."""
        return 1 if self.axis is None or self.one_file else stored

    def file_name(self, rank: int) -> str:
        return f"{self.name}.bin" if self.num_files(2) == 1 else f"{self.name}.{rank}.bin"

    def file_shape(self, stored: int) -> tuple[int, ...]:
        """Shape of each file at degree `stored`. ConfigError if the tensor cannot be split."""
        return self.shard_shape(self.num_files(stored))

    def shard_shape(self, world: int) -> tuple[int, ...]:
        """Shape of a rank's shard at tensor-parallel degree `world`. ConfigError if it cannot be split."""
        if self.axis is None:
            return self.shape
        self.check_divides(world)
        shape = list(self.shape)
        shape[self.axis] = sum(self.share_sizes(world))
        return tuple(shape)

    def check_divides(self, world: int) -> None:
        """Raise ConfigError unless the tensor can be split over `world` ranks."""
        for part, heads in zip(self.parts, self.heads or (0,) * len(self.parts)):
            if not divides(heads or part, world, shared=heads > 0, padded=self.padded):
                raise ConfigError(
                    f"{self.name} {self.shape} cannot be split over tensor_para_size = {world}: "
                    f"{part} (of axis {self.axis}) is {heads} heads, which cannot be split evenly"
                    if heads
                    else f"{self.name} {self.shape} cannot be split over tensor_para_size = {world}: "
                    f"{part} (of axis {self.axis}) is not a multiple of it"
                )
            if self.pairs and world > 1 and not heads and share_size(2 * part, world, self.padded) % 2:
                raise ConfigError(
                    f"{self.name} {self.shape} cannot be split over tensor_para_size = {world}: a rank would "
                    f"have an odd number of its {2 * part} columns; a byte holds two"
                )

    def share_sizes(self, world: int) -> list[int]:
        """The size along `axis` of each section's slice in a shard, padding included."""
        if self.pairs and not self.heads:
            return [share_size(2 * part, world, self.padded, self.aligned) // 2 for part in self.parts]
        if not self.heads:
            return [share_size(part, world, self.padded, self.aligned) for part in self.parts]
        return [part // heads * share_size(heads, world) for part, heads in zip(self.parts, self.heads)]

    def slices(self, rank: int, world: int) -> list[tuple[int, int]]:
        """Return a rank's shard as (start, stop) along `axis` of the whole tensor, one pair per section.

        A pair covers share_sizes, or less if the rest is padding.
        """
        out, begin = [], 0
        for index, (part, size) in enumerate(zip(self.parts, self.share_sizes(world))):
            heads = self.heads[index] if self.heads else 0
            copies = max(world // heads, 1) if heads else 1  # ranks that share a head
            start, stop = (min(rank // copies * size + end, part) for end in (0, size))
            out.append((begin + start, begin + stop))
            begin += part
        return out


def share_size(size: int, world: int, padded: bool = False, aligned: bool = False) -> int:
    """A rank's share of `size` columns or heads: size / world, and at least one head.

    padded: if world does not divide it, round up to a multiple of PADDED_MULTIPLE; the last shares are then
    filled up with zeros. aligned: round up even if world divides it.
    """
    if world == 1 or not padded or (size % world == 0 and not aligned):
        return max(size // world, 1)
    share = -(-size // world)
    return -(-share // PADDED_MULTIPLE) * PADDED_MULTIPLE


def divides(size: int, world: int, shared: bool = False, padded: bool = False) -> bool:
    """Whether `world` ranks can have equal shares of `size`. shared: several ranks may have the same head."""
    return size % world == 0 or padded or (shared and world % size == 0)


def vocabulary_rows(spec: WeightSpec) -> WeightSpec:
    """Return the spec of the embedding or head (V, C), or of the head's bias (V,): one file, rows split over
    ranks and padded.

    A share is ceil(V / t), rounded up to a multiple of 8, since the sampling kernel loads groups of ids.
    Rank r's shard has the tokens from r * shard_shape(t)[0]; rows beyond the vocabulary are zeros.
    """
    assert spec.axis is None, spec
    return replace(spec, axis=0, padded=True, aligned=True, one_file=True)


@dataclass(frozen=True)
class VocabShare:
    """The token ids of tensor rank `rank` of `world`, with the vocabulary split by vocabulary_rows.

    Its ids are first .. stop - 1 in the first `count` of its `size` columns; the rest are padding. A tiny
    vocabulary leaves the last ranks without ids.
    """

    vocab_size: int
    rank: int
    world: int

    @property
    def size(self) -> int:
        """Number of columns, the same on all ranks."""
        return share_size(self.vocab_size, self.world, padded=True, aligned=True)

    @property
    def first(self) -> int:
        return min(self.rank * self.size, self.vocab_size)

    @property
    def stop(self) -> int:
        return min((self.rank + 1) * self.size, self.vocab_size)

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def counts(self) -> list[int]:
        """Number of ids of each rank."""
        return [VocabShare(self.vocab_size, rank, self.world).count for rank in range(self.world)]


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Layers of a pipeline stage: blocks of ceil(num_layers / num_stages), FasterTransformer's rule."""
    size = -(-num_layers // num_stages)
    return range(min(stage * size, num_layers), min((stage + 1) * size, num_layers))
