"""What a snapshot must say of the machine that it was captured on, and what must be here again."""

from __future__ import annotations

import os
import re
import resource
from typing import TYPE_CHECKING, Final

from snapagent.preflight.criu_program import find_criu, probe_criu
from snapagent.preflight.machine import kernel_version
from snapagent.preflight.procfs import read_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from snapagent.preflight.obstacles import Obstacles

__all__ = ["add_machine", "check_machine", "cpu_facts"]

FLAGS_MAX: Final = 1024

# Of the flags that Linux lists, those of instructions and state that programs use themselves. The
# others are about the kernel, about virtual machines or about flaws, and differ without any harm.
_USED: Final = re.compile(
    r"""fpu|mmx(ext)?|fxsr(_opt)?|x?sse[0-9_a-z]*|ssse3|pni|3dnow(ext|prefetch)?
    |cx8|cx16|cmov|clflush(opt)?|clwb|clzero|popcnt|abm|lzcnt|bmi[12]|adx|movbe|f16c|fma4?|xop|tbm
    |avx.*|amx_.*|aes|vaes|v?pclmulqdq|gfni|sha_ni|sha512|sm[34]|rdrand|rdseed|rdtscp|rdpid|tsc
    |xsave(opt|c|s)?|xgetbv1|osxsave|fsgsbase|pku|ospke|hle|rtm|serialize|tsxldtrk
    |movdiri|movdir64b|cldemote|waitpkg|enqcmd|cmpccxadd|lahf_lm|syscall|lm|nx|user_shstk""",
    re.VERBOSE,
)
_X86: Final = frozenset({"x86_64", "i686"})


def cpu_facts(text: str | None = None) -> dict[str, object]:
    """Return vendor, model and features of the processor, as plain JSON values.

    Args:
        text: What to read instead of `/proc/cpuinfo`.
    """
    fields: dict[str, str] = {}
    for line in (read_text("/proc/cpuinfo") if text is None else text).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()[:FLAGS_MAX]
    found: dict[str, object] = {
        "vendor": fields.get("vendor_id") or fields.get("CPU implementer") or "unknown",
        "model_name": fields.get("model name", ""),
        "flags": sorted(set(flags)),
    }
    for key, name in (("family", "cpu family"), ("model", "model"), ("stepping", "stepping")):
        if fields.get(name, "").isdecimal():
            found[key] = int(fields[name])
    return found


def add_machine(
    requirements: Mapping[str, object], criu: Path | None = None, cache: Path | None = None
) -> dict[str, object]:
    """Add to the requirements of a snapshot what this machine is, on which it is captured.

    Adds `kernel`, `machine`, `page_bytes`, `cpu`, and CRIU's version in `criu`. What is there
    stays.

    Args:
        requirements: What is known already, from the images.
        criu: The program that captures.
        cache: A file that keeps what CRIU said of this machine.
    """
    found = dict(requirements)
    found.setdefault("kernel", os.uname().release)
    found.setdefault("machine", os.uname().machine)
    found.setdefault("page_bytes", resource.getpagesize())
    found.setdefault("cpu", cpu_facts())
    program = find_criu(criu)
    facts = None if program is None else probe_criu(program, cache)
    known = found.get("criu")
    of_criu = dict(known) if isinstance(known, dict) else {}
    if facts is not None and facts.version:
        of_criu.setdefault("version", facts.version_text)
        found["criu"] = of_criu
    return found


def check_machine(
    found: Obstacles, requirements: Mapping[str, object], criu_version: tuple[int, ...]
) -> None:
    """Compare what a snapshot says of its machine with this one.

    Requirements are stored bytes of anybody's: a value of another type than it should have counts
    as not there.
    """
    machine = requirements.get("machine")
    if isinstance(machine, str) and machine != os.uname().machine:
        found.block(
            "machine",
            f"it was captured on {machine[:40]}, this is {os.uname().machine}",
            "restore it on a node of the same architecture",
        )
        return
    page_bytes = requirements.get("page_bytes")
    if isinstance(page_bytes, int) and page_bytes != resource.getpagesize():
        found.block(
            "page-size",
            f"it was captured with pages of {page_bytes} bytes, here they have "
            f"{resource.getpagesize()}",
            "restore it on a kernel with the same page size",
        )
    kernel = requirements.get("kernel")
    if isinstance(kernel, str) and kernel != os.uname().release:
        _check_kernel(found, kernel[:100])
    _check_criu(found, requirements.get("criu"), criu_version)
    _check_cpu(found, requirements.get("cpu"))


def _check_kernel(found: Obstacles, kernel: str) -> None:
    is_older = kernel_version() < kernel_version(kernel)
    found.warn(
        "kernel-differs",
        f"it was captured on Linux {kernel}, this is {os.uname().release}",
        "an older kernel may lack what the processes use: try it before you rely on it"
        if is_older
        else "usually this works; if CRIU fails, use the same kernel",
    )


def _check_criu(found: Obstacles, of_criu: object, version: tuple[int, ...]) -> None:
    text = of_criu.get("version") if isinstance(of_criu, dict) else None
    if not isinstance(text, str) or not version:
        return
    captured = tuple(int(part) for part in re.findall(r"\d{1,6}", text)[:3])
    if version < captured:
        found.warn(
            "criu-older",
            f"it was captured with CRIU {text[:40]}, this is {'.'.join(map(str, version))}",
            "use at least the version that captured it: an older one may not know its images",
        )


def _check_cpu(found: Obstacles, cpu: object) -> None:
    if not isinstance(cpu, dict):
        return
    here = cpu_facts()
    flags = cpu.get("flags")
    captured = {one for one in flags if isinstance(one, str)} if isinstance(flags, list) else set()
    here_flags = here["flags"]
    assert isinstance(here_flags, list)
    lacking = sorted(captured - set(here_flags))
    if os.uname().machine in _X86:
        lacking = [one for one in lacking if _USED.fullmatch(one)]
    model = str(cpu.get("model_name", ""))[:100]
    if lacking:
        shown = ", ".join(one[:40] for one in lacking[:20])
        more = f" and {len(lacking) - 20} more" if len(lacking) > 20 else ""
        found.block(
            "cpu-features",
            f"this processor lacks {shown}{more}, which {model or 'the one of the capture'} has",
            "restore it on a processor that has them, or capture on the oldest model you have",
        )
    vendor = cpu.get("vendor")
    if isinstance(vendor, str) and vendor != here["vendor"]:
        found.warn(
            "cpu-vendor",
            f"it was captured on a processor of {vendor[:40]}, this one is of {here['vendor']}",
            "libraries that chose code for the other processor go on to use it",
        )
