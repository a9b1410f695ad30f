"""From a spec to an arm. Creators import what they need only when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from arms.protocol import Arm
from arms.spec import IN_PROCESS, ArmSpec

if TYPE_CHECKING:
    from lumotree.engine import Engine


def create(spec: ArmSpec, engine: Engine) -> Arm:
    """The arm of a parsed spec, not yet started. In-process arms share `engine`'s weights."""
    return CREATORS[spec.name](spec, engine)


def _in_process(spec: ArmSpec, engine: Engine) -> Arm:
    from arms.inprocess import InProcessArm

    return InProcessArm(spec, engine)


def _sglang(spec: ArmSpec, engine: Engine) -> Arm:
    from arms.sglang import SglangArm

    return SglangArm(spec)


def _vllm(spec: ArmSpec, engine: Engine) -> Arm:
    from arms.vllm import VllmArm

    return VllmArm(spec)


def _openai(spec: ArmSpec, engine: Engine) -> Arm:
    from arms.openai import OpenAIArm

    return OpenAIArm(spec)


CREATORS: dict[str, Callable[[ArmSpec, Engine], Arm]] = {
    **dict.fromkeys(IN_PROCESS, _in_process),
    "sglang-eagle": _sglang,
    "vllm-mtp": _vllm,
    "openai": _openai,
}
