"""Put the compiled optimizer step into the wheel: a library for each set of instructions that it is written for.

Without a C++ compiler, or where it fails, the wheel has none, and says so: it is for any platform then, and the step is
compiled at first use.
"""

from __future__ import annotations

import pathlib
import runpy
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = pathlib.Path(__file__).parent / "sp_lightning" / "kernels" / "build.py"


class CompiledStep(BuildHookInterface):
    """Compiles before the wheel's files are collected, and cleans up behind it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile all variants for this kind of processor, and give the wheel its platform's tag."""
        if version == "editable":
            return  # the source may change: it is compiled at first use
        build = runpy.run_path(str(BUILD))
        self._folder = tempfile.TemporaryDirectory()
        try:
            libraries = build["compile_all"](pathlib.Path(self._folder.name))
        except build["Unavailable"] as reason:
            self.app.display_warning(f"the wheel has no compiled optimizer step: {reason}")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{build['platform_tag'](libraries)}"
        build_data["force_include"].update({str(path): f"sp_lightning/kernels/{path.name}" for path in libraries})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: the wheel has it."""
        if version != "editable":
            self._folder.cleanup()
