"""The files in ops/ agree with the server, and the tools that read them accept them if they are installed."""

import json
import re
import shutil
import subprocess
import sys
import tomllib

import metrics
import pytest
import yaml
from http_server import Server, until
from shell import ROOT

from serving import protocol
from serving.http.metrics import OUTCOMES

OPS = ROOT / "ops"
SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})")
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$model": ".*"}


def dashboard():
    return json.loads((OPS / "grafana" / "dashboard.json").read_text())


def alerts():
    [group] = yaml.safe_load((OPS / "alerts.yml").read_text())["groups"]
    return group["rules"]


def queries():
    """Return every query of the dashboard and the alerts, with its title."""
    page = dashboard()
    asked = [
        (panel["title"], target["expr"]) for panel in page["panels"] for target in panel.get("targets", [])
    ]
    asked += [(note["name"], note["expr"]) for note in page["annotations"]["list"]]
    asked += [
        (one["label"], re.sub(r"label_values\((\w+), (\w+)\)", r'\1{\2=""}', one["query"]))
        for one in page["templating"]["list"]
        if one["type"] == "query"
    ]
    return asked + [(rule["alert"], rule["expr"]) for rule in alerts()]


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """Return the content of /metrics after a request: name -> labels -> values."""
    with Server(tmp_path_factory.mktemp("s")) as server:
        server.speak("frames 3")
        states = protocol.ModelStates({"fake": protocol.ModelState()})
        server.app.state.server.metrics.add_key("anna")
        server.call(server.engine.tell, states)
        until(lambda: ("zoo_model_loaded", "fake") in metrics.samples(server))
        until(lambda: ("zoo_pages",) in metrics.samples(server))
        text = server.http.get("/metrics").text
    found: dict[str, dict[str, set[str]]] = {}
    for family in metrics.text_string_to_metric_families(text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
    return found


def test_queries_name_existing_metrics_labels_and_values(exposed):
    assert len(queries()) > 40
    for title, query in queries():
        selectors = SELECTOR.findall(query)
        named = set(re.findall(r"\b(?:zoo|process)_\w+", query))
        assert named and named == {name for name, _ in selectors}, f"{title}: {query}"
        for name, within in selectors:
            assert name in exposed, f"{title}: /metrics has no {name}"
            for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', within):
                assert label == "job" or label in exposed[name], f"{title}: {name} has no label {label}"
                if label not in ("job", "model"):
                    values = set(value.split("|")) if operator == "=~" else {value}
                    possible = {*OUTCOMES} if label == "outcome" else exposed[name][label]
                    assert values <= possible, f"{title}: {name} has no {label} {values - possible}"
        for group in re.findall(r"by \(([^)]*)\)", query):
            labels = {label for name, _ in selectors for label in exposed[name]}
            assert set(group.split(", ")) <= labels | {"instance"}, f"{title}: {query}"


def test_the_dashboard_shows_every_metric(exposed):
    alerting = {rule["alert"] for rule in alerts()}
    shown_queries = [query for title, query in queries() if title not in alerting]
    asked = {name for query in shown_queries for name, _ in SELECTOR.findall(query)}
    asked = {re.sub("_(bucket|count|sum)$", "", name) for name in asked}
    ours = {name for name in exposed if name.startswith("zoo_") and not name.endswith("_created")}
    shown = {re.sub("_(bucket|count|sum)$", "", name) for name in ours}
    assert shown - asked == {"zoo_build_info"}


def test_panels_do_not_overlap():
    taken, ids = set(), []
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        ids.append(panel["id"])
        assert all(target["datasource"]["uid"] == "${source}" for target in panel.get("targets", []))
    assert len(ids) == len(set(ids)) > 15


def tool(name):
    path = shutil.which(name)
    return pytest.param(path, marks=[] if path else pytest.mark.skip(f"{name} is not installed"), id=name)


def run(*command):
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("promtool", [tool("promtool")])
def test_prometheus_accepts_every_query(promtool, tmp_path):
    rules = []
    for number, (_, query) in enumerate(queries()):
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        rules.append({"record": f"query:{number}", "expr": query})
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run(promtool, "check", "rules", tmp_path / "rules.yml")
    run(promtool, "check", "config", OPS / "prometheus.yml")
    assert f"{len(alerts())} rules found" in run(promtool, "check", "rules", OPS / "alerts.yml")


@pytest.mark.parametrize("hadolint", [tool("hadolint")])
def test_hadolint_accepts_the_dockerfile(hadolint):
    run(hadolint, OPS / "Dockerfile")


@pytest.mark.parametrize("compose", [tool("docker-compose"), tool("podman-compose")])
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.cuda.yaml"]])
def test_compose_accepts_its_files(compose, files):
    run(compose, *(part for file in files for part in ("-f", OPS / file)), "config", "-q")


@pytest.mark.parametrize("analyze", [tool("systemd-analyze")])
def test_systemd_accepts_the_unit(analyze, tmp_path):
    unit = (OPS / "zoo.service").read_text()
    assert "ExecStart=/opt/speechzoo/bin/zoo serve" in unit
    (tmp_path / "zoo.service").write_text(unit.replace("/opt/speechzoo/bin/zoo", sys.executable))
    assert not run(analyze, "verify", tmp_path / "zoo.service").strip()


def test_files_that_the_image_copies_exist_and_are_not_ignored():
    """COPY, the tree and .dockerignore agree, and both targets end in the same way."""
    text = (OPS / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    cpu, cuda = re.findall(r"^FROM torch-\w+ AS \w+\n(.*?)(?=^FROM|\Z)", text, re.M | re.S)
    assert re.sub("^#.*\n", "", cpu, flags=re.M).strip() == cuda.strip()


def test_constraints_pin_every_direct_dependency():
    """The packages of the extra parity are in an environment of their own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [named for extra, named in project["optional-dependencies"].items() if extra != "parity"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    asked = {name_of(one) for named in (project["dependencies"], *extras) for one in named}
    assert asked == {name_of(pin) for pin in pins}


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def test_files_that_compose_mounts_exist():
    services = yaml.safe_load((OPS / "compose.yaml").read_text())["services"]
    mounted = [
        volume.split(":")[0]
        for service in services.values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]
    assert len(mounted) == 5 and all((OPS / path).is_file() for path in mounted)
    assert yaml.safe_load((OPS / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"] == [
        {"targets": ["zoo:8000"]}
    ]


def health_checks():
    """Return the route and command of each health check, of the images and of compose."""
    text = (OPS / "Dockerfile").read_text()
    found = [
        ("/health", json.loads(command))
        for command in re.findall(r"^HEALTHCHECK .*\\\n +CMD (\[.*\])$", text, re.M)
    ]
    kind, *command = yaml.safe_load((OPS / "compose.yaml").read_text())["services"]["zoo"]["healthcheck"][
        "test"
    ]
    assert kind == "CMD"
    return [*found, ("/ready", command)]


def test_health_checks_ask_the_server(tmp_path):
    """The images check that the server is alive, compose that it is ready. The commands run here with another
    port and a longer timeout."""
    assert [route for route, _ in health_checks()] == ["/health", "/health", "/ready"]

    def statuses(url):
        found = []
        for route, (python, flag, code) in health_checks():
            assert (python, flag) == ("python", "-c") and f"http://127.0.0.1:8000{route}'" in code
            code = code.replace("http://127.0.0.1:8000", url).replace("timeout=2", "timeout=60")
            found.append(
                subprocess.run(
                    [sys.executable, flag, code], stderr=subprocess.DEVNULL, timeout=120
                ).returncode
            )
        return found

    with Server(tmp_path) as server:
        assert statuses(server.url) == [0, 0, 0]
        server.call(server.engine.away)
        until(lambda: server.http.get("/ready").status_code == 503)
        assert statuses(server.url) == [0, 0, 1]
    assert statuses(server.url) == [1, 1, 1]


def test_options_of_the_files_are_options_of_the_command():
    from shell import zoo

    known = set(re.findall(r"--[a-z][\w-]+", zoo("serve", "--help").stdout))
    named = set()
    for name in ("Dockerfile", "zoo.service"):
        for line in re.findall(r"^(?:ENTRYPOINT|ExecStart).*", (OPS / name).read_text(), re.M):
            named |= set(re.findall(r"--[a-z][\w-]+", line))
    assert named == {"--host", "--port"} and named <= known


def test_the_unit_may_use_gpus_and_map_compiled_code():
    settings = set(re.findall(r"^(\w+)=", (OPS / "zoo.service").read_text(), re.M))
    assert "ProtectSystem" in settings
    assert not settings & {
        "MemoryDenyWriteExecute",
        "PrivateDevices",
        "ProtectClock",
        "DeviceAllow",
        "DevicePolicy",
    }
