"""Python, torch, the compiler, and which kernels run."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire import __version__
from gradwire.doctor.finding import Finding
from gradwire.kernels import available

__all__ = ["software_findings"]


def software_findings() -> list[Finding]:
    """Everything that is installed and needed.

    >>> [each.name for each in software_findings()][:3]
    ['gradwire', 'Python', 'torch']
    """
    return [
        Finding("gradwire", "ok", __version__),
        Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}"),
        _torch(),
        *_devices(),
        _compiler(),
        _cpu_kernels(),
        _cuda_kernels(),
        *_backends(),
    ]


def _torch() -> Finding:
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPUs"
    if torch.version.hip:
        build = f"for ROCm {torch.version.hip}"
    if torch.version.cuda is None and torch.version.hip is None and Path("/dev/nvidiactl").exists():
        fact = f"{torch.__version__}, built {build}, and there is an NVIDIA GPU"
        return Finding("torch", "warning", fact, fix="pip install --force-reinstall torch   # PyPI's has CUDA")
    return Finding("torch", "ok", f"{torch.__version__}, built {build}")


def _devices() -> list[Finding]:
    if torch.version.cuda is None and torch.version.hip is None:
        return []
    if not torch.cuda.is_available():
        return [
            Finding(
                "GPU",
                "warning",
                "torch is built for one and finds none",
                fix="nvidia-smi   # if it fails, so does the driver; in a container: docker run --gpus all",
            )
        ]
    names = Counter(torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count()))
    return [Finding("GPU", "ok", ", ".join(f"{count} x {name}" for name, count in names.items()))]


def _compiler() -> Finding:
    found = next((path for each in _compilers() if (path := shutil.which(each))), None)
    if found is not None:
        return Finding("C++ compiler", "ok", f"{_first_line(found)}; only needed to build gradwire")
    if _has_native():
        return Finding("C++ compiler", "ok", "none; only needed to build gradwire, and its kernels are built")
    return Finding("C++ compiler", "warning", "none, so the kernels cannot be built", fix="apt-get install g++")


def _compilers() -> list[str]:
    chosen = os.environ.get("CXX")
    return [chosen] if chosen else ["c++", "g++", "clang++"]


def _first_line(program: str) -> str:
    try:
        told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return next(iter(told.splitlines()), program)


def _has_native() -> bool:
    return importlib.util.find_spec("gradwire._native") is not None


def _cpu_kernels() -> Finding:
    name = "kernels, CPU"
    rebuild = "pip install --force-reinstall --no-deps --no-binary gradwire gradwire   # with a C++ compiler installed"
    if not _has_native():
        fact = "reference, in plain torch, which is slower: the native ones are not built"
        return Finding(name, "warning", fact, fix=rebuild)
    try:
        share = Counter(available("cpu").values())
        from gradwire import _native
    except ImportError as error:
        return Finding(name, "problem", f"the native ones do not load: {error}", fix=rebuild)
    others = [each for each in _native.instruction_sets() if each != _native.instruction_set()]
    fact = f"native, {_native.instruction_set()}" + (f" (also built: {', '.join(others)})" if others else "")
    rest = "" if set(share) == {"native"} else f"; {share['reference']} of {share.total()} ops by the reference"
    return Finding(name, "ok", fact + rest)


def _cuda_kernels() -> Finding:
    name = "kernels, CUDA"
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "there is no device"
        return Finding(name, "ok", f"none: {why}")
    if importlib.util.find_spec("triton") is None:
        return Finding(name, "warning", "reference, in plain torch: there is no Triton", fix="pip install triton")
    try:
        share = Counter(available("cuda").values())
    except ImportError as error:
        return Finding(name, "problem", f"Triton does not load: {error}", fix="pip install --force-reinstall triton")
    return Finding(name, "ok", f"Triton, {share['triton']} of {share.total()} ops; the others in plain torch")


def _backends() -> list[Finding]:
    if not dist.is_available():
        return [Finding("gloo", "problem", "torch is built without torch.distributed", fix="pip install torch")]
    gloo = (
        Finding("gloo", "ok", "in this torch")
        if dist.is_gloo_available()
        else Finding("gloo", "problem", "not in this torch, and ranks meet by it", fix="pip install torch")
    )
    if dist.is_nccl_available():
        nccl = Finding("NCCL", "ok", f"{'.'.join(map(str, _nccl_version()))}, for dense all-reduces between GPUs")
    elif torch.cuda.is_available():
        nccl = Finding("NCCL", "warning", "not in this torch: GPUs exchange by way of the CPU", fix="pip install torch")
    else:
        nccl = Finding("NCCL", "ok", "not in this torch; only GPUs need it")
    mpi = "in this torch" if dist.is_mpi_available() else "not in this torch; gradwire does not need it"
    return [gloo, nccl, Finding("MPI", "ok", mpi)]


def _nccl_version() -> tuple[int, ...]:
    found: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return found
