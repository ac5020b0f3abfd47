"""The fields of KubeRay's three kinds, version ray.io/v1, as KubeRay 1.7 documents them.

No package carries KubeRay's definitions, so this is a list of ours: names, types and what is
required, to be joined with the schema of Kubernetes' own types (kubernetes.py). A cluster has the
real ones. This compares the list with them, field by field, and needs no Ray:

    kubectl get crd rayclusters.ray.io rayjobs.ray.io rayservices.ray.io -o yaml > crds.yaml
    python -m tests.infra.kuberay crds.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def of(name: str) -> Schema:
    """A type of Kubernetes, as `core.v1.PodTemplateSpec`."""
    return {"$ref": f"#/$defs/io.k8s.api.{name}"}


def choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def fields(*required: str, **properties: Schema) -> Schema:
    """An object that has these fields and no others."""
    known = {"properties": properties, "additionalProperties": False}
    return {"type": "object", "required": list(required), **known}


ENV = array(of("core.v1.EnvVar"))
QUANTITIES: Schema = {"type": "object"}
SECRET = fields(value=TEXT, valueFrom=of("core.v1.EnvVarSource"))
RULES = {
    "ingressRules": array(of("networking.v1.NetworkPolicyIngressRule")),
    "egressRules": array(of("networking.v1.NetworkPolicyEgressRule")),
}
POLICY = choice("DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone")

AUTOSCALER = fields(
    args=array(TEXT),
    command=array(TEXT),
    env=ENV,
    envFrom=array(of("core.v1.EnvFromSource")),
    idleTimeoutSeconds=WHOLE,
    image=TEXT,
    imagePullPolicy=TEXT,
    resources=of("core.v1.ResourceRequirements"),
    securityContext=of("core.v1.SecurityContext"),
    upscalingMode=choice("Default", "Aggressive", "Conservative"),
    version=choice("v1", "v2"),
    volumeMounts=array(of("core.v1.VolumeMount")),
)
FAULT_TOLERANCE = fields(
    backend=choice("redis", "rocksdb"),
    externalStorageNamespace=TEXT,
    redisAddress=TEXT,
    redisPassword=SECRET,
    redisUsername=SECRET,
    storage=fields(
        accessModes=array(TEXT),
        claimName=TEXT,
        deletionPolicy=choice("DeleteWithCluster", "Retain"),
        size={},
        storageClassName=TEXT,
        subPath=TEXT,
    ),
)
TLS = array(fields(hosts=array(TEXT), secretName=TEXT))
INGRESS = fields(
    host=TEXT, path=TEXT, pathType=choice("Exact", "Prefix", "ImplementationSpecific"), tls=TLS
)
HEAD = fields(
    "template",
    enableIngress=FLAG,
    headService=of("core.v1.Service"),
    ingressOptions=INGRESS,
    labels=TEXTS,
    rayStartParams=TEXTS,
    resources=QUANTITIES,
    serviceType=TEXT,
    template=of("core.v1.PodTemplateSpec"),
)
WORKERS = fields(
    "groupName",
    "minReplicas",
    "maxReplicas",
    "template",
    groupName=TEXT,
    idleTimeoutSeconds=WHOLE,
    labels=TEXTS,
    maxReplicas=WHOLE,
    minReplicas=WHOLE,
    numOfHosts=WHOLE,
    priority=WHOLE,
    rayStartParams=TEXTS,
    replicas=WHOLE,
    resources=QUANTITIES,
    scaleStrategy=fields(workersToDelete=array(TEXT)),
    suspend=FLAG,
    template=of("core.v1.PodTemplateSpec"),
)
COLLECTOR = fields(
    env=ENV, image=TEXT, imagePullPolicy=TEXT, resources=of("core.v1.ResourceRequirements")
)
CLUSTER = fields(
    "headGroupSpec",
    authOptions=fields(enableK8sTokenAuth=FLAG, mode=choice("disabled", "token"), secretName=TEXT),
    autoscalerOptions=AUTOSCALER,
    enableInTreeAutoscaling=FLAG,
    gcsFaultToleranceOptions=FAULT_TOLERANCE,
    headGroupSpec=HEAD,
    headServiceAnnotations=TEXTS,
    historyServerOptions=fields(collectorOptions=COLLECTOR),
    managedBy=TEXT,
    networkPolicy=fields(
        head=fields(**RULES),
        mode=choice("DenyAll", "DenyAllIngress", "DenyAllEgress"),
        worker=fields(**RULES),
        workerGroups=array(fields("groupName", groupName=TEXT, **RULES)),
    ),
    rayVersion=TEXT,
    suspend=FLAG,
    tlsOptions=fields(enabled=FLAG),
    upgradeStrategy=fields(type=choice("Recreate", "None")),
    workerGroupSpecs=array(WORKERS),
)
RULE = fields(
    "condition",
    "policy",
    condition=fields(
        jobDeploymentStatus=choice("Failed"),
        jobStatus=choice("SUCCEEDED", "FAILED"),
        ttlSeconds=WHOLE,
    ),
    policy=POLICY,
)
JOB = fields(
    activeDeadlineSeconds=WHOLE,
    backoffLimit=WHOLE,
    clusterSelector=TEXTS,
    deletionStrategy=fields(
        deletionRules=array(RULE), onFailure=fields(policy=POLICY), onSuccess=fields(policy=POLICY)
    ),
    entrypoint=TEXT,
    entrypointNumCpus=NUMBER,
    entrypointNumGpus=NUMBER,
    entrypointResources=TEXT,
    jobId=TEXT,
    managedBy=TEXT,
    metadata=TEXTS,
    preRunningDeadlineSeconds=WHOLE,
    rayClusterSpec=CLUSTER,
    runtimeEnvYAML=TEXT,
    shutdownAfterJobFinishes=FLAG,
    submissionMode=TEXT,
    submitterConfig=fields(backoffLimit=WHOLE),
    submitterPodTemplate=of("core.v1.PodTemplateSpec"),
    suspend=FLAG,
    ttlSecondsAfterFinished=WHOLE,
)
SERVICE = fields(
    "rayClusterConfig",
    deploymentUnhealthySecondThreshold=WHOLE,
    excludeHeadPodFromServeSvc=FLAG,
    managedBy=TEXT,
    rayClusterConfig=CLUSTER,
    rayClusterDeletionDelaySeconds=WHOLE,
    serveConfigV2=TEXT,
    serveService=of("core.v1.Service"),
    serviceUnhealthySecondThreshold=WHOLE,
    suspend=FLAG,
    upgradeStrategy=fields(
        clusterUpgradeOptions=fields(
            "gatewayClassName",
            "intervalSeconds",
            "stepSizePercent",
            gatewayClassName=TEXT,
            intervalSeconds=WHOLE,
            maxSurgePercent=WHOLE,
            stepSizePercent=WHOLE,
        ),
        type=TEXT,
    ),
)
SPECS = {"RayCluster": CLUSTER, "RayJob": JOB, "RayService": SERVICE}
# What the API server takes beyond the list of the CRD: submissionMode is checked by the operator.
SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")


def differences(ours: Schema, theirs: Schema, path: str) -> Iterator[str]:
    """Where the list and a CRD's schema disagree."""
    if "$ref" in ours or not ours or ours is QUANTITIES:
        return
    for name in ("type", "enum"):
        if sorted(map(str, _listed(ours.get(name)))) != sorted(map(str, _listed(theirs.get(name)))):
            yield f"{path}: {name} is {ours.get(name)} here and {theirs.get(name)} there"
    if set(ours.get("required", [])) != set(theirs.get("required", [])):
        yield f"{path}: required {ours.get('required')} here, {theirs.get('required')} there"
    mine, real = ours.get("properties", {}), theirs.get("properties", {})
    for name in sorted(set(mine) ^ set(real)):
        yield f"{path}.{name}: only {'here' if name in mine else 'there'}"
    for name in sorted(set(mine) & set(real)):
        yield from differences(mine[name], real[name], f"{path}.{name}")
    if "items" in ours:
        yield from differences(ours["items"], theirs.get("items", {}), f"{path}[]")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def main(file: Path) -> int:
    """Compare the list with definitions in `file`; 1 if they differ or one is missing."""
    documents = [tree for tree in yaml.safe_load_all(file.read_text("utf-8")) if tree]
    found = [crd for tree in documents for crd in tree.get("items", [tree])]
    kinds = {crd["spec"]["names"]["kind"]: crd for crd in found}
    wrong = [f"{kind}: no definition in {file}" for kind in SPECS if kind not in kinds]
    for kind, spec in SPECS.items():
        for version in kinds.get(kind, {"spec": {"versions": []}})["spec"]["versions"]:
            if version["name"] == "v1":
                schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
                wrong += differences(spec, schema, f"{kind}.spec")
    print("\n".join(wrong) or f"{', '.join(SPECS)}: no difference")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
