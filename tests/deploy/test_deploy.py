"""deploy/: what real linters say of it, and whether batchmill takes what stands in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from batchmill import __version__, cli
from batchmill.export import check_address
from batchmill.export.prometheus.exemplars import exemplar_of
from batchmill.kafka import KafkaAddress
from batchmill.run import (
    EXPORT_HEADERS_VARIABLE,
    EXPORT_TOKEN_VARIABLE,
    OTHER_VARIABLES,
    SETTINGS,
    TOKEN_VARIABLE,
    resolve,
    runner,
)
from tests.deploy import kit
from tests.kit.files import ROOT
from tests.kit.threads import PATIENCE_S

KUBERNETES = "1.32"
TOOLS = Path(sys.executable).parent
VARIABLES = {
    *(setting.variable for setting in SETTINGS),
    *OTHER_VARIABLES,
    TOKEN_VARIABLE,
    EXPORT_HEADERS_VARIABLE,
    EXPORT_TOKEN_VARIABLE,
}
HANDED_ON = re.compile(r"^--(to|source|store|bind|token-file)=(.*)")


def _run_tool(*command: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **more
    )


def _tool(name: str) -> str:
    """A tool that pip has brought, beside this Python or on the PATH."""
    path = shutil.which(name, path=f"{TOOLS}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip(f"{name} is not installed: pip install --group deploy")
    return path


# What linters say.


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    """The Dockerfile is as hadolint wants it; what it is told to ignore says why beside it."""
    done = _run_tool(_tool("hadolint"), "--no-color", kit.DOCKERFILE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", kit.SCRIPTS, ids=kit.name_of)
def test_shellcheck_finds_nothing_in_scripts(path: Path) -> None:
    """The scripts are as shellcheck wants them."""
    done = _run_tool(_tool("shellcheck"), path)
    assert done.returncode == 0, done.stdout


def test_the_repositorys_own_scripts_pass_shellcheck() -> None:
    """So are those that the Makefile and CI start."""
    scripts = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
    there = [script for script in scripts if script.exists()]
    done = _run_tool(_tool("shellcheck"), *there)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", kit.COMPOSE, ids=kit.name_of)
def test_compose_files_keep_to_the_compose_schema(path: Path) -> None:
    """Compose would take the files: no field that the specification does not know."""
    done = _run_tool(_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("variant", kit.VARIANTS, ids=kit.name_of)
def test_kubernetes_would_take_every_object(variant: Path) -> None:
    """Each object keeps to its kind's schema, and has no field that the schema does not know."""
    for where, manifest in kit.objects(variant):
        if manifest["kind"] != kit.SPARK:
            _kubernetes_takes(where, manifest)


def _kubernetes_takes(where: str, thing: dict[str, Any]) -> None:
    try:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        pytest.fail(f"{where}: {'.'.join(map(str, error.path))}: {error.message}")


