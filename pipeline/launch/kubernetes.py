"""The manifest of a Kubernetes JobSet, whose pods run the steps together.

All pods run the same command: `multi_node` reads a pod's rank from its completion index. They
rendezvous at the first pod's name in the headless service that JobSet creates.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from pipeline.launch.layout import Deployment
from pipeline.system.errors import EXIT_USER_ERROR

MAX_RESTARTS = 10
MOUNT = "/volume"


def job_set_manifest(deployment: Deployment, out: Path, options: Sequence[str]) -> str:
    """Return the manifest, named after `out`, as YAML; `options` are options of `train.py`."""
    slug = re.sub("[^a-z0-9]+", "-", f"rlhf {out.name}".lower())
    name = slug[:40].strip("-")  # names of pods, which are longer, are limited to 63 characters
    first_pod = f"{name}-nodes-0-0.{name}"
    arguments = [word.replace("$", "$$") for word in options]  # Kubernetes would expand $(NAME)
    overrides = f"--deployment-type multi_node --image null --volume null --master-addr {first_pod}"
    mounts = {"volume": MOUNT, "shm": "/dev/shm"}
    pod = {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "train",
                "image": deployment.image,
                "command": ["rlhf", *arguments, *overrides.split(), "--resume"],
                "workingDir": MOUNT,
                "envFrom": [{"secretRef": {"name": name, "optional": True}}],
                "resources": {"limits": {"nvidia.com/gpu": deployment.num_gpus}},
                "volumeMounts": [{"name": n, "mountPath": path} for n, path in mounts.items()],
            }
        ],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": deployment.volume}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    wrong_input = {"operator": "In", "values": [EXIT_USER_ERROR]}
    job = {
        "parallelism": deployment.num_nodes,
        "completions": deployment.num_nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod that fails restarts all of them
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": wrong_input}]},
        "template": {"spec": pod},
    }
    rule = {  # a restart would not correct wrong input
        "name": "wrongInput",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "failurePolicy": {"maxRestarts": MAX_RESTARTS, "rules": [rule]},
        "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return yaml.safe_dump({**kind, "metadata": {"name": name}, "spec": spec}, sort_keys=False)
