"""The manifests for Kubernetes as kubectl renders them, without a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import Engine, text

from kqueue.config import Config
from kqueue.contract import Deadlines, Request
from kqueue.limits import hard_limit_s
from kqueue.store import evaluations, roles
from workers.judge.host import uids

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy" / "kubernetes" / "example"
#: The versions of Kubernetes whose schemas the manifests must fit.
VERSIONS = ("1.29", "1.33", "1.35")
#: The password in each secret's key, by its name in the compose stack.
PASSWORDS = {
    ("kqueue-owner", "KQUEUE_DATABASE_URL"): "POSTGRES_PASSWORD",
    ("kqueue-logins", "POSTGRES_PRODUCER_PASSWORD"): "POSTGRES_PRODUCER_PASSWORD",
    ("kqueue-logins", "POSTGRES_GATEWAY_PASSWORD"): "POSTGRES_GATEWAY_PASSWORD",
    ("kqueue-logins", "POSTGRES_WORKER_PASSWORD"): "POSTGRES_WORKER_PASSWORD",
    ("kqueue-logins", "POSTGRES_READER_PASSWORD"): "POSTGRES_READER_PASSWORD",
    ("kqueue-http", "KQUEUE_DATABASE_URL"): "POSTGRES_GATEWAY_PASSWORD",
    ("kqueue-http", "KQUEUE_REDIS_URL"): "REDIS_PRODUCER_PASSWORD",
    ("kqueue-client", "KQUEUE_DATABASE_URL"): "POSTGRES_PRODUCER_PASSWORD",
    ("kqueue-client", "KQUEUE_REDIS_URL"): "REDIS_PRODUCER_PASSWORD",
    ("kqueue-worker", "KQUEUE_DATABASE_URL"): "POSTGRES_WORKER_PASSWORD",
    ("kqueue-worker", "KQUEUE_REDIS_URL"): "REDIS_WORKER_PASSWORD",
    ("kqueue-flower", "KQUEUE_REDIS_URL"): "REDIS_FLOWER_PASSWORD",
    ("kqueue-flower", "FLOWER_BASIC_AUTH"): "FLOWER_AUTH",
}
#: Services of the compose stack that a cluster provides, or that run outside it.
ELSEWHERE = {"postgres", "redis", "prometheus", "grafana"}
Object = dict[str, Any]


def kubectl() -> str:
    """Return the path of kubectl. Without it the test skips."""
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not on the PATH")
    return program


@cache
def rendered() -> list[Object]:
    """Return all objects of the example."""
    done = subprocess.run([kubectl(), "kustomize", EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(kind: str) -> dict[str, Object]:
    """Return the objects of one kind by name."""
    return {thing["metadata"]["name"]: thing for thing in rendered() if thing["kind"] == kind}


def pods() -> Iterator[tuple[str, Object, Object]]:
    """Yield each workload's name, its pods' template, and their one container."""
    for thing in rendered():
        template = thing.get("spec", {}).get("jobTemplate", thing).get("spec", {}).get("template")
        if template is not None:
            [container] = template["spec"]["containers"]
            assert "initContainers" not in template["spec"]
            yield thing["metadata"]["name"], template, container


def component(template: Object) -> str:
    """Return the name of the service in the compose stack."""
    return template["metadata"]["labels"]["app.kubernetes.io/component"]


def variables(container: Object) -> dict[str, str | tuple[str, str]]:
    """Return a container's environment: texts, or pairs of a secret and its key."""
    found: dict[str, str | tuple[str, str]] = {}
    for source in container.get("envFrom", []):
        found |= of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"]
    for entry in container["env"]:
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        found[entry["name"]] = (reference["name"], reference["key"]) if reference else entry["value"]
    return found


def compose() -> dict[str, Object]:
    """Return the services of docker-compose.yml."""
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]


@pytest.mark.parametrize(
    "version", [*(pytest.param(v, marks=pytest.mark.nightly) for v in VERSIONS[:-1]), VERSIONS[-1]]
)
def test_objects_fit_kubernetes_schemas(version: str) -> None:
    """Each object of a built-in kind is valid by Kubernetes' strict schema."""
    validate = pytest.importorskip("kubernetes_validate")
    own = [thing for thing in rendered() if not thing["apiVersion"].startswith("keda.sh/")]
    assert len(own) > 20
    for thing in own:
        validate.validate(thing, version, strict=True)


def test_the_services_are_those_of_compose() -> None:
    """Each service of the compose stack runs with its image and command, unless the cluster provides it."""
    services = compose()
    assert {component(template) for _, template, _ in pods()} == set(services) - ELSEWHERE
    for name, template, container in pods():
        service = services[component(template)]
        image = {"worker-cpu": "kqueue-worker-cpu"}.get(name, service["image"].partition(":")[0])
        assert container["image"] == f"registry.example/{image}:0.2.0"
        if component(template) in {"migrate", "http", "prune", "flower"}:
            assert container["command"] == service["command"], name
    [command] = {container["command"][-1] for _, template, container in pods() if component(template) == "worker"}
    assert command.endswith("exec " + " ".join(services["worker"]["command"]))


def test_each_service_knows_its_own_secrets_only() -> None:
    """A pod's secrets hold the passwords of its service in the compose stack, and no other."""
    services, used = compose(), set[tuple[str, str]]()
    for name, template, container in pods():
        references = {value for value in variables(container).values() if isinstance(value, tuple)}
        used |= references
        environment = " ".join(map(str, services[component(template)]["environment"].values()))
        wanted = set(re.findall(r"\$\{(\w*(?:PASSWORD|AUTH))\b", environment))
        assert {PASSWORDS[reference] for reference in references} == wanted, name
        mounted = [volume["secret"] for volume in template["spec"]["volumes"] if "secret" in volume]
        names = ["kqueue-ca", "kqueue-receipts"] if component(template) == "http" else ["kqueue-ca"]
        assert mounted == [{"secretName": secret, "optional": True} for secret in names], name
    assert used == set(PASSWORDS)
    assert of_kind("Secret") == {}


def test_every_setting_exists() -> None:
    """Each KQUEUE_* variable is a setting of kqueue/config.py with a valid value."""
    for name, _, container in pods():
        settings = {
            variable.removeprefix("KQUEUE_").lower(): value
            for variable, value in variables(container).items()
            if variable.startswith("KQUEUE_")
        }
        assert set(settings) <= set(Config.model_fields), name
        Config.model_validate({key: value for key, value in settings.items() if isinstance(value, str) and value})


def test_pods_are_as_tight_as_the_containers_of_compose() -> None:
    """Pods have no privilege, host resource or cluster token, and only workers have capabilities, like in compose."""
    services = compose()
    for name, template, container in pods():
        spec, security = template["spec"], container["securityContext"]
        worker = component(template) == "worker"
        assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(spec), name
        # Service links would set KQUEUE_* variables.
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False), name
        assert spec["shareProcessNamespace"] is services[component(template)]["init"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert security["capabilities"]["drop"] == ["ALL"], name
        assert security.get("capabilities", {}).get("add", []) == services[component(template)].get("cap_add", []), name
        assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True), name
        assert (spec["securityContext"]["runAsUser"] == 0) is worker, name
        assert spec["securityContext"].get("runAsNonRoot", False) is not worker, name
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "secret", "persistentVolumeClaim"}, name
        assert container["resources"]["requests"], name
        assert container["resources"]["limits"]["memory"], name
        sized = [volume["emptyDir"] for volume in spec["volumes"] if "emptyDir" in volume]
        assert all(volume.get("sizeLimit") for volume in sized), name
    assert of_kind("Namespace")["kqueue"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"


def test_one_worker_pod_a_node() -> None:
    """No node ever has two worker pods, even during a rollout, because the candidates' uids belong to the node."""
    for deployment in of_kind("Deployment").values():
        template = deployment["spec"]["template"]
        if component(template) != "worker":
            continue
        [rule] = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert (rule["topologyKey"], rule["namespaceSelector"]) == ("kubernetes.io/hostname", {})
        wanted = {entry["key"]: entry["values"] for entry in rule["labelSelector"].pop("matchExpressions")}
        assert rule["labelSelector"] == {}
        assert wanted == {"app.kubernetes.io/name": ["kqueue"], "app.kubernetes.io/component": ["worker"]}
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_a_worker_ends_what_it_judges() -> None:
    """With the default deadlines Celery's hard limit comes before SIGKILL, no probe kills a worker, uids are locked."""
    for name, template, container in pods():
        if component(template) == "worker":
            assert {mount["mountPath"] for mount in container["volumeMounts"]} & set(uids.PARENTS), name
            assert template["spec"]["terminationGracePeriodSeconds"] > hard_limit_s(Deadlines().total_s) + 10, name
            assert "livenessProbe" not in container, name
            probe = container["readinessProbe"]["exec"]["command"]
            assert probe == compose()["worker"]["healthcheck"]["test"][1:], name


def test_an_upgrade_rolls_pools_after_the_schema() -> None:
    """The steps of docs/deploy.md apply each object after its dependencies, and a rollout waits for ending pods."""

    def labelled(key: str, value: str | None = None) -> list[Object]:
        labels = [(thing["metadata"].get("labels", {}), thing) for thing in rendered()]
        return [thing for given, thing in labels if key in given and value in {None, given[key]}]

    page = (ROOT / "docs" / "deploy.md").read_text()
    steps = ("-l app.kubernetes.io/component=migrate\n", "wait --for=condition=complete --timeout=60m job/migrate\n")
    places = [page.index(step) for step in (*steps, "-l kqueue/pool\n", "rollout status deployment -l kqueue/pool\n")]
    assert places == sorted(places)

    [job] = labelled("app.kubernetes.io/component", "migrate")
    assert (job["kind"], job["metadata"]["name"]) == ("Job", "migrate")
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert "envFrom" not in container
    assert all("configMap" not in volume for volume in job["spec"]["template"]["spec"]["volumes"])

    pools = {(thing["kind"], thing["metadata"]["name"]): thing for thing in labelled("kqueue/pool")}
    workers = {name: template for name, template, _ in pods() if component(template) == "worker"}
    assert {name for kind, name in pools if kind == "Deployment"} == set(workers)
    for name, template in workers.items():
        [container] = template["spec"]["containers"]
        assert {("ConfigMap", source["configMapRef"]["name"]) for source in container["envFrom"]} <= set(pools), name
        spec = pools["Deployment", name]["spec"]
        assert spec["progressDeadlineSeconds"] >= template["spec"]["terminationGracePeriodSeconds"] + 600, name


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a policy's selector matches a pod."""
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        expression["operator"] == "In" and labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", [])
    )


