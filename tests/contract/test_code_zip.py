"""Ray unpacks pdlab's zip as an entry of py_modules, and its builders build an exported application from it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from contract.conftest import built, quietly

from pdlab.cli import launch
from pdlab.deploy.kubernetes.code_zip import archive, code, file_name

X2 = ("--cluster", "p5.48xlarge-x2")


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    path = tmp_path / file_name(code())
    path.write_bytes(archive(code()))
    return path


@pytest.mark.usefixtures("ray_llm")
def test_ray_keeps_the_package_when_it_unpacks(zipped: Path, tmp_path: Path) -> None:
    """A zip with one top folder loses it."""
    packaging = quietly("ray._private.runtime_env.packaging")
    packaging.unzip_package(
        package_path=str(zipped), target_dir=str(tmp_path / "out"), remove_top_level_directory=True,
        unlink_zip=False, logger=logging.getLogger("test"),
    )  # fmt: skip
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == set(code())


@pytest.mark.usefixtures("ray_llm")
def test_exports_build_from_the_zip_alone_and_plain_ones_without_it(zipped: Path, tmp_path: Path) -> None:
    least = {"--pd-spread": 3, "--pd-fluid": 2, "--collocated": 2}
    apps = {mode: tmp_path / f"app{mode}.yaml" for mode in least}
    for mode, app in apps.items():
        assert launch.main([mode, *X2, "--export", str(app)]) == 0
    modes = (["--pd-spread"], ["--collocated"], ["--collocated", "--dp", "2"])
    plain = [tmp_path / f"plain{'-'.join(mode)}.yaml" for mode in modes]
    for mode, app in zip(modes, plain, strict=True):
        assert launch.main([*mode, *X2, "--export-plain", str(app)]) == 0
    without, pdlab, made = built(plain, list(apps.values()), tmp_path, zipped)
    assert without is None and all(made[str(app)] == ["Application", []] for app in plain), "Ray's own builders"
    assert pdlab.startswith(str(zipped))
    counts = {mode: len(made[str(app)][1]) for mode, app in apps.items()}
    assert all(counts[mode] >= least[mode] for mode in least), counts
