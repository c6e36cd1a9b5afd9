"""Writes image archives that containerd imports, without any container tool."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Image:
    name: str
    layers: tuple[Path, ...]  # directories, the lowest first
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""

    def config(self, diff_ids: Sequence[str]) -> bytes:
        env = {"PATH": PATH, **self.env}
        return json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "history": [{"created_by": "e2e/cluster"} for _ in diff_ids],  # buildah counts them
                "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
                "config": {
                    "Entrypoint": list(self.entrypoint),
                    "Cmd": list(self.command),
                    "Env": [f"{key}={value}" for key, value in env.items()],
                    "User": self.user,
                },
            },
            sort_keys=True,
        ).encode()


def write(out: Path, images: Sequence[Image]) -> None:
    """One archive of several images; a layer that they share is in it once."""
    layers = {layer: _layer(layer, out) for layer in {d: 0 for i in images for d in i.layers}}
    manifest = []
    new = out.with_suffix(".new")
    with tarfile.open(new, "w") as archive:
        for image in images:
            config = image.config([f"sha256:{layers[d][1]}" for d in image.layers])
            name = hashlib.sha256(config).hexdigest() + ".json"
            _add(archive, name, config)
            files = [f"{layers[d][1]}.tar" for d in image.layers]
            manifest.append({"Config": name, "RepoTags": [image.name], "Layers": files})
        _add(archive, "manifest.json", json.dumps(manifest).encode())
        for file, digest in layers.values():
            archive.add(file, arcname=f"{digest}.tar")
            file.unlink()
    os.replace(new, out)


def _layer(folder: Path, out: Path) -> tuple[Path, str]:
    file = out.with_name(f".{out.stem}.{folder.name}.layer")
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as layer:
        for entry in sorted(folder.iterdir()):
            layer.add(entry, arcname=entry.name)
    with file.open("rb") as data:
        return file, hashlib.file_digest(data, "sha256").hexdigest()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))
