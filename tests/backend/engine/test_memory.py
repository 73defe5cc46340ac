"""The planned memory of a rank equals the size of a loaded engine's tensors, to the byte."""

from __future__ import annotations

import gc
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import FAMILIES, save, tiny_gpt2, tiny_llama
from tests.lora_adapters import make_adapter
from tests.pruned_checkpoints import Cut, prune, unpruned
from tridecode.backend import models
from tridecode.backend.base.errors import ConfigError
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.engine.device import memory
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.memory import RankMemory, _Place, plan_rank, plan_ranks
from tridecode.backend.engine.device.resolved_settings import resolve
from tridecode.backend.engine.offline import OfflineEngine
from tridecode.backend.models import read_model_config
from tridecode.backend.weights.quantization import Quantization
from tridecode.backend.wire.messages import SamplingParams
from tridecode.converters.adapters import write_targets
from tridecode.converters.checkpoint import open_checkpoint
from tridecode.converters.convert import plan_conversion
from tridecode.kernels import library, scratch
from tridecode.kernels.build import source
from tridecode.tools.bench.shapes.presets import PRESETS

CPU = torch.device("cpu")
CONFIG = EngineConfig(data_type="fp16", max_sequences=6, max_step_tokens=48, block_tokens=16, device="cpu")


def storages() -> dict[int, int]:
    """Map the address of every tensor's memory in this process to its bytes; packed weights by oneDNN's size.
    The garbage collector finds them, independently of the engine."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == "cpu":
            if thing.is_mkldnn:
                found[id(thing)] = torch.ops.mkldnn._nbytes(thing)
            elif thing.numel():
                found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return found


def loaded(directory: Path, config: EngineConfig, place: _Place) -> tuple[int, int]:
    """Return (bytes of all tensors of a loaded engine, blocks of its cache)."""
    gc.collect()
    before = storages()
    model = read_model_config(directory)
    engine = load_engine(directory, model, config, place, CPU)
    gc.collect()
    return sum(size for at, size in storages().items() if at not in before), engine.state.num_blocks


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """Return a function from a family to a weight directory of its tiny checkpoint."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            planned = plan_conversion(open_checkpoint(save(FAMILIES[family](), folder / "hf")), "fp32")
            planned.write(folder / "w")
            made[family] = folder / "w"
        return made[family]

    return make


def check(directory: Path, config: EngineConfig, tensor_rank: int = 0, stage: int = 0) -> RankMemory:
    model = read_model_config(directory)
    config = resolve(config, model, CPU)
    planned = plan_rank(model, config, tensor_rank, stage, "cpu")
    place = _Place(tensor_rank, config.tensor_para_size, stage, config.pipeline_para_size)
    found, blocks = loaded(directory, replace(config, cache_bytes=5 * planned.block + 7), place)
    assert blocks == 5
    assert planned.fixed + 5 * planned.block == found
    return planned


@pytest.mark.parametrize("family", FAMILIES)
def test_every_byte_of_an_engine_is_planned(converted, family):
    check(converted(family), CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"data_type": "bf16"},
        {"max_sequences": 1, "max_step_tokens": None},
        {"max_sequences": 31, "max_sequence_tokens": 33, "block_tokens": 5},
        {"max_bad_word_tokens": 3},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8", "data_type": "bf16", "block_tokens": 5},
    ],
)
def test_every_setting_that_takes_memory_is_planned(converted, change):
    check(converted("gpt2"), replace(CONFIG, **change))


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_every_rank_is_planned(tmp_path, tensor, stages):
    model = tiny_llama(num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=96)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf")), "fp32").write(tmp_path / "w")
    config = replace(CONFIG, tensor_para_size=tensor, pipeline_para_size=stages)
    for stage in range(stages):
        for rank in range(tensor):
            check(tmp_path / "w", config, rank, stage)
    ranks = plan_ranks(
        read_model_config(tmp_path / "w"), resolve(config, read_model_config(tmp_path / "w"), CPU), "cpu"
    )
    assert [(rank.stage, rank.tensor_rank) for rank in ranks] == [
        (stage, rank) for stage in range(stages) for rank in range(tensor)
    ]


@pytest.mark.parametrize(
    ("format", "data_type"), [("int8", "fp32"), ("int8", "bf16"), ("fp8", "bf16"), ("int4", "bf16")]
)
def test_quantised_weights_are_planned(tmp_path, format, data_type):
    """int8 is stored as it is; fp8 and int4 are dequantised. oneDNN does not pad a head of 384 rows."""
    quantization = Quantization(format, 16 if format == "int4" else 0, zeros=format == "int4")
    checkpoint = open_checkpoint(save(FAMILIES["llama"](vocab_size=384), tmp_path / "hf"))
    plan_conversion(checkpoint, "fp32", None, quantization).write(tmp_path / "w")
    check(tmp_path / "w", replace(CONFIG, data_type=data_type))