def test_the_spark_operator_would_take_its_application() -> None:
    """The SparkApplication has fields of v1beta2 only; its security contexts are Kubernetes'."""
    application = kit.spark_application()
    schema = json.loads((ROOT / "tests/deploy/sparkapplication.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(application)
    for name in ("driver", "executor"):
        part = application["spec"][name]
        container = {"name": name, "image": "x", "securityContext": part["securityContext"]}
        spec = {"containers": [container], "securityContext": part["podSecurityContext"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        _kubernetes_takes(name, pod)


@pytest.mark.parametrize("variant", kit.VARIANTS, ids=kit.name_of)
def test_kustomize_makes_every_variant(variant: Path) -> None:
    """kustomize can put a variant together, and what it makes is still valid."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which has kustomize in it, is not on the PATH")
    done = _run_tool(kubectl, "kustomize", variant)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    for manifest in made:
        assert manifest["kind"] == "Namespace" or manifest["metadata"]["namespace"] == "batchmill"
        if manifest["kind"] != kit.SPARK:
            _kubernetes_takes(f"kustomized {manifest['kind']}", manifest)


@pytest.mark.parametrize("variant", kit.VARIANTS, ids=kit.name_of)
def test_no_manifest_is_left_out(variant: Path) -> None:
    """Every file of a variant is in its kustomization."""
    files = {path.name for path in variant.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(kit.load(variant / "kustomization.yaml")["resources"])


def test_systemd_would_take_the_units(tmp_path: Path) -> None:
    """systemd-analyze finds no unknown option, no bad value, and little exposure."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not on the PATH: apt-get install systemd")
    for unit in kit.UNITS:  # it looks whether the program is there
        text = unit.read_text().replace("/opt/batchmill/bin/batchmill", sys.executable)
        (tmp_path / unit.name).write_text(text)
    shutil.copytree(kit.DEPLOY / "systemd/batchmill.service.d", tmp_path / "batchmill.service.d")
    units = [tmp_path / unit.name for unit in kit.UNITS]
    done = _run_tool(analyze, "verify", "--man=no", *units)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    done = _run_tool(analyze, "security", "--offline=true", "--threshold=20", *units)
    assert done.returncode == 0, done.stdout + done.stderr


# Whether batchmill takes it.


@pytest.mark.parametrize("command", kit.commands(), ids=str)
def test_every_command_is_one_that_batchmill_takes(
    command: kit.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real parser takes every command line in deploy/; the addresses in it are valid."""
    arguments = list(command.arguments)
    if arguments == ["--version"]:
        return
    try:
        cli._parser().parse_args(arguments)
    except SystemExit:
        pytest.fail(f"{command}: {capsys.readouterr().err}")
    for option, value in _handed_on(arguments):
        if value.startswith("kafka://"):
            KafkaAddress.parse(value)
        elif value.startswith("prometheus://"):
            check_address(value)
        elif option == "store":
            assert value.startswith(("sqlite:///", "postgresql://")), value


def _handed_on(arguments: list[str]) -> Iterator[tuple[str, str]]:
    words = iter(arguments)
    for word in words:
        if option := HANDED_ON.match(word):
            yield option[1], option[2]
        elif HANDED_ON.match(f"{word}="):
            yield word.removeprefix("--"), next(words)


def test_commands_are_found_everywhere() -> None:
    """The tests see the commands of each way to deploy, so none passes for want of any."""
    places = {command.where.partition(":")[0].split("/")[-1] for command in kit.commands()}
    ways = {"Dockerfile", "compose.yaml", "compose.split.yaml", "statefulset.yaml", "README.md"}
    assert ways | {"pipeline.yaml", "ingest.yaml", *(unit.name for unit in kit.UNITS)} <= places
    assert {command.arguments[0] for command in kit.commands()} >= {
        *("run", "ingest", "pipeline", "export", "web", "status")
    }


@pytest.mark.parametrize("path", sorted(kit.DEPLOY.rglob("batchmill.toml")), ids=kit.name_of)
def test_every_file_of_settings_is_valid(path: Path) -> None:
    """batchmill knows each setting in a batchmill.toml, and takes its value."""
    settings = resolve(tomllib.loads(path.read_text()), str(path), {}, {}, path.parent)
    given = [value for value in settings.values.values() if value.origin == str(path)]
    assert {"home", "bind", "drain"} <= {value.setting.name for value in given}


def test_every_variable_is_one_that_batchmill_reads() -> None:
    """Nothing in deploy/ sets a variable BATCHMILL_… that nobody reads, and `run` would refuse."""
    for path in sorted(path for path in kit.DEPLOY.rglob("*") if path.is_file()):
        names = set(re.findall(r"\bBATCHMILL_[A-Z_]*[A-Z]\b", path.read_text("utf-8")))
        assert names <= VARIABLES, kit.name_of(path)


def test_whoever_listens_beyond_its_machine_asks_for_a_token() -> None:
    """Every command and every file of settings that binds to all addresses names a token's file."""
    for command in kit.commands():
        text = " ".join(command.arguments)
        assert "0.0.0.0" not in text or "--token-file" in text, str(command)
    for path in kit.DEPLOY.rglob("batchmill.toml"):
        settings = tomllib.loads(path.read_text())
        assert settings["bind"] == "127.0.0.1" or settings["token_file"], kit.name_of(path)


def test_a_service_of_its_own_name_cannot_confuse_a_pod() -> None:
    """Kubernetes puts no variable BATCHMILL_PORT and the like into a pod that runs batchmill."""
    for variant in kit.VARIANTS:
        for where, pod in kit.pods(variant):
            assert pod["spec"]["enableServiceLinks"] is False, where


def test_everybody_has_the_time_that_an_end_takes() -> None:
    """What may kill `batchmill run` waits longer than its end can take."""
    ends = [
        value
        for name, value in vars(runner).items()
        if name.endswith("_END_S") and not name.startswith("DEMO")
    ]
    settings = [tomllib.loads(path.read_text()) for path in kit.DEPLOY.rglob("batchmill.toml")]
    longest = sum(ends) + runner.EXPORT_READ_S + max(setting["drain"] for setting in settings)
    (compose,) = [
        service for _, service in kit.services() if service.get("command", [""])[0] == "run"
    ]
    (pod,) = [pod for _, pod in kit.pods(kit.VARIANTS[0])]
    given = [
        float(compose["stop_grace_period"].removesuffix("s")),
        float(pod["spec"]["terminationGracePeriodSeconds"]),
        float(kit.unit(kit.DEPLOY / "systemd/batchmill.service")["TimeoutStopSec"][0]),
    ]
    assert min(given) >= longest


@pytest.mark.parametrize("path", kit.UNITS, ids=kit.name_of)
def test_systemd_tells_the_main_process_alone_to_end(path: Path) -> None:
    """Told all at once, a JVM would stop inside a batch, a pipeline before the spool is read."""
    assert kit.unit(path)["KillMode"] == ["mixed"]


# Whether its parts fit one another.


@pytest.mark.parametrize("variant", kit.VARIANTS, ids=kit.name_of)
def test_selectors_and_ports_find_what_they_name(variant: Path) -> None:
    """Each Service, budget and policy selects pods that are there, by ports that these have."""
    templates = [pod for _, pod in kit.pods(variant)]
    application = [
        manifest for _, manifest in kit.objects(variant) if manifest["kind"] == kit.SPARK
    ]
    known: list[tuple[dict[str, str], set[str]]] = [
        (
            pod["metadata"]["labels"],
            {
                port["name"]
                for container in pod["spec"]["containers"]
                for port in container.get("ports", [])
            },
        )
        for pod in templates
    ]
    known += [(manifest["spec"]["driver"]["labels"], set()) for manifest in application]
    for where, manifest in kit.objects(variant):
        spec = manifest.get("spec", {})
        if manifest["kind"] == "Service":
            wanted, ports = spec["selector"], {port["targetPort"] for port in spec["ports"]}
        elif manifest["kind"] == "PodDisruptionBudget":
            wanted, ports = spec["selector"]["matchLabels"], set()
        elif manifest["kind"] == "NetworkPolicy":
            wanted = spec["podSelector"].get("matchLabels", {})
            rules = [port for rule in spec.get("ingress", []) for port in rule.get("ports", [])]
            ports = {rule["port"] for rule in rules}
        else:
            continue
        selected = [names for labels, names in known if wanted.items() <= labels.items()]
        assert selected, f"{where}: nothing has {wanted}"
        assert all(ports <= names for names in selected), where


def test_the_context_of_the_image_has_what_it_copies() -> None:
    """What the Dockerfile copies is there, and let through by .dockerignore; nothing else is."""
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert "*" in rules
    copied = set()
    for name, rest in kit.instructions():
        if name == "COPY" and "--from=" not in rest:
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            copied |= set(sources)
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == rule or source.startswith(f"{rule}/") for rule in let_through), source
    used = {rule for rule in let_through if any(source.startswith(rule) for source in copied)}
    assert used == let_through


def test_the_image_installs_what_every_extra_needs() -> None:
    """requirements/run.lock, which the image is made by, has all that the extras name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lock = (ROOT / "requirements/run.lock").read_text()
    locked = set(re.findall(r"^([a-z0-9._-]+)==", lock, re.MULTILINE))
    wanted = {
        re.split(r"[\[<>=;,!~ ]", requirement)[0].lower()
        for name, requirements in extras.items()
        if name not in ("all", "jre")  # the image has a Java
        for requirement in requirements
    }
    assert wanted <= locked


def test_images_and_spark_have_the_versions_of_this_source() -> None:
    """The tags are batchmill's version, and the operator is told the Spark that the lock pins."""
    text = "\n".join(path.read_text() for path in (*kit.COMPOSE, kit.VARIANTS[1] / "pipeline.yaml"))
    assert set(re.findall(r"image: batchmill(?:-spark)?:(\S+)", text)) == {__version__}
    for variant in kit.VARIANTS:
        (image,) = kit.load(variant / "kustomization.yaml")["images"]
        assert str(image["newTag"]) == __version__
    pinned = re.search(r"^pyspark==(\S+)", (ROOT / "requirements/run.lock").read_text(), re.M)
    assert pinned is not None
    assert kit.spark_application()["spec"]["sparkVersion"] == pinned[1]


def test_files_that_compose_mounts_are_there() -> None:
    """Every file that a service mounts from this folder is in it, but for what the user makes."""
    for where, service in kit.services():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (kit.DEPLOY / source).exists(), f"{where}: {source}"


def test_exemplars_in_grafana_lead_to_traces_of_the_web_server() -> None:
    """Prometheus keeps them, their label is the one that we write, and its destination exists."""
    folder = kit.DEPLOY / "grafana/provisioning/datasources"
    [listed] = [yaml.safe_load(path.read_text("utf-8")) for path in folder.iterdir()]
    sources = {source["uid"]: source for source in listed["datasources"]}
    [destination] = sources["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    jaeger = sources[destination["datasourceUid"]]
    assert (jaeger["type"], jaeger["url"]) == ("jaeger", sources["batchmill"]["url"])
    assert jaeger["secureJsonData"] == sources["batchmill"]["secureJsonData"]
    exemplar = exemplar_of("4bf92f", "00f0", 1.0, 0.0)
    assert exemplar is not None
    assert destination["name"] in exemplar.labels
    services = yaml.safe_load((kit.DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]
    assert any(word.startswith("--traces=") for word in services["export"]["command"])


# What the image's own files do.


def test_the_application_for_spark_is_the_command() -> None:
    """Spark is given a file that is the `batchmill` command, from whatever folder."""
    done = _run_tool(sys.executable, kit.DEPLOY / "spark/app.py", "--version", env=_source_path())
    assert (done.returncode, done.stdout) == (0, f"batchmill {__version__}\n"), done.stderr


def _source_path() -> dict[str, str]:
    folder = str(Path(cli.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def entrypoint(tmp_path: Path) -> Path:
    """The entry point for Spark, with stand-ins for what it starts: they say what they are told."""
    (tmp_path / "python").write_text("#!/bin/sh\necho /spark\n")
    (tmp_path / "tini").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    script = (kit.DEPLOY / "spark/entrypoint.sh").read_text()
    script = script.replace("/opt/batchmill/bin/python", str(tmp_path / "python"))
    (tmp_path / "entrypoint.sh").write_text(script)
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    return tmp_path / "entrypoint.sh"


def _started(entrypoint: Path, *arguments: str, **variables: str) -> list[str]:
    path = f"{entrypoint.parent}{os.pathsep}{os.environ['PATH']}"
    done = _run_tool(entrypoint, *arguments, env={"PATH": path, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_spark_can_start_a_driver(entrypoint: Path) -> None:
    """`driver …` submits the application in this very container."""
    started = _started(
        entrypoint, "driver", "--properties-file", "p", SPARK_DRIVER_BIND_ADDRESS="10.1.2.3"
    )
    bind = "spark.driver.bindAddress=10.1.2.3"
    submit = ["/spark/bin/spark-submit", "--conf", bind, "--deploy-mode", "client"]
    assert started == ["-s", "--", *submit, "--properties-file", "p"]


def test_spark_can_start_an_executor(entrypoint: Path) -> None:
    """`executor` starts one with the options and the address that its variables tell, in order."""
    numbers = {f"SPARK_JAVA_OPT_{number}": f"-Dn={number}" for number in (0, 2, 10)}
    variables = {
        "SPARK_EXECUTOR_MEMORY": "2g",
        "SPARK_DRIVER_URL": "spark://driver:7078",
        "SPARK_EXECUTOR_ID": "3",
        "SPARK_EXECUTOR_CORES": "2",
        "SPARK_APPLICATION_ID": "app-1",
        "SPARK_EXECUTOR_POD_IP": "10.1.2.4",
        "SPARK_RESOURCE_PROFILE_ID": "0",
        "SPARK_EXECUTOR_POD_NAME": "pod-3",
    }
    started = _started(entrypoint, "executor", **numbers, **variables)
    options = ["-Dn=0", "-Dn=2", "-Dn=10", "-Xms2g", "-Xmx2g", "-cp", "/spark/conf:/spark/jars/*"]
    assert started[2 : 3 + len(options)] == ["java", *options]
    assert started[3 + len(options) :] == [
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *("--driver-url", "spark://driver:7078", "--executor-id", "3", "--cores", "2"),
        *("--app-id", "app-1", "--hostname", "10.1.2.4", "--resourceProfileId", "0"),
        *("--podName", "pod-3"),
    ]


def test_anything_else_is_run_as_it_is(entrypoint: Path) -> None:
    """What is neither driver nor executor is a command."""
    assert _started(entrypoint, "sh", "-c", "true") == ["-s", "--", "sh", "-c", "true"]
