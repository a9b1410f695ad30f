"""What `lumotree doctor` found, as text for people."""

from __future__ import annotations

from typing import Any

MIB, GIB = 2**20, 2**30


def text(found: dict[str, Any]) -> str:
    """Sections of plain lines; every figure with its unit."""
    parts = (_machine, _packages, _kernels, _models, _probe, _external)
    return "\n\n".join("\n".join(part(found)) for part in parts)


def _machine(found: dict[str, Any]) -> list[str]:
    machine, memory = found["machine"], found["machine"]["memory"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "Machine",
        f"  {machine['system']} {machine['architecture']}, {machine['cpu']}, "
        f"{machine['cores']} cores",
        f"  memory {gib(memory['total_bytes'])}, {gib(memory['available_bytes'])} available",
        f"  {versions}",
    ]
    for gpu in machine["gpus"]:
        lines.append(
            f"  {gpu['name']} (compute {gpu['capability']}): {gib(gpu['total_bytes'])}, "
            f"{gib(gpu['free_bytes'])} free; {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['registers_per_multiprocessor']} registers each, "
            f"{gpu['shared_bytes_per_block'] // 1024} KiB shared memory a block, "
            f"{gpu['l2_bytes'] / MIB:.0f} MiB L2"
        )
    return lines if machine["gpus"] else [*lines, "  no CUDA device"]


def _packages(found: dict[str, Any]) -> list[str]:
    return [
        "Optional packages",
        *(
            f"  {package['name']:<8} {package['version'] or 'not installed':<16} {package['use']}"
            for package in found["packages"]
        ),
    ]


def _kernels(found: dict[str, Any]) -> list[str]:
    kernels = found["kernels"]
    name = {"triton": "Triton kernels", "torch": "torch reference operations"}[kernels["path"]]
    lines = [f"Operations on {found['device']}: {name} ({kernels['why']})"]
    for kernel, launch in kernels["launches"].items():
        sizes = ", ".join(f"{key} {value}" for key, value in launch.items())
        lines.append(f"  {kernel}: {sizes}")
    return lines


def _models(found: dict[str, Any]) -> list[str]:
    width = max(len(model["name"]) for model in found["models"])
    lines = [
        f"Models in {found['dtype']} on {found['device']}, {gib(found['free_bytes'])} free",
        f"  {'':<{width}}  {'weights':>11}  {'state':>11}  {'at tokens':>9}",
    ]
    for model in found["models"]:
        verdict = "fits"
        if not model["fits"]:
            most = model["most_context"]
            verdict = f"fits up to {most} tokens" if most else "does not fit"
        lines.append(
            f"  {model['name']:<{width}}  {gib(model['weights_bytes']):>11}  "
            f"{gib(model['state_bytes']):>11}  {model['context']:>9}  {verdict}"
        )
    label = next((m["label"] for m in found["models"][:1] if "label" in m), None)
    return [*lines, f"  figures of {found['models'][0]['name']}: {label}"] if label else lines


def _probe(found: dict[str, Any]) -> list[str]:
    probe = found["probe"]
    if probe is None:
        return ["Equal bits: not tried (--probe loads the model and does)"]
    if "error" in probe:
        return [f"Equal bits: not known, {probe['error']}"]
    if not probe["equal_bits"]:
        return ["Equal bits: no; arms agree to rounding on this machine"]
    return [
        f"Equal bits: yes, at row counts that are multiples of {probe['row_multiple']}, "
        f"probed up to {probe['equal_bits_probed_rows']} rows"
    ]


def _external(found: dict[str, Any]) -> list[str]:
    lines = [f"External arms for {found['models'][0]['name']}"]
    for entry in found["external"]:
        why = "; ".join(entry["hindrances"])
        lines.append(f"  {entry['arm']}: {why or 'can run here'}")
        if entry["prepare"]:
            lines.append(f"    {entry['prepare']}")
        lines.append(f"    {entry['launch']}")
        lines.append(f'    lumotree replay CORPUS --arms "ar lumotree {entry["use"]}"')
    return lines


def gib(count: float) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
