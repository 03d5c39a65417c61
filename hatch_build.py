"""Compile the core where there is a C compiler, and make the README readable on a package index.

The package is whole without the compiled core: the same files are plain Python.
HEADGATE_PURE=1 leaves the core uncompiled, HEADGATE_COMPILED=1 makes it an error if it cannot be compiled.
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
    """Adds the compiled modules to a wheel, or puts them beside their sources for an editable install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if _is_wanted("HEADGATE_PURE"):
            return
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
        """Put the compiled modules where they belong."""
        target = Path(self.root, SOURCES if version == "editable" else Path("build", "compiled"))
        for name, content in built.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a process may be running the old one
            path.write_bytes(content)
            if version != "editable":
                build_data["force_include"][str(path)] = name
        if version != "editable":
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def _is_wanted(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def compiled_sources(root: Path) -> list[Path]:
    """Return the modules to compile: those with a `.pxd` file beside them, which declares their types."""
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
                    extra_compile_args=[] if os.name == "nt" else ["-O2", "-g0"],
                )
                for path in compiled_sources(Path())
            ],
            include_path=[str(SOURCES)],
            language_level=3,
            compiler_directives={
                # The annotations are for people and mypy: an `int` there may be any number, the types are in the .pxd.
                "annotation_typing": False,
                # Otherwise None or an object of another class, where one of ours belongs, crashes the interpreter.
                "allow_none_for_extension_args": False,
                "binding": False,
                "auto_pickle": False,  # of gates and states there is no copy
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
    """Provides README.md as the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {"content-type": "text/markdown", "text": portable(text, repository)}


PICTURE = re.compile(r"<picture>.*?</picture>\n*|!\[[^]]*\]\((?!https?:)[^)]*\)\n*", re.DOTALL)
LINK = re.compile(r"\[([^]]+)\]\((?!https?:|#)([^)]+)\)")


def portable(readme: str, repository: str | None) -> str:
    """Return a README whose links and pictures do not depend on the files around it.

    Links lead to the repository if it has a public address. If it has none, their texts stay, and pictures are left out.
    """
    if repository is None:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    pictures = re.sub(r'(src(?:set)?="|!\[[^]]*\]\()(?!https?:)', rf"\1{repository}/raw/main/", readme)
    return LINK.sub(rf"[\1]({repository}/blob/main/\2)", pictures)
