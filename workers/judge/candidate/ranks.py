"""The membership of a sealed process in a group, whose processes share a private network and nothing else."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from workers.judge.channel.orders import Member

#: Port of the group's store. Each group has a private network.
_PORT: Final = 29500
#: Only the judge's deadlines end a wait.
_FOR_EVER: Final = timedelta(days=1)


def prepare(member: Member) -> None:
    """Set the variables that torch, CUDA, Gloo and NCCL read. Call this before the device is opened."""
    os.environ |= {
        "RANK": str(member.rank),
        "LOCAL_RANK": str(member.rank),
        "WORLD_SIZE": str(member.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_PORT),
        "CUDA_DEVICE_MAX_CONNECTIONS": "8",  # NCCL uses several streams
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "1",  # shares memory by descriptors, which needs no common uid
        "NCCL_DEBUG": "WARN",
        # Multicast is set up by a service that all users of a host share.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
    if member.devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(member.devices)


def join(member: Member) -> None:
    """Make the default process group, and show that all ranks reach each other. The source runs later."""
    device = torch.device("cuda", member.rank) if member.devices else torch.device("cpu")
    dist.init_process_group(
        "nccl" if member.devices else "gloo",
        init_method="env://",
        timeout=_FOR_EVER,
        device_id=device if member.devices else None,
    )
    dist.all_reduce(torch.zeros(1, device=device))
    if member.devices:
        torch.cuda.synchronize()
