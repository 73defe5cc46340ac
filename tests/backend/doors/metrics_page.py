"""Reads Triton's metrics page with Prometheus' own parser, and checks its form."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def text_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        return response.read().decode()


def check_form(text: str) -> None:
    """HELP and TYPE once per family, before its samples; no two samples with one name and labels."""
    lines = text.splitlines()
    for word in ("HELP", "TYPE"):
        names = Counter(line.split(" ", 3)[2] for line in lines if line.startswith(f"# {word} "))
        assert all(count == 1 for count in names.values()), [n for n, c in names.items() if c > 1]
    samples = Counter(line.rpartition(" ")[0] for line in lines if line and not line.startswith("#"))
    assert all(count == 1 for count in samples.values()), [s for s, c in samples.items() if c > 1]


def families(text: str) -> dict[str, Metric]:
    """Our families on the page, by the name of their HELP line."""
    check_form(text)
    names = re.findall(r"^# HELP (tridecode_\w+) ", text, re.MULTILINE)
    found = [one for one in text_string_to_metric_families(text) if one.name.startswith("tridecode_")]
    assert len(found) == len(names)
    return dict(zip(names, found))


def value(text: str, name: str, **labels: str) -> float:
    """The sample of this name and these labels; 0.0 if there is none."""
    for family in families(text).values():
        for sample in family.samples:
            # the parser adds _total to counters whose name has another end
            if sample.name in (name, f"{name}_total") and sample.labels == labels:
                return sample.value
    return 0.0


def counts_of(text: str, name: str, **labels: str) -> dict[float, float]:
    """The counts of the buckets of a page, for one series, by their upper bounds."""
    return {
        float(sample.labels["le"]): sample.value
        for family in families(text).values()
        for sample in family.samples
        if sample.name.removesuffix("_total") == f"{name}_bucket"
        and {k: v for k, v in sample.labels.items() if k != "le"} == labels
    }
