"""Runs one rank: `python -m tridecode.backend.engine`. The supervisor starts it and defines the arguments."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tridecode.backend.base import log_format
from tridecode.backend.base.errors import (
    ConfigError,
    EngineDownError,
    TridecodeError,
    UnsupportedError,
    WeightFileError,
)
from tridecode.backend.base.garbage import freeze_objects
from tridecode.backend.configuration.engine_config import EngineConfig, read_engine_config, with_folders
from tridecode.backend.configuration.engine_config_file import (
    checkpoint_dir,
    read_engine_parameters,
    tokenizer_dir,
)
from tridecode.backend.configuration.model_config import ModelConfig, check_ranks
from tridecode.backend.engine.device.drafters.draft_loading import check_draft_tokenizer, draft_config
from tridecode.backend.engine.device.drafters.trained_loading import trained_info
from tridecode.backend.engine.device.engine import Engine
from tridecode.backend.engine.device.loading import load_engine
from tridecode.backend.engine.device.resolved_settings import choose_device, resolve
from tridecode.backend.engine.door_socket import DoorSocket
from tridecode.backend.engine.loop import DecodeLoop, follow
from tridecode.backend.engine.ranks.agreement import AgreementError, PeerLost, StepDigest, facts_of
from tridecode.backend.engine.ranks.join_meeting import join, set_gpu
from tridecode.backend.engine.ranks.parallel import Joining, ProcessRanks, Ranks, SingleRank
from tridecode.backend.engine.scheduler_factory import make_scheduler
from tridecode.backend.models import read_model_config
from tridecode.backend.supervisor.rank_link import RankLink
from tridecode.backend.wire import messages as m

#: a rank that is still running this long after Stop exits by itself; the supervisor waits 2 s
LEAVE_S = 1.5

log = logging.getLogger("tridecode.engine")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", required=True, help="the fastertransformer model of the repository")
    parser.add_argument("--control", required=True, help="the supervisor's endpoint")
    parser.add_argument("--endpoint", required=True, help="address at which rank 0 serves the doors")
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--meeting", help="tcp://HOST:PORT of rank 0 (default: a file next to the endpoint)")
    parser.add_argument(
        "--meeting-fd", type=int, help="rank 0: file descriptor of the socket that listens there"
    )
    parser.add_argument("--local-world", type=int, help="ranks of this node (default: all)")
    parser.add_argument("--first-device", type=int, default=0, help="first device of this node's ranks")
    parser.add_argument("--host-cache-fd", type=int, help="memory file of this rank's part of the host tier")
    parser.add_argument("--devices", help="GPUs of the ranks, instead of the parameter of that name")
    return parser.parse_args()


def make_ranks(
    arguments: argparse.Namespace, config: EngineConfig, device: torch.device, joining: Joining
) -> Ranks:
    """Join the ranks. Those of one node meet through a file next to rank 0's socket."""
    if config.tensor_para_size * config.pipeline_para_size == 1:
        return SingleRank()
    url = arguments.meeting or "file://" + arguments.endpoint.removeprefix("ipc://") + ".ranks"
    store = join(url, arguments.rank, arguments.world, arguments.meeting_fd, config.start_timeout_s)
    return ProcessRanks(
        arguments.rank, config.tensor_para_size, config.pipeline_para_size, store, device, joining
    )


def load(arguments: argparse.Namespace, link: RankLink) -> Engine:
    """Read the settings and load the weights. Raises TridecodeError with the exact reason."""
    engine_dir = Path(arguments.engine_dir)
    config = read_engine_config(read_engine_parameters(str(engine_dir)), str(engine_dir / "config.pbtxt"))
    config = with_folders(config, engine_dir)
    if arguments.devices:
        config = replace(config, devices=arguments.devices)
    directory = checkpoint_dir(str(engine_dir))
    model = read_model_config(Path(directory))
    check_ranks(model, config.tensor_para_size, config.pipeline_para_size)
    draft_config(config, model)
    trained_info(config, model)
    if arguments.rank == 0:
        check_draft_tokenizer(config, tokenizer_dir(engine_dir))
    set_gpu(config, arguments.rank, arguments.local_world or arguments.world, arguments.first_device)
    device = choose_device(config)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    link.progress(f"joining {arguments.world} ranks")
    facts = facts_of(config, model, Path(directory), device)
    ranks = make_ranks(arguments, config, device, Joining(facts, config.start_timeout_s, link.progress))
    link.status.exchange = ranks
    config = resolve(config, model, device)
    assert config.max_sequences is not None and config.max_step_tokens is not None
    config = replace(  # depends on memory, which may differ between the ranks' GPUs
        config,
        max_sequences=ranks.smallest(config.max_sequences),
        max_step_tokens=ranks.smallest(config.max_step_tokens),
    )
    progress, host_fd = _Progress(link, model), arguments.host_cache_fd
    engine = load_engine(Path(directory), model, config, ranks, device, progress, link.progress, host_fd)
    if isinstance(ranks, ProcessRanks):
        engine.digest = StepDigest(arguments.epoch, arguments.rank, ranks.stage, link.status, link.tell)
    if engine.state.adapters is not None:
        engine.state.adapters.on_broken = partial(_give_up, link)
        if engine.state.adapters.broken is not None:
            raise engine.state.adapters.broken
    return engine


