"""/v1/load_lora_adapter and /v1/unload_lora_adapter, for operators.

The engine looks at the folder of adapters by itself. An adapter appears and goes with one rename, so it never
sees half of one; it reads an adapter, and checks it, when a request names it first.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tridecode.backend.front.errors import ApiError, bad_request, shown
from tridecode.backend.front.service import FrontService
from tridecode.backend.weights.lora import CONFIG_FILE, TENSOR_FILE, check_name

_MAX_BYTES = 16 << 30


class LoadAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """lora_path: a folder of this machine in PEFT's layout, with safetensors."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    base_model_name: Any = None


class UnloadAdapter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: Any = None


async def load(request: Request) -> Response:
    return await _change(request, LoadAdapter, _load, "loaded")


async def unload(request: Request) -> Response:
    return await _change(request, UnloadAdapter, _unload, "unloaded")


async def _change(request: Request, kind: type[Any], work: Any, done: str) -> Response:
    front = FrontService.of(request)
    call, wanted = await front.begin(request, "lora", kind)
    try:
        _check_allowed(front)
        check_name(wanted.lora_name)
        folder = Path(front.settings.lora_dir)
        await front.model.run(True, work, wanted, folder)
    except Exception as error:
        raise front.failed(call, error, kind.__struct_fields__) from error
    front.ended(call)
    return PlainTextResponse(f"Success: LoRA adapter '{wanted.lora_name}' {done} successfully.")


def _check_allowed(front: FrontService) -> None:
    if not front.settings.manage_adapters:
        text = "this service takes no adapters over HTTP without --manage-adapters; use `tridecode adapters`"
        raise ApiError(403, text, code="not_allowed")
    if not front.settings.lora_dir:
        raise bad_request("the engine serves no adapters (lora_path in config.pbtxt is none)", "lora_name")


def _load(wanted: LoadAdapter, folder: Path) -> None:
    source, target = Path(wanted.lora_path), folder / wanted.lora_name
    if os.path.lexists(target) and not wanted.load_inplace:
        raise bad_request(f"the adapter {shown(wanted.lora_name)} is loaded already", "lora_name", "exists")
    for name in (CONFIG_FILE, TENSOR_FILE):
        if not _is_adapter_file(source / name):
            text = f"lora_path has no {name}; wanted a folder in PEFT's layout, with safetensors"
            raise bad_request(text, "lora_path", "not_found")
    staging = folder / f".{wanted.lora_name}.adding-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        for name in (CONFIG_FILE, TENSOR_FILE):
            shutil.copyfile(source / name, staging / name)
        if os.path.lexists(target):
            _remove(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _is_adapter_file(file: Path) -> bool:
    try:
        return file.is_file() and file.stat().st_size <= _MAX_BYTES
    except (OSError, ValueError):  # a path that is too long, or has a NUL or half of a surrogate pair
        return False


def _unload(wanted: UnloadAdapter, folder: Path) -> None:
    target = folder / wanted.lora_name
    if not target.is_dir():
        text = f"the adapter {shown(wanted.lora_name)} is not loaded"
        raise ApiError(404, text, param="lora_name", code="not_found")
    _remove(target)


def _remove(target: Path) -> None:
    """Rename the folder out of sight, then delete it; of a link only the link goes."""
    if target.is_symlink():
        target.unlink()
        return
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    target.rename(old)
    shutil.rmtree(old, ignore_errors=True)
