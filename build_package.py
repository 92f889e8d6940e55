"""The build backend: setuptools, with the shaders compiled first, so that a wheel or an sdist never lacks them.

An editable installation needs no compiled shaders, since `make setup` makes them afterwards. What an sdist holds is up
to date, so that building a wheel from it needs no shader compiler.
"""

from __future__ import annotations

from typing import Any

from setuptools import build_meta

import build_shaders

Settings = dict[str, Any] | None

build_editable = build_meta.build_editable
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel


def build_wheel(folder: str, settings: Settings = None, metadata: str | None = None) -> str:
    """Build the wheel with the compiled shaders."""
    compile_shaders()
    return str(build_meta.build_wheel(folder, settings, metadata))


def build_sdist(folder: str, settings: Settings = None) -> str:
    """Build the sdist with the shaders and what they compile to."""
    compile_shaders()
    return str(build_meta.build_sdist(folder, settings))


def compile_shaders() -> None:
    """Compile what is not up to date; where that fails, the build ends with one line."""
    try:
        print(build_shaders.build(force=False))
    except build_shaders.BuildError as error:
        raise SystemExit(f"vkdecode cannot be built: {error}") from None
