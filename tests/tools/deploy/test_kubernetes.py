"""Kubernetes manifests match their schemas, and everything they name exists in our code and the image."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.tools.deploy.files import (
    MANIFESTS,
    ROOT,
    documents,
    every_container,
    health_command,
    instruction,
    of_kind,
    parsed,
    pod_templates,
)
from tridecode.backend.configuration.engine_config import EngineConfig
from tridecode.backend.nodes import launchers
from tridecode.tools.serve import drain

KUBERNETES = "1.34"
LEADER_WORKER_SET = json.loads(Path(__file__).with_name("leaderworkerset_v1.json").read_text())
CONTAINERS = list(every_container())
ANSWERING = [one for one in CONTAINERS if not one[0].endswith("workerTemplate")]
ONE_POD = next(path for path in MANIFESTS if path.stem == "one_pod")
SET = next(path for path in MANIFESTS if path.stem == "leader_worker_set")


def check(document: dict[str, Any]) -> None:
    """Raise the schema's error for an unknown field or a wrong value."""
    if document["kind"] == "LeaderWorkerSet":
        jsonschema.validate(document, LEADER_WORKER_SET)
        for template in pod_templates(document).values():
            metadata = {"name": "template", **template.get("metadata", {})}
            check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def seconds(probe: dict[str, Any]) -> float:
    return probe["periodSeconds"] * probe["failureThreshold"]


def end_s(options: dict[str, Any]) -> float:
    """Return the longest time that `tridecode serve` needs to end after SIGTERM."""
    return options["drain_s"] + drain.IDLE_S + drain.END_S + 2.0


def sleep_s(container: dict[str, Any]) -> float:
    word, value = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    return float(value)


def options_of(container: dict[str, Any]) -> dict[str, Any]:
    entry = json.loads(instruction("ENTRYPOINT"))
    command = container.get("command", entry) + container["args"]
    return parsed(command[command.index("tridecode") :])


# ---------------------------------------------------------------- schemas


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_follows_its_schema(path):
    for document in documents(path):
        check(document)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("name", "value"), [("terminationGracePeriod", 80), ("terminationGracePeriodSeconds", "soon")]
)
def test_a_wrong_field_is_noticed_in_every_template(path, name, value):
    for document in documents(path):
        for place in pod_templates(document):
            changed = copy.deepcopy(document)
            pod_templates(changed)[place]["spec"][name] = value
            with pytest.raises((kubernetes_validate.ValidationError, jsonschema.ValidationError)):
                check(changed)


# ---------------------------------------------------------------- what the containers run


@pytest.mark.parametrize(("place", "pod", "container"), CONTAINERS, ids=[one[0] for one in CONTAINERS])
def test_a_container_runs_a_command_of_ours_on_the_ports_that_it_names(place, pod, container):
    options = options_of(container)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {ports[name] for name in ("http", "grpc", "metrics")} == {
        options[f"{name}_port"] for name in ("http", "grpc", "metrics")
    }
    assert options["address"] == "0.0.0.0", "a pod is reached from outside"
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts[str(options["repository"])]["readOnly"] is True


@pytest.mark.parametrize(("place", "pod", "container"), CONTAINERS, ids=[one[0] for one in CONTAINERS])
def test_every_environment_variable_of_ours_is_read_by_our_code(place, pod, container):
    source = "\n".join(
        path.read_text() for folder in ("backend", "tools") for path in (ROOT / folder).rglob("*.py")
    )
    named = set(re.findall(r"TRIDECODE_[A-Z_]+", json.dumps(container)))
    assert {name for name in named if f'"{name}"' not in source} == set()


