"""Build hooks: compile the core if there is a C compiler, and adapt the README for a package index.

The compiled core is optional: without it the same files run as plain Python.
HEADGATE_PURE=1 skips the compilation; with HEADGATE_COMPILED=1 a failed compilation is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = Path("src")


class CompiledCore(BuildHookInterface[Any]):
    """Add the compiled modules to a wheel, or write them beside their sources for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if _is_wanted("HEADGATE_PURE"):
            return
        self.app.display_info("headgate: compiling the core; HEADGATE_PURE=1 installs plain Python instead")
        with tempfile.TemporaryDirectory() as folder:
            try:
                built = compile_modules(Path(self.root), Path(folder))
            except Exception as error:
                if _is_wanted("HEADGATE_COMPILED"):
                    raise
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self.app.display_warning(f"headgate: installed as plain Python, not compiled: {reason}")
                return
            self.install(version, build_data, built)

    def install(self, version: str, build_data: dict[str, Any], built: dict[str, bytes]) -> None:
        """Write the compiled modules into the source tree or the wheel."""
        target = Path(self.root, SOURCES if version == "editable" else Path("build", "compiled"))
        for name, content in built.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a running process may have loaded the old file
            path.write_bytes(content)
            if version != "editable":
                build_data["force_include"][str(path)] = name
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def _is_wanted(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def compiled_sources(root: Path) -> list[Path]:
    """Return the modules to compile: all modules with a `.pxd` file, which declares their types."""
    return [path.with_suffix(".py") for path in sorted((root / SOURCES).rglob("*.pxd"))]


def compile_modules(root: Path, folder: Path) -> dict[str, bytes]:
    """Return the compiled modules by their paths below `src`."""
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension

    before = Path.cwd()
    shutil.copytree(
        root / SOURCES, folder / SOURCES, ignore=shutil.ignore_patterns("*.so", "*.pyd", "static")
    )
    os.chdir(folder)
    try:
        extensions = cythonize(
            [
                Extension(
                    ".".join(path.relative_to(SOURCES).with_suffix("").parts),
                    [str(path)],
                    # -O1 takes half the time of -O2, and a decision takes 3 to 9 % longer.
                    extra_compile_args=[] if os.name == "nt" else ["-O1", "-g0", "-w"],
                )
                for path in compiled_sources(Path())
            ],
            include_path=[str(SOURCES)],
            language_level=3,
            compiler_directives={
                # C types are declared in the .pxd files; an annotated `int` may be larger than 64 bits.
                "annotation_typing": False,
                # Otherwise None instead of an extension type crashes the interpreter.
                "allow_none_for_extension_args": False,
                "binding": False,
                "auto_pickle": False,  # gates and states cannot be pickled
                "freethreading_compatible": True,
            },
            quiet=True,
        )
        command = Distribution({"name": "headgate", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib = str(folder / "lib")
        command.build_temp = str(folder / "temp")
        command.parallel = os.cpu_count()
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    library = folder / "lib"
    return {
        path.relative_to(library).as_posix(): path.read_bytes()
        for path in library.rglob("*")
        if path.is_file()
    }


class PortableReadme(MetadataHookInterface):
    """Use README.md as the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": portable(text, repository)}


PICTURE = re.compile(r"<picture>.*?</picture>\n*|!\[[^]]*\]\((?!https?:)[^)]*\)\n*", re.DOTALL)
LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)")


def portable(readme: str, repository: str | None) -> str:
    """Return a README without relative links and pictures.

    They become links to the repository if it has a public address. Otherwise only the texts of the links are kept.
    """
    if repository is None:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    pictures = re.sub(r'(src(?:set)?="|!\[[^]]*\]\()(?!https?:)', rf"\1{repository}/raw/main/", readme)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", pictures)
