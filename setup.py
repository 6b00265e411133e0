"""Build of overspill: Python packages mapped under one import name, and two native extensions.

The compiler is probed first.  Without one the install is an honest pure wheel (the pure-torch and
pure-Python fallbacks run); with one, any compile error is fatal.  Metadata is in pyproject.toml.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
ROOTS = {
    "overspill": "offload",
    "overspill.optim": "optim",
    "overspill.io_engine": "io_engine",
    "overspill.cuda_sources": "csrc/cuda",
}
ROOMS = (
    "activations",
    "cli",
    "doctor",
    "durable",
    "facts",
    "grads",
    "integrations",
    "logits",
    "measure",
    "movement",
    "movement.accelerators",
    "observe",
    "params",
    "planning",
    "private",
    "quantised",
    "ranks",
    "schedule",
    "state",
    "step",
    "train",
)
PACKAGES = [*ROOTS, *(f"overspill.{room}" for room in ROOMS)]
NATIVE = {"overspill.io_engine._native": "csrc/io", "overspill.optim._native": "csrc/cpu"}
# No contraction, so that every instruction set gives the same bits; never -ffast-math, which
# would set flush-to-zero for the whole process.
COMPILE_ARGS = [
    "-std=c++17",
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wextra",
    "-pthread",
]


def compiler_works() -> bool:
    """Whether the C++ compiler that setuptools will use turns a small program into an object."""
    command = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    if shutil.which(command[0]) is None:
        return False
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "probe.cpp", Path(folder) / "probe.o"
        source.write_text("#include <thread>\nint main() { return 0; }\n")
        done = subprocess.run(
            [*command, "-std=c++17", "-c", str(source), "-o", str(output)],
            capture_output=True,
            check=False,
        )
        return done.returncode == 0 and output.exists()


def extensions() -> list[Extension]:
    """Both extensions, for Python's stable ABI; nanobind's core comes from its backend wheel."""
    import nanobind

    return [
        Extension(
            name,
            sources=sorted(str(p.relative_to(HERE)) for p in (HERE / folder).glob("*.cpp")),
            depends=sorted(str(p.relative_to(HERE)) for p in (HERE / folder).glob("*.[hi]*")),
            include_dirs=[nanobind.include_dir(), folder],
            define_macros=[
                ("Py_LIMITED_API", "0x030A0000"),
                ("NB_BACKEND_MODULE", "nanobind_backend"),
                ("NB_BACKEND_PYPI", "nanobind-backend"),
            ],
            extra_compile_args=COMPILE_ARGS,
            extra_link_args=["-pthread"],
            language="c++",
            py_limited_api=True,
        )
        for name, folder in NATIVE.items()
    ]


class ParallelBuildExt(build_ext):
    """Compiles the files of an extension side by side."""

    def build_extension(self, ext: Extension) -> None:
        compiler: Any = self.compiler
        one_by_one = compiler.compile

        def compile_all(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                made = pool.map(lambda source: one_by_one([source], *args, **kwargs), sources)
                return [each for objects in made for each in objects]

        compiler.compile = compile_all
        try:
            super().build_extension(ext)
        finally:
            compiler.compile = one_by_one


class FreshBuildPy(build_py):
    """Starts from an empty build folder, so that deleted modules do not come back."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


native = compiler_works()
if not native and os.environ.get("OVERSPILL_REQUIRE_NATIVE") == "1":
    raise SystemExit("OVERSPILL_REQUIRE_NATIVE=1, but no working C++ compiler was found (see CXX)")

options: dict[str, Any] = {"bdist_wheel": {"py_limited_api": "cp310"}} if native else {}
setup(
    packages=PACKAGES,
    package_dir=ROOTS,
    package_data={
        "overspill": ["py.typed"],
        "overspill.cuda_sources": ["*.cu", "*.cuh"],
        "overspill.observe": ["page/*"],
    },
    ext_modules=extensions() if native else [],
    cmdclass={"build_ext": ParallelBuildExt, "build_py": FreshBuildPy},
    options=options,
)