@pytest.mark.parametrize(("format", "expands", "multiplies"), [("int8", 75, 80), ("fp8", 86, 89)])
def test_w8a8_weights_take_a_byte_on_a_gpu_that_multiplies_them(monkeypatch, format, expands, multiplies):
    quantization = Quantization(format, activations=format)
    model = replace(PRESETS["llama-3-8b"].model, quantization=quantization)
    config = resolve(replace(CONFIG, max_sequence_tokens=64), model, CPU)

    def planned(capability: int) -> int:
        monkeypatch.setattr(memory, "_capability", lambda: capability)
        return plan_rank(model, config, 0, 0, "cuda").weights

    specs = [spec for spec in models.family(model.family).weight_specs(model) if quantization.covers(spec)]
    weights, outputs = (
        sum(size(spec.shape) for spec in specs) for size in (math.prod, lambda shape: shape[1])
    )
    assert planned(expands) - planned(90) == 2 * weights - (weights + 4 * outputs)
    assert planned(multiplies) == planned(90)


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("preset", ["bloom-7b1", "llama-3-8b"])
def test_large_weights_are_expanded_in_memory_for_a_piece(preset: str, format: str, monkeypatch) -> None:
    """Scratch has 32 MiB, or without a limit holds 16384 x 4096 and 28672 x 4096 whole."""
    model = PRESETS[preset].model
    config = resolve(replace(CONFIG, max_sequence_tokens=64), model, CPU)
    rounded = replace(model, quantization=Quantization(format, 128 if format == "int4" else 0))
    without, pieces = (plan_rank(each, config, 0, 0, "cuda").scratch for each in (model, rounded))
    assert pieces - without == 33_554_432
    monkeypatch.setattr(scratch, "EXPANDED_WEIGHT_BYTES", 0)
    whole = plan_rank(rounded, config, 0, 0, "cuda").scratch
    assert whole - without == 2 * {"bloom-7b1": 16384, "llama-3-8b": 28672}[preset] * 4096


def test_weights_that_are_rounded_while_loading_are_planned(converted):
    whole = check(converted("llama"), CONFIG)
    for mode in (1, 2):
        assert check(converted("llama"), replace(CONFIG, int8_mode=mode)).weights < whole.weights


def test_a_head_that_ranks_share_is_planned_on_each(tmp_path):
    model = tiny_llama(num_attention_heads=4, num_key_value_heads=1, hidden_size=64, intermediate_size=96)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf")), "fp32").write(tmp_path / "w")
    alone = check(tmp_path / "w", CONFIG)
    for rank in range(2):
        assert check(tmp_path / "w", replace(CONFIG, tensor_para_size=2), rank).block == alone.block


def top_bytes(config: EngineConfig, vocab_size: int) -> int:
    """Return the bytes for the most likely tokens of a step: results, saved logits and scratch."""
    kept = 4 * (1024 + 16 + config.max_bad_word_tokens)
    return config.slots * (2 * 21 * 4 + kept) + scratch.top_log_probs_bytes(config.slots, vocab_size)


def test_gpus_that_reach_their_peers_are_planned_with_a_share_of_the_vocabulary() -> None:
    """LLaMA-3-8B: embedding and head of 128,256 x 4096 in 16 bit, logits, and counts of each row."""
    model = PRESETS["llama-3-8b"].model
    config = resolve(
        replace(CONFIG, max_sequence_tokens=64, max_step_tokens=8192, tensor_para_size=2), model, CPU
    )
    shared = plan_rank(model, config, 1, 0, "cuda")
    whole = plan_rank(model, replace(config, enable_custom_all_reduce=False), 1, 0, "cuda")
    share = model.vocab_size // 2
    assert whole.weights - shared.weights == 2 * share * 4096 * 2
    held = top_bytes(config, model.vocab_size)  # ranks that share the vocabulary have none of these buffers
    assert whole.workspace - shared.workspace == config.slots * share * (4 + 2) + held
    peers = scratch.peer_bytes(2, config.max_step_tokens, 8192) + scratch.exchange_bytes(2, config.slots)
    peers += scratch.chain_exchange_bytes(2)
    peers += scratch.copied_bytes(2, config.max_step_tokens, 8192)
    sampling = [scratch.sample_bytes(config.slots, ids) for ids in (share, model.vocab_size)]
    assert shared.scratch - whole.scratch == peers + sampling[0] - sampling[1]


