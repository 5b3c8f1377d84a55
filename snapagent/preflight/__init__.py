"""Say what stands in the way before anything is begun: each obstacle with its remedy."""

from __future__ import annotations

from snapagent.preflight.communicators import check_communicators
from snapagent.preflight.cpu import add_machine
from snapagent.preflight.criu_program import CriuFacts, find_criu, probe_criu
from snapagent.preflight.external import check_external
from snapagent.preflight.gpus import GpuPlan, check_cuda, plan_gpus
from snapagent.preflight.images import Images, read_images, snapshot_reader
from snapagent.preflight.obstacles import Obstacle, Obstacles, obstacles_json, require
from snapagent.preflight.options import CaptureConditions, RestoreConditions, RestorePlace
from snapagent.preflight.process import check_process
from snapagent.preflight.snapshot import check_images, check_snapshot

__all__ = [
    "CaptureConditions",
    "CriuFacts",
    "GpuPlan",
    "Images",
    "Obstacle",
    "Obstacles",
    "RestoreConditions",
    "RestorePlace",
    "add_machine",
    "check_communicators",
    "check_cuda",
    "check_external",
    "check_images",
    "check_process",
    "check_snapshot",
    "find_criu",
    "obstacles_json",
    "plan_gpus",
    "probe_criu",
    "read_images",
    "require",
    "snapshot_reader",
]
