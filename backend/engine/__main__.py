"""`python -m tridecode.backend.engine`: one rank. Started by the supervisor, which owns the arguments."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tridecode.backend import messages as m
from tridecode.backend.config import EngineConfig, ModelConfig, read_engine_config
from tridecode.backend.engine.adapters import Adapters
from tridecode.backend.engine.engine import Engine, Ranks
from tridecode.backend.engine.front import Front
from tridecode.backend.engine.loop import DecodeLoop, follow
from tridecode.backend.engine.offline import limits_of
from tridecode.backend.engine.parallel import ProcessRanks, SingleRank
from tridecode.backend.engine.scheduler import Scheduler
from tridecode.backend.engine.settings import choose_device, resolve
from tridecode.backend.engine_config_file import checkpoint_dir, read_engine_parameters
from tridecode.backend.errors import ConfigError, TridecodeError, UnsupportedError, WeightFileError
from tridecode.backend.models import read_model_config
from tridecode.backend.models.config_ini import prompt_tasks
from tridecode.backend.supervisor.rank_link import RankLink

log = logging.getLogger("tridecode.engine")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-dir", required=True, help="the fastertransformer model of the repository")
    parser.add_argument("--control", required=True, help="the supervisor's endpoint")
    parser.add_argument("--endpoint", required=True, help="where rank 0 serves the doors")
    parser.add_argument("--epoch", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    return parser.parse_args()


def make_ranks(arguments: argparse.Namespace, config: EngineConfig, device: torch.device) -> Ranks:
    """This rank's place. Ranks of one engine meet through a file beside rank 0's socket."""
    if config.tensor_para_size * config.pipeline_para_size == 1:
        return SingleRank()
    meeting = "file://" + arguments.endpoint.removeprefix("ipc://") + ".ranks"
    return ProcessRanks(arguments.rank, config.tensor_para_size, config.pipeline_para_size, meeting, device)


def load(arguments: argparse.Namespace, link: RankLink) -> Engine:
    """Read the settings, load the weights. Raises TridecodeError with the exact reason."""
    engine_dir = Path(arguments.engine_dir)
    config = read_engine_config(read_engine_parameters(str(engine_dir)), str(engine_dir / "config.pbtxt"))
    if config.lora_path != "none":
        config = replace(config, lora_path=str(engine_dir / config.lora_path))
    directory = checkpoint_dir(str(engine_dir))
    model = read_model_config(Path(directory))
    tasks = prompt_tasks(Path(directory))
    if tasks and arguments.rank == 0:
        log.warning("prompt learning is not served; ignored are the tasks %s", ", ".join(tasks))
    if torch.cuda.is_available() and config.device != "cpu":
        torch.cuda.set_device(arguments.rank % torch.cuda.device_count())
    device = choose_device(config)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    link.progress(f"joining {arguments.world} ranks")
    ranks = make_ranks(arguments, config, device)
    config = resolve(config, model, device)
    return Engine.load(Path(directory), model, config, ranks, device, _Progress(link, model))


class _Progress:
    """Reports the progress of loading, at most five times a second."""

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


def door_limits(engine: Engine) -> m.Limits:
    """The limits of the model, for the doors."""
    model, config = engine.model_config, engine.config
    assert config.max_sequence_tokens is not None
    return m.Limits(
        vocab_size=model.vocab_size,
        max_sequence_tokens=config.max_sequence_tokens,
        max_sequences=config.max_sequences,
        max_queued_requests=config.max_queued_requests,
        max_bad_word_tokens=config.max_bad_word_tokens,
        max_stop_word_tokens=config.max_stop_word_tokens,
        start_id=model.start_id,
        end_id=model.end_id,
        model_name=model.model_name,
        hidden_size=model.hidden_size,
        request_timeout_s=config.request_timeout_s,
    )


def _give_up(link: RankLink, reason: str) -> None:
    """End the process: the supervisor tells the doors why and starts the next engine."""
    link.failed(reason, fatal=False)
    os._exit(1)


def serve(arguments: argparse.Namespace, engine: Engine, link: RankLink) -> None:
    """Rank 0: doors, scheduler and loop, until the supervisor says Stop."""
    scheduler = Scheduler(limits_of(engine), time.monotonic, Adapters(engine.loader))
    front = Front(
        arguments.endpoint, arguments.epoch, door_limits(engine), link.beat, partial(_give_up, link)
    )
    if engine.adapters is not None:
        engine.adapters.on_finished = front.wake
    loop = DecodeLoop(engine, scheduler, front, link.status)
    link.on_stop = loop.stop
    link.ready()
    log.info("serving %s on %s", engine.model_config.model_name, engine.device)
    try:
        loop.run()
    finally:
        engine.ranks.broadcast_plan(None)
        engine.close()
        front.close()


def main() -> int:
    arguments = parse_arguments()
    logging.basicConfig(
        level=os.environ.get("TRIDECODE_LOG_LEVEL", "INFO"),
        format=f"%(asctime)s %(levelname)s engine rank {arguments.rank}: %(message)s",
        stream=sys.stderr,
    )
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C in a terminal is for the server; the supervisor ends us
    link = RankLink(arguments.control, arguments.epoch, arguments.rank)
    try:
        engine = load(arguments, link)
        if arguments.rank == 0:
            serve(arguments, engine, link)
        else:
            link.ready()
            follow(engine, link.status)
            engine.close()
        return 0
    except TridecodeError as error:
        log.error("%s", error)
        link.failed(str(error), fatal=isinstance(error, (ConfigError, UnsupportedError, WeightFileError)))
    except Exception as error:  # the process ends: a client learns no more than this text
        log.error("%s", traceback.format_exc())
        link.failed(f"{type(error).__name__}: {error}", fatal=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