def test_layers_of_different_sizes_are_planned(tmp_path):
    cuts = {0: Cut((1, 3, 4, 5, 7), tuple(range(0, 60, 2))), 2: Cut(neurons=(5, 6, 7, 8))}
    source = prune(unpruned("gpt2"), cuts).save(tmp_path / "hf")
    plan_conversion(open_checkpoint(source), "fp32").write(tmp_path / "w")
    whole = 3 * 2 * 12 * 4 * 16 * 2  # layers, K and V, heads, size of a head, tokens, bytes
    assert check(tmp_path / "w", CONFIG).block < whole
    check(tmp_path / "w", replace(CONFIG, pipeline_para_size=3), stage=1)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_take_at_most_what_is_planned(tmp_path, family):
    """The limit also suffices if each matrix of a fused one has its own adapter."""
    model = FAMILIES[family]()
    conversion = plan_conversion(open_checkpoint(save(model, tmp_path / "hf")), "fp32")
    conversion.write(tmp_path / "w")
    write_targets(tmp_path / "w", conversion)
    make_adapter(model, tmp_path / "adapters" / "all", 1, r=4)
    config = replace(CONFIG, lora_path=str(tmp_path / "adapters"), max_loras=3, max_lora_rank=4)
    config = replace(config, data_type="fp32", cache_bytes=1 << 20, max_step_tokens=None)
    offline = OfflineEngine.load(tmp_path / "w", config)
    model_config = read_model_config(tmp_path / "w")
    planned = plan_rank(model_config, resolve(config, model_config, CPU), 0, 0, "cpu").adapters
    offline.submit([1, 2, 3], SamplingParams(max_tokens=1), "all")
    offline.run()
    assert offline.engine.state.adapters is not None
    (table,) = offline.engine.state.adapters._tables.values()
    taken = sum(tensor.nbytes for pair in table.values() for tensor in pair)
    assert 3 * taken <= planned
    assert (3 * taken == planned) == (family == "llama")


def test_float32_on_a_cpu_counts_packed_weights(tmp_path):
    """A tied head is packed as well, so its copy takes the embedding's bytes once more."""
    model = tiny_gpt2(n_embd=64, n_head=4, vocab_size=640, n_inner=256)
    plan_conversion(open_checkpoint(save(model, tmp_path / "hf")), "fp32").write(tmp_path / "w")
    check(tmp_path / "w", replace(CONFIG, data_type="fp32"))


def test_a_gpu_is_planned_with_its_own_buffers_and_scratch(converted):
    model = read_model_config(converted("gpt2"))
    config = resolve(replace(CONFIG, data_type="fp16"), model, CPU)
    cpu, gpu = (plan_rank(model, config, 0, 0, device) for device in ("cpu", "cuda"))
    assert gpu.weights == cpu.weights and gpu.block == cpu.block
    buffer = gpu.workspace - (cpu.workspace - gpu.host)
    buffer -= top_bytes(config, model.vocab_size)  # stay on the device
    results = 12 * config.slots  # a token, its log probability and a number of kept tokens for each row
    assert gpu.host == 4 * (buffer + results)  # rings of four on the host
    widest = max(3 * model.hidden_size, 2 * model.mlp_size)
    assert gpu.scratch > scratch.SUM_BYTES + 3 * 48 * widest
    assert cpu.scratch == 0


def test_the_scratch_of_kernels_is_that_of_their_sources():
    headers = ("decode_columns.cuh", "decode_attention.cuh")
    attention = "".join(source(header).read_text() for header in headers)
    constant = {
        name: int(re.search(rf"constexpr int {name} = (\d+);", attention)[1])
        for name in ("kWarps", "kMaxBlocks", "kGroup")
    }
    slot = constant["kGroup"] * (256 + 2)
    assert scratch.attention_bytes() == constant["kMaxBlocks"] * constant["kWarps"] * 2 * slot * 4
    sampling = source("sampling_row.cuh").read_text()
    threads = int(re.search(r"constexpr int kThreads = (\d+);", sampling)[1])
    assert "kChunk = 8 * kThreads" in sampling and "kSegment = 64;" in sampling
    chunks, segments = -(-50257 // (8 * threads)), -(-50257 // 64)
    ranks, sums = 2 * 8, threads // 32 * 8  # bytes per chunk
    assert scratch.sample_bytes(3, 50257) == 3 * -(-(chunks * (ranks + sums) + segments * 4) // 16) * 16


@pytest.mark.skipif(not library.LIBRARY.exists(), reason="the kernel library is not built")
def test_the_scratch_of_kernels_is_that_of_the_library():
    built = library.Library()
    assert scratch.attention_bytes() == built.decode_attention_scratch(256)
    assert scratch.sample_bytes(64, 250880) == built.sample_scratch(64, 250880)
    assert scratch.top_log_probs_bytes(64, 250880) == built.top_log_probs_scratch(64, 250880)
    for ranks, tokens in [(2, 100), (4, 100), (8, 8192)]:
        limits = scratch.peer_limits(ranks)
        assert limits is not None
        slot = scratch.plan_peers(limits, ranks, tokens, 8192).slot_bytes
        assert scratch.peer_bytes(ranks, tokens, 8192) == built.peer_bytes(ranks, slot)
    for ranks, rows in ((2, 1), (3, 64), (8, 100)):
        assert scratch.exchange_bytes(ranks, rows) == built.sample_exchange(rows, ranks)


def test_block_tables_beyond_reason_are_refused_before_they_are_made(converted):
    model = read_model_config(converted("gpt2"))
    config = replace(resolve(CONFIG, model, CPU), max_sequences=1 << 40)
    with pytest.raises(ConfigError, match="max_sequences 1,099,511,627,776"):
        plan_rank(model, config, 0, 0, "cpu")