@pytest.mark.parametrize(("place", "pod", "container"), CONTAINERS, ids=[one[0] for one in CONTAINERS])
def test_a_container_has_few_rights_and_room_to_write(place, pod, container):
    user = int(instruction("USER").partition(":")[0])
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == user
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {
        mount["mountPath"]: mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert {"/tmp", "/dev/shm"} <= set(writable)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(writable.values()) <= set(volumes)
    shared = volumes[writable["/dev/shm"]]["emptyDir"]
    assert shared["medium"] == "Memory" and shared["sizeLimit"]
    assert (
        "nvidia.com/gpu" in container["resources"]["limits"] and "memory" in container["resources"]["limits"]
    )


# ---------------------------------------------------------------- times


@pytest.mark.parametrize(("place", "pod", "container"), CONTAINERS, ids=[one[0] for one in CONTAINERS])
def test_open_requests_can_end_before_the_pod_is_killed(place, pod, container):
    options = options_of(container)
    assert pod["terminationGracePeriodSeconds"] >= sleep_s(container) + end_s(options)


@pytest.mark.parametrize(("place", "pod", "container"), ANSWERING, ids=[one[0] for one in ANSWERING])
def test_a_start_and_a_restart_inside_have_their_time(place, pod, container):
    assert seconds(container["startupProbe"]) >= EngineConfig().start_timeout_s
    assert seconds(container["livenessProbe"]) >= 60, (
        "serve restarts a dead tritonserver with a back-off of 15 s"
    )
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"


def test_the_rollout_waits_for_the_start():
    deployment = of_kind(ONE_POD, "Deployment")
    [container] = pod_templates(deployment)["template"]["spec"]["containers"]
    assert deployment["spec"]["progressDeadlineSeconds"] > seconds(container["startupProbe"])


# ---------------------------------------------------------------- probes, metrics and services


@pytest.mark.parametrize(("place", "pod", "container"), ANSWERING, ids=[one[0] for one in ANSWERING])
def test_the_pod_is_probed_as_the_image_is(place, pod, container):
    assert container["readinessProbe"]["exec"]["command"] == health_command()


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_prometheus_finds_the_port_of_the_metrics(path):
    workload = documents(path)[0]
    template = next(iter(pod_templates(workload).values()))  # a worker's ports stay closed
    annotations = template["metadata"]["annotations"]
    [container] = template["spec"]["containers"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert int(annotations["prometheus.io/port"]) == options_of(container)["metrics_port"]
    assert annotations["prometheus.io/path"] == "/metrics"


def test_the_service_selects_the_pods_by_ports_that_they_name():
    service, deployment = of_kind(ONE_POD, "Service"), of_kind(ONE_POD, "Deployment")
    template = pod_templates(deployment)["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    named = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= named


# ---------------------------------------------------------------- several nodes


def node_environment(container: dict[str, Any], index: int, size: int) -> dict[str, str]:
    """Return a container's variables, with each $(NAME) replaced by the value that LeaderWorkerSet sets."""
    known = {
        "LWS_LEADER_ADDRESS": "tridecode-0.tridecode.default",
        "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index),
    }
    return {
        one["name"]: re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], one["value"])
        for one in container["env"]
    }


def test_every_pod_of_a_set_finds_its_place_among_the_nodes():
    size = of_kind(SET, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["size"]
    templates = pod_templates(of_kind(SET, "LeaderWorkerSet"))
    for index in range(size):
        template = templates["workerTemplate" if index else "leaderTemplate"]
        [container] = template["spec"]["containers"]
        place = launchers.find_place(node_environment(container, index, size))
        assert place is not None and (place.index, place.size) == (index, size)
        assert place.hosts == ("tridecode-0.tridecode.default",)
        assert place.port in [port["containerPort"] for port in container["ports"] if port["name"] == "nodes"]
        mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
        [secret] = [volume for volume in template["spec"]["volumes"] if "secret" in volume]
        assert Path(place.secret_file).parent == mounts[secret["name"]]


def test_the_workers_stay_until_the_leader_has_drained():
    leader, worker = pod_templates(of_kind(SET, "LeaderWorkerSet")).values()
    [leading], [lending] = leader["spec"]["containers"], worker["spec"]["containers"]
    assert sleep_s(lending) >= sleep_s(leading) + options_of(leading)["drain_s"]
    assert leading["resources"] == lending["resources"] and leading["image"] == lending["image"]


def test_a_worker_is_not_probed_over_ports_that_it_does_not_open():
    worker = pod_templates(of_kind(SET, "LeaderWorkerSet"))["workerTemplate"]["spec"]["containers"][0]
    assert not {"startupProbe", "readinessProbe", "livenessProbe"} & set(worker)


def test_clients_reach_the_leaders_by_another_name_than_the_sets_own_service():
    service, made = of_kind(SET, "Service"), of_kind(SET, "LeaderWorkerSet")
    assert service["metadata"]["name"] != made["metadata"]["name"]
    assert service["spec"]["selector"] == {
        "leaderworkerset.sigs.k8s.io/name": made["metadata"]["name"],
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }
