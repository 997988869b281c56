"""The manifests of examples/kubernetes and of the docs: valid, and their commands run as pods would run them."""

import os
import re
import secrets
import socket
import subprocess
from pathlib import Path

import netns
import pytest

from lockstep import environment
from lockstep.cli.main import make_parser
from lockstep.cli.run import _elastic

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/kubernetes").glob("*.yaml"))
SHOWS = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))"

# The fields of these kinds that we use, as their definitions have them; all below `template` is Kubernetes' own.
FIELDS = {
    "JobSet": {
        "apiVersion", "kind", "metadata.name", "spec.network.enableDNSHostnames", "spec.network.subdomain",
        "spec.network.publishNotReadyAddresses", "spec.failurePolicy.maxRestarts", "spec.failurePolicy.rules.action",
        "spec.failurePolicy.rules.onJobFailureReasons", "spec.replicatedJobs.name", "spec.replicatedJobs.replicas",
        "spec.replicatedJobs.template",
    },
    "PyTorchJob": {
        "apiVersion", "kind", "metadata.name", "spec.nprocPerNode", "spec.elasticPolicy.rdzvBackend",
        "spec.elasticPolicy.minReplicas", "spec.elasticPolicy.maxReplicas", "spec.elasticPolicy.maxRestarts",
        "spec.runPolicy.backoffLimit", "spec.runPolicy.cleanPodPolicy", "spec.pytorchReplicaSpecs.Worker.replicas",
        "spec.pytorchReplicaSpecs.Worker.restartPolicy", "spec.pytorchReplicaSpecs.Worker.template",
    },
}  # fmt: skip
VERSIONS = {"JobSet": "jobset.x-k8s.io/v1alpha2", "PyTorchJob": "kubeflow.org/v1"}


def documents():
    for path in EXAMPLES:
        yield from ((path.name, each) for each in yaml.safe_load_all(path.read_text()))
    for name in ("hosts.md", "elastic.md"):
        for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / name).read_text(), re.S):
            yield from ((name, each) for each in yaml.safe_load_all(block))


def fields(tree, name=""):
    """The names of what a document says, down to `template`."""
    if isinstance(tree, dict) and not name.endswith("template"):
        return {field for key, each in tree.items() for field in fields(each, f"{name}.{key}".strip("."))}
    if isinstance(tree, list) and any(isinstance(each, dict) for each in tree):
        return {field for each in tree for field in fields(each, name)}
    return {name}


def as_job(spec, name="inner"):
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}


def test_manifests_are_valid():
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    version, checked = validator.latest_version(), []
    for name, document in documents():
        kind = document["kind"]
        checked.append((name, kind))
        if kind in FIELDS:
            assert document["apiVersion"] == VERSIONS[kind]
            assert fields(document) <= FIELDS[kind], (name, fields(document) - FIELDS[kind])
        if kind == "JobSet":
            for job in document["spec"]["replicatedJobs"]:
                validator.validate(as_job(job["template"]["spec"]), version, strict=True)
        elif kind == "PyTorchJob":
            for replicas in document["spec"]["pytorchReplicaSpecs"].values():
                template = {"spec": {**replicas["template"]["spec"], "restartPolicy": replicas["restartPolicy"]}}
                validator.validate(as_job({"template": template}), version, strict=True)
        else:
            validator.validate(document, version, strict=True)
    assert {("job.yaml", "Job"), ("job.yaml", "Service"), ("elastic.md", "Job")} <= set(checked)
    assert {("jobset.yaml", "JobSet"), ("pytorchjob.yaml", "PyTorchJob")} <= set(checked)
    with pytest.raises(validator.ValidationError):  # It does look.
        validator.validate(as_job({"template": {}, "complettions": 4}), version, strict=True)


def pods(document):
    """Of each pod: its command, with its variables put in, and those that Kubernetes and the operator give it."""
    spec, given = document["spec"], {}
    if document["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if document["kind"] == "PyTorchJob":
        policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
        port = worker["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
        given = {
            "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
            "PET_RDZV_ENDPOINT": f"{document['metadata']['name']}-worker-0:{port}",
            "PET_RDZV_BACKEND": "c10d",
            "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        }
        count, index = worker["replicas"], "POD_INDEX"
        spec = worker
    else:
        count, index = spec.get("completions", 1), "JOB_COMPLETION_INDEX"
    command = spec["template"]["spec"]["containers"][0]["command"]
    for number in range(count):
        told = {**given, index: str(number)}
        yield [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in command], told


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_each_pod_knows_its_place(path):
    document = list(yaml.safe_load_all(path.read_text()))[-1]
    from lockstep.cli import run as command

    places = []
    for words, told in pods(document):
        args = make_parser([command]).parse_args(words[1:])
        assert words[0] == "lockstep" and _elastic(args) is not None
        places.append(environment.hosts_of(told, args.hosts, args.host_rank, args.meet, args.join))
    least = 2 if path.name == "pytorchjob.yaml" else 4
    assert [place.rank for place in places] == [0, 1, 2, 3][:least] + [None] * (4 - least)
    assert len({place.meet for place in places}) == 1
    name = {"job.yaml": "train-0.train", "jobset.yaml": "train-hosts-0-0.train", "pytorchjob.yaml": "train-worker-0"}
    assert places[0].meet == f"{name[path.name]}:29400"


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_the_commands_of_a_manifest(name, tmp_path):
    """Two of its pods, for real, of two workers each; the names lead to this host."""
    (tmp_path / "train.py").write_text(SHOWS)
    document = list(yaml.safe_load_all((ROOT / "examples/kubernetes" / name).read_text()))[-1]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        here = f"127.0.0.1:{probe.getsockname()[1]}"
    secret, started = secrets.token_hex(16), []
    for words, told in list(pods(document))[:2]:
        words[words.index("-n") + 1] = "2"
        words = [here if ":29400" in word else "2" if word == "4" else word for word in words if word != "--elastic"]
        told = {key: here if key == "PET_RDZV_ENDPOINT" else value for key, value in told.items()}
        told |= {"PET_NNODES": "2", "RANK": "7", "WORLD_SIZE": "9"} if "PET_NNODES" in told else {}
        environ = {**os.environ, **told, "LOCKSTEP_SECRET": secret}
        started.append(
            subprocess.Popen(
                [*netns.LOCKSTEP, *words[1:]], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
            )
        )
    said = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    shown = sorted(line for text in said for line in text.splitlines())
    assert shown == [f"[{rank}] {rank} 4 {rank % 2} 2" for rank in range(4)]
