"""Two physical devices with one name and one UUID: the CPU driver's manifest twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

FOLDERS = ("/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/etc/vulkan/icd.d")


def lavapipe_manifest() -> Path:
    """The manifest of Mesa's CPU driver on this machine."""
    named = os.environ.get("VK_DRIVER_FILES") or os.environ.get("VK_ICD_FILENAMES") or ""
    files = [Path(one) for one in named.split(os.pathsep) if one]
    files += [path for folder in FOLDERS for path in sorted(Path(folder).glob("*.json"))]
    found = [path for path in files if path.is_file() and "libvulkan_lvp" in path.read_text(encoding="utf-8")]
    assert found, f"no lavapipe manifest in {', '.join(FOLDERS)}; on Debian it is in mesa-vulkan-drivers"
    return found[0]


def two_device_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that sees two lavapipe devices; the manifests are put into `folder`."""
    source = lavapipe_manifest()
    manifest = json.loads(source.read_text(encoding="utf-8"))
    library = Path(manifest["ICD"]["library_path"])
    if len(library.parts) > 1:
        manifest["ICD"]["library_path"] = str(source.parent / library)
    copies = [folder / "first_icd.json", folder / "second_icd.json"]
    for copy in copies:
        copy.write_text(json.dumps(manifest), encoding="utf-8")
    both = os.pathsep.join(map(str, copies))
    # Loaders before 1.3.207 know only the second name.
    return {**os.environ, "VK_DRIVER_FILES": both, "VK_ICD_FILENAMES": both}