class _Progress:
    """Reports the progress of loading, at most five times per second."""

    def __init__(self, link: RankLink, model: ModelConfig):
        self._link, self._layers, self._last = link, model.num_layers, 0.0

    def __call__(self, name: str) -> None:
        now = time.monotonic()
        if now - self._last > 0.2:
            self._last = now
            parts = name.split(".")
            layer = int(parts[2]) if parts[1] == "layers" else None
            share = "" if layer is None else f" ({100 * layer // self._layers} %)"
            self._link.progress(f"loading weights: {name}{share}")


def door_limits(engine: Engine, grammar_fault: str = "") -> m.Limits:
    """Return the model's limits that doors check. grammar_fault: see Limits."""
    model, config = engine.model_config, engine.config
    assert config.max_sequence_tokens is not None and config.max_sequences is not None
    return m.Limits(
        vocab_size=model.vocab_size,
        max_sequence_tokens=config.max_sequence_tokens,
        max_sequences=config.max_sequences,
        max_queued_requests=config.max_queued_requests,
        max_bad_word_tokens=config.max_bad_word_tokens,
        max_stop_word_tokens=config.max_stop_word_tokens,
        max_logits_bytes=config.max_logits_bytes,
        max_grammar_bytes=config.max_grammar_bytes,
        grammar_fault=grammar_fault,
        start_id=model.start_id,
        end_id=model.end_id,
        more_end_ids=list(model.more_end_ids),
        model_name=model.model_name,
        hidden_size=model.hidden_size,
        request_timeout_s=config.request_timeout_s,
        prompts=engine.state.prompt_limits,
    )


def _tell_failure(link: RankLink, error: BaseException) -> None:
    """Report why this rank ends, so that the supervisor finds the cause."""
    if isinstance(error, TridecodeError):
        fatal = isinstance(error, (ConfigError, UnsupportedError, WeightFileError))
        kinds = {AgreementError: "group", PeerLost: "peer", EngineDownError: "peer"}
        link.failed(str(error), fatal, kinds.get(type(error), "self"))
    else:
        link.failed(f"{type(error).__name__}: {error}", fatal=False)


def _give_up(link: RankLink, error: BaseException) -> None:
    """Exit: the supervisor tells the doors the reason and starts the next engine."""
    _tell_failure(link, error)
    os._exit(1)


def serve(arguments: argparse.Namespace, engine: Engine, link: RankLink) -> None:
    """Run rank 0 (doors, scheduler and loop) until the supervisor sends Stop."""
    scheduler = make_scheduler(engine, tokenizer_dir(Path(arguments.engine_dir)), start_grammars=True)
    doors = DoorSocket(
        arguments.endpoint,
        arguments.epoch,
        door_limits(engine, scheduler.grammars.fault),
        link.beat,
        lambda reason: _give_up(link, TridecodeError(reason)),
        scheduler.prompt_hasher,
    )
    if engine.state.adapters is not None:
        engine.state.adapters.on_finished = doors.wake
    loop = DecodeLoop(engine, scheduler, doors, link.status)
    link.on_stop = loop.stop
    freeze_objects()
    link.ready()
    engine.pin_host_memory(doors.wake)
    log.info("serving %s on %s", engine.model_config.model_name, engine.device)
    try:
        loop.run()
    finally:
        doors.close()
    scheduler.grammars.close()
    engine.ranks.broadcast_plan(None)
    engine.close()


def serve_as_follower(engine: Engine, link: RankLink) -> None:
    """Run rank 0's plans on a rank > 0, until rank 0 ends them."""

    def leave_soon() -> None:
        timer = threading.Timer(LEAVE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()

    link.on_stop = leave_soon
    freeze_objects()
    link.ready()
    engine.pin_host_memory()
    follow(engine, link.status)
    engine.close()


def main() -> int:
    arguments = parse_arguments()
    who = f"engine rank {arguments.rank}"
    log_format.configure(who, who, os.environ.get("TRIDECODE_LOG_LEVEL", "INFO"))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal is meant for the server; the supervisor ends this process
    link = RankLink(arguments.control, arguments.epoch, arguments.rank)
    try:
        engine = load(arguments, link)
        if arguments.rank == 0:
            serve(arguments, engine, link)
        else:
            serve_as_follower(engine, link)
        return 0
    except Exception as error:  # the process exits: clients see only this text
        log.error("%s", error if isinstance(error, TridecodeError) else traceback.format_exc())
        _tell_failure(link, error)
    if arguments.world > 1:  # an orderly exit may block on process groups that other ranks have left
        os._exit(1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
