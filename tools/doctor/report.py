"""A diagnosis as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tridecode.backend.engine.parts.table import BACKGROUND
from tridecode.tools.byte_sizes import in_words
from tridecode.tools.checks.findings import Finding, one_line
from tridecode.tools.doctor.diagnosis import Diagnosis
from tridecode.tools.doctor.fit import Fit
from tridecode.tools.doctor.machine import Machine


def print_report(found: Diagnosis, console: Console) -> None:
    console.print(_machine(found.machine))
    for where, fit in found.fits.items():
        console.print(_memory(where, fit))
        console.print(_sequences(fit))
    if found.findings:
        console.print(_findings(found.findings))
    what = found.repository or "this machine"
    console.print(f"{what}: problems: {found.problems}, warnings: {found.warnings}", markup=False)


def _machine(machine: Machine) -> Table:
    table = Table(title="machine", title_justify="left", show_header=False)
    table.add_column("", style="bold")
    table.add_column("", overflow="fold")
    for name, value in _facts(machine):
        table.add_row(name, Text(one_line(value)))
    return table


def _facts(machine: Machine) -> list[tuple[str, str]]:
    cuda = machine.cuda
    gpus = [
        f"{gpu.index}: {gpu.name}, compute capability {gpu.capability // 10}.{gpu.capability % 10}, "
        f"{in_words(gpu.memory)} ({in_words(gpu.used)} in use), MIG {gpu.mig.lower()}"
        for gpu in cuda.visible or cuda.smi
    ]
    driver = next((gpu.driver for gpu in cuda.smi), "")
    cpus = f"{machine.cpus}" + (f", the cgroup grants {machine.cpu_limit:g}" if machine.cpu_limit else "")
    memory = f"{in_words(machine.memory)}, {in_words(machine.memory_available)} available"
    if machine.memory_limit is not None:
        memory += f", cgroup limit {in_words(machine.memory_limit)}"
    doors, kernels = machine.doors, machine.kernels
    server = doors.server_version or doors.server or "none that can run the doors"
    facts = [("GPU", text) for text in gpus] or [("GPU", f"no GPU: CPU path ({cuda.smi_error})")]
    if driver:
        facts.append(("driver", f"{driver}, runs CUDA {cuda.driver_cuda or 'unknown'}"))
    facts += [
        ("torch", f"{machine.torch}, CUDA {cuda.torch_cuda or 'none'}, NCCL {cuda.nccl or 'none'}"),
        ("kernels", kernels.info or f"{kernels.error}: {kernels.path}"),
        ("python", machine.python),
        ("doors", f"python {doors.python_version or '?'}, numpy {doors.numpy or 'none'} ({doors.python})"),
        ("tritonserver", server),
        ("CPUs", cpus),
        ("memory", memory),
        ("/dev/shm", f"{in_words(machine.shm_total)}, {in_words(machine.shm_free)} free"),
        ("limits", f"ulimit -n {machine.nofile}, ulimit -l {in_words(machine.memlock)}"),
    ]
    if machine.disk_free is not None and machine.disk_total is not None:
        facts.append(("disk", f"{in_words(machine.disk_total)}, {in_words(machine.disk_free)} free"))
    taken = ", ".join(machine.ports_taken) or "none of 8000, 8001, 8002"
    return [*facts, ("ports taken", taken)]


def _memory(where: str, fit: Fit) -> Table:
    """A column for each group of ranks with the same bytes."""
    kind = "a CPU" if fit.place.kind == "cpu" else f"{fit.place.devices} x {in_words(fit.place.memory)} GPU"
    table = Table(title=f"memory of {where} on {kind}", title_justify="left")
    table.add_column("bytes of a rank")
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, rank in enumerate(fit.ranks):
        features = [rank.background.get(feature.name, 0) for feature in BACKGROUND]
        numbers = (rank.weights, rank.workspace, rank.scratch, rank.block, rank.adapters, *features)
        groups.setdefault(numbers, []).append(index)
    for ranks in groups.values():
        table.add_column(_ranks(ranks), justify="right", overflow="fold")
    names = ("weights and tables", "workspace", "kernels' scratch", "one block of the cache")
    for row, name in enumerate(names):
        table.add_row(name, *(f"{numbers[row]:,}" for numbers in groups))
    cache = [fit.blocks * numbers[3] for numbers in groups]
    table.add_row("cache", *(f"{size:,}" for size in cache))
    if any(numbers[4] for numbers in groups):
        table.add_row("adapters, at most", *(f"{numbers[4]:,}" for numbers in groups))
    for row, feature in enumerate(BACKGROUND, 5):
        if any(numbers[row] for numbers in groups):
            table.add_row(feature.name, *(f"{numbers[row]:,}" for numbers in groups))
    table.add_row("libraries, about", *(f"{fit.libraries:,}" for _ in groups))
    totals = (
        sum(numbers[:3]) + sum(numbers[4:]) + size + fit.libraries for numbers, size in zip(groups, cache)
    )
    table.add_row("together", *(f"{size:,}" for size in totals))
    table.caption = (
        f"cache in {fit.cache_dtype}: {fit.blocks:,} blocks of {fit.block_tokens} tokens, "
        f"{fit.tokens:,} tokens; max_sequences {fit.slots}"
    )
    if fit.fits and fit.host_cache:
        table.caption += (
            f"; with host_cache_bytes {fit.host_cache} a host tier holds {fit.host_tokens:,} tokens more"
        )
    return table


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _sequences(fit: Fit) -> Table:
    table = Table(title="sequences that the cache holds at once", title_justify="left")
    table.add_column("tokens of each", justify="right")
    table.add_column("sequences", justify="right")
    for tokens, count in fit.sequences:
        table.add_row(f"{tokens:,}", f"{count:,}")
    return table


def _findings(findings: list[Finding]) -> Table:
    table = Table(title="findings", title_justify="left", show_lines=True, show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for finding in findings:
        problem = finding.severity == "error"
        text = Text(f"{one_line(finding.where)}\n", style="bold")
        for name, part in (("found", finding.found), ("wanted", finding.wanted), ("change", finding.fix)):
            text.append(f"{name}: {one_line(part)}" + ("\n" if name != "change" else ""), style="not bold")
        word = Text("problem", style="red") if problem else Text("warning", style="yellow")
        table.add_row(word, text)
    return table
