"""Node types of two clouds with their list prices, and published training rates of their GPUs.

Prices change. These are on-demand prices for Linux in dollars an hour, of AWS us-east-1 and Azure
eastus, as the public catalogue of SkyPilot listed them (github.com/skypilot-org/skypilot-catalog,
catalogs/v8/aws/vms.csv at 00148f2 and catalogs/v6/azure/vms.csv at 098741e, read on AS_OF). Your
own prices go into `cost.price_per_hour`.

Rates are images a second of ResNet-50 training in 16 bits on one GPU, all of one benchmark, so that
their ratios mean something: github.com/lambdal/deeplearning-benchmark,
pytorch/pytorch-train-throughput-fp16.csv at 0551cb7. Tuned code reaches more (NVIDIA: 2,470 on an
A100). GPUs without a published training rate there have none here.
"""

from __future__ import annotations

from dataclasses import dataclass

AS_OF = "2026-11-24"


@dataclass(frozen=True)
class Node:
    """gpu: the name of its GPUs in RATES; None: it has none. cpus: hardware threads."""

    gpu: str | None
    gpus: int
    cpus: int
    usd_per_hour: float


NODES: dict[str, Node] = {
    "m7i.xlarge": Node(None, 0, 4, 0.2016),
    "c7i.4xlarge": Node(None, 0, 16, 0.714),
    "g4dn.xlarge": Node("T4", 1, 4, 0.526),
    "g4dn.12xlarge": Node("T4", 4, 48, 3.912),
    "g5.xlarge": Node("A10", 1, 4, 1.006),
    "g5.12xlarge": Node("A10", 4, 48, 5.672),
    "p3.2xlarge": Node("V100", 1, 8, 3.06),
    "p3.8xlarge": Node("V100", 4, 32, 12.24),
    "p4d.24xlarge": Node("A100", 8, 96, 21.957642),
    "p5.4xlarge": Node("H100", 1, 16, 6.88),
    "p5.48xlarge": Node("H100", 8, 192, 55.04),
    "Standard_D4s_v5": Node(None, 0, 4, 0.192),
    "Standard_D16s_v5": Node(None, 0, 16, 0.768),
    "Standard_NC4as_T4_v3": Node("T4", 1, 4, 0.526),
    "Standard_NC6s_v3": Node("V100", 1, 6, 3.06),
    "Standard_NC24ads_A100_v4": Node("A100", 1, 24, 3.673),
    "Standard_NC48ads_A100_v4": Node("A100", 2, 48, 7.346),
    "Standard_NC40ads_H100_v5": Node("H100", 1, 40, 6.98),
    "Standard_ND96asr_v4": Node("A100", 8, 96, 27.197),
}

RATES: dict[str, float] = {
    "V100": 833.0,
    "A10": 638.0,  # of the A10; the A10G of g5 nodes is its sister, and was not measured there
    "A100": 1396.0,  # 40 GB, PCIe; 1,582 with 80 GB, SXM
    "H100": 1866.0,  # PCIe; about 2,700 as SXM
    "T4": 305.0,  # by NVIDIA's inference rates, T4 to V100 as 1,190 to 3,249: no training rate
}

# FLOPs of a forward and a backward pass of ResNet-50 at 224 px, as train/measure/flops.py counts.
RESNET50_FLOPS = 24.3e9
# Bytes that its forward pass keeps for an image, as train/parallel/memory.py counts.
RESNET50_BYTES = 86.0e6

# Of several GPUs together, for each: 8 V100 train 6.93 times as fast as one, 8 A100 6.72 times
# (NVIDIA DeepLearningExamples, ResNet-50 v1.5 for PyTorch).
SCALING = 0.87