def test_pods_reach_what_they_need_and_nothing_reaches_workers() -> None:
    """Pods can reach only DNS, Postgres and Redis if they have its URL, and producers can reach HTTP."""
    policies = of_kind("NetworkPolicy")
    assert policies["nobody"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for name, template, container in pods():
        mine = {
            policy: thing["spec"]
            for policy, thing in policies.items()
            if matches(thing["spec"]["podSelector"], template["metadata"]["labels"])
        }
        wanted = {"nobody", "names"}
        if "KQUEUE_DATABASE_URL" in variables(container):
            wanted.add("postgres")
        if "KQUEUE_REDIS_URL" in variables(container):
            wanted.add("redis")
        if component(template) == "http":
            wanted.add("http")
        assert set(mine) == wanted, name
        reached = {
            (target["ipBlock"]["cidr"], port["port"])
            for spec in mine.values()
            for rule in spec.get("egress", [])
            for target in rule["to"]
            for port in rule["ports"]
            if "ipBlock" in target
        }
        addresses = {"postgres": ("10.0.0.10/32", 5432), "redis": ("10.0.0.11/32", 6379)}
        assert reached == {addresses[policy] for policy in wanted & set(addresses)}, name
        assert [policy for policy, spec in mine.items() if spec.get("ingress")] == ["http"] * ("http" in wanted), name
    for rule in policies["names"]["spec"]["egress"]:
        assert {port["port"] for port in rule["ports"]} == {53}


def test_each_selector_finds_its_pods() -> None:
    """Services and budgets select pods of one workload, and each deployment its pods."""
    labels = {name: template["metadata"]["labels"] for name, template, _ in pods()}
    for kind, path in (("Service", ()), ("PodDisruptionBudget", ("matchLabels",)), ("Deployment", ("matchLabels",))):
        for name, thing in of_kind(kind).items():
            selector = thing["spec"]["selector"]
            for key in path:
                selector = selector[key]
            assert [pod for pod, those in labels.items() if selector.items() <= those.items()] == [name], kind


def test_pools_grow_with_what_waits() -> None:
    """Each ScaledObject is the only one to set its deployment's replicas, and keeps a worker."""
    deployments, logins = of_kind("Deployment"), of_kind("TriggerAuthentication")
    assert set(of_kind("ScaledObject")) == {"worker-h200", "worker-cpu"}
    for name, thing in of_kind("ScaledObject").items():
        spec = thing["spec"]
        assert spec["scaleTargetRef"] == {"name": name}
        assert "replicas" not in deployments[name]["spec"]
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        [trigger] = spec["triggers"]
        login = logins[trigger["authenticationRef"]["name"]]["spec"]
        reference = {"parameter": "connection", "name": "kqueue-reader", "key": "KEDA_CONNECTION"}
        assert login == {"secretTargetRef": [reference]}
        behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 600


def test_a_reader_may_ask_what_waits(engine: Engine, fields: Callable[..., dict[str, object]]) -> None:
    """The query of each pool counts the open evaluations of its lanes with a reader's rights."""
    lanes = ("cpu", "gpu", "gpu.h200", "gpu.a100", "cpu")
    evaluations.submit(engine, [Request.model_validate(fields(lane=lane)) for lane in lanes])
    counted: dict[str, int] = {}
    for name, thing in of_kind("ScaledObject").items():
        [trigger] = thing["spec"]["triggers"]
        with engine.connect() as connection:
            connection.execute(text(f"SET ROLE {roles.READER}"))
            counted[name] = connection.scalars(text(trigger["metadata"]["query"])).one()
    assert counted == {"worker-h200": 2, "worker-cpu": 2}
